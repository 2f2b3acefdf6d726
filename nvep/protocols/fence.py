"""Host half of the Fence protocol."""

from __future__ import annotations

import numpy as np

from nvep.config import ExchangeConfig
from nvep.protocols.base import WORD_BYTES, ArrivalProtocol, ArrivalRegions
from nvep.symmetric.layout import Region


class FenceProtocol(ArrivalProtocol):
    """Push into exposed buffers; one released record per (source, step)."""

    name = "fence"
    arrivals = ArrivalRegions(True, "Payload", "ExpertIds", "ExpertWeights", "PartialRows")
    exposes_partial_rows = True

    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        return [Region("CombineRecord", num_ranks * WORD_BYTES), *self.arrivals.regions(config, num_ranks)]

    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        return []

    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        return {"CombineRecord": np.full(num_ranks, (first_epoch - 1) % (1 << 32), dtype=np.uint64)}

    def filled_regions(self) -> dict[str, int]:
        return {}


FENCE = FenceProtocol()
