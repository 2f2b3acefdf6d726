"""Streams, events and graphs of the emulated device: worker threads, host clocks and recorded lists."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from nvep.errors import DeviceError
from nvep.runtime.device import Event, Graph, Stream

Work = Callable[[], None]

_handles = itertools.count(0x6E760001)
_numbers = itertools.count(1)
_streams: weakref.WeakValueDictionary[int, EmulatedStream] = weakref.WeakValueDictionary()
_log = logging.getLogger("nvep.emulated")


def stream_of_handle(handle: int) -> EmulatedStream | None:
    """The live stream with this handle, of any emulated device of this process."""
    return _streams.get(handle)


class EmulatedEvent(Event):
    """Set by the stream's worker once it gets there."""

    def __init__(self, graph: EmulatedGraph | None = None) -> None:
        self.graph = graph
        self._reached = threading.Event()
        self._seconds = 0.0

    def reach(self) -> None:
        self._seconds = time.perf_counter()
        self._reached.set()

    def await_reached(self) -> None:
        self._reached.wait()

    def synchronize(self) -> None:
        if self.graph is not None:
            raise DeviceError("an event recorded during a capture cannot be waited for by the host")
        self._reached.wait()

    @property
    def done(self) -> bool:
        return self._reached.is_set()

    def elapsed_ms(self, earlier: Event) -> float:
        if not isinstance(earlier, EmulatedEvent) or not (self._reached.is_set() and earlier._reached.is_set()):
            raise DeviceError("elapsed_ms needs two completed events of emulated streams")
        return (self._seconds - earlier._seconds) * 1e3


class EmulatedGraph(Graph):
    """Work in the order it was captured; a launch enqueues it in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.work: list[Work] | None = []
        self.streams: list[EmulatedStream] = []
        self.complete = False

    def launch(self, stream: Stream) -> None:
        if self.work is None:
            raise DeviceError("the graph is closed")
        if not self.complete:
            raise DeviceError("the graph is still being captured, or its capture failed")
        assert isinstance(stream, EmulatedStream)
        for work in self.work:
            stream.enqueue(work)

    def close(self) -> None:
        self.work = None
        self._held.clear()


@dataclass
class _Shared:
    """What a worker needs, apart from the stream, so that dropping a stream ends its worker."""

    work: queue.SimpleQueue[Work | None] = field(default_factory=queue.SimpleQueue)
    error: BaseException | None = None


def _work_off(shared: _Shared) -> None:
    while (work := shared.work.get()) is not None:
        try:
            work()
        except BaseException as e:  # reported by the next synchronize of the stream
            if shared.error is None:
                shared.error = e


class EmulatedStream(Stream):
    """A queue and the daemon thread that works it off, started with the first work.

    After work failed, further work is dropped until ``synchronize`` has raised the error; events are still reached,
    so that nobody waits for ever.
    """

    def __init__(self) -> None:
        self.handle = next(_handles)
        self.graph: EmulatedGraph | None = None
        self._shared = _Shared()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finish = weakref.finalize(self, self._shared.work.put, None)
        _streams[self.handle] = self

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def enqueue(self, work: Work) -> None:
        """Append work, or record it while capturing."""
        if self.graph is not None:
            assert self.graph.work is not None
            self.graph.work.append(work)
            return
        shared = self._shared

        def unless_failed() -> None:
            if shared.error is None:
                work()

        self._put(unless_failed)

    def _put(self, work: Work) -> None:
        with self._lock:
            if self._closed:
                raise DeviceError("the stream is closed")
            if self._thread is None:
                name = f"nvep-stream-{self.handle:x}"
                self._thread = threading.Thread(target=_work_off, args=(self._shared,), name=name, daemon=True)
                self._thread.start()
            self._shared.work.put(work)

    def synchronize(self) -> None:
        if self.graph is not None:
            raise DeviceError("a stream cannot be synchronised while it is captured")
        if self._thread is None:
            return
        reached = EmulatedEvent()
        self._put(reached.reach)
        reached.await_reached()
        error, self._shared.error = self._shared.error, None
        if isinstance(error, DeviceError):
            raise DeviceError(str(error)) from error
        if error is not None:
            raise DeviceError(f"work on an emulated stream failed: {error!r}") from error

    def record(self) -> Event:
        event = EmulatedEvent(self.graph)
        if self.graph is None:
            self._put(event.reach)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        if event.graph is not None and event.graph.complete:
            raise DeviceError("the event belongs to a finished capture")
        if event.graph is not None and self.graph is None:
            self.graph = event.graph  # the fork of a captured stream is captured too
            event.graph.streams.append(self)
        elif event.graph is not self.graph:
            raise DeviceError("a captured stream cannot wait for an event recorded outside the capture")
        elif event.graph is None:
            self._put(event.await_reached)

    def close(self) -> None:
        """Finish the work and end the worker; an error nobody asked for is logged. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._finish()
        if self._thread is not None:
            self._thread.join()
        if self._shared.error is not None:
            _log.warning("stream closed with an unreported error: %s", self._shared.error)
