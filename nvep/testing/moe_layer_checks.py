"""`MoELayer` with its options, against float64 bounds: formats end to end, biases, activations, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.group import RankGroup, run_local
from nvep.moe import MoELayer, MoEWeights
from nvep.reference.formats import decode, encode
from nvep.reference.routing import distinct_targets
from nvep.testing.moe_bounds import Interval, WideExpert, expert_bounds, require_inside, weighted_bounds
from nvep.testing.moe_gemms import GemmCase, wide_experts

Array = npt.NDArray[Any]
_BF16 = partial_dtype("bf16")
LIMIT = 100.0


@dataclass(frozen=True)
class LayerCase:
    """A layer's experts, and shared ones beside them."""

    experts: GemmCase
    shared: GemmCase | None = None
    grouped_gemm: str = "gather"
    split: bool = False

    def weights(self) -> tuple[MoEWeights, MoEWeights | None]:
        """Of routed and shared experts, the same on every rank."""
        rng = np.random.default_rng(17)
        routed = self.experts.weights(rng)
        return routed, None if self.shared is None else self.shared.weights(rng)

    def tokens(self, rank: int, step: int) -> tuple[Array, Array, Array]:
        """Rows, ids and weights of a rank in a step; there are steps without any."""
        case, rng = self.experts, np.random.default_rng((rank, step))
        n = (case.max_tokens, 0, 1)[(rank + step) % 3]
        rows = rng.standard_normal((n, case.hidden)).astype(_BF16)
        ids = [rng.permutation(case.num_experts)[: case.top_k] for _ in range(n)]
        weights = rng.standard_normal((n, case.top_k)).astype(np.float32)
        return rows, np.array(ids, np.int32).reshape(n, case.top_k), weights


_BASE = GemmCase(ranks=2, max_tokens=5, top_k=3, num_experts=6, hidden=48, intermediate=32, partial_format="bf16")
_SHARED = GemmCase(num_experts=2, hidden=48, intermediate=16)
CASES = {
    "biases": LayerCase(replace(_BASE, biases=True, activation="swiglu_clamped"), split=True),
    "fp8": LayerCase(replace(_BASE, row_format="fp8_block", weight_format="fp8_block", partial_format="fp32")),
    "fp8-ue8m0": LayerCase(replace(_BASE, row_format="fp8_block_ue8m0"), grouped_gemm="auto", split=True),
    "mxfp8": LayerCase(replace(_BASE, row_format="mxfp8", activation="geglu")),
    "fp8-tensor": LayerCase(replace(_BASE, row_format="fp8_tensor", row_scale=0.01), grouped_gemm="auto"),
    "nvfp4": LayerCase(replace(_BASE, row_format="nvfp4", row_scale=0.002, weight_format="fp8_block")),
    "shared": LayerCase(_BASE, _SHARED),
    "shared-split": LayerCase(replace(_BASE, partial_format="fp32"), replace(_SHARED, num_experts=1), split=True),
}


@contextmanager
def on_device(layer: MoELayer, arrays: tuple[Array, ...]) -> Iterator[list[DeviceArray]]:
    """Copies on the layer's device."""
    device = layer.group.device
    owner = ArrayOwner(device)
    memories = [device.allocate(max(16, a.nbytes)) for a in arrays]
    for memory, array in zip(memories, arrays, strict=True):
        if array.nbytes:
            device.copy_in(memory.address, array, device.default_stream)
    try:
        yield [DeviceArray(m.address, a.shape, a.dtype, owner=owner) for m, a in zip(memories, arrays, strict=True)]
    finally:
        device.synchronize()
        owner.expire()
        for memory in memories:
            memory.free()


def output_of(layer: MoELayer, inputs: list[DeviceArray], *, split: bool) -> Array:
    """What the layer gives, in one call or phase by phase."""
    if not split:
        return layer(*inputs).numpy()
    layer.dispatch_send(*inputs)
    arrivals = layer.dispatch_recv()
    layer.experts(arrivals)
    layer.combine_send(arrivals)
    return layer.combine_recv(arrivals).numpy()


def bounds_of(case: LayerCase, tokens: tuple[Array, Array, Array], config: Any) -> list[Interval]:
    """Where each token's output must lie."""
    experts, dtype = case.experts, partial_dtype(case.experts.partial_format)
    weights, shared = case.weights()
    wide = wide_experts(experts, weights)
    beside = [] if shared is None or case.shared is None else wide_experts(case.shared, shared)
    owners = config.expert_ranks(experts.ranks)
    rows, ids, factors = tokens
    if len(rows) == 0:
        return []
    scale = experts.row_scale
    encoded = encode(rows, experts.row_format, tensor_scale=scale)
    travelled = decode(encoded, experts.row_format, experts.hidden, tensor_scale=scale).astype(np.float64)
    rounding = 0.0 if experts.row_format == "bf16" else 2.0**-8
    result = []
    for token in range(len(rows)):
        x = Interval(travelled[token], rounding * np.abs(travelled[token]))
        parts = []
        for target in distinct_targets(ids[token].tolist(), owners):
            mine = [k for k in range(experts.top_k) if owners[ids[token, k]] == target]
            terms = [
                (float(factors[token, k]), expert_bounds(x, wide[ids[token, k]], experts.activation)) for k in mine
            ]
            parts.append((1.0, weighted_bounds(terms).rounded(dtype)))
        total = weighted_bounds(parts).rounded(dtype)
        if beside:
            total = _with_shared(total, rows[token], beside, (experts.activation, dtype))
        result.append(total)
    return result


def _with_shared(total: Interval, row: Array, beside: list[WideExpert], kind: tuple[str, Any]) -> Interval:
    exact = Interval(row.astype(np.float64), np.zeros(len(row)))
    shared = weighted_bounds([(1.0, expert_bounds(exact, expert, kind[0])) for expert in beside])
    return weighted_bounds([(1.0, total), (1.0, shared.rounded(kind[1]))]).rounded(kind[1])


def options_of(case: LayerCase) -> dict[str, Any]:
    """Arguments of `MoELayer` beside group and weights."""
    experts = case.experts
    return {
        "top_k": experts.top_k,
        "max_tokens": experts.max_tokens,
        "grouped_gemm": case.grouped_gemm,
        "activation": experts.activation,
        "row_format": experts.row_format,
        "row_scale": experts.row_scale,
        "partial_format": experts.partial_format,
        "shared": case.weights()[1],
    }


def check_options(case: LayerCase, device: str) -> None:
    """Three steps on every rank of a local group, each token within its bounds."""

    def main(group: RankGroup) -> None:
        with MoELayer(group, case.weights()[0], **options_of(case)) as layer:
            for step in range(3):
                tokens = case.tokens(group.rank, step)
                with on_device(layer, tokens) as inputs:
                    got = output_of(layer, inputs, split=case.split)
                for token, bounds in enumerate(bounds_of(case, tokens, layer.exchange.config)):
                    require_inside(got[token], bounds, f"rank {group.rank}, step {step}, token {token}")

    run_local(main, case.experts.ranks, device=device, timeout=LIMIT)


def check_profile(case: LayerCase, device: str) -> None:
    """Every part of a step has a time, and the layer works on."""

    def main(group: RankGroup) -> list[str]:
        with MoELayer(group, case.weights()[0], **options_of(case)) as layer:
            tokens = case.tokens(0, 0)
            with on_device(layer, tokens) as inputs:
                times = layer.profile(*inputs, steps=3)
                got = output_of(layer, inputs, split=False)
            for token, bounds in enumerate(bounds_of(case, tokens, layer.exchange.config)):
                require_inside(got[token], bounds, f"after profile, token {token}")
            assert all(us >= 0 for us in times.values()), times
            assert sum(times.values()) > 0
            assert {line.name for line in layer.memory()} >= {"weights", "heap", "plan", "intermediate"}
            return list(times)

    for names in run_local(main, case.experts.ranks, device=device, timeout=LIMIT):
        start = ["quantise"] if case.experts.row_format != "bf16" else []
        shared = ["shared experts"] if case.shared else []
        end = ["add shared"] if case.shared else []
        middle = ["dispatch receive", "plan", "gate and up", "down", "combine send", "combine receive"]
        assert names == [*start, "dispatch send", *shared, *middle, *end]
