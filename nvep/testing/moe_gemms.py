"""A grouped GEMM backend without an exchange: arrivals made by hand in plain device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from nvep.moe.grouped_gemm import ExpertShape, GroupedGemm
from nvep.moe.grouped_gemm.base import local_index
from nvep.moe.naming import ExpertParts
from nvep.moe.weights import LocalExperts
from nvep.reference.formats import decode, encode
from nvep.runtime.device import Device, Memory, Stream
from nvep.testing.moe_bounds import Interval, WideExpert, expert_bounds, require_inside, weighted_bounds

Array = npt.NDArray[Any]
MakeGemm = Callable[[Device, ExpertShape, LocalExperts], GroupedGemm]
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
    row_scale: float | None = None

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(
            self.ranks, self.max_tokens, self.top_k, self.num_experts, len(self.local), self.hidden, self.intermediate,
            self.partial_format, activation=self.activation, row_format=self.row_format,
            weight_format=self.weight_format, biases=self.biases, row_scale=self.row_scale or 1.0,
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
            gate, up, down = (m.astype(_BF16) for m in matrices)
            return MoEWeights(gate, up, down, biases)
        scales = ExpertParts(
            *(rng.uniform(0.002, 0.008, (e, -(-s[1] // 128), -(-s[2] // 128))).astype(np.float32) for s in shapes)
        )
        gate, up, down = ((m * 100).astype(np.float32).astype(_FP8) for m in matrices)
        return MoEWeights(gate, up, down, biases, scales)


@dataclass(frozen=True)
class Step:
    """What arrived, on the host: rows as given, as decoded and as they travel, ids, weights, counts."""

    given: Array
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
    chosen = [rng.permutation(np.array(choices))[:k] for _ in range(ranks * most)]
    ids = np.array([np.pad(some, (0, k - len(some)), constant_values=-1) for some in chosen], np.int32)
    ids = np.where(rng.random(ids.shape) < 0.15, -1, ids).astype(np.int32)
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    encoded = encode(rows, case.row_format, tensor_scale=case.row_scale)
    decoded = decode(encoded, case.row_format, case.hidden, tensor_scale=case.row_scale)
    scales = [] if encoded.scales is None else [encoded.scales.copy()]
    payloads = (encoded.payload.copy(), *scales)
    empty = (np.arange(most)[None] >= np.array(counts)[:, None]).reshape(-1)
    ids[empty], weights[empty] = -1, np.nan
    for payload in payloads:
        payload[empty] = NAN_BYTE
    return Step(rows, decoded, payloads, ids, weights, np.array(counts, np.int32))


class GemmBench:
    """A backend with its weights and a receive buffer; `run` gives partial rows."""

    def __init__(self, device: Device, case: GemmCase, make: MakeGemm, weights: MoEWeights) -> None:
        self.device, self.case = device, case
        index = np.full(case.num_experts, -1, np.int32)
        index[list(case.local)] = 0
        self.experts = LocalExperts(device, weights.checked(device), local_index(index, 0))
        self.gemm: GroupedGemm = make(device, case.shape, self.experts)
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


def wide_experts(case: GemmCase, weights: MoEWeights) -> list[WideExpert]:
    """Every expert in float64, scales multiplied in."""
    result = []
    for e in range(case.num_experts):
        matrices = [np.asarray(m[e]).astype(np.float64) for m in (weights.gate, weights.up, weights.down)]
        if weights.scales is not None:
            for i, scales in enumerate(weights.scales):
                whole = np.kron(np.asarray(scales[e], np.float64), np.ones((128, 128)))
                matrices[i] = matrices[i] * whole[: matrices[i].shape[0], : matrices[i].shape[1]]
        biases = None
        if weights.biases is not None:
            gate, up, down = (np.asarray(b[e], np.float64) for b in weights.biases)
            biases = (gate, up, down)
        result.append(WideExpert(matrices[0], matrices[1], matrices[2], biases))
    return result


def check_partial_rows(
    got: Array, step: Step, model: tuple[GemmCase, MoEWeights], where: str, *, rounds: bool = False
) -> None:
    """Every row with a local expert within its bounds (`expert_bounds`); all others untouched."""
    case, weights = model
    experts = wide_experts(case, weights)
    rounding = 0.0 if case.row_format == "bf16" else 2.0**-8  # decoded rows become bf16
    for row, ids in enumerate(step.ids.tolist()):
        choice = [(k, e) for k, e in enumerate(ids) if e in case.local]
        if not choice:
            assert np.isnan(got[row].astype(np.float32)).all(), f"{where}: row {row} was written"
            continue
        wide = step.rows[row].astype(np.float64)
        x = Interval(wide, rounding * np.abs(wide))
        terms = [
            (float(step.weights[row, k]), expert_bounds(x, experts[e], case.activation, rounds=rounds))
            for k, e in choice
        ]
        bounds = weighted_bounds(terms).rounded(partial_dtype(case.partial_format))
        require_inside(got[row], bounds, f"{where}: row {row}")


@contextmanager
def gemm_bench(device: Device, case: GemmCase, make: MakeGemm, weights: MoEWeights) -> Iterator[GemmBench]:
    """A `GemmBench` that is closed."""
    bench = GemmBench(device, case, make, weights)
    try:
        yield bench
    finally:
        bench.close()
