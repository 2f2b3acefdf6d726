"""Host half of the peer load/store transport."""

from __future__ import annotations

from nvep.config import ExchangeConfig
from nvep.symmetric.layout import Region
from nvep.transports.base import Transport, max_targets

ROUTE_BYTES = 8


class NvlinkTransport(Transport):
    """Dispatch pushes into rank-major buffers; combine pulls exposed partial rows."""

    name = "nvlink"
    cpp_template = "Nvlink"

    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        rows = num_ranks * config.max_tokens
        return [
            *(Region(f"Payload{i}", rows * nbytes) for i, nbytes in enumerate(config.payload_bytes)),
            Region("ExpertIds", rows * config.top_k * 4),
            Region("ExpertWeights", rows * config.top_k * 4),
            Region("PartialRows", rows * config.partial_row_bytes),
        ]

    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        return [Region("Routes", config.max_tokens * max_targets(config, num_ranks) * ROUTE_BYTES)]


NVLINK = NvlinkTransport()
