"""Host half of gpi: GPUs write one descriptor a message."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.nic import RingSpec
from nvep.transports.network import NetworkTransport, descriptor_rings


class GpiTransport(NetworkTransport):
    """GPUs write one descriptor a message."""

    name = "gpi"
    template = "Gpi"

    def rings(self, config: ExchangeConfig, num_ranks: int) -> list[RingSpec]:
        return descriptor_rings(config)


GPI = GpiTransport()
