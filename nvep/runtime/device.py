"""What every device offers. ``cuda`` runs kernels on a GPU, ``emulated`` runs the same sources on CPU cores."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from nvep.runtime.frees import Frees
from nvep.runtime.source import KernelSource


class LaunchShape(NamedTuple):
    """Blocks, their threads, whether programmatic dependent launch is used, and dynamic shared memory of each block."""

    blocks: int
    threads: int
    dependent: bool = False
    shared_bytes: int = 0


@dataclass(frozen=True)
class BulkCopies:
    """How kernels use bulk copies (TMA) on a device that has them.

    Attributes
    ----------
    send_bytes, pull_bytes : int
        Largest piece of a row that one copy sends, and pulls; multiples of 16.
    send_ring_bytes, pull_ring_bytes : int
        Shared memory of a block for pieces on their way.
    """

    send_bytes: int = 8192
    pull_bytes: int = 4096
    send_ring_bytes: int = 96 << 10
    pull_ring_bytes: int = 128 << 10


class Memory(ABC):
    """Device memory owned by nvep; usable until ``free()`` (idempotent), which nobody calls implicitly."""

    address: int
    nbytes: int

    @abstractmethod
    def free(self) -> None: ...


class HostMemory(Memory):
    """Memory that host and kernels both address (pinned and mapped on ``cuda``)."""

    @abstractmethod
    def view(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """NumPy view of the host side, valid until ``free()``."""


class Event(ABC):
    """A point in a stream; also a timestamp."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @property
    @abstractmethod
    def done(self) -> bool:
        """Reached already? Never waits."""

    @abstractmethod
    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds from ``earlier`` to this event, both completed."""


class Stream(ABC):
    """Work in order. ``handle`` is the integer that other libraries exchange."""

    handle: int

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work so far; raises DeviceError if any of it failed."""

    @abstractmethod
    def record(self) -> Event: ...

    def mark(self, spare: Event | None = None) -> Event:
        """An event without a time, cheaper than `record`; ``spare``, of an earlier `mark`, may become it."""
        return self.record()

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Later work of this stream starts after ``event``."""


class Graph(ABC):
    """Captured work. Replays read the captured addresses, so inputs change by writing to the same arrays."""

    def __init__(self) -> None:
        self._held: list[object] = []

    def hold(self, keepalive: object) -> None:
        """Reference what captured kernels read, until `close`."""
        self._held.append(keepalive)

    @abstractmethod
    def launch(self, stream: Stream) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Free the graph, whose launches have completed."""


class CaptureWatcher(Protocol):
    """Whoever keeps account of what was enqueued."""

    def undo_capture(self, capture: int) -> None:
        """Nothing that ``capture`` (of `Device.capture_of`) recorded will ever run."""


class Kernel(ABC):
    """A compiled, loaded kernel."""

    source: KernelSource


Launch = Callable[[Stream], None]
"""What `Device.prepare` returns: it enqueues a kernel on a stream of the device."""


class Device(ABC):
    """One GPU, or one emulated device. Methods may be called from any thread.

    Attributes
    ----------
    kind : str
        ``"cuda"`` or ``"emulated"``.
    ordinal : int
        GPU number, 0 when emulated.
    name : str
        For people; says ``emulated`` where it is.
    multiprocessors : int
        Processors that run blocks independently of one another.
    default_threads, default_blocks : int
        Launch shape of exchange kernels where the configuration leaves it open.
    bulk : BulkCopies or None
        None where it has no bulk copies.
    frees_wait_for_kernels : bool
        Freeing memory may wait for kernels of other ranks of the process: it goes through `frees`.
    """

    kind: str
    ordinal: int
    name: str
    multiprocessors: int
    default_threads: int
    default_blocks: int
    bulk: BulkCopies | None
    frees_wait_for_kernels = False

    @cached_property
    def frees(self) -> Frees:
        """What is freed only while no exchange is open; ranks of one process that exchange come to share it."""
        return Frees()

    @cached_property
    def control_stream(self) -> Stream:
        """A stream with no kernels, for what must not stand behind one that waits."""
        return self.create_stream()

    @property
    def emulated(self) -> bool:
        return self.kind == "emulated"

    @abstractmethod
    def make_current(self) -> None:
        """Bind the calling thread to this device (CUDA context); cheap and idempotent."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Zero-filled device memory, 256-byte aligned, private to this process."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> HostMemory:
        """Zero-filled memory that kernels and the host both read and write."""

    @abstractmethod
    def create_stream(self) -> Stream: ...

    @property
    @abstractmethod
    def default_stream(self) -> Stream:
        """A non-blocking stream owned by this object, used where the caller names none."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for every stream that this object made; those of other ranks on the same device are left alone."""

    @abstractmethod
    def as_stream(self, stream: Any) -> Stream:
        """Accept ``None`` (the default stream), a Stream, an int handle, or anything with ``__cuda_stream__``.

        Raises
        ------
        ArgumentError
            It is none of these.
        """

    @abstractmethod
    def order(self, consumer_handle: int, producer: Stream) -> None:
        """Make another library's stream ``consumer_handle`` wait for the work so far of ``producer``."""

    @abstractmethod
    def copy_in(self, address: int, array: np.ndarray, stream: Stream) -> None:
        """Copy a C-contiguous host array to device ``address``; ``array`` may be changed once this returns."""

    @abstractmethod
    def copy_out(self, array: np.ndarray, address: int, stream: Stream) -> None:
        """Copy device memory into a C-contiguous host array and wait for it."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Device-to-device copy, in stream order."""

    @abstractmethod
    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None: ...

    @abstractmethod
    def load(self, source: KernelSource) -> Kernel:
        """Compile (or take from the cache) and load; nothing is loaded lazily at launch.

        Raises
        ------
        CompilationError
            The compiler refused; its output is in the text.
        """

    def load_all(self, sources: dict[str, KernelSource]) -> dict[str, Kernel]:
        """Load several kernels, by name; devices with a slow compiler run it in parallel."""
        return {name: self.load(source) for name, source in sources.items()}

    @abstractmethod
    def launch(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure, stream: Stream) -> None:
        """Enqueue. ``arguments`` is copied before this returns."""

    def prepare(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure) -> Launch:
        """A launch to repeat, cheaper than `launch`; each call enqueues it with what ``arguments`` holds then."""
        return partial(self.launch, kernel, shape, arguments)

    @abstractmethod
    def resident_blocks(self, kernel: Kernel, threads: int, *, shared_bytes: int = 0) -> int:
        """Blocks of this kernel, with so much dynamic shared memory each, that the whole device runs at once."""

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """Record what is enqueued on ``stream`` inside the block; the Graph yielded is launchable after it."""
        graph = self._begin_capture(stream)
        capture, complete = self.capture_of(stream), False
        self._captures[capture] = graph
        try:
            try:
                yield graph
            except BaseException:
                self._end_capture(stream, graph, keep=False)
                raise
            self._end_capture(stream, graph, keep=True)
            complete = True
        finally:
            self._captures.pop(capture, None)
            for watcher in [] if complete else list(self._watchers):
                watcher.undo_capture(capture)

    @cached_property
    def _captures(self) -> WeakValueDictionary[int, Graph]:
        return WeakValueDictionary()

    @cached_property
    def _watchers(self) -> WeakSet[CaptureWatcher]:
        return WeakSet()

    def watch_captures(self, watcher: CaptureWatcher) -> None:
        """Tell ``watcher``, as long as it lives, of each `capture` that failed."""
        self._watchers.add(watcher)

    def capture_of(self, stream: Stream) -> int:
        """A number for the capture that ``stream`` takes part in, 0 if none; no two captures have the same."""
        return int(self.is_capturing(stream))

    def graph_of(self, capture: int) -> Graph | None:
        """What ``capture`` is recorded in; None where another library captures."""
        return self._captures.get(capture)

    @abstractmethod
    def _begin_capture(self, stream: Stream) -> Graph: ...

    @abstractmethod
    def _end_capture(self, stream: Stream, graph: Graph, *, keep: bool) -> None: ...

    @abstractmethod
    def is_capturing(self, stream: Stream) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Synchronise and free streams, through `frees`; memory handed out must have been freed by its owners."""
