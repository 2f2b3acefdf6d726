"""Ranks as threads of one process: for tests, for one GPU, and for machines with no MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from nvep.errors import ArgumentError, GroupError, PeerLeft
from nvep.group.base import RankGroup, checked_exclusion
from nvep.group.placement import collective_timeout, device_kind, name_ranks, physical_device, spread, visible_gpus
from nvep.runtime.device import Device

T = TypeVar("T")
MAX_LOCAL_RANKS = 1024
_LAST_WORDS = 5.0  # seconds that ranks get to notice an abort before run_local gives up on them


class _StoppedByPeer(GroupError):
    """Another rank ended the group; the cause is on that rank."""


class _Rendezvous:
    """Where the ranks of one process meet: every rank brings a value, everybody leaves with all of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._condition = threading.Condition()
        self._arrived: dict[int, Any] = {}
        self._departed: set[int] = set()
        self._excluded: set[int] = set()
        self._generation = 0
        self._gathered: list[Any] = []
        self._failure: str | None = None

    def exchange(self, rank: int, value: Any, timeout: float) -> list[Any]:
        with self._condition:
            self._raise_failure()
            if rank in self._arrived:
                raise GroupError(f"rank {rank} entered a collective from two threads at once")
            self._arrived[rank] = value
            if self._members() <= set(self._arrived):
                # No rank can complete the next generation, and replace this list, before all ranks have left this one.
                self._gathered = [self._arrived.get(r) for r in range(self._size)]
                self._arrived.clear()
                self._generation += 1
                self._condition.notify_all()
                return list(self._gathered)
            return self._await_others(self._generation, rank, timeout)

    def _await_others(self, generation: int, rank: int, timeout: float) -> list[Any]:
        def settled() -> bool:
            return self._generation != generation or self._failure is not None or bool(self._gone())

        in_time = self._condition.wait_for(settled, timeout)
        if self._generation != generation:
            return list(self._gathered)
        self._raise_failure()
        if in_time:
            reason = f"{name_ranks(self._gone())} left the group while rank {rank} waited in a collective"
        else:
            missing = self._members() - set(self._arrived)
            reason = f"{name_ranks(missing)} did not reach a collective: rank {rank} waited {timeout:g} s"
        self._fail(reason)
        raise GroupError(reason)

    def abort(self, reason: str) -> None:
        with self._condition:
            self._fail(reason)

    def depart(self, rank: int) -> None:
        """``rank`` takes part in no further collective."""
        with self._condition:
            self._departed.add(rank)
            self._condition.notify_all()

    def exclude(self, lost: set[int]) -> None:
        """Collectives go on without ``lost``. They fail none that is pending: survivors call this before their next."""
        with self._condition:
            self._excluded |= lost

    def members(self) -> tuple[int, ...]:
        with self._condition:
            return tuple(sorted(self._members()))

    def _gone(self) -> set[int]:
        return self._departed - set(self._arrived) - self._excluded

    def _members(self) -> set[int]:
        return set(range(self._size)) - self._excluded

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._condition.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise _StoppedByPeer(self._failure)


class LocalGroup(RankGroup):
    """One rank of a group that lives in one process; made by ``local_groups``.

    Values of ``allgather`` are passed by reference: all ranks see the same objects.

    Attributes
    ----------
    timeout : float
        Seconds that a collective waits for the other ranks.
    """

    in_process = True

    def __init__(self, rank: int, rendezvous: _Rendezvous, devices: Sequence[Device]) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(devices)
        self.device = devices[rank]
        names = [physical_device(d) for d in devices]
        self.ranks_on_device = names.count(names[rank])
        self.timeout = collective_timeout()
        self._rendezvous = rendezvous
        self._closed = False

    def allgather(self, value: Any) -> list[Any]:
        if self._closed:
            raise GroupError(f"rank {self.rank} used its group after close()")
        return self._rendezvous.exchange(self.rank, value, self.timeout)

    def barrier(self) -> None:
        self.allgather(None)

    def exclude(self, lost: Collection[int]) -> None:
        self._rendezvous.exclude(checked_exclusion(lost, self.rank, self.size))

    @property
    def members(self) -> tuple[int, ...]:
        return self._rendezvous.members()

    def abort(self, reason: str) -> None:
        self._rendezvous.abort(f"rank {self.rank} stopped the group: {reason}")

    def leave(self) -> None:
        """Let collectives of other ranks fail at once instead of waiting for this rank."""
        self._rendezvous.depart(self.rank)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.leave()
            self.device.close()


def local_groups(n: int, *, device: str | None = None, ordinals: Sequence[int] | None = None) -> list[RankGroup]:
    """Groups of ``n`` ranks inside this process, one object per rank; use each from its own thread.

    Parameters
    ----------
    n : int
        Number of ranks.
    device : str, optional
        ``"cuda"``, ``"emulated"`` or ``"auto"`` (default: ``NVEP_DEVICE``).
    ordinals : sequence of int, optional
        GPU of each rank. Default: contiguous blocks of ranks over the visible GPUs.

    Returns
    -------
    list of RankGroup
        By rank. Each has its own Device object, so its own default stream; close each of them.

    Raises
    ------
    ArgumentError
        ``n``, ``device`` or ``ordinals`` is not acceptable.
    DeviceError
        A device cannot be opened.
    """
    from nvep.runtime import open_device

    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_LOCAL_RANKS:
        raise ArgumentError("n", n, f"an integer from 1 to {MAX_LOCAL_RANKS}")
    kind = device_kind(device)
    gpus = visible_gpus() if kind == "cuda" else 1
    if ordinals is None:
        ordinals = spread(n, gpus) if kind == "cuda" else [0] * n
    elif len(ordinals) != n or any(not isinstance(o, int) or not 0 <= o < gpus for o in ordinals):
        raise ArgumentError("ordinals", list(ordinals), f"{n} device numbers below {gpus}")
    with ExitStack() as opened:
        devices = []
        for ordinal in ordinals:
            devices.append(open_device(kind, ordinal))
            opened.callback(devices[-1].close)
        rendezvous = _Rendezvous(n)
        groups: list[RankGroup] = [LocalGroup(rank, rendezvous, devices) for rank in range(n)]
        opened.pop_all()
    return groups


class _RankThread(threading.Thread):
    """Runs ``function(group)``; an exception stops the other ranks and is kept for the caller."""

    def __init__(self, function: Callable[[RankGroup], Any], group: LocalGroup) -> None:
        super().__init__(name=f"nvep-rank-{group.rank}", daemon=True)
        self._function = function
        self.group = group
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function(self.group)
        except BaseException as error:
            self.error = error
            self.group.abort(f"{type(error).__name__}: {error}")
        finally:
            self.group.leave()


def run_local(
    function: Callable[[RankGroup], T],
    ranks: int,
    *,
    device: str | None = None,
    ordinals: Sequence[int] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Run ``function(group)`` once per rank, each in its own thread, and close the groups.

    Parameters
    ----------
    function : callable
        Called with its rank's group.
    ranks : int
        Number of ranks.
    device, ordinals : optional
        As for ``local_groups``.
    timeout : float, optional
        Seconds that all ranks together may take; default: no limit beyond that of each collective.

    Returns
    -------
    list
        Results by rank.

    Raises
    ------
    ArgumentError
        An argument is not acceptable.
    GroupError
        Some ranks did not finish in time (their threads and devices are left as they are).
    BaseException
        What the lowest rank raised that failed by itself, with its traceback; ranks that only noticed another's
        failure do not count.
    """
    if not callable(function):
        raise ArgumentError("function", function, "a callable")
    if timeout is not None and not timeout > 0:
        raise ArgumentError("timeout", timeout, "seconds above 0, or None")
    groups = local_groups(ranks, device=device, ordinals=ordinals)
    threads = [_RankThread(function, group) for group in groups if isinstance(group, LocalGroup)]
    try:
        for thread in threads:
            thread.start()
        _join(threads, timeout)
        unfinished = {t.group.rank for t in threads if t.is_alive()}
        if unfinished:
            raise GroupError(f"{name_ranks(unfinished)} did not finish within {timeout:g} s")
    except BaseException as error:
        threads[0].group.abort(f"{type(error).__name__}: {error}")
        _join(threads, _LAST_WORDS)
        _close_finished(threads)
        raise
    errors = [t.error for t in threads if t.error is not None]
    errors.sort(key=lambda error: isinstance(error, (_StoppedByPeer, PeerLeft)))  # stable: causes first, then by rank
    errors += _close_finished(threads)
    if errors:
        raise errors[0]
    return [thread.result for thread in threads]


def _join(threads: list[_RankThread], timeout: float | None) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        if thread.ident is not None:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))


def _close_finished(threads: list[_RankThread]) -> list[Exception]:
    errors = []
    for thread in threads:
        if not thread.is_alive():
            try:
                thread.group.close()
            except Exception as error:
                errors.append(error)
    return errors
