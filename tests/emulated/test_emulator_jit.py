"""Compiling for the host: compilers, the cache shared by processes, flags, and errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nvep.config import ExchangeConfig, Settings
from nvep.errors import CompilationError, DeviceError
from nvep.exchange.plan import Plan
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.emulated import EmulatedDevice
from nvep.runtime.host_jit import HostJit, find_compiler
from nvep.runtime.source import KernelSource
from tests.emulated.emulator_kit import NAMES, enqueue, run, source

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import numpy as np
from nvep.runtime.emulated import EmulatedDevice
from tests.emulated.emulator_kit import run
device = EmulatedDevice()
out = np.zeros(64, np.uint32)
run(device, "faults", (2, 64), out=out, mode=99)
device.close()
assert (out == np.arange(64)).all()
print("ran")
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return dataclasses.replace(Settings.from_environment(), cache_dir=tmp_path / "cache")


def _child(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NVEP_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _output(child: subprocess.Popen[str]) -> str:
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0, out
    assert out.endswith("ran\n")
    return out


def test_processes_compile_once_between_them_and_later_ones_not_at_all(tmp_path: Path) -> None:
    together = [_child(tmp_path) for _ in range(4)]
    said = "".join(_output(child) for child in together)
    assert said.count("compiling faults with") == 1
    assert said.count("compiling emulator with") == 1
    assert "compiling" not in _output(_child(tmp_path))
    left = sorted(p.suffix for p in (tmp_path / "host").iterdir())
    assert left == [".lock", ".lock", ".so", ".so"]


def test_kernels_compile_side_by_side_and_in_time(settings: Settings) -> None:
    said: list[str] = []
    jit = HostJit(settings, progress=said.append)
    start = time.monotonic()
    paths = jit.compile_all([source(name) for name in NAMES] * 2)
    assert time.monotonic() - start < 3 * len(NAMES)
    assert [p.name.split("-")[0] for p in paths] == list(NAMES) * 2
    assert sum(line.startswith("compiling") for line in said) == len(NAMES)


def test_everything_that_matters_is_in_the_key(settings: Settings, tmp_path: Path) -> None:
    jit = HostJit(settings)
    path = jit.kernel(source("append"))
    assert HostJit(settings, extra_flags=["-DX=1"]).kernel(source("append")) != path
    file = tmp_path / "append.cu"
    file.write_text(source("append").path.read_text())
    original = KernelSource("append", source("append").arguments, file=file)
    same = jit.kernel(original)
    file.write_text(file.read_text() + "\n// changed\n")
    assert jit.kernel(original) != same
    assert jit.kernel(dataclasses.replace(original, prelude="// changed")) not in (path, same)


def test_extra_flags_reach_the_compiler(settings: Settings) -> None:
    with pytest.raises(CompilationError, match=r"append: .*-Dprintf=3x"):
        HostJit(settings, extra_flags=["-Dprintf=3x"]).kernel(source("append"))


@pytest.mark.parametrize(("elements", "chunk_bytes"), [(128, 2048), (24, 48), (640, 32), (1032, 4096)])
def test_kernels_of_any_shape_compile_silently(
    elements: int, chunk_bytes: int, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    config = ExchangeConfig(
        num_experts=4,
        top_k=2,
        max_tokens=4,
        row_bytes=elements * 2,
        protocol="sentinel",
        chunk_bytes=chunk_bytes,
        partial_format="fp32",
    )
    HostJit(settings).kernel(Plan(config, 2).kernels("sentinel")["combine"])
    assert caplog.messages == []


def test_the_compilers_words_are_in_the_error(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "broken.cu"
    file.write_text('extern "C" __global__ void broken(const __grid_constant__ A arguments) {\n  arguments.n = 1;\n}\n')
    broken = KernelSource("broken", ArgumentStruct("A", [Field("n", "u32")]), file=file)
    with pytest.raises(CompilationError, match=r"broken\.cu:2:\d+: error"):
        HostJit(settings).kernel(broken)
    file.write_text('extern "C" __global__ void broken(const __grid_constant__ A arguments) { __shared__ int x; }\n')
    with pytest.raises(CompilationError, match="__shared__"):
        HostJit(settings).kernel(broken)


def test_a_damaged_cache_entry_is_removed_and_rebuilt(settings: Settings) -> None:
    path = HostJit(settings).kernel(source("append"))
    path.write_bytes(b"not a library")
    device = EmulatedDevice(settings)
    with pytest.raises(CompilationError, match="cannot be loaded"):
        device.load(source("append"))
    device.load(source("append"))
    device.close()


def test_a_cache_that_cannot_be_written_is_done_without(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    device = EmulatedDevice(dataclasses.replace(settings, cache_dir=tmp_path / "file"))
    out = np.zeros(64, np.uint32)
    run(device, "faults", (1, 64), out=out, mode=99)
    np.testing.assert_array_equal(out, np.arange(64))
    device.close()


def test_the_preferred_compiler_is_taken_or_refused() -> None:
    assert find_compiler("g++ -DNOTHING").command == ("g++", "-DNOTHING")
    with pytest.raises(CompilationError, match="CXX='/nonexistent/c\\+\\+'"):
        find_compiler("/nonexistent/c++")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    find_compiler.cache_clear()
    try:
        with pytest.raises(CompilationError, match=r"apt install g\+\+.*pip install ziglang"):
            find_compiler()
    finally:
        find_compiler.cache_clear()


def test_an_overflowed_stack_without_a_guard_page_is_reported(settings: Settings) -> None:
    """A process has guard pages for thousands of stacks; further ones only have a canary."""
    device = EmulatedDevice(jit=HostJit(settings, extra_flags=["-DNVEP_GUARDED_STACKS=0"]))
    enqueue(device, "deep_stack", (1, 1), None, out=np.zeros(64, np.uint32), spare=16384)
    with pytest.raises(DeviceError, match="thread 0 overflowed its stack"):
        device.default_stream.synchronize()
    device.close()


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="ucontext is deprecated elsewhere")
def test_ucontext_runs_the_same_kernels(settings: Settings) -> None:
    """The fallback for other processors: barriers, shuffles, deadlock reports."""
    device = EmulatedDevice(jit=HostJit(settings, extra_flags=["-DNVEP_USE_UCONTEXT"]))
    values, results = np.arange(300, dtype=np.int32).reshape(3, 100), np.zeros((3, 6), np.int32)
    run(device, "block_reduce", (2, 128), values=values, results=results, rows=3, columns=100)
    np.testing.assert_array_equal(results[:, 0], values.sum(1))
    enqueue(device, "faults", (1, 64), None, out=np.zeros(64, np.uint32), mode=4)
    with pytest.raises(DeviceError, match="deadlock"):
        device.default_stream.synchronize()
    device.close()
