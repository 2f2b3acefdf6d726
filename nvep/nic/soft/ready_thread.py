"""The host thread of Free Flow: C++ that watches ready words and rings, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nvep.nic.layouts import READY_QUEUE, ring_prelude
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.host_jit import HostJit

_JOIN_S = 10.0
# As in nvep_kernels/nic/ready_thread.h.
_THREAD = ArgumentStruct(
    "ReadyThread",
    [Field(name, "u64") for name in ("queues", "count", "stop", "heartbeat", "rung", "doorbells")],
)


@dataclass(frozen=True)
class ReadyQueue:
    """What the thread needs to know of a send queue; addresses are the host's."""

    ready: int
    doorbell: int
    record: int
    depth: int
    number: int


class ReadyThread:
    """Rings doorbells for contiguous ready entries of any number of send queues.

    Parameters
    ----------
    jit : HostJit, optional
        Compiles the thread.
    """

    def __init__(self, jit: HostJit | None = None) -> None:
        text = f'#include "emulator/cuda.cuh"\n{ring_prelude()}#include "nic/ready_thread.h"\n'
        library = ctypes.CDLL(str((jit or HostJit()).library("ready_thread", text)))
        self._run: Callable[[int], None] = library.nvep_ready_run
        library.nvep_ready_run.argtypes = [ctypes.c_void_p]
        library.nvep_ready_run.restype = None
        self._self = _THREAD.new()
        self._queues: dict[int, ctypes.Structure] = {}
        self._table: ctypes.Array[ctypes.Structure] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, queues: list[ReadyQueue]) -> None:
        """Watch further queues; their memory must stay until `remove`."""
        with self._lock:
            self._stop()
            for queue in queues:
                fields = {name: getattr(queue, name) for name in queue.__dataclass_fields__}
                self._queues[queue.number] = READY_QUEUE.new(**fields)
            self._start()

    def remove(self, numbers: list[int]) -> None:
        """Forget queues. Returns once the thread does not touch them any more."""
        with self._lock:
            self._stop()
            for number in numbers:
                self._queues.pop(number, None)
            self._start()

    @property
    def heartbeat(self) -> int:
        """Scans so far: grows while the thread is well."""
        return int(self._self.heartbeat)

    @property
    def rung(self) -> tuple[int, int]:
        """Entries announced so far, and doorbells that took."""
        return int(self._self.rung), int(self._self.doorbells)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        if not self._queues:
            return
        table = (READY_QUEUE.ctype * len(self._queues))(*self._queues.values())
        self._table = table
        self._self.queues, self._self.count, self._self.stop = ctypes.addressof(table), len(table), 0
        address = ctypes.addressof(self._self)
        self._thread = threading.Thread(target=self._run, args=(address,), name="nvep-free-flow", daemon=True)
        self._finish = weakref.finalize(self, _tell, self._self, self._thread)
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is None:
            return
        self._finish()
        self._thread = None
        if self._table is not None:
            for queue in self._table:  # how far each got
                self._queues[queue.number] = READY_QUEUE.ctype.from_buffer_copy(bytes(queue))
            self._table = None

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._stop()
            self._queues.clear()


def _tell(state: ctypes.Structure, thread: threading.Thread) -> None:
    stop = np.frombuffer(state, dtype=np.uint64)  # type: ignore[call-overload]
    stop[_THREAD.ctype.stop.offset // 8] = 1
    thread.join(_JOIN_S)
