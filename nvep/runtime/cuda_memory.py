"""Device memory, host memory that both sides address, and the pinned ring that host arrays go through."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from cuda.bindings import driver

from nvep.errors import ArgumentError, DeviceError
from nvep.runtime.cuda_calls import check, core_call
from nvep.runtime.device import HostMemory, Memory

_MAPPED = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP


class CudaMemory(Memory):
    """A block of the device's pool.

    Parameters
    ----------
    buffer : cuda.core.Buffer
    release : callable
        Gives the buffer back to the pool; called once.
    """

    def __init__(self, buffer: Any, nbytes: int, release: Callable[[CudaMemory, Any], None]) -> None:
        self.address = int(buffer.handle)
        self.nbytes = nbytes
        self._buffer: Any = buffer
        self._release = release

    def free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._release(self, buffer)


class CudaHostMemory(HostMemory):
    """Pinned memory, mapped into every context of the process.

    Parameters
    ----------
    bind : callable
        Makes the device current on the calling thread.
    defer : callable
        Runs what it is given when freeing may wait for kernels, as ``cuMemFreeHost`` does.
    """

    def __init__(self, nbytes: int, bind: Callable[[], None], defer: Callable[[Callable[[], object]], None]) -> None:
        bind()
        self._bind = bind
        self._defer = defer
        size = max(nbytes, 1)
        self._host: int | None = int(check(f"cuMemHostAlloc of {size} bytes", driver.cuMemHostAlloc(size, _MAPPED)))
        ctypes.memset(self._host, 0, size)
        self.address = int(check("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(self._host, 0)))
        self.nbytes = nbytes

    def view(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        if self._host is None:
            raise DeviceError("the host memory was freed")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size > self.nbytes:
            raise ArgumentError("shape", shape, f"at most {self.nbytes} bytes of {np.dtype(dtype).name}")
        raw = memoryview((ctypes.c_uint8 * max(self.nbytes, 1)).from_address(self._host)).cast("B")
        flat: np.ndarray = np.frombuffer(raw, dtype=np.uint8)[:size].view(dtype)
        return flat.reshape(shape)

    def free(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._defer(partial(self._free, host))

    def _free(self, host: int) -> None:
        self._bind()
        check("cuMemFreeHost", driver.cuMemFreeHost(host))


class StagingRing:
    """Copies host arrays to the device through pinned memory, so that the caller may change an array at once.

    The driver may wait for the stream before it takes pageable memory. A stream can stand behind a kernel that waits
    for another rank of the same thread, so that wait could last until the deadline; copies from pinned memory do not
    wait. Only when the ring is full does a copy wait for the oldest one.

    Parameters
    ----------
    memory : CudaHostMemory
        The ring, owned by this object from now on.
    record : callable
        Records an event on a stream, for the end of a copy.
    """

    PIECES = 4  # a large array goes in pieces, so that filling one overlaps the transfer of the others

    def __init__(self, memory: CudaHostMemory, record: Callable[[Any], Any]) -> None:
        self._memory = memory
        self._bytes = memory.view(np.uint8, (memory.nbytes,))
        self._base = int(self._bytes.ctypes.data)
        self._record = record
        self._next = 0
        self._pending: deque[tuple[int, int, Any]] = deque()  # begin, end, event; oldest first
        self._lock = Lock()

    def copy(self, address: int, raw: np.ndarray, stream: Any) -> None:
        """Enqueue the copy of ``raw`` (uint8, one dimension) to device ``address`` on ``stream``."""
        piece = self._memory.nbytes // self.PIECES
        with self._lock:
            for begin in range(0, raw.nbytes, piece):
                part = raw[begin : begin + piece]
                at = self._reserve(part.nbytes)
                self._bytes[at : at + part.nbytes] = part
                result = driver.cuMemcpyHtoDAsync(address + begin, self._base + at, part.nbytes, stream.cuda)
                check(f"cuMemcpyHtoDAsync of {part.nbytes} bytes to {address + begin:#x}", result)
                self._pending.append((at, at + part.nbytes, self._record(stream)))

    def _reserve(self, nbytes: int) -> int:
        while self._pending and core_call("cuEventQuery of a staged copy", lambda: self._pending[0][2].is_done):
            self._pending.popleft()
        begin = self._next if self._next + nbytes <= self._memory.nbytes else 0
        end = begin + nbytes
        while any(begin < other_end and other_begin < end for other_begin, other_end, _ in self._pending):
            _, _, event = self._pending.popleft()
            core_call("cuEventSynchronize of a staged copy", event.sync)
        self._next = end
        return begin

    def close(self) -> None:
        with self._lock:
            for _, _, event in self._pending:
                core_call("cuEventSynchronize of a staged copy", event.sync)
            self._pending.clear()
            self._memory.free()
