"""What the host knows of an arrival protocol; the device half is ``nvep_kernels/protocols/<name>.cuh``."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from nvep.symmetric.layout import Region


class ArrivalProtocol(ABC):
    """How a receiver knows.

    Attributes
    ----------
    name : str
        As in ``ExchangeConfig.protocol``; also the header's name.
    cpp_type : str
        C++ type in namespace ``nvep``.
    """

    name: str
    cpp_type: str

    @abstractmethod
    def heap_regions(self, num_ranks: int) -> list[Region]:
        """Record words of one lane, written by peers."""

    @abstractmethod
    def initial_words(self, num_ranks: int, first_epoch: int) -> dict[str, np.ndarray]:
        """What each region of ``heap_regions`` holds before the step ``first_epoch``: records of the steps before
        it."""
