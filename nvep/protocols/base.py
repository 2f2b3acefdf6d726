"""What the host knows of an arrival protocol; the device half is ``nvep_kernels/protocols/<name>.cuh``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nvep.config import ExchangeConfig
from nvep.symmetric.layout import Region

RECORD_WORDS = 2  # by parity of the epoch
WORD_BYTES = 8


@dataclass(frozen=True)
class ArrivalRegions:
    """Names of the regions that ``Arrivals`` of a protocol show.

    Attributes
    ----------
    symmetric : bool
        They are in the symmetric heap; otherwise in a rank's private memory.
    payload : str
        Prefix of the payload regions, followed by the payload's number.
    expert_ids, expert_weights, partial_rows : str
        The others.
    """

    symmetric: bool
    payload: str
    expert_ids: str
    expert_weights: str
    partial_rows: str

    def regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        """Rank-major buffers of these names, ``[ranks, max_tokens, ...]``."""
        rows = num_ranks * config.max_tokens
        return [
            *(Region(f"{self.payload}{i}", rows * nbytes) for i, nbytes in enumerate(config.payload_bytes)),
            Region(self.expert_ids, rows * config.top_k * 4),
            Region(self.expert_weights, rows * config.top_k * 4),
            Region(self.partial_rows, rows * config.partial_row_bytes),
        ]


class ArrivalProtocol(ABC):
    """How a receiver knows, and the memory it takes besides the step records that all protocols share.

    Attributes
    ----------
    name : str
        As in ``ExchangeConfig.protocol``; also the header's name.
    arrivals : ArrivalRegions
        Where arrivals are found.
    exposes_partial_rows : bool
        Peers read partial rows where ``Arrivals`` shows them: C.send moves nothing if they were written there.
    """

    name: str
    arrivals: ArrivalRegions
    exposes_partial_rows: bool

    @abstractmethod
    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        """Memory of one lane that peers write or read. Sizes depend on the configuration alone."""

    @abstractmethod
    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        """Private memory of one lane."""

    @abstractmethod
    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        """Contents of heap regions before the step ``first_epoch``, where they are neither zeros nor filled."""

    @abstractmethod
    def filled_regions(self) -> dict[str, int]:
        """Heap regions filled with a byte before the first step."""

    def initial_signals(self, config: ExchangeConfig, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        """As `initial_words`, of regions whose size depends on more than the number of ranks."""
        return {}

    def busy_warps(self, config: ExchangeConfig, num_ranks: int, phase: str) -> int | None:
        """Warps with work of their own in ``phase`` (a kernel's name) of a largest step; None: as many as there are."""
        return None

    def constants(self, config: ExchangeConfig) -> dict[str, int]:
        """``u32`` constants of its kernels, by name."""
        return {}


def record_regions(num_ranks: int) -> list[Region]:
    """Step records of one lane."""
    return [Region("Record", num_ranks * RECORD_WORDS * WORD_BYTES)]


def initial_records(num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
    """Step records before the step ``first_epoch``: those of the two steps before it."""
    records = np.empty((num_ranks, RECORD_WORDS), dtype=np.uint64)
    for back in (2, 1):
        epoch = (first_epoch - back) % (1 << 32)
        records[:, epoch & 1] = epoch
    return {"Record": records}
