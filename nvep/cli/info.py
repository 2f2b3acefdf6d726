"""``nvep info``: what this machine offers nvep, and the heap that a configuration needs."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import nvep
from nvep.config import ExchangeConfig, Settings
from nvep.errors import ArgumentError, CompilationError, DeviceError
from nvep.runtime import choose_device_kind

PACKAGES = (
    "numpy", "ml_dtypes", "cuda-python", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvmath-python",
    "nvidia-cublas", "mpi4py", "mpich", "safetensors", "rich",
)  # fmt: skip
Row = tuple[str, str]
_SIZES = ("ranks", "experts", "top_k", "max_tokens", "row_bytes")
_MPI_TIMEOUT_S = 30.0
_INFO_BLOCKS = 264  # two on each multiprocessor of an H200: work areas grow with them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("heap of a configuration", "give all but --lanes")
    sizes.add_argument("--ranks", type=int, metavar="N", help="ranks that exchange")
    sizes.add_argument("--experts", type=int, metavar="E", help="number of experts")
    sizes.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    sizes.add_argument("--max-tokens", type=int, metavar="T", help="most tokens one rank sends in a step")
    sizes.add_argument("--row-bytes", type=int, metavar="B", help="bytes of a token's row")
    sizes.add_argument("--intermediate", type=int, metavar="I", help="inner size of an expert: adds expert compute")
    sizes.add_argument("--lanes", type=int, default=1, metavar="L", help="steps in flight (default: %(default)s)")


def run(namespace: argparse.Namespace) -> int:
    """Print every section; a part that is missing is a line in it, never a failure."""
    heap = _heap(namespace)  # first: a bad configuration is an error before anything is printed
    settings = Settings.from_environment()
    print(f"nvep {nvep.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for title, rows in (
        ("device", _device(settings)),
        ("gpus", _gpus()),
        ("mpi", _mpi()),
        ("compilers", _compilers(settings)),
        ("expert compute", _expert_compute(settings)),
        ("packages", _packages()),
        ("cache", _cache(settings)),
    ):
        _print_section(title, rows)
    if heap is not None:
        print(f"\nheap of one rank\n{heap}")
    if heap is not None and namespace.intermediate is not None:
        _print_section("expert compute of one rank (bf16, gather)", _expert_memory(namespace))
    return 0


def _print_section(title: str, rows: Iterator[Row]) -> None:
    listed = list(rows)
    width = max(len(name) for name, _ in listed) + 2
    print(f"\n{title}: {listed[0][1]}" if not listed[0][0] else f"\n{title}")
    for name, value in listed[0 if listed[0][0] else 1 :]:
        print(f"  {name:<{width}}{value}")


def _device(settings: Settings) -> Iterator[Row]:
    """A row without a name becomes the section's title line."""
    try:
        kind = choose_device_kind(settings.device)
    except DeviceError as error:
        yield "", f"none ({error})"
    else:
        yield "", "cuda (GPU)" if kind == "cuda" else "emulated (CPU)"
    yield "NVEP_DEVICE", settings.device
    yield "NVEP_DEADLINE", f"{settings.deadline:g} s"
    yield "CPU cores", str(len(os.sched_getaffinity(0)))


def _gpus() -> Iterator[Row]:
    from nvep.runtime.cuda_calls import count_devices
    from nvep.runtime.cuda_facts import driver_version, gpu_facts

    try:
        count, why = count_devices()
    except DeviceError as error:
        count, why = 0, str(error)
    if count == 0:
        yield "", f"none ({why})"
        return
    yield "", f"{count}, driver for CUDA {driver_version()}"
    for gpu in gpu_facts():
        yield (
            f"GPU {gpu.ordinal}",
            (
                f"{gpu.name} at {gpu.pci_bus_id}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
                f"{gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 2**30:.1f} GiB"
            ),
        )
        handles = {"POSIX file descriptors": gpu.posix_handles, "fabric": gpu.fabric_handles, "dma-buf": gpu.dma_buf}
        yield "", "memory handles: " + ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in handles.items())
    yield from _links(count)


def _links(count: int) -> Iterator[Row]:
    """One row per GPU: what its kernels reach at each other GPU."""
    from nvep.runtime.cuda_facts import link

    if count > 1:
        yield "peer access", "GPU of the row to GPU of the column; a: with native atomics, r: rank among links, 0 best"
        yield "", "".join(f"{f'GPU {target}':>10}" for target in range(count))
    for source in range(count if count > 1 else 0):
        cells = []
        for target in range(count):
            found = None if target == source else link(source, target)
            if found is None:
                cells.append("-")
            else:
                cells.append(f"yes{' a' if found.atomics else ''} r{found.performance_rank}" if found.access else "no")
        yield f"GPU {source}", "".join(f"{cell:>10}" for cell in cells)


def _mpi() -> Iterator[Row]:
    launcher = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    yield "mpirun", launcher or "not found"
    yield "mpi4py", _version("mpi4py")
    yield "library", _mpi_library()


def _mpi_library() -> str:
    """Ask in another process: this one may be a rank, or may start MPI later, and must not load it half."""
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_MPI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not load ({error})"
    if answer.returncode != 0:
        return f"does not load ({answer.stderr.strip().splitlines()[-1:] or answer.returncode})"
    return " ".join(answer.stdout.strip("\0\n ").splitlines()[0].split())


def _compilers(settings: Settings) -> Iterator[Row]:
    from nvep.runtime.host_jit import find_compiler
    from nvep.runtime.jit import nvrtc_version

    try:
        host = find_compiler(settings.cxx)
        yield "host C++", f"{' '.join(host.command)} ({host.identity})"
    except CompilationError as error:
        yield "host C++", f"none ({error})"
    try:
        yield "NVRTC", nvrtc_version()
    except CompilationError as error:
        yield "NVRTC", f"none ({error})"


def _expert_compute(settings: Settings) -> Iterator[Row]:
    """Backends of the grouped GEMMs, and which one ``"auto"`` takes."""
    from nvep.moe.grouped_gemm.choice import describe

    try:
        emulated = choose_device_kind(settings.device) == "emulated"
    except DeviceError:
        emulated = True
    yield from describe(emulated=emulated)


def _expert_memory(namespace: argparse.Namespace) -> Iterator[Row]:
    """Weights and work areas of a rank that holds its even share of the experts."""
    from nvep.moe.grouped_gemm import ExpertShape
    from nvep.moe.grouped_gemm.gather import lane_memory

    hidden, local = namespace.row_bytes // 2, -(-namespace.experts // namespace.ranks)
    shape = ExpertShape(
        namespace.ranks, namespace.max_tokens, namespace.top_k, namespace.experts, local, hidden,
        namespace.intermediate, "bf16",
    )  # fmt: skip
    areas = {name: size * namespace.lanes for name, size in lane_memory(shape, _INFO_BLOCKS).items()}
    sizes = {f"weights of {local} experts": 6 * local * hidden * namespace.intermediate, **areas}
    for name, nbytes in {**sizes, "sum": sum(sizes.values())}.items():
        yield name, f"{nbytes:>20,} B"


def _packages() -> Iterator[Row]:
    for name in PACKAGES:
        yield name, _version(name)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cache(settings: Settings) -> Iterator[Row]:
    files = [path for path in settings.cache_dir.rglob("*") if path.is_file()] if settings.cache_dir.is_dir() else []
    yield "", f"{settings.cache_dir} ({len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB)"


def _heap(namespace: argparse.Namespace) -> str | None:
    """The sum of a configuration's heap, line by line; None where none was asked for."""
    from nvep.exchange.plan import heap_layout

    given = {name: getattr(namespace, name) for name in _SIZES}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(_SIZES):
        return None
    if missing:
        together = ", ".join(_option(name) for name in _SIZES)
        raise ArgumentError(_option(missing[0]), None, f"a number: {together} belong together")
    if given["ranks"] < 1:
        raise ArgumentError("--ranks", given["ranks"], "1 or more")
    config = ExchangeConfig(
        num_experts=given["experts"],
        top_k=given["top_k"],
        max_tokens=given["max_tokens"],
        row_bytes=given["row_bytes"],
        lanes=namespace.lanes,
    )
    return heap_layout(config, given["ranks"]).describe()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
