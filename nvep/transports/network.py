"""What transports over a network adapter have in common: one header each, and the rings that they post to."""

from __future__ import annotations

from abc import abstractmethod

from nvep.config import ExchangeConfig
from nvep.nic import RingSpec
from nvep.nic.layouts import ring_prelude
from nvep.transports.base import Transport


class NetworkTransport(Transport):
    """Rows travel as messages; see ``nvep_kernels/transports/network.cuh``."""

    template: str

    def header(self, protocol: str) -> str:
        return f"transports/{self.name.replace('-', '_')}.cuh"

    def cpp_template(self, protocol: str) -> str:
        return self.template

    def prelude(self) -> str:
        return ring_prelude()

    @abstractmethod
    def rings(self, config: ExchangeConfig, num_ranks: int) -> list[RingSpec]:
        """Rings of one rank."""


def peer_queues(config: ExchangeConfig, num_ranks: int, *, ready: bool) -> list[RingSpec]:
    """``queues`` send queues to every rank, by rank."""
    depth = config.queue_depth
    return [RingSpec("send_queue", depth, peer, ready) for peer in range(num_ranks) for _ in range(config.queues)]


def descriptor_rings(config: ExchangeConfig) -> list[RingSpec]:
    """``queues`` descriptor rings."""
    return [RingSpec("gfd", config.queue_depth) for _ in range(config.queues)]
