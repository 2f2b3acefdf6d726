"""Host C++ at run time: finds a compiler, builds shared libraries, and keeps them in a cache that processes share."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nvep.config import Settings
from nvep.errors import CompilationError
from nvep.runtime.source import KERNEL_ROOT, KernelSource, headers_digest

FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # explicit *_rn arithmetic must give the GPU's bits
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unknown-warning-option",  # Clang does not know the next one
    "-Wno-maybe-uninitialized",  # GCC takes a lane's units beyond a short chunk for used ones
    "-DNVEP_EMULATED=1",
)
LOCK_TIMEOUT_S = 300.0
COMPILE_TIMEOUT_S = 600.0
ENTRY = "nvep_entry"

Progress = Callable[[str], None]
_LOG = logging.getLogger("nvep.host_jit")


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: its command line so far, what it says about itself, and whether its first run takes a minute."""

    command: tuple[str, ...]
    identity: str
    slow_start: bool = False


@lru_cache(maxsize=8)
def find_compiler(preferred: str | None = None) -> HostCompiler:
    """Return the first compiler that runs: ``preferred`` ($CXX), ``c++``, ``g++``, ``clang++``, the ``ziglang`` wheel.

    Raises
    ------
    CompilationError
        There is none, or ``preferred`` does not run; the text says what to install.
    """
    if preferred:
        command = tuple(shlex.split(preferred))
        found = _probe(command)
        if found is None:
            raise CompilationError(f"CXX={preferred!r} does not run; set CXX to a C++17 compiler or unset it")
        return found
    for name in ("c++", "g++", "clang++"):
        found = _probe((name,)) if shutil.which(name) else None
        if found is not None:
            return found
    if importlib.util.find_spec("ziglang") is not None:
        zig = (sys.executable, "-m", "ziglang")
        found = _probe((*zig, "version"), ask=())
        if found is not None:
            # `cc`, not `c++`: no C++ library has to be built first, and none is needed here. Baseline: by default zig
            # compiles for the processor at hand, but a cache may be shared by machines.
            return HostCompiler((*zig, "cc", "-mcpu=baseline"), f"zig {found.identity}", slow_start=True)
    raise CompilationError(
        "the emulated device needs a C++17 compiler and none was found; install one (Debian: apt install g++; "
        "macOS: xcode-select --install), or pip install ziglang, or set CXX"
    )


def _probe(command: tuple[str, ...], ask: tuple[str, ...] = ("--version",)) -> HostCompiler | None:
    try:
        answer = subprocess.run((*command, *ask), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    first = (answer.stdout or answer.stderr).strip().splitlines()[:1]
    return HostCompiler(command, first[0] if first else command[0])


class HostJit:
    """Builds the emulator and kernels; every result is a file in the cache.

    Parameters
    ----------
    settings : Settings, optional
        Compiler preference and cache directory; default: the environment's.
    extra_flags : sequence of str
        Appended to every compiler call and part of the cache key, e.g. ``("-fsanitize=address",)``.
    progress : callable, optional
        Told in one sentence what is being compiled; default: the logger ``nvep.host_jit``.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        extra_flags: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self._settings = settings or Settings.from_environment()
        self._extra = tuple(extra_flags)
        self._progress = progress or _LOG.info

    @property
    def compiler(self) -> HostCompiler:
        return find_compiler(self._settings.cxx)

    def kernel(self, source: KernelSource) -> Path:
        """Shared library of a kernel, exporting ``void nvep_entry(const void* arguments)``.

        Raises
        ------
        CompilationError
            The compiler refused; its output is in the text.
        """
        struct = source.arguments.name
        text = (
            f'#include "emulator/cuda.cuh"\n{source.translation_unit()}\n'
            f'extern "C" __attribute__((visibility("default"))) void {ENTRY}(const void* arguments) {{\n'
            f"  {source.name}(*static_cast<const {struct}*>(arguments));\n}}\n"
        )
        return self.library(source.name, text)

    def compile_all(self, sources: Sequence[KernelSource]) -> list[Path]:
        """Build several kernels side by side; paths in the order of ``sources``."""
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
            return list(pool.map(self.kernel, sources))

    def runtime(self) -> Path:
        """Shared library of the emulator itself."""
        files = sorted((KERNEL_ROOT / "emulator").glob("*.cpp"))
        return self.library("emulator", "".join(f'#include "emulator/{f.name}"\n' for f in files), "-pthread")

    def library(self, name: str, text: str, *flags: str) -> Path:
        """Build C++ ``text`` (includes are relative to ``nvep_kernels``) unless the cache has it.

        Parameters
        ----------
        name : str
            Start of the file name, for people.
        text : str
            Complete translation unit.
        flags : str
            Further compiler flags, after the common ones.
        """
        all_flags = (*FLAGS, *self._extra, *flags)
        target = self._settings.cache_dir / "host" / f"{name}-{self._key(text, all_flags)}.so"
        if not target.exists():
            target = _writable(target)
            with _lock(target.with_suffix(".lock")):
                if not target.exists():
                    self._compile(name, text, all_flags, target)
        return target

    def _key(self, text: str, flags: tuple[str, ...]) -> str:
        h = hashlib.sha256(headers_digest().encode())
        machine = (platform.system(), platform.machine())
        for part in (text, *self.compiler.command, self.compiler.identity, *machine, *flags):
            h.update(b"\0" + part.encode())
        return h.hexdigest()[:32]

    def _compile(self, name: str, text: str, flags: tuple[str, ...], target: Path) -> None:
        hint = " (the first time may take a minute)" if self.compiler.slow_start else ""
        self._progress(f"compiling {name} with {self.compiler.identity}{hint}")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            unit = Path(scratch) / f"{name}.cpp"
            unit.write_text(text)
            output = Path(scratch) / target.name
            shared = ("-dynamiclib", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)
            command = [*self.compiler.command, "-x", "c++", *flags, *shared, "-I", str(KERNEL_ROOT)]
            _run([*command, str(unit), "-o", str(output), "-lm"], name)
            os.replace(output, target)
        self._progress(f"compiled {name} in {time.monotonic() - started:.1f} s")


def _writable(target: Path) -> Path:
    """Return ``target``, or where its folder cannot be written, the same name in a folder that this process deletes."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as error:
        private = _private_folder()
        _LOG.warning("compiled kernels are not kept, %s cannot be written: %s", target.parent, error)
        return private / target.name


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="nvep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise CompilationError(f"{name}: the compiler did not finish in {COMPILE_TIMEOUT_S:.0f} s") from e
    if done.returncode != 0:
        raise CompilationError(f"{name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        _LOG.warning("%s: %s", name, done.stderr.strip())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file; after the timeout go on without it, since writing a library is atomic anyway."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        yield
