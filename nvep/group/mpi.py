"""Ranks as MPI processes. Importing this module initialises MPI, as importing ``mpi4py.MPI`` does."""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi4py import MPI

from nvep.errors import ArgumentError, GroupError
from nvep.group.base import RankGroup, checked_exclusion
from nvep.group.placement import collective_timeout, device_kind, name_ranks, physical_device, visible_gpus
from nvep.runtime import open_device

_TAGS = 1024  # a peer is at most one collective ahead of this rank, so numbers may repeat
_POLLS_BEFORE_NAPS = 100
_LAST_WORDS = 0.5  # seconds; mpirun drops what it has not yet forwarded when a rank aborts
_NAPS = (20e-6, 1e-3)  # seconds: first and longest


class MpiGroup(RankGroup):
    """All ranks of an MPI communicator, each a process with its own device.

    Collectives run on a duplicate of ``comm``. Each is one message from every rank to every other, received by polling
    with naps: waiting ranks leave their core to the others, and a rank that never comes can be named.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Its ranks all construct the group (collective).
    device : str, optional
        ``"cuda"``, ``"emulated"`` or ``"auto"`` (default: ``NVEP_DEVICE``). All ranks must come to the same kind.

    Attributes
    ----------
    timeout : float
        Seconds that a collective waits for the other ranks.

    Raises
    ------
    ArgumentError
        ``comm`` is not an intracommunicator, or ``device`` is not allowed.
    ConfigMismatch
        Ranks came to different device kinds.
    DeviceError
        A rank cannot open its device; raised on every rank.
    GroupError
        MPI failed, or a rank did not take part.
    """

    in_process = False

    def __init__(self, comm: MPI.Intracomm, *, device: str | None = None) -> None:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError("comm", comm, "an mpi4py intracommunicator")
        self.timeout = collective_timeout()
        self._closed = False
        self._failure: str | None = None
        self._collectives = 0
        self._abandoned: list[Any] = []
        self._excluded: set[int] = set()
        with ExitStack() as undo:
            self.rank, self.size = comm.rank, comm.size
            self._unname_shared_files()
            with _mpi_errors("duplicating the communicator"):
                # Without blocking: a rank that never comes must be noticed. The calls after this find all ranks here.
                self._comm, pending = comm.Idup()
                self._await_all(pending)
                undo.callback(self._free)
                self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            host = self._find_host()
            kind = self.together(lambda: device_kind(device))
            self.agree("the kind of device", kind)
            self.together(lambda: self._open_device(kind, undo))
            mine = (host, physical_device(self.device))
            self.ranks_on_device = 1 if self.device.emulated else self.allgather(mine).count(mine)
            undo.pop_all()

    def _await_all(self, pending: MPI.Request) -> None:
        try:
            self._wait(pending.Test, set)
        except GroupError:
            where = f"rank {self.rank} of {self.size} waited {self.timeout:g} s in RankGroup.from_mpi"
            raise GroupError(f"not all ranks came: {where}") from None

    def _find_host(self) -> int:
        """Set local rank and size; return the lowest rank of this host, which stands for it."""
        with _mpi_errors("finding the ranks of this host"):
            host = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            self.local_rank, self.local_size = host.rank, host.size
            lowest: int = host.bcast(self.rank)
            host.Free()
        return lowest

    def _unname_shared_files(self) -> None:
        """MPICH takes its file out of /dev/shm at the end only; without a name it goes away with a killed job too.

        Initialising MPI waits until all ranks of the host have mapped it.
        """
        with suppress(OSError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/mpich_shm_"):
                    Path(path).unlink(missing_ok=True)

    def _open_device(self, kind: str, undo: ExitStack) -> None:
        self.device = open_device(kind, self.local_rank % visible_gpus() if kind == "cuda" else 0)
        undo.callback(self.device.close)

    def allgather(self, value: Any) -> list[Any]:
        if self._closed:
            raise GroupError(f"rank {self.rank} used its group after close()")
        if self._failure is not None:
            raise GroupError(self._failure)
        self._collectives += 1
        tag = self._collectives % _TAGS
        payload = pickle.dumps(_portable(value))
        gathered = {self.rank: value}
        with _mpi_errors("a collective"):
            others = [r for r in self.members if r != self.rank]
            sends = [self._comm.Isend([payload, MPI.BYTE], r, tag) for r in others]
            try:
                self._wait(lambda: self._receive(tag, gathered), lambda: set(others) - set(gathered))
                self._wait(lambda: MPI.Request.Testall(sends), lambda: set(others))
            except GroupError:
                self._abandoned.append((payload, sends))  # MPI may still read the buffer
                raise
        return [gathered.get(r) for r in range(self.size)]

    def _receive(self, tag: int, gathered: dict[int, Any]) -> bool:
        """Take what has come; True once every rank's value is there."""
        status = MPI.Status()
        while len(gathered) < len(self.members):
            message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status)
            if message is None:
                return False
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            gathered[status.source] = pickle.loads(data)
        return True

    def _wait(self, done: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        end = time.monotonic() + self.timeout
        polls, (nap, longest) = 0, _NAPS
        while not done():
            polls += 1
            if polls <= _POLLS_BEFORE_NAPS:
                continue
            if time.monotonic() > end:
                self._failure = (
                    f"{name_ranks(missing())} did not reach a collective: rank {self.rank} waited {self.timeout:g} s"
                )
                raise GroupError(self._failure)
            time.sleep(nap)
            nap = min(2 * nap, longest)

    def barrier(self) -> None:
        self.allgather(None)

    def exclude(self, lost: Collection[int]) -> None:
        self._excluded |= checked_exclusion(lost, self.rank, self.size)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if r not in self._excluded)

    def abort(self, reason: str) -> None:
        logging.getLogger("nvep").critical("rank %d of %d ends the job: %s", self.rank, self.size, reason)
        _abort_job()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.device.close()
        finally:
            self._free()

    def _free(self) -> None:
        # After a failed collective the others may never free theirs; MPI then keeps this one until the process ends.
        if self._failure is None and not self._excluded and not MPI.Is_finalized():
            self._comm.Free()


@contextmanager
def _mpi_errors(what: str) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise GroupError(f"{what}: {error}") from error


def _portable(value: Any) -> Any:
    """An error that other processes can rebuild; anything else unchanged."""
    if isinstance(value, Exception):
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            return GroupError(f"{type(value).__name__}: {value}")
    return value


def _abort_job() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()  # MPI ends the process without Python's clean-up
    time.sleep(_LAST_WORDS)
    MPI.COMM_WORLD.Abort(1)


def install_abort_hook() -> None:
    """Make an uncaught exception on one rank end the whole MPI job, after its traceback and rank were written.

    Without it the other ranks wait for the failed one forever. For programs, not for libraries: it replaces
    ``sys.excepthook``. ``SystemExit`` is not an uncaught exception: leave with it on all ranks or on none.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = MPI.COMM_WORLD
        if MPI.Is_finalized() or world.size == 1:
            previous(kind, error, trace)
            return
        error.add_note(f"raised by rank {world.rank} of {world.size}, which ends the job")
        previous(kind, error, trace)
        _abort_job()

    sys.excepthook = hook
