"""What an eager step makes the host do, in Python calls: clocks differ from machine to machine, these do not."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local

CONFIG = ExchangeConfig(num_experts=8, top_k=2, max_tokens=16, row_bytes=64, deadline=20.0)
MOST_CALLS = 60  # of Python functions, by dispatch and combine together; the emulated device's own included
ONCE = ("_accept", "_own", "_check_shape", "__post_init__", "contiguous_strides", "partial_dtype", "prepare")
EVENTS = ("mark", "record", "done")
SETS = 3  # of inputs, which steps take in turn


def _calls_of_a_step(group: RankGroup) -> Counter[str]:
    calls: Counter[str] = Counter()
    device = group.device
    memories = [device.allocate(nbytes) for nbytes in (16 * 64, 16 * 2 * 4, 16 * 2 * 4)]
    kinds = [((16, 64), np.uint8), ((16, 2), np.int32), ((16, 2), np.float32)]
    sets = [
        [DeviceArray(m.address, shape, kind, owner=ArrayOwner(device)) for m, (shape, kind) in zip(memories, kinds)]
        for _ in range(SETS)
    ]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    with Exchange(group, CONFIG) as exchange:
        stream = device.create_stream()
        for index in range(3 * SETS + 1):
            measured = index == 3 * SETS
            if measured:
                sys.setprofile(count)
            arrivals = exchange.dispatch(*sets[index % SETS], stream=stream)
            exchange.combine(arrivals.partial_rows, arrivals, stream=stream)
            if measured:
                sys.setprofile(None)
            exchange.synchronize(stream)
    return calls


def test_a_step_repeats_nothing_that_cannot_change() -> None:
    for calls in run_local(_calls_of_a_step, 2, device="emulated", timeout=60):
        assert calls.total() <= MOST_CALLS, calls
        assert [name for name in (*ONCE, *EVENTS) if calls[name]] == [], calls
