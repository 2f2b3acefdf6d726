"""Host half of the Fence protocol."""

from __future__ import annotations

import numpy as np

from nvep.protocols.base import ArrivalProtocol
from nvep.symmetric.layout import Region

RECORD_WORDS = 2  # by parity of the epoch
WORD_BYTES = 8
CODE = 1  # Fence::kCode


class FenceProtocol(ArrivalProtocol):
    """Push into exposed buffers; one released record per (source, step)."""

    name = "fence"
    cpp_type = "Fence"

    def heap_regions(self, num_ranks: int) -> list[Region]:
        return [
            Region("Record", num_ranks * RECORD_WORDS * WORD_BYTES),
            Region("CombineRecord", num_ranks * WORD_BYTES),
        ]

    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        before = [(first_epoch - back) % (1 << 32) | CODE << 56 for back in (2, 1)]
        records = np.empty((num_ranks, RECORD_WORDS), dtype=np.uint64)
        for word in before:
            records[:, word & 1] = word
        return {"Record": records, "CombineRecord": np.full(num_ranks, before[1], dtype=np.uint64)}


FENCE = FenceProtocol()
