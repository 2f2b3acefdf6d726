"""The tree keeps its structure; every rule is also shown to find a planted violation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host import rules

REPOSITORY = Path(__file__).resolve().parents[2]
RULES = {
    name.removesuffix("_violations"): getattr(rules, name) for name in dir(rules) if name.endswith("_violations")
}
IMPORT_SECONDS = 0.5
HEAVY = ("cuda", "mpi4py", "safetensors", "rich", "nvmath", "torch")


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps(rule: str) -> None:
    assert RULES[rule](REPOSITORY) == []


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 40
LONG_KERNEL = "void f(int a) {\n" + "  g();\n" * 149 + "}\n"
PLANTED = [
    ("import", "nvep/runtime/jit.py", "from nvep.group.base import RankGroup\n", "upwards"),
    ("import", "nvep/runtime/jit.py", "def f():\n    import nvep.moe.layer\n", "upwards"),
    ("import", "nvep/runtime/jit.py", "from ..symmetric import layout\n", "upwards"),
    ("import", "nvep/config.py", "from nvep.runtime import device\n", "upwards"),
    ("import", "nvep/errors.py", "from nvep import config\n", "upwards"),
    ("import", "nvep/exchange/plan.py", "from nvep import Exchange\n", "re-exports"),
    ("import", "nvep/protocols/fence.py", "from nvep.transports.base import Transport\n", "side by side"),
    ("import", "nvep/testing/faults.py", "from nvep.cli.main import main\n", "upwards"),
    ("import", "nvep/transports/gpi_mc.py", "from nvep.transports.gpi import ring\n", "alternatives"),
    ("import", "nvep/transports/gpi_mc.py", "from . import gpi\n", "alternatives"),
    ("import", "nvep/runtime/cuda_graph.py", "from nvep.runtime import emulated_stream\n", "alternatives"),
    ("import", "nvep/reference/moe.py", "from nvep.runtime.device import Device\n", "depends on nothing"),
    ("import", "nvep/extras/new.py", "x = 1\n", "in no layer"),
    ("environment", "nvep/group/mpi.py", "import os\nx = os.environ['A']\n", "os.environ"),
    ("environment", "nvep/group/mpi.py", "import os\nx = os.getenv('A')\n", "os.getenv"),
    ("environment", "nvep/group/mpi.py", "from os import environ\n", "environ"),
    ("print", "nvep/moe/layer.py", "print('x')\n", "print"),
    ("print", "nvep/testing/program.py", "print('x')\n", "print"),
    ("print", "nvep/moe/layer.py", "import sys\nsys.stdout.write('x')\n", "sys.stdout"),
    ("include", "nvep_kernels/kernels/a.cu", "#include <cuda_fp16.h>\n", "cuda_fp16"),
    ("include", "nvep_kernels/kernels/a.cu", '#include "missing.cuh"\n', "missing"),
    ("include", "nvep_kernels/kernels/a.cu", '  #  include "../../nvep/errors.py"\n', "errors"),
    ("size", "nvep/moe/layer.py", "x = 1\n" * 401, "401 lines"),
    ("size", "nvep_kernels/kernels/a.cu", "\n" * 301, "301 lines"),
    ("function", "nvep/moe/layer.py", LONG_FUNCTION, "41 lines"),
    ("function", "nvep/moe/layer.py", "def f(a, b, c, d, *, e, f, g): pass\n", "7 parameters"),
    ("kernel_body", "nvep_kernels/kernels/a.cu", LONG_KERNEL, "body of 151 lines"),
    ("mirror", "nvep/transports/gdaki.py", "x = 1\n", "has no"),
]
ALLOWED = [
    ("import", "nvep/exchange/exchange.py", "from nvep.errors import NvepError\nfrom nvep.transports import nvlink\n"),
    ("import", "nvep/transports/__init__.py", "from nvep.transports.nvlink import Nvlink\n"),
    ("import", "nvep/group/base.py", "def f():\n    from nvep.group.mpi import MpiGroup\n"),
    ("import", "nvep/cli/main.py", "import nvep\nfrom nvep import Exchange\n"),
    ("environment", "nvep/config.py", "import os\nx = os.environ.get('A')\n"),
    ("print", "nvep/cli/main.py", "print('x')\n"),
    ("print", "nvep/testing/program.py", "import sys\nsys.stdout.write('x')\n"),
    ("include", "nvep_kernels/emulator/fiber.cpp", "#include <cstdint>\n"),
    ("function", "nvep/moe/layer.py", 'def f():\n    """' + "doc\n" * 40 + '    """\n' + "    x = 1\n" * 38),
    ("function", "nvep/testing/suite.py", "def test_f(a, b, c, d, e, f, g): pass\n"),
    ("function", "nvep/moe/layer.py", "class C:\n    def f(self, a, b, *, c, d, e, f): pass\n"),
    ("kernel_body", "nvep_kernels/kernels/a.cu", "namespace a {\n" + "void f() { }  // {\n" * 200 + "}\n"),
]


def _plant(root: Path, name: str, text: str) -> None:
    for folder in ("nvep", "nvep_kernels"):
        (root / folder).mkdir()
    (root / "nvep" / "errors.py").write_text("")
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("rule", "name", "text", "expected"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, rule: str, name: str, text: str, expected: str) -> None:
    _plant(tmp_path, name, text)
    found = RULES[rule](tmp_path)
    assert len(found) == 1
    assert expected in found[0]
    assert name.rpartition("/")[2] in found[0]


@pytest.mark.parametrize(("rule", "name", "text"), ALLOWED)
def test_what_is_allowed_is_not_reported(tmp_path: Path, rule: str, name: str, text: str) -> None:
    _plant(tmp_path, name, text)
    assert RULES[rule](tmp_path) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in PLANTED} == set(RULES)


def _import(statement: str) -> tuple[float, list[str]]:
    """Seconds and the top-level modules of ``statement`` in a new process, not slowed down by coverage."""
    code = (
        "import json, sys, time\n"
        f"start = time.perf_counter()\n{statement}\n"
        "print(json.dumps([time.perf_counter() - start, sorted({m.partition('.')[0] for m in sys.modules})]))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    seconds, modules = json.loads(output)
    return seconds, modules


def _best(measure: Callable[[], float], attempts: int) -> float:
    """Least of several: other work on the machine only ever adds time."""
    return min(measure() for _ in range(attempts))


def test_import_is_fast() -> None:
    assert _best(lambda: _import("import nvep")[0], 5) < IMPORT_SECONDS


def test_import_loads_nothing_heavy() -> None:
    _, modules = _import("import nvep")
    assert [m for m in modules if m in HEAVY] == []
    # The check can fail: the same measurement sees a heavy import.
    _, modules = _import("import nvep, rich")
    assert "rich" in modules
