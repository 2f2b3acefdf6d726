"""Ranks of a command: those that ``mpirun`` started, else threads of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from nvep.config import mpi_launch
from nvep.errors import (
    ArgumentError,
    CompilationError,
    ConfigMismatch,
    GroupError,
    HeapTooLarge,
    NvepError,
    PeerTimeout,
    TraceError,
)
from nvep.group import RankGroup, run_local

T = TypeVar("T")
DEFAULT_RANKS = 4
USAGE_STATUS, FAILURE_STATUS = 2, 1
# Raised on every rank with the same text: one report is enough, and every rank leaves in order.
COLLECTIVE_ERRORS = (ArgumentError, TraceError, ConfigMismatch, HeapTooLarge, CompilationError)


def open_groups_and_run(function: Callable[[RankGroup], T], ranks: int | None = None) -> list[T]:
    """Call ``function(group)`` on every rank of this process and close the groups.

    Under ``mpirun`` this process is one rank of an MPI group; otherwise ``ranks`` threads (default 4) form a local one.

    Parameters
    ----------
    function : callable
        Work of one rank. Errors of COLLECTIVE_ERRORS must be raised by all ranks; any other error of one MPI rank ends
        the job.
    ranks : int, optional
        Number of ranks; under ``mpirun`` it may only repeat what that says.

    Returns
    -------
    list
        Results of the ranks of this process, by rank.

    Raises
    ------
    ArgumentError
        ``ranks`` is no number of ranks.
    SystemExit
        Under ``mpirun``, instead of any of COLLECTIVE_ERRORS, once rank 0 has reported it; also when ``ranks``
        contradicts ``mpirun``.
    """
    if ranks is not None and ranks < 1:
        raise ArgumentError("--ranks", ranks, "1 or more")
    if mpi_launch() is None:
        return run_local(function, DEFAULT_RANKS if ranks is None else ranks)
    from mpi4py import MPI

    from nvep.group.mpi import install_abort_hook

    install_abort_hook()
    with RankGroup.from_mpi(MPI.COMM_WORLD) as group:
        try:
            if ranks not in (None, group.size):
                raise ArgumentError("--ranks", ranks, f"{group.size} under mpirun -n {group.size}, or nothing")
            return [function(group)]
        except COLLECTIVE_ERRORS as error:
            _leave_together(error, group)
        except (PeerTimeout, GroupError) as error:
            _leave_without(error, group.rank)
        except (Exception, KeyboardInterrupt) as error:
            group.abort(f"{type(error).__name__}: {error}")
            raise


def _leave_together(error: NvepError, group: RankGroup) -> NoReturn:
    """Report once, and only then let any rank exit: mpirun may kill the others as soon as one has failed."""
    if group.rank == 0:
        print(f"nvep: error: {error}", file=sys.stderr, flush=True)
    group.barrier()
    raise SystemExit(USAGE_STATUS)


def _leave_without(error: NvepError, rank: int) -> NoReturn:
    """Report and end this process at once: MPI's own shutdown would wait for the rank that is gone."""
    print(f"nvep: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILURE_STATUS)
