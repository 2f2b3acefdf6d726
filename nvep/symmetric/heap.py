"""The symmetric heap: one layout, allocated on every rank and mapped by every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from nvep.errors import ArgumentError, ExchangeClosed, HeapTooLarge
from nvep.group.base import RankGroup
from nvep.symmetric.layout import Layout
from nvep.symmetric.slices import SliceBackend, map_slices


class SymmetricHeap:
    """Zero-filled memory laid out alike on all ranks, every slice addressable from this one (collective).

    No rank leaves the constructor before all slices are initialised: peers may write as soon as it returns.

    Parameters
    ----------
    group : RankGroup
        Ranks that share.
    layout : Layout
        Regions; equal on all ranks.
    initialise : callable, optional
        Called with this heap when everything is mapped, to fill regions of this rank's own slice. Work that it
        enqueues on the device's default stream is waited for.

    Attributes
    ----------
    base : int
        Address of this rank's slice.
    peer_bases : tuple of int
        Addresses of all ranks' slices by rank, valid in this process.
    layout : Layout
        As given.
    nbytes : int
        Bytes of a slice (the allocation is rounded up).

    Raises
    ------
    ArgumentError
        ``group`` or ``layout`` is something else.
    ConfigMismatch
        Ranks bring layouts of different size.
    HeapTooLarge
        Some rank's device has too little memory; raised on every rank before anything is allocated.
    DeviceError
        Memory could not be allocated or mapped on some rank.
    GroupError
        Ranks cannot share memory (they are on several hosts), or one is gone.
    """

    def __init__(
        self, group: RankGroup, layout: Layout, *, initialise: Callable[[SymmetricHeap], None] | None = None
    ) -> None:
        if not isinstance(group, RankGroup):
            raise ArgumentError("group", group, "a RankGroup")
        group.together(lambda: _require_layout(layout))
        self.group = group
        self.layout = layout
        self.nbytes = layout.nbytes
        self._closed = False
        self._cleanup = ExitStack()
        try:
            group.agree("the size of the symmetric heap in bytes", layout.nbytes)
            backend = _open_backend(group)
            group.together(lambda: self._require_room(backend))
            rounded = max(group.allgather(backend.round_up(layout.nbytes)))  # GPUs may differ in granularity
            self.peer_bases = map_slices(backend, group, rounded, self._cleanup)
            self.base = self.peer_bases[group.rank]
            group.together(lambda: self._initialise(initialise))  # the barrier before first use
        except BaseException:
            self.close()
            raise

    def address(self, region: str, lane: int = 0, rank: int | None = None) -> int:
        """Address, in this process, of a region of a lane of ``rank``'s slice (default: this rank's own).

        Raises
        ------
        ArgumentError
            There is no such region, lane or rank.
        ExchangeClosed
            The heap is closed.
        """
        if self._closed:
            raise ExchangeClosed("the symmetric heap is closed")
        names = [placed.name for placed in self.layout.regions]
        if region not in names:
            raise ArgumentError("region", region, ", ".join(names))
        if not 0 <= lane < self.layout.lanes:
            raise ArgumentError("lane", lane, f"0 to {self.layout.lanes - 1}")
        if rank is not None and not 0 <= rank < self.group.size:
            raise ArgumentError("rank", rank, f"0 to {self.group.size - 1}")
        base = self.base if rank is None else self.peer_bases[rank]
        return base + self.layout.offset(region, lane)

    def close(self) -> None:
        """Unmap every slice here; idempotent and not collective.

        A rank's memory lives on until the last rank unmapped it, so peers may still be using theirs. No work that
        touches the heap may be pending on this rank's device.
        """
        self._closed = True
        self._cleanup.close()

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_room(self, backend: SliceBackend) -> None:
        free, sharers = backend.free_bytes(), backend.sharers()
        needed = sharers * backend.round_up(self.nbytes)
        if needed > free:
            raise HeapTooLarge(
                f"the symmetric heap needs {needed:,} B for {sharers} rank(s) on {self.group.device.name}, where "
                f"{free:,} B are free; each rank needs\n{self.layout.describe()}"
            )

    def _initialise(self, initialise: Callable[[SymmetricHeap], None] | None) -> None:
        try:
            if initialise is not None:
                initialise(self)
        finally:
            self.group.device.default_stream.synchronize()  # before anything is unmapped, too


def _require_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", layout, "a Layout")


def _open_backend(group: RankGroup) -> SliceBackend:
    if group.device.emulated:
        from nvep.symmetric.heap_shared import HostBackend

        return HostBackend(group)
    from nvep.symmetric.heap_cuda import CudaBackend

    return CudaBackend(group)
