"""A grouped GEMM backend without an exchange: arrivals made by hand in plain device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.exchange import Arrivals
from nvep.formats import payload_format
from nvep.moe import MoEWeights
from nvep.moe.grouped_gemm import BACKENDS, ExpertShape, GroupedGemm
from nvep.moe.grouped_gemm.base import local_index
from nvep.moe.naming import ExpertParts
from nvep.moe.weights import LocalExperts
from nvep.reference.formats import decode, encode
from nvep.runtime.device import Device, Memory, Stream

Array = npt.NDArray[Any]
_BF16, _FP8 = partial_dtype("bf16"), np.dtype(ml_dtypes.float8_e4m3fn)
NAN_BYTE = 0xFF


@dataclass(frozen=True)
class GemmCase:
    """Sizes and formats of a rank's experts, and how full the receive buffer is."""

    ranks: int = 2
    max_tokens: int = 6
    top_k: int = 2
    num_experts: int = 4
    local: tuple[int, ...] = (1, 3)
    hidden: int = 48
    intermediate: int = 32
    activation: str = "swiglu"
    row_format: str = "bf16"
    weight_format: str = "bf16"
    biases: bool = False
    partial_format: str = "fp32"

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(
            self.ranks, self.max_tokens, self.top_k, self.num_experts, len(self.local), self.hidden, self.intermediate,
            self.partial_format, activation=self.activation, row_format=self.row_format,
            weight_format=self.weight_format, biases=self.biases,
        )  # fmt: skip

    def weights(self, rng: np.random.Generator) -> MoEWeights:
        """Random weights; outputs are of order one."""
        e, i, h = self.num_experts, self.intermediate, self.hidden
        shapes = ((e, i, h), (e, i, h), (e, h, i))
        matrices = [rng.standard_normal(shape) * np.sqrt(3.0 / shape[2]) for shape in shapes]
        biases = None
        if self.biases:
            biases = ExpertParts(*(rng.standard_normal((e, n)).astype(np.float32) for n in (i, i, h)))
        if self.weight_format == "bf16":
            return MoEWeights(*(m.astype(_BF16) for m in matrices), biases=biases)
        scales = ExpertParts(
            *(rng.uniform(0.002, 0.008, (e, -(-s[1] // 128), -(-s[2] // 128))).astype(np.float32) for s in shapes)
        )
        return MoEWeights(*((m * 100).astype(np.float32).astype(_FP8) for m in matrices), biases=biases, scales=scales)


@dataclass(frozen=True)
class Step:
    """What arrived, on the host: rows as they are and as they travel, ids, weights, counts."""

    rows: Array
    payloads: tuple[Array, ...]
    ids: Array
    weights: Array
    counts: Array


def make_step(case: GemmCase, rng: np.random.Generator, counts: list[int], *, local_only: bool = False) -> Step:
    """Random rows below the counts; beyond them invalid ids and NaN."""
    ranks, most, k = case.ranks, case.max_tokens, case.top_k
    rows = rng.standard_normal((ranks * most, case.hidden)).astype(_BF16)
    choices = case.local if local_only else range(case.num_experts)
    ids = np.array([rng.permutation(np.array(choices))[:k] for _ in range(ranks * most)], np.int32)
    ids = np.where(rng.random(ids.shape) < 0.15, -1, ids).astype(np.int32)
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    encoded = encode(rows, case.row_format)
    payloads = [encoded.payload.copy()] + ([encoded.scales.copy()] if encoded.scales is not None else [])
    if payload_format(case.row_format).scale is None:
        payloads = payloads[:1]
    empty = (np.arange(most)[None] >= np.array(counts)[:, None]).reshape(-1)
    ids[empty] = -1
    weights[empty] = np.nan
    for payload in payloads:
        payload[empty] = NAN_BYTE
    made = payload_format(case.row_format).scale
    decoded = decode(type(encoded)(payloads[0], payloads[1] if made else None), case.row_format, case.hidden)
    return Step(decoded, tuple(payloads), ids, weights, np.array(counts, np.int32))


class GemmBench:
    """A backend with its weights and a receive buffer; `run` gives partial rows."""

    def __init__(self, device: Device, case: GemmCase, name: str, weights: MoEWeights) -> None:
        self.device, self.case = device, case
        index = np.full(case.num_experts, -1, np.int32)
        index[list(case.local)] = 0
        self.experts = LocalExperts(device, weights.checked(device), local_index(index, 0))
        self.gemm: GroupedGemm = BACKENDS[name](device, case.shape, self.experts)
        self._memories: list[Memory] = []
        self.owner = ArrayOwner(device)
        rows = (case.ranks, case.max_tokens)
        made = payload_format(case.row_format)
        payloads = [self._array((*rows, n), np.uint8) for n in made.payload_bytes(case.hidden)]
        self.arrivals = Arrivals(
            payloads=tuple(payloads),
            expert_ids=self._array((*rows, case.top_k), np.int32),
            expert_weights=self._array((*rows, case.top_k), np.float32),
            counts=self._array((case.ranks,), np.int32),
            partial_rows=self._array((*rows, case.hidden), partial_dtype(case.partial_format)),
            protocol="fence",
            lane=0,
            step=0,
        )

    def _array(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        memory = self.device.allocate(max(16, int(np.prod(shape)) * np.dtype(dtype).itemsize))
        self._memories.append(memory)
        return DeviceArray(memory.address, shape, dtype, owner=self.owner)

    def fill(self, step: Step, stream: Stream) -> None:
        """Put a step into the receive buffer, and NaN into the partial rows."""
        a = self.arrivals
        targets = [*a.payloads, a.expert_ids, a.expert_weights, a.counts]
        for target, source in zip(targets, [*step.payloads, step.ids, step.weights, step.counts], strict=True):
            self.device.copy_in(target.address, np.ascontiguousarray(source), stream)
        self.device.fill(a.partial_rows.address, NAN_BYTE, a.partial_rows.nbytes, stream)

    def run(self, step: Step) -> Array:
        """Partial rows ``[rows, hidden]``."""
        stream = self.device.default_stream
        self.fill(step, stream)
        self.gemm.run(self.arrivals, self.arrivals.partial_rows, stream)
        stream.synchronize()
        return self.arrivals.partial_rows.numpy().reshape(-1, self.case.hidden)

    def close(self) -> None:
        self.device.synchronize()
        self.gemm.close()
        self.experts.close()
        self.owner.expire()
        for memory in self._memories:
            memory.free()


@contextmanager
def gemm_bench(device: Device, case: GemmCase, name: str, weights: MoEWeights) -> Iterator[GemmBench]:
    """A `GemmBench` that is closed."""
    bench = GemmBench(device, case, name, weights)
    try:
        yield bench
    finally:
        bench.close()
