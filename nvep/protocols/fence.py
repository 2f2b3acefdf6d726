"""Host half of the Fence protocol."""

from __future__ import annotations

from nvep.protocols.base import ArrivalProtocol
from nvep.symmetric.layout import Region

RECORD_WORDS = 2  # by parity of the epoch
WORD_BYTES = 8


class FenceProtocol(ArrivalProtocol):
    """Push into exposed buffers; one released record per (source, step)."""

    name = "fence"
    cpp_type = "Fence"

    def heap_regions(self, num_ranks: int) -> list[Region]:
        return [
            Region("Record", num_ranks * RECORD_WORDS * WORD_BYTES),
            Region("CombineRecord", num_ranks * WORD_BYTES),
        ]


FENCE = FenceProtocol()
