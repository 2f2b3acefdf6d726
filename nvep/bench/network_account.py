"""Where the time of sends goes, from what kernels added up (``ExchangeConfig.account_sends``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvep.exchange import Exchange
from nvep.protocols.signal import SEND_PHASES, SEND_STAGES

# SendStage in nvep_kernels/transports/send_clock.cuh, in its order. A row of a table is a block's mean, but `signals`,
# which one block posts; what a poster does is told apart by the shares of all threads that post.
BLOCK_STAGES = ("routing", "staging", "fence", "posting", "arrival", "signals")
POST_STAGES = ("claim", "build", "ordered publication", "lock", "doorbell", "ready word")
_TOTALS = ("cycles", "nanoseconds", "blocks")
_NAMES = (*BLOCK_STAGES, *POST_STAGES, *_TOTALS)
STAGES = (*BLOCK_STAGES[:3], *POST_STAGES, *BLOCK_STAGES[4:])
assert len(_NAMES) == SEND_STAGES

Sums = npt.NDArray[np.uint64]


def clear_account(exchange: Exchange) -> None:
    """Start adding up afresh; no step may be in flight."""
    stream = exchange.device.default_stream
    exchange.device.fill(_address(exchange), 0, SEND_PHASES * SEND_STAGES * 8, stream)
    stream.synchronize()


def read_account(exchange: Exchange) -> Sums:
    """Sums of this rank since then: uint64 ``[phases, stages]``."""
    sums = np.zeros((SEND_PHASES, SEND_STAGES), dtype=np.uint64)
    exchange.device.copy_out(sums, _address(exchange), exchange.device.default_stream)
    return sums


def _address(exchange: Exchange) -> int:
    return exchange.memory.lane_local(0) + exchange.plan.local.offset("SendAccount")


def account_us(sums: Sums, launches: int) -> dict[str, dict[str, float]]:
    """Microseconds of a block by stage, for ``"dispatch"`` and ``"combine"``, with their ``"total"``.

    Parameters
    ----------
    sums : numpy.ndarray
        Of all ranks together.
    launches : int
        Sends behind them, of each phase, all ranks together.
    """
    return {phase: _phase_us(sums[row], launches) for row, phase in enumerate(("dispatch", "combine"))}


def _phase_us(row: Sums, launches: int) -> dict[str, float]:
    values = dict(zip(_NAMES, (float(value) for value in row), strict=True))
    if not values["blocks"] or not values["cycles"]:
        return {}
    cycle_us = values["nanoseconds"] / values["cycles"] / 1e3
    mean = {name: values[name] * cycle_us / values["blocks"] for name in BLOCK_STAGES}
    mean["signals"] = values["signals"] * cycle_us / launches
    posts = sum(values[name] for name in POST_STAGES)
    split = {name: mean["posting"] * values[name] / posts if posts else 0.0 for name in POST_STAGES}
    found = {name: split.get(name, mean.get(name, 0.0)) for name in STAGES}
    return found | {"total": sum(found.values())}
