"""Host half of gpi-mc: GPUs write one descriptor a token, which is fanned out."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.nic import RingSpec
from nvep.transports.network import NetworkTransport, descriptor_rings


class GpiMcTransport(NetworkTransport):
    """GPUs write one descriptor a token, which is fanned out."""

    name = "gpi-mc"
    template = "GpiMc"

    def rings(self, config: ExchangeConfig, num_ranks: int) -> list[RingSpec]:
        return descriptor_rings(config)


GPI_MC = GpiMcTransport()
