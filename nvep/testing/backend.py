"""The backend that conformance tests run against."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvep.arrays import DeviceArray
from nvep.config import ExchangeConfig
from nvep.exchange import Arrivals, Exchange
from nvep.group import run_local
from nvep.testing.steps import Step, arrivals_of, check_arrivals, fill_unused, output_of, same


class Backend:
    """What is tested: a device, a transport and a protocol; and how a step of it is run and compared."""

    device = "emulated"
    transport = "nvlink"
    protocol = "fence"
    wide_ranks = 64

    def config(self, **fields: Any) -> ExchangeConfig:
        """A configuration of this backend."""
        defaults: dict[str, Any] = {"num_experts": 8, "top_k": 2, "max_tokens": 16, "row_bytes": 64, "deadline": 20.0}
        return ExchangeConfig(**{**defaults, "transport": self.transport, "protocol": self.protocol, **fields})

    def run(self, function: Any, ranks: int) -> list[Any]:
        """Run ``function(group)`` on every rank of a local group."""
        return run_local(function, ranks, device=self.device)

    @staticmethod
    def finish(exchange: Exchange, arrivals: Arrivals, step: Step, **combine: Any) -> DeviceArray:
        """Combine the partial rows that ``step`` prescribes for this rank."""
        expected = arrivals_of(step, exchange.config, exchange.group.rank, protocol=exchange.protocol)
        return exchange.combine(
            fill_unused(step, expected, exchange.group.rank, protocol=exchange.protocol), arrivals, **combine
        )

    def verified_step(self, exchange: Exchange, step: Step, where: str, *, split: bool = False) -> np.ndarray:
        """Run a step on this rank, compare everything, return the output."""
        rank, config = exchange.group.rank, exchange.config
        source, expected = step.sources[rank], arrivals_of(step, config, rank, protocol=exchange.protocol)
        inputs = (tuple(source.payloads), source.expert_ids, source.expert_weights)
        if split:
            exchange.dispatch_send(*inputs)
            arrivals = exchange.dispatch_recv()
        else:
            arrivals = exchange.dispatch(*inputs)
        check_arrivals(arrivals, expected, where)
        rows = fill_unused(step, expected, rank, protocol=exchange.protocol)
        if split:
            exchange.combine_send(rows, arrivals)
            output = exchange.combine_recv(arrivals)
        else:
            output = exchange.combine(rows, arrivals)
        exchange.synchronize()
        got = output.numpy()
        same(got, output_of(step, config, rank), f"{where}: output")
        return got
