"""What an expert-compute backend offers to `MoELayer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nvep.arrays import DeviceArray
from nvep.exchange import Arrivals
from nvep.moe.weights import LocalExperts
from nvep.runtime.device import Device, Stream


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a rank's expert compute.

    Attributes
    ----------
    rows : int
        Rows of the receive buffer: ranks x max_tokens.
    top_k : int
        Ids per row.
    hidden, intermediate : int
        Elements of a row, and of an expert's inner activation.
    partial_format : str
        Element type of partial rows.
    lanes : int
        Steps whose expert compute may run at once.
    """

    rows: int
    top_k: int
    hidden: int
    intermediate: int
    partial_format: str
    lanes: int = 1


class GroupedGemm(ABC):
    """Gate/up with activation, then down with the weighted local sum; rows are read in place.

    Parameters
    ----------
    device : Device
        Where it runs; everything is loaded and allocated here, nothing in a step.
    shape : ExpertShape
        Sizes.
    experts : LocalExperts
        This rank's weights, on the device.
    """

    name: str

    def __init__(self, device: Device, shape: ExpertShape, experts: LocalExperts) -> None:
        self.device = device
        self.shape = shape
        self.experts = experts

    @abstractmethod
    def run(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> None:
        """Enqueue both projections: every row with a local expert gets its partial row, others are left as they are.

        Calls for one lane run in order; those for different lanes may overlap on the device.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the backend allocated."""


def local_index(expert_ranks: np.ndarray, rank: int) -> np.ndarray:
    """int32 ``[num_experts]``: position of each expert among those of ``rank``, -1 for experts of other ranks."""
    mine = expert_ranks == rank
    return np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)
