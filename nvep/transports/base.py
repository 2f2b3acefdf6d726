"""What the host knows of a transport; the device half is ``nvep_kernels/transports/<name>.cuh``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvep.config import ExchangeConfig
from nvep.symmetric.layout import Region


class Transport(ABC):
    """How bytes move.

    Attributes
    ----------
    name : str
        As in ``ExchangeConfig.transport``; also the header's name.
    cpp_template : str
        C++ class template in namespace ``nvep`` over (protocol, partial format).
    """

    name: str
    cpp_template: str

    @abstractmethod
    def heap_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        """Receive buffers of one lane, reached by peers. Sizes depend on the configuration alone."""

    @abstractmethod
    def local_regions(self, config: ExchangeConfig, num_ranks: int) -> list[Region]:
        """Private state of one lane."""


def max_targets(config: ExchangeConfig, num_ranks: int) -> int:
    """Most ranks that one token can go to."""
    return min(config.top_k, num_ranks)
