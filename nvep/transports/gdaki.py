"""Host half of gdaki: GPUs build work-queue entries and ring doorbells."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.nic import RingSpec
from nvep.transports.network import NetworkTransport, peer_queues


class GdakiTransport(NetworkTransport):
    """GPUs build work-queue entries and ring doorbells."""

    name = "gdaki"
    template = "Gdaki"

    def rings(self, config: ExchangeConfig, num_ranks: int) -> list[RingSpec]:
        return peer_queues(config, num_ranks, ready=False)


GDAKI = GdakiTransport()
