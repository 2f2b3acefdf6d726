"""The routing kernel on the emulated device: bit by bit what the reference gives, ready for dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nvep import Exchange, ExchangeConfig, run_local
from nvep.moe.placement import balance
from nvep.moe.routing import Router, Routing
from nvep.reference.routing import route
from nvep.runtime.emulated import EmulatedDevice
from nvep.testing.routing_checks import RoutingChecks


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


class TestRouting(RoutingChecks):
    """The whole suite."""


def test_replicated_experts_receive_what_the_router_chose() -> None:
    """Router, placement and exchange together: every token arrives where a copy of its expert lives."""
    ranks, tokens, routing = 4, 6, Routing(10, 3, renormalise=True)
    placement = balance(np.arange(1.0, 11.0), ranks, 16)
    config = ExchangeConfig(
        num_experts=placement.num_physical, top_k=3, max_tokens=tokens, row_bytes=16, placement=placement.ranks
    )
    logits = np.random.default_rng(3).standard_normal((ranks, tokens, 10)).astype(np.float32)
    rows = np.arange(ranks * tokens * 16, dtype=np.uint8).reshape(ranks, tokens, 16)

    def step(group: Any) -> tuple[np.ndarray, np.ndarray]:
        with (
            Exchange(group, config) as exchange,
            Router(group.device, routing, max_tokens=tokens, replicas=placement.replicas(group.rank)) as router,
        ):
            arrivals = exchange.dispatch(rows[group.rank], *router(logits[group.rank]))
            exchange.synchronize()
            result = arrivals.expert_ids.numpy().copy(), arrivals.expert_weights.numpy().copy()
            exchange.release(arrivals)
            return result

    received = run_local(step, ranks, device="emulated")
    load = np.zeros(placement.num_physical)
    for rank, (ids, _) in enumerate(received):
        mine = np.array(placement.ranks)[np.maximum(ids, 0)] == rank
        np.add.at(load, ids[mine & (ids >= 0)], 1)
    chosen = np.concatenate([route(each, routing)[0].ravel() for each in logits])
    np.testing.assert_array_equal(placement.logical_load(load), np.bincount(chosen, minlength=10))
