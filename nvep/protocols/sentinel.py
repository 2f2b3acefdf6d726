"""Host half of the Sentinel protocol."""

from __future__ import annotations

import numpy as np

from nvep.config import ExchangeConfig
from nvep.protocols.base import ArrivalProtocol, ArrivalRegions
from nvep.symmetric.layout import Region

EMPTY_BYTE = 0x80  # of the sentinel word, kEmpty
GENERATIONS = 2  # of dispatch wires; combine needs one
PREFIX_BYTES = 16  # of a chunk: its key, and 8 bytes that nobody touches


class SentinelProtocol(ArrivalProtocol):
    """Data carries its own validity; no fence, no flag. Wires are symmetric, what lands is private."""

    name = "sentinel"
    arrivals = ArrivalRegions(False, "LandingPayload", "LandingIds", "LandingWeights", "LandingPartialRows")
    exposes_partial_rows = False

    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        slots = GENERATIONS * num_ranks * config.max_tokens
        dispatch = wire_slot_bytes(sum(config.payload_bytes), config.top_k, config.chunk_bytes)
        combine = wire_slot_bytes(config.partial_row_bytes, 0, config.chunk_bytes)
        returns = config.max_tokens * config.max_targets(num_ranks)
        return [Region("DispatchWire", slots * dispatch), Region("CombineWire", returns * combine)]

    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        return self.arrivals.regions(config, num_ranks)

    def busy_warps(self, config: ExchangeConfig, num_ranks: int, phase: str) -> int | None:
        """One for each chunk that is sent to or comes from another rank."""
        if phase.startswith("dispatch"):
            chunks = slot_chunks(sum(config.payload_bytes), config.top_k, config.chunk_bytes)
        else:
            chunks = slot_chunks(config.partial_row_bytes, 0, config.chunk_bytes)
        return config.max_tokens * max(1, num_ranks - 1) * chunks

    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        return {}

    def filled_regions(self) -> dict[str, int]:
        return {"DispatchWire": EMPTY_BYTE, "CombineWire": EMPTY_BYTE}


SENTINEL = SentinelProtocol()


def wire_slot_bytes(row_bytes: int, header_pairs: int, chunk_bytes: int) -> int:
    """Bytes of a slot on the wire, as ``Wire`` in nvep_kernels/protocols/sentinel.cuh lays it out."""
    chunks = slot_chunks(row_bytes, header_pairs, chunk_bytes)
    return chunks * PREFIX_BYTES + (header_pairs + 1) // 2 * 16 + row_bytes


def slot_chunks(row_bytes: int, header_pairs: int, chunk_bytes: int) -> int:
    """Chunks of a slot, the header's included."""
    return -(-row_bytes // chunk_bytes) + (1 if header_pairs else 0)
