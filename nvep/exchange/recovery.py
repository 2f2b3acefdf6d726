"""What survivors make sure of before they go on without lost ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nvep.config import Settings
from nvep.errors import PeerTimeout
from nvep.exchange.memory import ExchangeMemory
from nvep.group import RankGroup

_NAP = 0.005
_HALF = 1 << 31


def await_departure(memory: ExchangeMemory, lost: Sequence[int], processes: Sequence[int | None]) -> None:
    """Wait until no kernel of a lost rank can write here: it closed its exchange, or its process ended.

    Parameters
    ----------
    memory : ExchangeMemory
        Where lost ranks that close leave a word.
    lost : sequence of int
        Ranks.
    processes : sequence
        Process of each rank on this host; None where ranks are threads.

    Raises
    ------
    PeerTimeout
        Neither happened within the deadline.
    """
    config = memory.plan.config
    limit = config.deadline if config.deadline is not None else Settings.from_environment().deadline
    end = time.monotonic() + limit
    for rank in lost:
        while not memory.has_left(rank) and not _has_ended(processes[rank]):
            if time.monotonic() > end:
                raise PeerTimeout(rank, "recover", max(memory.progress()), memory.rank)
            time.sleep(_NAP)


def _has_ended(process: int | None) -> bool:
    """Gone, or dead and not yet reaped."""
    if process is None:
        return False
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


def common_epoch(group: RankGroup, memory: ExchangeMemory) -> int:
    """An epoch that no lane of any remaining rank has reached, the same on all (collective)."""
    gathered = group.allgather(memory.progress())
    epochs: list[int] = [epoch for rank in group.members for epoch in gathered[rank]]
    # They lie close together on the circle of 32 bits: compare by the shorter way round.
    latest = epochs[0]
    for epoch in epochs[1:]:
        if 0 < (epoch - latest) % (2 * _HALF) < _HALF:
            latest = epoch
    return (latest + 1) % (2 * _HALF)
