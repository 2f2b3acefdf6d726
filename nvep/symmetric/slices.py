"""A rank's slice of the heap, and how the ranks come to map one another's."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack

from nvep.errors import GroupError
from nvep.group.base import RankGroup
from nvep.symmetric.fd_exchange import exchange_fds

Handle = int | bytes
"""What another process opens a slice with: a file descriptor, or the bytes of a fabric handle."""


class Slice:
    """One rank's memory as this process maps it: once, until the last of its holders lets go.

    Parameters
    ----------
    address : int
        Where it is mapped.
    unmap : callable
        Undoes the mapping.
    """

    def __init__(self, address: int, unmap: Callable[[], None]) -> None:
        self.address = address
        self._unmap = unmap
        self._holders = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        """Become a further holder. Raises GroupError if the slice is unmapped already."""
        with self._lock:
            if self._holders == 0:
                raise GroupError("a rank closed its heap while others were still mapping it")
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._unmap()


class SliceBackend(ABC):
    """Memory of one kind of device. The methods are not collective."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be allocated where this rank's slice goes."""

    @abstractmethod
    def sharers(self) -> int:
        """Ranks whose slices come out of the same memory."""

    @abstractmethod
    def round_up(self, nbytes: int) -> int:
        """Bytes that a slice of ``nbytes`` occupies."""

    @abstractmethod
    def create(self, nbytes: int) -> Slice:
        """Allocate and map a zero-filled slice that every rank of this process can use."""

    @abstractmethod
    def create_shared(self, nbytes: int) -> tuple[Slice, Handle]:
        """The same for other processes; a file descriptor is the caller's to close."""

    @abstractmethod
    def open_shared(self, handle: Handle, nbytes: int) -> Slice:
        """Map another process's slice. The handle stays the caller's."""


def map_slices(backend: SliceBackend, group: RankGroup, nbytes: int, cleanup: ExitStack) -> tuple[int, ...]:
    """Collective: allocate this rank's slice and map everybody's.

    Returns
    -------
    tuple of int
        Address of each rank's slice in this process. ``cleanup`` holds what unmaps them, also when this raises.
    """
    if group.in_process:
        return _share_by_reference(backend, group, nbytes, cleanup)
    return _share_by_handle(backend, group, nbytes, cleanup)


def _share_by_reference(backend: SliceBackend, group: RankGroup, nbytes: int, cleanup: ExitStack) -> tuple[int, ...]:
    def create() -> Slice:
        own = backend.create(nbytes)
        cleanup.callback(own.release)
        return own

    slices: list[Slice] = group.allgather(group.together(create))

    def hold_peers() -> None:
        for rank, peer in enumerate(slices):
            if rank != group.rank:
                peer.retain()
                cleanup.callback(peer.release)

    group.together(hold_peers)
    return tuple(s.address for s in slices)


def _share_by_handle(backend: SliceBackend, group: RankGroup, nbytes: int, cleanup: ExitStack) -> tuple[int, ...]:
    with ExitStack() as descriptors:

        def create() -> tuple[Slice, Handle]:
            own, handle = backend.create_shared(nbytes)
            cleanup.callback(own.release)
            if isinstance(handle, int):
                descriptors.callback(os.close, handle)
            return own, handle

        own, handle = group.together(create)
        handles = _exchange(group, handle, descriptors)

        def open_peers() -> tuple[int, ...]:
            bases = []
            for rank, peer in enumerate(handles):
                mapped = own if rank == group.rank else backend.open_shared(peer, nbytes)
                if mapped is not own:
                    cleanup.callback(mapped.release)
                bases.append(mapped.address)
            return tuple(bases)

        return group.together(open_peers)


def _exchange(group: RankGroup, handle: Handle, descriptors: ExitStack) -> list[Handle]:
    if isinstance(handle, bytes):
        return group.allgather(handle)
    handles = exchange_fds(group, handle)
    for rank, fd in enumerate(handles):
        if rank != group.rank:
            descriptors.callback(os.close, fd)
    return list(handles)
