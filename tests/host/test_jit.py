"""NVRTC and its disk cache: no driver, no GPU."""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvep.errors import ArgumentError, CompilationError
from nvep.runtime import jit
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.source import KernelSource

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120")
ARGUMENTS = ArgumentStruct("ScaleArguments", [Field("values", "float*"), Field("factor", "f32"), Field("count", "i32")])
SCALE = """#include "primitives/types.cuh"
extern "C" __global__ void scale(const __grid_constant__ ScaleArguments arguments) {
  __shared__ float row[64];
  row[threadIdx.x % 64] = arguments.values[threadIdx.x];
  __syncthreads();
  nvep::u32 other = 63 - threadIdx.x % 64;
  arguments.values[threadIdx.x] = row[other] * arguments.factor;
}
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) scale(const __grid_constant__ ScaleArguments arguments) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = arguments.values[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) arguments.values[i * 1024 + threadIdx.x] = v[95 - i] * arguments.factor;
}
"""
EM_CUDA = 190
REPOSITORY = Path(__file__).resolve().parents[2]


def source(folder: Path, text: str = SCALE, name: str = "scale", **keywords: object) -> KernelSource:
    path = folder / f"{name}.cu"
    path.write_text(text)
    return KernelSource(name, ARGUMENTS, file=path, **keywords)  # type: ignore[arg-type]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> jit.Cubin:
        raise AssertionError("compiled although the cache holds it")

    monkeypatch.setattr(jit, "_compile", refuse)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_compiles_without_a_driver(arch: str, tmp_path: Path) -> None:
    cubin = jit.compile_kernel(source(tmp_path), arch, tmp_path / "cache")
    assert cubin.code[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin.code, 18) == (EM_CUDA,)
    assert b"scale" in cubin.code
    assert cubin.resources.registers is not None
    assert 0 < cubin.resources.registers < 64
    assert cubin.resources == jit.Resources(cubin.resources.registers, spill_bytes=0, stack_bytes=0, shared_bytes=256)
    assert (cubin.arch, cubin.cached, cubin.warnings) == (arch, False, "")


def test_each_architecture_has_its_own_entry(tmp_path: Path) -> None:
    one, other = (jit.compile_kernel(source(tmp_path), arch, tmp_path / "cache") for arch in ARCHITECTURES[:2])
    assert one.key != other.key
    assert one.code != other.code


def test_spills_are_counted(tmp_path: Path) -> None:
    used = jit.compile_kernel(source(tmp_path, SPILLS), "sm_90a", tmp_path / "cache").resources
    assert used.registers is not None
    assert used.spill_bytes is not None
    assert used.stack_bytes is not None
    assert used.registers <= 32
    assert used.spill_bytes > 96 * 4
    assert used.stack_bytes > 0


def test_the_second_process_takes_it_from_the_disk(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = jit.compile_kernel(source(tmp_path), "sm_90a", tmp_path / "cache")
    request.getfixturevalue("no_compiler")
    second = jit.compile_kernel(source(tmp_path), "sm_90a", tmp_path / "cache")
    assert second.cached
    assert (second.key, second.code, second.resources) == (first.key, first.code, first.resources)
    assert second.seconds == first.seconds


@pytest.mark.parametrize("changed", ["body", "prelude", "options", "compiler", "headers"])
def test_whatever_goes_in_is_part_of_the_key(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile_kernel(source(tmp_path), "sm_90a", tmp_path / "cache")
    kernel = source(tmp_path)
    if changed == "body":
        kernel = source(tmp_path, SCALE + "// more\n")
    elif changed == "prelude":
        kernel = source(tmp_path, prelude="constexpr int kUnused = 1;")
    elif changed == "options":
        monkeypatch.setattr(jit, "OPTIONS", (*jit.OPTIONS, "--maxrregcount=64"))
    elif changed == "compiler":
        monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.99")
    else:
        monkeypatch.setattr("nvep.runtime.source.headers_digest", lambda: "other headers")
    second = jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache")
    assert not second.cached
    assert second.key != first.key


@pytest.mark.parametrize("damage", ["cut", "flipped", "no header", "empty", "older format"])
def test_a_damaged_entry_is_built_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel, cache = source(tmp_path), tmp_path / "cache"
    first = jit.compile_kernel(kernel, "sm_90a", cache)
    (entry,) = (cache / "cubin" / "sm_90a").glob("scale-*")
    whole = entry.read_bytes()
    entry.write_bytes(
        {
            "cut": whole[:-100],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "no header": whole.partition(b"\n")[2],
            "empty": b"",
            "older format": whole.replace(b'"registers"', b'"register_count"'),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "nvep"):
        second = jit.compile_kernel(kernel, "sm_90a", cache)
    assert not second.cached
    assert second.resources == first.resources
    assert "built again" in caplog.text
    assert jit.compile_kernel(kernel, "sm_90a", cache).cached


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "nvep"):
        cubin = jit.compile_kernel(source(tmp_path), "sm_90a", blocked)
    assert cubin.code[:4] == b"\x7fELF"
    assert "not kept" in caplog.text


def test_nothing_but_the_entry_and_its_lock_is_left(tmp_path: Path) -> None:
    cubin = jit.compile_kernel(source(tmp_path), "sm_90a", tmp_path / "cache")
    left = sorted(path.name for path in (tmp_path / "cache" / "cubin" / "sm_90a").iterdir())
    assert left == sorted([f"scale-{cubin.key}", f"{cubin.key[:2]}.lock"])


def test_an_error_shows_the_compilers_output_with_the_files_own_line(tmp_path: Path) -> None:
    kernel = source(tmp_path, SCALE.replace("arguments.factor", "arguments.facto"))
    with pytest.raises(CompilationError, match=r"scale for sm_90a \(NVRTC 13\.\d+\)") as caught:
        jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache")
    assert 'scale.cu(7): error: class "ScaleArguments" has no member "facto"' in str(caught.value)
    assert not list((tmp_path / "cache").rglob("scale-*"))


def test_warnings_are_kept_apart_from_resource_usage(tmp_path: Path) -> None:
    kernel = source(tmp_path, f"#warning look here\n{SCALE}")
    first = jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache")
    assert "look here" in first.warnings
    assert "ptxas info" not in first.warnings
    assert jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache").warnings == first.warnings


def test_a_field_at_another_offset_does_not_compile(tmp_path: Path) -> None:
    class Misplaced(ArgumentStruct):
        def cpp(self) -> str:
            return super().cpp().replace("factor) == 8", "factor) == 12")

    path = source(tmp_path).path
    kernel = KernelSource("scale", Misplaced("ScaleArguments", list(ARGUMENTS.fields)), file=path)
    with pytest.raises(CompilationError, match=r"ScaleArguments\.factor: offset"):
        jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache")


def test_threads_that_ask_at_once_compile_once(tmp_path: Path) -> None:
    kernel, results = source(tmp_path), []

    def ask() -> None:
        results.append(jit.compile_kernel(kernel, "sm_90a", tmp_path / "cache"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.cached for result in results].count(False) == 1
    assert len({result.code for result in results}) == 1


ASK = """
import sys
from pathlib import Path
from tests.host.test_jit import ARGUMENTS
from nvep.runtime import jit
from nvep.runtime.source import KernelSource
kernel = KernelSource("scale", ARGUMENTS, file=Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(jit.compile_kernel(kernel, "sm_90a", Path(sys.argv[2])).cached)
"""


def test_processes_that_ask_at_once_compile_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, str(source(tmp_path).path), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, cwd=REPOSITORY, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    answers = []
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        answers.append(child.communicate(timeout=60)[0].strip())
        assert child.returncode == 0
    assert sorted(answers) == ["False", "True", "True"]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120"),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
    ],
)
def test_a_gpu_gets_its_architecture(capability: tuple[int, int], arch: str) -> None:
    assert jit.architecture_for(capability) == arch


def test_a_gpu_newer_than_the_compiler_gets_the_nearest_of_its_family() -> None:
    assert jit.architecture_for((8, 99)) == "sm_89"


@pytest.mark.parametrize("capability", [(6, 1), (99, 0)])
def test_a_gpu_that_the_compiler_cannot_serve_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(CompilationError, match=rf"capability {capability[0]}\.{capability[1]}; NVRTC .* knows .*9\.0"):
        jit.architecture_for(capability)


@pytest.mark.parametrize("arch", ["sm_9", "90a", "sm_90b", "compute_90", "", "sm_90a;rm"])
def test_what_is_no_architecture_is_refused(arch: str) -> None:
    with pytest.raises(ArgumentError, match="--arch"):
        jit.check_architecture("--arch", arch)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100f", "sm_120"])
def test_architectures_are_accepted(arch: str) -> None:
    assert jit.check_architecture("--arch", arch) == arch


LOG = """kernel.cu(3): warning #550-D: variable "x" was set but never used
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 7 registers, used 0 barriers
ptxas info    : Compiling entry function 'mine' for 'sm_90a'
ptxas info    : Function properties for mine
ptxas         .     160 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 53 registers, used 1 barriers, 192 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compile time = 90.512 ms
ptxas info    : Function properties for _Z6helperPf
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"""


def test_the_log_is_read_for_the_kernel_asked_for() -> None:
    resources, rest = jit.read_log(LOG, "mine")
    assert resources == jit.Resources(registers=53, spill_bytes=40, stack_bytes=192, shared_bytes=256)
    assert rest == 'kernel.cu(3): warning #550-D: variable "x" was set but never used'


def test_a_log_that_says_nothing_gives_nothing() -> None:
    assert jit.read_log("", "mine") == (jit.Resources(), "")
