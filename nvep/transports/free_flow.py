"""Host half of free-flow: GPUs build work-queue entries; a host thread rings doorbells."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.nic import RingSpec
from nvep.transports.network import NetworkTransport, peer_queues


class FreeFlowTransport(NetworkTransport):
    """GPUs build work-queue entries; a host thread rings doorbells."""

    name = "free-flow"
    template = "FreeFlow"

    def rings(self, config: ExchangeConfig, num_ranks: int) -> list[RingSpec]:
        return peer_queues(config, num_ranks, ready=True)


FREE_FLOW = FreeFlowTransport()
