"""NVRTC: kernel sources become cubins, without a driver, and stay on disk for later processes.

Every failure to reach the disk cache is survivable: the kernel is then compiled again. A cache file is written under
another name and renamed, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nvep.errors import ArgumentError, CompilationError
from nvep.runtime.source import KERNEL_ROOT, KernelSource

_LOG = logging.getLogger("nvep")

# NVRTC 13.0 lacks the builtin that the argument structs' checks use; every NVRTC has what it expands to here.
_OFFSETOF = "--define-macro=__builtin_offsetof(type,member)=__INTADDR__(&((type*)0)->member)"

# Kernels share one generated prelude, so most leave some of its constants unused (177).
# Products and sums stay as written (a fused one only where a kernel asks for it): the emulated device, the reference
# and every architecture then agree to the bit. NVRTC's own cache is off because a hit in it prints no resource usage.
OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--no-cache",
    "--diag-suppress=177",
    _OFFSETOF,
)

# Variants with instructions that later GPUs of the same family may lack; a cubin built here always runs where it was
# built for, so the variant is taken wherever one exists.
_ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120"}


@dataclass(frozen=True)
class Resources:
    """What ptxas said about a kernel; ``None`` where it said nothing.

    Attributes
    ----------
    registers : int or None
        Registers per thread.
    spill_bytes : int or None
        Bytes of spill stores and loads per thread, functions that were not inlined included.
    stack_bytes : int or None
        Local memory per thread.
    shared_bytes : int or None
        Static shared memory per block.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes
    ----------
    key : str
        Digest of everything that went in: source, headers, options, architecture and compiler.
    code : bytes
        ELF image for ``arch``.
    arch : str
        For example ``sm_90a``.
    resources : Resources
    warnings : str
        The compiler's output without the resource usage; empty when it had no complaints.
    seconds : float
        What compiling took, also when this one came from the cache.
    cached : bool
        It came from the disk.
    """

    key: str
    code: bytes
    arch: str
    resources: Resources
    warnings: str
    seconds: float
    cached: bool


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library, not the Python module, is missing
        raise CompilationError(f"NVRTC cannot be loaded (pip install nvidia-cuda-nvrtc): {error}") from error
    return nvrtc


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompilationError(f"{call} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def nvrtc_version() -> str:
    """Version of the NVRTC library in use, e.g. ``13.0``.

    Raises
    ------
    CompilationError
        NVRTC is not installed.
    """
    major, minor = _checked("nvrtcVersion", _nvrtc().nvrtcVersion())
    return f"{major}.{minor}"


def architecture_for(capability: tuple[int, int]) -> str:
    """Architecture to compile for on a GPU of compute capability ``(major, minor)``.

    Raises
    ------
    CompilationError
        The installed NVRTC has nothing that runs there.
    """
    if capability in _ARCHITECTURES:
        return _ARCHITECTURES[capability]
    major, minor = capability
    supported = [divmod(number, 10) for number in _checked("nvrtcGetSupportedArchs", _nvrtc().nvrtcGetSupportedArchs())]
    # A cubin also runs on later minor versions of its major version.
    usable = [known for known in supported if known[0] == major and known[1] <= minor]
    if not usable:
        shown = ", ".join(f"{a}.{b}" for a, b in supported)
        raise CompilationError(f"the GPU has compute capability {major}.{minor}; NVRTC {nvrtc_version()} knows {shown}")
    return "sm_{}{}".format(*max(usable))


def check_architecture(name: str, arch: str) -> str:
    """Return ``arch`` if it reads like ``sm_90`` or ``sm_90a``; ``name`` is the argument to blame otherwise."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ArgumentError(name, arch, "an architecture such as sm_90a, sm_100a, sm_103a or sm_120")
    return arch


def compile_kernel(source: KernelSource, arch: str, cache_dir: Path) -> Cubin:
    """Compile ``source`` for ``arch``, or take the result of an earlier process from ``cache_dir``.

    Threads and processes that ask for the same kernel at once compile it once.

    Raises
    ------
    CompilationError
        The compiler refused; its output is in the text.
    """
    key = source.digest(arch, *OPTIONS, f"nvrtc {nvrtc_version()}")
    path = cache_dir / "cubin" / arch / f"{source.name}-{key}"
    found = _read(path, arch, key)
    if found is not None:
        return found
    with _lock(path.parent / f"{key[:2]}.lock"):
        found = _read(path, arch, key)
        if found is not None:
            return found
        cubin = _compile(source, arch, key)
        _write(path, cubin)
        return cubin


def _compile(source: KernelSource, arch: str, key: str) -> Cubin:
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={arch}", f"--include-path={KERNEL_ROOT}", *OPTIONS]
    start = time.perf_counter()
    text, label = source.translation_unit().encode(), f"{source.name}.cu".encode()
    program = _checked("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(text, label, 0, None, None))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _log(nvrtc, program)
        if int(status) != 0:
            raise CompilationError(f"{source.name} for {arch} (NVRTC {nvrtc_version()}): {status.name}\n{log}")
        code = bytes(_checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program)))
        _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    resources, warnings = read_log(log, source.name)
    return Cubin(key, code, arch, resources, warnings, time.perf_counter() - start, cached=False)


def _log(nvrtc: Any, program: Any) -> str:
    log = bytes(_checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program)))
    _checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0 \n").decode(errors="replace")


def read_log(log: str, entry: str) -> tuple[Resources, str]:
    """Split NVRTC's log into what ptxas says of kernel ``entry`` and everything that is not resource usage."""
    usage = [line for line in log.splitlines() if re.match(r"ptxas\s+(info\s+:|\.\s)", line)]
    rest = "\n".join(line for line in log.splitlines() if line not in usage).strip()
    own = usage[next((i for i, line in enumerate(usage) if f"entry function '{entry}'" in line), len(usage)) :]
    registers = re.search(r"Used (\d+) registers", "\n".join(own))
    if registers is None:
        return Resources(), rest
    used = own[next(i for i, line in enumerate(own) if "Used" in line)]
    stack = re.search(r"(\d+) bytes stack frame", "\n".join(own))
    cumulative = re.search(r"(\d+) bytes cumulative stack size", used)
    shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", used)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", "\n".join(usage))]
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(spills),
        stack_bytes=int(cumulative[1]) if cumulative else int(stack[1]) if stack else None,
        shared_bytes=int(shared[1]) if shared else 0,
    ), rest


def _read(path: Path, arch: str, key: str) -> Cubin | None:
    """Take a cubin from the cache; ``None`` if it is absent or not what was written."""
    try:
        header, _, code = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            raise ValueError("checksum differs")
        resources = Resources(**facts["resources"])
        return Cubin(key, code, arch, resources, facts["warnings"], facts["seconds"], cached=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("compiled kernel %s is unusable and is built again: %s", path, error)
        return None


def _write(path: Path, cubin: Cubin) -> None:
    facts = asdict(replace(cubin, code=b""))
    header = {name: facts[name] for name in ("resources", "warnings", "seconds")}
    header["sha256"] = hashlib.sha256(cubin.code).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + cubin.code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _LOG.warning("compiled kernel %s is not kept: %s", path, error)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock shared by threads and processes; where the folder cannot be written, hold none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: compiling twice is harmless
            _LOG.debug("no lock on %s: %s", path, error)
        yield
