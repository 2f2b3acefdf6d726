"""Order of a lane's phases, and of the streams they run on."""

from __future__ import annotations

from collections import deque
from typing import Any

from nvep.errors import StepOrderError
from nvep.runtime.device import Device, Event, Stream

IDLE, SENT, ARRIVED, RETURNED = "idle", "dispatch sent", "arrived", "combine sent"
_ORDER = {
    "dispatch": (IDLE, ARRIVED),
    "dispatch_send": (IDLE, SENT),
    "dispatch_recv": (SENT, ARRIVED),
    "work": (ARRIVED, ARRIVED),
    "combine": (ARRIVED, IDLE),
    "combine_send": (ARRIVED, RETURNED),
    "combine_recv": (RETURNED, IDLE),
    "release": (ARRIVED, IDLE),
}


class Lane:
    """One step in flight: which phase comes next, and on which stream the last one ran.

    Parameters
    ----------
    index : int
        Position among ``ExchangeConfig.lanes``.
    device : Device
        Where the phases run.
    protocol : str
        Protocol until the first step says otherwise.
    """

    def __init__(self, index: int, device: Device, protocol: str) -> None:
        self.index = index
        self.step = 0
        self.protocol = protocol  # of the step in flight
        self.tokens: int | None = None  # tokens of the step where the host knows them
        self._device = device
        self._state = IDLE
        self._stream: Stream | None = None
        self._pending: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._captured: list[tuple[Any, ...]] = []

    def require(self, phase: str) -> None:
        """Raise StepOrderError unless ``phase`` is what comes next."""
        needed, _ = _ORDER[phase]
        if self._state != needed:
            raise StepOrderError(f"{phase} on lane {self.index}: the lane is {self._state!r}, it must be {needed!r}")

    def advance(self, phase: str) -> None:
        """The phase was enqueued."""
        _, self._state = _ORDER[phase]
        if phase in ("dispatch", "dispatch_send"):
            self.step += 1

    def follow(self, stream: Stream) -> None:
        """Make ``stream`` wait for the lane's previous phase if that ran elsewhere.

        A capture cannot wait for work outside it: whoever launches the graph orders it behind that work.
        """
        last = self._stream
        elsewhere = last is not None and last.handle != stream.handle
        if last is not None and elsewhere and self._device.is_capturing(last) == self._device.is_capturing(stream):
            stream.wait(last.record())
        self._stream = stream

    def keep(self, stream: Stream, *objects: Any) -> None:
        """Hold what the last kernel on ``stream`` reads until it ran; what a graph reads, until the exchange closes."""
        if self._device.is_capturing(stream):
            self._captured.append(objects)
            return
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()
        self._pending.append((stream.record(), objects))

    def restart(self) -> None:
        """Forget the step in flight; its arrivals become stale."""
        self._state = IDLE
        self.step += 1

    def synchronize(self) -> None:
        """Wait for the last phase."""
        if self._stream is not None:
            self._stream.synchronize()
