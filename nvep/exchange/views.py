"""What of an exchange's memory users and kernels see."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import Settings, partial_dtype
from nvep.exchange.arguments import combine_arguments, dispatch_arguments
from nvep.exchange.arrivals import Arrivals
from nvep.exchange.memory import ExchangeMemory
from nvep.protocols import PROTOCOLS


def view_arrivals(memory: ExchangeMemory, lane: int, protocol: str, owner: ArrayOwner) -> Arrivals:
    """The receive buffers of a lane under a protocol."""
    plan = memory.plan
    config, ranks = plan.config, plan.num_ranks
    names = PROTOCOLS[protocol].arrivals
    rows = (ranks, config.max_tokens)

    def region(name: str, shape: tuple[int, ...], dtype: Any, *, symmetric: bool = names.symmetric) -> DeviceArray:
        address = (
            memory.heap.address(name, lane=lane) if symmetric else memory.lane_local(lane) + plan.local.offset(name)
        )
        return DeviceArray(address, shape, dtype, owner=owner)

    payloads = enumerate(config.payload_bytes)
    return Arrivals(
        payloads=tuple(region(f"{names.payload}{i}", (*rows, nbytes), np.uint8) for i, nbytes in payloads),
        expert_ids=region(names.expert_ids, (*rows, config.top_k), np.int32),
        expert_weights=region(names.expert_weights, (*rows, config.top_k), np.float32),
        counts=region("Counts", (ranks,), np.int32, symmetric=False),
        partial_rows=region(names.partial_rows, (*rows, config.elements), partial_dtype(config.partial_format)),
        protocol=protocol,
        lane=lane,
        step=0,
    )


def lane_arguments(memory: ExchangeMemory, lane: int, rank: int) -> tuple[ctypes.Structure, ctypes.Structure]:
    """Arguments of a lane's dispatch and combine kernels, with everything set that no step changes."""
    config = memory.plan.config
    deadline = config.deadline if config.deadline is not None else Settings.from_environment().deadline
    common = {
        "local": memory.lane_local(lane),
        "status": memory.status.address(lane),
        "deadline": int(deadline * 1e9),
        "rank": rank,
        "lane": lane,
        "expert_ranks": memory.expert_ranks.address,
        "masked": memory.mask.address,
    }
    ranks = memory.plan.num_ranks
    lane_structs = dispatch_arguments(ranks).new(**common), combine_arguments(ranks).new(**common)
    for arguments in lane_structs:
        arguments.peers[:] = memory.heap.peer_bases
    return lane_structs
