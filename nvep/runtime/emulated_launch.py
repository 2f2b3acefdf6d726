"""The emulator's shared library and kernels loaded from it."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from nvep.errors import CompilationError, DeviceError
from nvep.runtime.device import Kernel, LaunchShape
from nvep.runtime.host_jit import ENTRY, HostJit
from nvep.runtime.source import KernelSource

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 << 10  # dynamic, of a block
RESIDENT_THREADS = 16384
MESSAGE_BYTES = 2048


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
    ]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        path.unlink(missing_ok=True)  # a damaged cache entry: the next load builds it again
        raise CompilationError(f"{path} cannot be loaded (removed; try again): {e}") from e


class EmulatedKernel(Kernel):
    """A kernel's entry point in this process."""

    def __init__(self, source: KernelSource, library: ctypes.CDLL) -> None:
        self.source = source
        self.entry = ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value
        self._library = library


def window(threads: int) -> int:
    """Blocks of ``threads`` threads that one launch keeps resident at once."""
    return max(1, RESIDENT_THREADS // threads)


class Emulator:
    """Loads kernels and runs them on the calling OS thread.

    Parameters
    ----------
    jit : HostJit
        Where libraries come from.
    seed : int
        Order in which blocks and threads of a launch start; 0 is ascending.
    """

    def __init__(self, jit: HostJit, *, seed: int = 0) -> None:
        self._jit = jit
        self._seed = seed
        self._lock = threading.Lock()
        self._launch: ctypes._NamedFuncPointer | None = None
        self._libraries: dict[Path, ctypes.CDLL] = {}

    def load(self, source: KernelSource) -> EmulatedKernel:
        path = self._jit.kernel(source)
        with self._lock:
            if self._launch is None:
                self._launch = _open(self._jit.runtime()).nvep_emulator_launch
                self._launch.argtypes = [ctypes.POINTER(_Launch)]
            if path not in self._libraries:
                self._libraries[path] = _open(path)
            return EmulatedKernel(source, self._libraries[path])

    def compile_all(self, sources: list[KernelSource]) -> None:
        """Put several kernels into the cache, compiled side by side."""
        self._jit.compile_all(sources)

    def run(self, kernel: EmulatedKernel, shape: LaunchShape, arguments: bytes) -> None:
        """Run a grid to its end; ``arguments`` holds the bytes of the kernel's argument struct.

        Raises
        ------
        DeviceError
            Threads deadlocked or broke a rule of the machine; the text says where.
        """
        assert self._launch is not None
        data = ctypes.create_string_buffer(arguments, len(arguments) + 64)
        address = -(-ctypes.addressof(data) // 64) * 64
        ctypes.memmove(address, arguments, len(arguments))
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        launch = _Launch(
            kernel.entry,
            address,
            kernel.source.name.encode(),
            ctypes.cast(message, ctypes.c_char_p),
            MESSAGE_BYTES,
            shape.blocks,
            shape.threads,
            window(shape.threads),
            self._seed,
            shape.shared_bytes,
        )
        if self._launch(ctypes.byref(launch)) != 0:
            raise DeviceError(message.value.decode(errors="replace"))
