"""A kernel with outputs of its own: what quantisers and routers share."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError
from nvep.inputs import InputSpec, InputView, as_input
from nvep.runtime.device import Device, Event, LaunchShape, Memory, Stream

_COUNT = InputSpec("num_tokens", (np.dtype(np.int32), np.dtype(np.uint32)), (1,))
_THREADS_EACH = 2048  # threads that a multiprocessor holds
_CLOSED = "the object that owned this array is closed"


class DeviceOperation:
    """Owns device memory, hands out views of it, and holds on to inputs until the kernels that read them ran.

    Parameters
    ----------
    device : Device
        Where the kernels run.
    """

    def __init__(self, device: Device) -> None:
        if not isinstance(device, Device):
            raise ArgumentError("device", device, "a Device, such as RankGroup.device")
        self.device = device
        self._resources = ExitStack()
        self._owner = ArrayOwner(device)
        self._pending: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._captured: list[tuple[Any, ...]] = []

    def _own(self, nbytes: int) -> Memory:
        memory = self.device.allocate(max(nbytes, 16))
        self._resources.callback(memory.free)
        return memory

    def _put(self, array: np.ndarray) -> int:
        """Device address of a copy of ``array`` that lives until ``close``."""
        memory = self._own(array.nbytes)
        stream = self.device.default_stream
        if array.nbytes:
            self.device.copy_in(memory.address, np.ascontiguousarray(array), stream)
            stream.synchronize()
        return memory.address

    def _output(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return DeviceArray(self._own(nbytes).address, shape, dtype, owner=self._owner)

    def _shape(self, threads: int, *, block: int = 256) -> LaunchShape:
        """A launch of about ``threads`` threads in blocks of ``block``, no more than the device runs at once."""
        if self.device.emulated:
            return LaunchShape(self.device.default_blocks, self.device.default_threads)
        most = self.device.multiprocessors * (_THREADS_EACH // block)
        return LaunchShape(max(1, min(most, -(-threads // block))), block)

    def _input(self, array: Any, spec: InputSpec, stream: Stream) -> InputView:
        view = as_input(array, spec, device=self.device, stream=stream)
        if view.host:
            raise ArgumentError(spec.name, "a host array", f"an array on {self.device.name}")
        return view

    def _count(self, count: Any, rows: int, stream: Stream) -> tuple[int, InputView | None]:
        """``num_tokens`` as a number and, if only the device knows it, an array."""
        if count is None:
            return rows, None
        if isinstance(count, (int, np.integer)):
            if isinstance(count, bool) or not 0 <= int(count) <= rows:
                raise ArgumentError("num_tokens", count, f"0 to {rows}, the rows given")
            return int(count), None
        return rows, self._input(count, _COUNT, stream)

    def _finish(self, stream: Stream, *read: Any) -> None:
        """The kernel was enqueued: it fills the outputs on ``stream`` and reads ``read``."""
        self._owner.stream = stream
        if self.device.is_capturing(stream):
            self._captured.append(read)
            return
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()
        self._pending.append((stream.record(), read))

    def close(self) -> None:
        """Wait for what was enqueued, then free everything, once nothing reads the outputs in place. Idempotent."""
        while self._pending:
            self._pending.popleft()[0].synchronize()
        self._captured.clear()
        resources = self._resources.pop_all()
        self._owner.expire(_CLOSED, then=resources.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
