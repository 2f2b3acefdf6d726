"""What every network adapter offers to a rank: registered memory, rings, and somebody who executes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from nvep.errors import ArgumentError, NicError
from nvep.nic.dump import RingDump
from nvep.nic.layouts import KINDS, LARGEST_DESCRIPTOR, LARGEST_QUEUE, SMALLEST_RING

PLACEMENTS = ("default", "host", "device")


@dataclass(frozen=True)
class RingSpec:
    """A ring to create.

    Attributes
    ----------
    kind : str
        ``"send_queue"`` (work-queue entries to one peer) or ``"gfd"`` (descriptors to any).
    depth : int
        Entries; a power of two from 64 to 16384, at least four times the largest descriptor.
    peer : int or None
        Rank that a send queue leads to.
    ready : bool
        The send queue's doorbell is rung by a host thread that watches ready words.
    counters : int
        Completion counters of a descriptor ring.
    """

    kind: str
    depth: int = 128
    peer: int | None = None
    ready: bool = False
    counters: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError("kind", self.kind, ", ".join(KINDS))
        smallest = max(SMALLEST_RING, 4 * LARGEST_DESCRIPTOR)
        power = isinstance(self.depth, int) and self.depth > 0 and self.depth & (self.depth - 1) == 0
        if not power or not smallest <= self.depth <= LARGEST_QUEUE:
            raise ArgumentError("depth", self.depth, f"a power of two from {smallest} to {LARGEST_QUEUE}")
        if (self.kind == "send_queue") != (self.peer is not None):
            raise ArgumentError("peer", self.peer, "a rank for a send queue, None for a descriptor ring")
        if self.ready and self.kind != "send_queue":
            raise ArgumentError("ready", self.ready, "False for a descriptor ring")
        if not 0 <= self.counters <= 1 << 16 or (self.counters and self.kind != "gfd"):
            raise ArgumentError("counters", self.counters, "at most 65536, and none for a send queue")


@dataclass(frozen=True)
class NicStatistics:
    """What an adapter did for a rank since construction.

    Attributes
    ----------
    descriptors, messages, bytes : int
        Entries taken, payloads moved, and their sum.
    batches, doorbells : int
        Times it took entries, and saw a doorbell.
    retries : int
        Times it put entries off because something had no room.
    errors : int
        Entries that failed.
    stalls, stalled_ns : int
        Times, and how long in total, a sender waited for room: back-pressure, not send work.
    """

    descriptors: int
    messages: int
    bytes: int
    batches: int
    doorbells: int
    retries: int
    errors: int
    stalls: int
    stalled_ns: int


class Nic(ABC):
    """One rank's network adapter.

    Construction is collective. Memory is registered first, then rings are created, once; both collectively and in the
    same order on all ranks.

    Attributes
    ----------
    label : str
        What executes the rings, shown with every figure.
    """

    label: str

    @abstractmethod
    def register(self, bases: Sequence[int], nbytes: int, *, ordered: bool = False) -> int:
        """Register memory that has the same size on every rank.

        Parameters
        ----------
        bases : sequence of int
            Where this process maps each rank's, by rank; 0 for memory that only its owner may reach.
        nbytes : int
            Size; a multiple of 4.
        ordered : bool
            A write to it becomes visible only after every earlier write of the same ring to the same rank.

        Returns
        -------
        int
            Handle, the same on all ranks.
        """

    @abstractmethod
    def create_rings(self, specs: Sequence[RingSpec], *, signals: int, sink: int = 0) -> int:
        """Create this rank's rings.

        Parameters
        ----------
        specs : sequence of RingSpec
        signals : int
            Handle of the ordered memory whose 8-byte words are the signals.
        sink : int
            Local signal word that takes what atomic additions fetched.

        Returns
        -------
        int
            Device address of an array of ``Ring``, in the order of ``specs``, valid until ``close``.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make sure that somebody executes what will be posted. Never waits; cheap when nothing has to be done."""

    @abstractmethod
    def drain(self, seconds: float) -> bool:
        """Wait until everything posted to this rank's rings so far has been executed; False after ``seconds``."""

    @abstractmethod
    def error(self) -> NicError | None:
        """The first entry that failed, or None. Waits for nothing, reads no device memory."""

    @abstractmethod
    def check(self) -> None:
        """Raise what went wrong so far.

        Raises
        ------
        NicError
            An entry failed.
        NicTimeout
            A sender gave up waiting.
        """

    @abstractmethod
    def statistics(self) -> NicStatistics: ...

    @abstractmethod
    def dump(self) -> list[RingDump]:
        """The rings as they are now; taken while others may be writing to them."""

    @abstractmethod
    def detach(self) -> None:
        """Execute nothing of this rank any more; frees nothing. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Detach, then free this rank's rings. Idempotent, not collective: peers expect no more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
