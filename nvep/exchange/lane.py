"""Order of a lane's phases, and of the streams they run on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from sys import getrefcount

from nvep.errors import StepOrderError
from nvep.inputs import InputView
from nvep.runtime.device import Device, Event, Launch, Stream

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
_NOWHERE = (0, -1)
_LONGEST = 64  # steps that something is held without being read again, if others hold it too
(_ALONE,) = [getrefcount(kept[0]) for kept in [(object(), 0)]]  # what `Lane._let_go` counts if nobody else holds it


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
        self.capture = 0  # that the phase being enqueued is recorded by
        # Stream and capture whose latest work, as far as is known, is a phase of this lane: nothing of ours came after.
        self.latest = _NOWHERE
        self._device = device
        self._state = IDLE
        self._stream: Stream | None = None
        self.launches: dict[tuple[str, str, bool, bool], Launch] = {}  # by protocol, phase, copies, dependent
        self._read: dict[int, tuple[object, int]] = {}  # by identity: what a step reads, the latest step that does
        self._known = 0  # of these, those that were there when the last step ended
        self._pending: deque[tuple[Event, int]] = deque()  # ends of steps, oldest first
        self._spare: list[Event] = []
        self._captured: dict[int, tuple[int, object]] = {}  # by address: bytes, what keeps them alive
        self._recorder = 0  # the capture that the last phase was recorded by
        self._before: tuple[str, int, str, int | None] = (
            IDLE,
            0,
            protocol,
            None,
        )  # that: state, step, protocol, tokens
        device.watch_captures(self)

    def open(self, phase: str, stream: Stream) -> None:
        """``phase`` comes next, on ``stream``: raise StepOrderError if not, and order it behind the phase before.

        A capture cannot wait for work outside it: whoever launches the graph orders it behind that work.
        """
        needed, _ = _ORDER[phase]
        if self._state != needed:
            raise StepOrderError(self._refusal(phase, needed))
        self.capture = self._device.capture_of(stream)
        if self.capture != self._recorder:
            self._recorder, self._before = self.capture, (self._state, self.step, self.protocol, self.tokens)
        if stream is not self._stream:
            self._follow(stream)

    def _refusal(self, phase: str, needed: str) -> str:
        text = f"{phase} on lane {self.index}: the lane is {self._state!r}, it must be {needed!r}"
        if self._recorder:
            text += "; its last phase was captured in a graph: if that capture failed, call Exchange.undo_capture"
        return text

    def follow(self, stream: Stream) -> None:
        """Make ``stream`` wait for the lane's previous phase, and the next one for what is enqueued there now."""
        self.capture = self._device.capture_of(stream)
        self._follow(stream)
        self.interrupt()

    def _follow(self, stream: Stream) -> None:
        last, self._stream = self._stream, stream
        if last is None or last.handle == stream.handle:
            return
        self.interrupt()
        if bool(self._device.capture_of(last)) == bool(self.capture):
            event = last.mark(self._spare.pop() if self._spare else None)
            stream.wait(event)
            self._spare.append(event)  # a wait is for what was marked, whatever the event becomes later

    def advance(self, phase: str, stream: Stream) -> None:
        """The phase was enqueued on ``stream``."""
        _, self._state = _ORDER[phase]
        if phase == "dispatch" or phase == "dispatch_send":
            self.step += 1
        self.latest = stream.handle, self.capture

    def interrupt(self) -> None:
        """Something else was enqueued on the lane's stream."""
        self.latest = _NOWHERE

    # --- what kernels read --------------------------------------------------------------------------------------------

    def keep(self, views: Iterable[InputView]) -> None:
        """Hold what the kernel just enqueued reads: until the step ran, or, if it was captured, with the graph.

        Where another library captures, until the exchange closes; memory that is held already is not held twice.
        """
        if not self.capture:
            read, step = self._read, self.step
            for view in views:
                keepalive = view.keepalive
                read[id(keepalive)] = keepalive, step
            return
        graph = self._device.graph_of(self.capture)
        for view in views:
            if graph is not None:
                graph.hold(view.keepalive)
            elif self._captured.get(view.address, (-1, None))[0] < view.nbytes:
                self._captured[view.address] = view.nbytes, view.keepalive

    def finish(self, stream: Stream) -> None:
        """The step's last phase was enqueued on ``stream``: once it ran, let go of what it read.

        What others hold as well may be read again: to hold it on costs nothing, and most steps, that read what was read
        before, then record no event and ask for none, which takes microseconds.
        """
        if self.capture:
            return
        brought = len(self._read) > self._known or self.step % _LONGEST == 0
        if self._pending:
            self._let_go()
        if brought:
            self._pending.append((stream.mark(self._spare.pop() if self._spare else None), self.step))
        self._known = len(self._read)

    def _let_go(self) -> None:
        pending, ended = self._pending, 0
        while pending and pending[0][0].done:
            event, ended = pending.popleft()
            self._spare.append(event)
        if ended:
            forgotten = ended - _LONGEST
            self._read = {
                key: kept
                for key, kept in self._read.items()
                if kept[1] > ended or (kept[1] > forgotten and getrefcount(kept[0]) > _ALONE)
            }

    # --- captures and recovery ----------------------------------------------------------------------------------------

    def undo_capture(self, capture: int | None = None) -> None:
        """Return to before ``capture`` (default: the latest one that recorded a phase), none of which will ever run."""
        if self._recorder and capture in (None, self._recorder):
            self._state, self.step, self.protocol, self.tokens = self._before
            self._recorder = 0
            self.interrupt()

    def restart(self) -> None:
        """Forget the step in flight; its arrivals become stale."""
        self._state = IDLE
        self.step += 1
        self._read.clear()
        self._known = 0
        self._recorder = 0
        self.interrupt()

    def synchronize(self) -> None:
        """Wait for the last phase."""
        if self._stream is not None:
            self._stream.synchronize()
