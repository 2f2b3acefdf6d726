"""The emulated device under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.

ThreadSanitizer takes every emulated thread for a thread and knows only the order that CUDA gives, so it also finds
what strongly ordered processors hide: a Fence without its acquire, its fence or its ordered increment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from nvep.config import Settings
from nvep.runtime.host_jit import find_compiler
from nvep.runtime.simulated_library import Overlay
from nvep.runtime.source import KERNEL_ROOT

PROGRAM = Path(__file__).with_name("sanitized_program.py")
LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
FOUND = 66  # exit status of a process in which a tool found something
# Nothing is suppressed. Leaks are not looked for: Python frees little of its memory at exit. Python's own allocator
# would hide the ends of objects.
OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
    "UBSAN_OPTIONS": f"exitcode={FOUND}",
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}",
    "PYTHONMALLOC": "malloc",
}
# Each loses one edge of the order that the protocol gives; the results stay right on x86-64.
UNORDERED = {
    "no acquire": ("static constexpr bool kAcquires = true;", "static constexpr bool kAcquires = false;"),
    "no fence": ("    fence_acq_rel_system();\n", ""),
    "relaxed increment": ("fetch_add_acq_rel_device(arrivals", "fetch_add_relaxed_device(arrivals"),
}


@lru_cache(maxsize=2)
def _preload(tool: str) -> tuple[list[str], dict[str, str]]:
    """Command prefix and environment of a Python with the tool's library. Skips where the compiler has none."""
    name, compiler = LIBRARIES[tool], find_compiler(Settings.from_environment().cxx)
    asked = subprocess.run(
        [*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True, timeout=60, check=False
    )
    library = Path(asked.stdout.strip() or name)
    if not library.is_absolute() or not library.exists():
        pytest.skip(f"{compiler.identity} has no {name}")
    env = {**os.environ, **OPTIONS, "LD_PRELOAD": str(library)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return _fixed_addresses() if tool == "thread" else [], env


def _fixed_addresses() -> list[str]:
    """ThreadSanitizer of GCC 12 knows a few address ranges only, and wide randomisation leaves them."""
    fixed = ["setarch", "-R"]
    if shutil.which("setarch") and subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0:
        return fixed
    return []


def _run(tool: str, what: str, *overlay: str) -> subprocess.CompletedProcess[str]:
    prefix, env = _preload(tool)
    command = [*prefix, sys.executable, str(PROGRAM), tool, what, *overlay]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)


def _require_clean(tool: str, what: str) -> None:
    done = _run(tool, what)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[:6000]}"
    assert "Sanitizer" not in done.stderr, done.stderr[:6000]


def _require_found(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == FOUND, f"status {done.returncode}\n{done.stderr[-6000:]}"
    for text in texts:
        assert text in done.stderr, done.stderr[:6000]


@pytest.mark.parametrize("tool", LIBRARIES)
def test_true_exchanges_are_clean(tool: str) -> None:
    _require_clean(tool, "phases,joined")


def test_what_orders_is_known() -> None:
    _require_clean("thread", "acquire,barrier")


@pytest.mark.parametrize(
    ("what", "report"),
    [
        ("outside", "heap-buffer-overflow"),
        ("outside-region", "use-after-poison"),
        ("undefined", "signed integer overflow"),
    ],
)
def test_a_wrong_access_is_found(what: str, report: str) -> None:
    _require_found(_run("address", what), report, "planted.cu")


@pytest.mark.parametrize("what", ["no-acquire", "no-barrier"])
def test_a_race_is_found(what: str) -> None:
    _require_found(_run("thread", what), "data race", "planted.cu")


@pytest.mark.parametrize("name", UNORDERED)
def test_a_fence_that_does_not_order_is_found(name: str) -> None:
    old, new = UNORDERED[name]
    text = (KERNEL_ROOT / "protocols" / "fence.cuh").read_text()
    assert text.count(old) == 1
    overlay = Overlay({"protocols/fence.cuh": text.replace(old, new)})
    folder = overlay.write(Settings.from_environment().cache_dir / "host" / "overlays")  # found again by the next run
    _require_found(_run("thread", "fence", str(folder)), "data race")
