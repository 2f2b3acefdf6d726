"""Streams, events and graphs of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver

from nvep.errors import ArgumentError, DeviceError
from nvep.runtime.cuda_calls import check, core_call
from nvep.runtime.device import Event, Graph, Stream

_NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_LAST_DEFAULT = 2  # handles up to here name no stream but a default one
# Other threads (ranks of a local group) go on allocating while this one captures, and Python's garbage collector may
# free what an earlier exchange left in the thread that captures: stricter modes would fail the capture for it.
_CAPTURE_MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class CudaEvent(Event):
    """A ``cuda.core.Event``, with its time if `CudaStream.record` made it."""

    def __init__(self, core: Any, bind: Callable[[], None]) -> None:
        self.core = core
        self.cuda = core.handle
        self._bind = bind

    def synchronize(self) -> None:
        self._bind()
        core_call("cuEventSynchronize", self.core.sync)

    @property
    def done(self) -> bool:
        try:  # a query needs no current context
            return bool(self.core.is_done)
        except Exception as error:
            raise DeviceError(f"cuEventQuery failed: {error}") from error

    def elapsed_ms(self, earlier: Event) -> float:
        if not isinstance(earlier, CudaEvent):
            raise ArgumentError("earlier", earlier, "an event of a CUDA stream")
        self._bind()
        return float(core_call("cuEventElapsedTime", lambda: self.core - earlier.core))


class CudaStream(Stream):
    """A stream by its handle.

    Parameters
    ----------
    handle : int
        ``CUstream``; 0 and 1 are the legacy default stream, 2 the per-thread one.
    ordinal : int
        GPU whose context the stream belongs to.
    bind : callable
        Makes that context current on the calling thread.
    new_event : callable
        Creates a ``cuda.core.Event``, with timing if its argument is true.
    owner : object
        Kept alive as long as this object: the ``cuda.core.Stream``, or the caller's stream.
    """

    def __init__(
        self, handle: int, ordinal: int, *, bind: Callable[[], None], new_event: Callable[[bool], Any], owner: Any
    ) -> None:
        self.handle = handle
        self.ordinal = ordinal
        self.cuda = driver.CUstream(handle)
        self.owner = owner
        self._bind = bind
        self._new_event = new_event

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        self._bind()
        check("cuStreamSynchronize", driver.cuStreamSynchronize(self.cuda))

    def record(self) -> CudaEvent:
        return self._record(CudaEvent(self._new_event(True), self._bind))

    def mark(self, spare: Event | None = None) -> CudaEvent:
        if isinstance(spare, CudaEvent):
            self._bind()
            return self._record(spare)
        return self._record(CudaEvent(self._new_event(False), self._bind))

    def _record(self, event: CudaEvent) -> CudaEvent:
        check("cuEventRecord", driver.cuEventRecord(event.cuda, self.cuda))
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise ArgumentError("event", event, "an event of a CUDA stream")
        self._bind()
        check("cuStreamWaitEvent", driver.cuStreamWaitEvent(self.cuda, event.cuda, 0))

    def is_capturing(self) -> bool:
        self._bind()
        return bool(check("cuStreamIsCapturing", driver.cuStreamIsCapturing(self.cuda)) != _NOT_CAPTURING)

    @property
    def capture(self) -> int:
        """See `Device.capture_of`."""
        if self.handle <= _LAST_DEFAULT:  # which of the contexts' default streams is meant
            self._bind()
        status, capturing = driver.cuStreamIsCapturing(self.cuda)
        if not (status or capturing):  # success and none are 0; to compare enumerations takes longer than the call
            return 0
        check("cuStreamIsCapturing", (status,))
        return int(check("cuStreamGetCaptureInfo", driver.cuStreamGetCaptureInfo(self.cuda))[1])

    @property
    def idle(self) -> bool:
        """Nothing is left to do; False also under capture."""
        self._bind()
        return bool(driver.cuStreamQuery(self.cuda)[0] == 0)


def stream_handle(stream: Any) -> int:
    """Integer handle of ``stream``: an int, or an object with ``__cuda_stream__``.

    Raises
    ------
    ArgumentError
        It is neither.
    """
    allowed = "None, an nvep Stream of this device, an integer handle, or an object with __cuda_stream__ (version 0)"
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise ArgumentError("stream", stream, allowed)
    pair = protocol() if callable(protocol) else protocol
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or pair[0] != 0:
        raise ArgumentError("stream", pair, allowed)
    return int(pair[1])


class CudaGraph(Graph):
    """An instantiated graph; launchable once its capture has ended. ``defer`` runs what may wait for kernels."""

    def __init__(self, bind: Callable[[], None], defer: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self._bind = bind
        self._defer = defer
        self._executable: Any = None

    @property
    def ready(self) -> bool:
        return self._executable is not None

    def begin(self, stream: CudaStream) -> None:
        self._bind()
        check("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream.cuda, _CAPTURE_MODE))

    def end(self, stream: CudaStream) -> None:
        """End the capture, instantiate, and place the graph on the device: a first launch then allocates nothing."""
        self._bind()
        graph = check("cuStreamEndCapture", driver.cuStreamEndCapture(stream.cuda))
        try:
            self._executable = check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        finally:
            check("cuGraphDestroy", driver.cuGraphDestroy(graph))
        check("cuGraphUpload", driver.cuGraphUpload(self._executable, stream.cuda))

    def abandon(self, stream: CudaStream) -> None:
        """End the capture and drop what it recorded; quiet, because an error is already on its way."""
        self._bind()
        status, graph = driver.cuStreamEndCapture(stream.cuda)
        if status == 0 and int(graph) != 0:
            driver.cuGraphDestroy(graph)

    def launch(self, stream: Stream) -> None:
        if self._executable is None:
            raise DeviceError("the graph is still being captured, was abandoned, or was closed")
        if not isinstance(stream, CudaStream):
            raise ArgumentError("stream", stream, "a stream of the CUDA device")
        self._bind()
        check("cuGraphLaunch", driver.cuGraphLaunch(self._executable, stream.cuda))

    def close(self) -> None:
        executable, self._executable = self._executable, None
        self._held.clear()
        if executable is not None:
            self._defer(partial(self._destroy, executable))

    def _destroy(self, executable: Any) -> None:
        self._bind()
        check("cuGraphExecDestroy", driver.cuGraphExecDestroy(executable))
