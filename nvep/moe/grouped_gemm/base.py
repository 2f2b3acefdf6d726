"""What an expert-compute backend offers to `MoELayer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nvep.arrays import DeviceArray
from nvep.exchange import Arrivals
from nvep.moe.weights import LocalExperts
from nvep.runtime.device import Device, Stream

ACTIVATIONS = ("swiglu", "geglu", "swiglu_clamped", "plain")


@dataclass(frozen=True)
class ExpertShape:
    """Sizes and number formats of a rank's expert compute.

    Attributes
    ----------
    ranks, max_tokens : int
        The receive buffer has ``ranks * max_tokens`` rows.
    top_k : int
        Ids per row.
    num_experts, local_experts : int
        Of the whole layer, and of this rank.
    hidden, intermediate : int
        Elements of a row, and of an expert's inner activation.
    partial_format : str
        Element type of partial rows.
    lanes : int
        Steps whose expert compute may run at once.
    activation : str
        One of ``ACTIVATIONS``.
    row_format : str
        Payload format of the rows that arrive.
    weight_format : str
        ``"bf16"``, or ``"fp8_block"``: e4m3 with float32 scales of 128 x 128 blocks.
    biases : bool
        Whether the projections have biases.
    row_scale : float
        The scale of all rows, in formats that have one.
    """

    ranks: int
    max_tokens: int
    top_k: int
    num_experts: int
    local_experts: int
    hidden: int
    intermediate: int
    partial_format: str
    lanes: int = 1
    activation: str = "swiglu"
    row_format: str = "bf16"
    weight_format: str = "bf16"
    biases: bool = False
    row_scale: float = 1.0

    @property
    def rows(self) -> int:
        """Rows of the receive buffer."""
        return self.ranks * self.max_tokens

    @property
    def most_pairs(self) -> int:
        """Most pairs of a row and a local expert in a step."""
        return self.rows * min(self.top_k, self.local_experts)


class MemoryLine(NamedTuple):
    """A use of device memory and its bytes, all lanes together."""

    name: str
    nbytes: int


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

    def run(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> None:
        """Enqueue both projections: every row with a local expert gets its partial row, others are left as they are.

        Calls for one lane run in order; those for different lanes may overlap on the device.
        """
        for _ in self.stages(arrivals, partial_rows, stream):
            pass

    @abstractmethod
    def stages(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> Iterator[str]:
        """`run` stage by stage: each name comes when that stage was enqueued."""

    @abstractmethod
    def memory(self) -> list[MemoryLine]:
        """What the backend allocated."""

    @abstractmethod
    def close(self) -> None:
        """Free what the backend allocated."""


def local_index(expert_ranks: np.ndarray, rank: int) -> np.ndarray:
    """int32 ``[num_experts]``: position of each expert among those of ``rank``, -1 for experts of other ranks."""
    mine = expert_ranks == rank
    return np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)
