"""Who takes part. Collectives here are for construction, agreement and shutdown: no step uses them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from nvep.errors import ArgumentError, ConfigMismatch
from nvep.runtime.device import Device

T = TypeVar("T")


class RankGroup(ABC):
    """Ranks that exchange with one another, each with its device.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks.
    local_rank, local_size : int
        Position among the ranks of this host.
    device : Device
        This rank's device.
    in_process : bool
        All ranks are threads of one process.
    ranks_on_device : int
        Ranks of the group that share this rank's physical device (1 when emulated by separate processes).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: Device
    in_process: bool
    ranks_on_device: int

    @staticmethod
    def from_mpi(comm: Any, *, device: str | None = None) -> RankGroup:
        """Group of all ranks of an mpi4py communicator (collective; the communicator is duplicated).

        Parameters
        ----------
        comm : mpi4py.MPI.Comm
            Intracommunicator whose ranks all call this.
        device : str, optional
            ``"cuda"``, ``"emulated"`` or ``"auto"`` (default: ``NVEP_DEVICE``).
        """
        from nvep.group.mpi import MpiGroup

        return MpiGroup(comm, device=device)

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Everybody's picklable ``value``, by rank. Collective. Raises GroupError if another rank is gone."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks. Collective. Raises GroupError if another rank is gone."""

    @abstractmethod
    def exclude(self, lost: Collection[int]) -> None:
        """Leave ranks out of every later collective: ``allgather`` gives None in their place.

        Not collective by itself, but all ranks that remain must do the same before their next collective. One-way.

        Raises
        ------
        ArgumentError
            This rank is among them, or there is no such rank.
        """

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Ranks that have not been excluded, ascending."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every other rank's pending or next collective fail with GroupError (MPI: end the job)."""

    @abstractmethod
    def close(self) -> None:
        """Free the communicator and the device. Collective. Idempotent."""

    def raise_together(self, error: Exception | None) -> None:
        """Collective: if any rank brings an error, every rank raises the lowest such rank's, with the same text."""
        errors = self.allgather(error)
        for rank, e in enumerate(errors):
            if e is not None:
                raise e if rank == self.rank else _duplicate(e)

    def together(self, step: Callable[[], T]) -> T:
        """Collective: run ``step`` on each rank; if any raised, every rank raises the lowest such rank's error."""
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        self.raise_together(failure)
        return result

    def agree(self, what: str, value: Any) -> None:
        """Collective: raise ConfigMismatch with the same text on every rank unless all bring an equal ``value``."""
        gathered = self.allgather(value)
        values = [(rank, gathered[rank]) for rank in self.members]
        if any(v != values[0][1] for _, v in values):
            shown = ", ".join(f"rank {r}: {v!r}" for r, v in values[:8])
            more = "" if len(values) <= 8 else f", and {len(values) - 8} more"
            raise ConfigMismatch(f"{what} must be equal on all ranks; {shown}{more}")

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _duplicate(error: Exception) -> Exception:
    """An equal error with a traceback of its own: ranks that are threads share the original object."""
    try:
        return copy.copy(error)
    except Exception:
        return error


def checked_exclusion(lost: Collection[int], rank: int, size: int) -> set[int]:
    """The argument of ``RankGroup.exclude`` as a set."""
    wanted = {int(r) for r in lost if isinstance(r, int) and not isinstance(r, bool)}
    if len(wanted) != len(set(lost)) or any(not 0 <= r < size for r in wanted):
        raise ArgumentError("lost", list(lost), f"ranks from 0 to {size - 1}")
    if rank in wanted:
        raise ArgumentError("lost", list(lost), f"other ranks than this one, {rank}")
    return wanted
