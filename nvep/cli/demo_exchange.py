"""The demo's experts over ranks: one expert-parallel layer per layer of the model, counted and timed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.cli.demo_model import ModelWeights
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup
from nvep.moe import MoELayer, MoEWeights

BF16_EXPONENT_TOP = 0x40  # in the high byte of a bf16: flipping it multiplies or divides the number by 2^128
BF16_TWO = 0x4000


@dataclass
class Traffic:
    """What one rank saw; a call is one layer's exchange in one step, and all ranks make the same calls.

    Attributes
    ----------
    sent : list of numpy.ndarray
        By call, int64 ``[ranks]``: rows that this rank's routing asks to send to each rank.
    received : list of numpy.ndarray
        By call, int64 ``[ranks]``: rows from each rank, as counted in this rank's receive buffers.
    routed, load : numpy.ndarray
        int64 ``[layers, experts]``: (token, expert) pairs that this rank's routing asks for, and those that its own
        experts found in the headers it received.
    call_ms : list of float
        By call: dispatch, experts and combine on this rank's stream, waiting for peers included.
    ids, weights : list of list of numpy.ndarray
        By layer and call: what the router chose, ``[rows, top_k]``.
    sabotage : str
        What was flipped, empty if nothing.
    """

    sent: list[npt.NDArray[np.int64]]
    received: list[npt.NDArray[np.int64]]
    routed: npt.NDArray[np.int64]
    load: npt.NDArray[np.int64]
    call_ms: list[float]
    ids: list[list[npt.NDArray[np.int32]]]
    weights: list[list[npt.NDArray[np.float32]]]
    sabotage: str = field(default="")


class ExpertParallel:
    """Computes a model's routed experts on the ranks that own them; an ``Experts`` of the demo's model.

    Construction, every call and ``close`` are collective.

    Parameters
    ----------
    group : RankGroup
        Who takes part.
    weights : ModelWeights
        The whole model; each rank's device gets its own experts, from the file.
    max_tokens : int
        Most rows of this rank in a call.
    protocol : str
        As in `ExchangeConfig`.
    sabotage : bool
        On the rank that owns the last expert, flip one bit of the first row it receives, between dispatch and experts.
    """

    def __init__(
        self,
        group: RankGroup,
        weights: ModelWeights,
        *,
        max_tokens: int,
        protocol: str = "fence",
        sabotage: bool = False,
    ) -> None:
        shape = weights.shape
        options: dict[str, Any] = {
            "top_k": shape.top_k,
            "partial_format": "fp32",
            "protocol": protocol,
        }
        self._resources = ExitStack()
        self._layers: list[MoELayer] = []
        try:
            for layer in range(shape.layers):
                experts = MoEWeights.from_safetensors(weights.path, layer=layer, naming="stacked")
                moe = MoELayer(group, experts, max_tokens=max_tokens, **options)
                self._layers.append(self._resources.enter_context(moe))
        except BaseException:
            self._resources.close()
            raise
        self.config = self._layers[0].exchange.config
        self._rank, self._num_ranks = group.rank, group.size
        self._expert_ranks = self.config.expert_ranks(group.size)
        self._sabotage = sabotage and group.rank == self._expert_ranks[-1]
        counts = (shape.layers, shape.num_experts)
        self.traffic = Traffic(
            [], [], np.zeros(counts, np.int64), np.zeros(counts, np.int64), [],
            [[] for _ in range(shape.layers)], [[] for _ in range(shape.layers)],
        )  # fmt: skip

    def __call__(
        self,
        layer: int,
        rows: npt.NDArray[np.generic],
        expert_ids: npt.NDArray[np.int32],
        expert_weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.generic]:
        """See ``nvep.cli.demo_model.Experts``; float32 ``[rows, hidden]``."""
        self._count_routing(layer, expert_ids, expert_weights)
        exchange = self._layers[layer].exchange
        stream = exchange.device.default_stream
        start = stream.record()
        arrivals = exchange.dispatch(rows, expert_ids, expert_weights)
        if self._sabotage:
            self._flip(arrivals, exchange)
        partial_rows = self._layers[layer].experts(arrivals)
        computed = stream.record()
        self._count_arrivals(layer, arrivals)
        resumed = stream.record()
        output = exchange.combine(partial_rows, arrivals)
        end = stream.record()
        exchange.synchronize()
        self.traffic.call_ms.append(computed.elapsed_ms(start) + end.elapsed_ms(resumed))
        return output.numpy()

    def _count_routing(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        reaches = (self._expert_ranks[ids][:, :, None] == np.arange(self._num_ranks)).any(axis=1)
        self.traffic.sent.append(reaches.sum(axis=0))
        self.traffic.routed[layer] += np.bincount(ids.ravel(), minlength=self.config.num_experts)
        self.traffic.ids[layer].append(ids)
        self.traffic.weights[layer].append(weights)

    def _count_arrivals(self, layer: int, arrivals: Arrivals) -> None:
        """Read counts and headers from the receive buffers, while they still belong to this step."""
        occupied = arrivals.occupied()
        self.traffic.received.append(occupied.sum(axis=1, dtype=np.int64))
        ids = arrivals.expert_ids.numpy()[occupied]
        mine = ids[(ids >= 0) & (self._expert_ranks[ids] == self._rank)]
        self.traffic.load[layer] += np.bincount(mine, minlength=self.config.num_experts)

    def _flip(self, arrivals: Arrivals, exchange: Exchange) -> None:
        rows = np.argwhere(arrivals.occupied())
        if not len(rows):
            return
        self._sabotage = False
        source, slot = (int(i) for i in rows[0])
        row = arrivals.rows[source, slot]
        elements = row.numpy().view(np.uint16)
        index = int(np.flatnonzero((elements & 0x7FFF) < BF16_TWO)[0])  # a number below 2, which becomes enormous
        high = np.array([(int(elements[index]) >> 8) ^ BF16_EXPONENT_TOP], np.uint8)
        exchange.device.copy_in(row.address + 2 * index + 1, high, exchange.work(arrivals))
        self.traffic.sabotage = (
            f"rank {self._rank} flipped a bit of byte {2 * index + 1} of the first row it received, from rank {source}"
        )

    def close(self) -> None:
        """Free the layers, as `Exchange.close` does. Idempotent."""
        self._resources.close()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._resources.__exit__(kind, error, trace)
