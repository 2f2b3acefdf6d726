"""Checks of a grouped GEMM backend that hold on every device."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from nvep.moe import MoEWeights
from nvep.moe.naming import ExpertParts
from nvep.runtime.device import Device
from nvep.testing.moe_gemms import GemmCase, MakeGemm, check_partial_rows, gemm_bench, make_step, wide_experts
from nvep.testing.steps import same

# Several segments of the inner dimension, tiles that end inside a warp, more tokens of an expert than a tile holds.
CASES = {
    "small": GemmCase(),
    "one-expert": GemmCase(ranks=1, top_k=1, num_experts=2, local=(1,), max_tokens=9, partial_format="bf16"),
    "segments": GemmCase(hidden=320, intermediate=200, max_tokens=3, partial_format="fp16"),
    "long-segments": GemmCase(ranks=1, hidden=1216, intermediate=72, max_tokens=2),
    "token-tiles": GemmCase(ranks=2, max_tokens=70, top_k=1, num_experts=2, local=(0,), hidden=24, intermediate=16),
    "many-experts": GemmCase(ranks=3, top_k=5, num_experts=70, local=tuple(range(3, 43)), hidden=16, intermediate=8),
    "geglu": GemmCase(activation="geglu", biases=True),
    "clamped": GemmCase(activation="swiglu_clamped", biases=True, hidden=72, intermediate=136),
    "plain": GemmCase(activation="plain"),
    "fp8-weights": GemmCase(weight_format="fp8_block", hidden=176, intermediate=208, max_tokens=20),
    "fp8": GemmCase(weight_format="fp8_block", row_format="fp8_block", hidden=272, intermediate=144, max_tokens=4),
    "ue8m0-rows": GemmCase(row_format="fp8_block_ue8m0", hidden=136),
    "mxfp8-rows": GemmCase(row_format="mxfp8", hidden=72, biases=True),
    "fp16-rows": GemmCase(row_format="fp16"),
    "fp8-tensor-rows": GemmCase(row_format="fp8_tensor", row_scale=0.01, hidden=56),
    "nvfp4-rows": GemmCase(row_format="nvfp4", row_scale=0.002, hidden=200),
}


def counts_of(case: GemmCase, index: int) -> list[int]:
    """Full, empty and mixed buffers."""
    full = [case.max_tokens] * case.ranks
    return (full, [0] * case.ranks, [n if r % 2 else max(1, n // 3) for r, n in enumerate(full)])[index % 3]


def check_case(device: Device, case: GemmCase, make: MakeGemm, *, rounds: bool = False) -> None:
    """Three steps of one backend, against bounds derived from the number formats."""
    rng = np.random.default_rng(7)
    weights = case.weights(rng)
    with gemm_bench(device, case, make, weights) as bench:
        for index in range(3):
            step = make_step(case, rng, counts_of(case, index), local_only=index == 0 and case.top_k <= len(case.local))
            check_partial_rows(bench.run(step), step, (case, weights), f"step {index}", rounds=rounds)


def check_rows_alone(device: Device, case: GemmCase, make: MakeGemm) -> None:
    """A row's result has the same bits alone, in other places, and in the company of others."""
    rng = np.random.default_rng(11)
    weights = case.weights(rng)
    counts = [case.max_tokens] * case.ranks
    with gemm_bench(device, case, make, weights) as bench:
        step = make_step(case, rng, counts, local_only=True)
        together = bench.run(step).copy()
        same(bench.run(step), together, "again")
        order = rng.permutation(len(step.ids))
        payloads = tuple(payload[order] for payload in step.payloads)
        moved = replace(step, payloads=payloads, ids=step.ids[order], weights=step.weights[order])
        same(bench.run(moved), together[order], "in other places")
        for row in rng.choice(len(step.ids), 3, replace=False).tolist():
            ids = np.full_like(step.ids, -1)
            ids[row] = step.ids[row]
            same(bench.run(replace(step, ids=ids))[row], together[row], f"row {row} alone")


# Norm of the error over the norm of the output, against float64 of the rows and weights given.
ACCURACY = {
    "bf16": (GemmCase(hidden=256, intermediate=128), 1e-2),
    "fp16": (GemmCase(hidden=256, intermediate=128, row_format="fp16"), 1e-2),
    "fp8_block": (GemmCase(hidden=256, intermediate=128, row_format="fp8_block", weight_format="fp8_block"), 6e-2),
    "fp8_block_ue8m0": (GemmCase(hidden=256, intermediate=128, row_format="fp8_block_ue8m0"), 6e-2),
    "mxfp8": (GemmCase(hidden=256, intermediate=128, row_format="mxfp8"), 6e-2),
}


def check_accuracy(device: Device, case: GemmCase, make: MakeGemm, limit: float) -> None:
    """Partial rows of a full buffer, as a whole, within ``limit`` of float64."""
    rng = np.random.default_rng(23)
    weights = case.weights(rng)
    experts = [replace(expert, biases=None) for expert in wide_experts(case, weights)]
    with gemm_bench(device, case, make, weights) as bench:
        step = make_step(case, rng, [case.max_tokens] * case.ranks, local_only=True)
        got = bench.run(step).astype(np.float64)
    exact = np.full(got.shape, np.nan)
    for row, ids in enumerate(step.ids.tolist()):
        x = step.given[row].astype(np.float64)
        for k, e in enumerate(ids):
            if e < 0:
                continue
            gate, up = experts[e].gate @ x, experts[e].up @ x
            output = float(step.weights[row, k]) * (experts[e].down @ (gate / (1 + np.exp(-gate)) * up))
            exact[row] = output if np.isnan(exact[row, 0]) else exact[row] + output
    written = ~np.isnan(exact[:, 0])
    error = np.linalg.norm((got - exact)[written]) / np.linalg.norm(exact[written])
    assert limit / 100 < error < limit, f"{case}: {error:.2e}"  # far smaller would be another computation


def check_e4m3_codes(device: Device, make: MakeGemm) -> None:
    """Every finite e4m3 weight counts as what it is: outputs are the codes' values, bit for bit."""
    case = GemmCase(
        ranks=1, max_tokens=1, top_k=1, num_experts=1, local=(0,), hidden=256, intermediate=256, activation="plain",
        weight_format="fp8_block",
    )  # fmt: skip
    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    values = codes.view(ml_dtypes.float8_e4m3fn)
    gate, up = np.zeros((2, 1, 256, 256), values.dtype)
    gate[0, :, 3], up[0, :, 3] = values, 1
    scales = ExpertParts(*(np.ones((1, 2, 2), np.float32) for _ in range(3)))
    weights = MoEWeights(gate, up, np.eye(256, dtype=np.float32).astype(values.dtype)[None], None, scales)
    step = make_step(case, np.random.default_rng(0), [1])
    rows = np.zeros((1, 256), ml_dtypes.bfloat16)
    rows[0, 3] = 1
    one = np.ones((1, 1), np.float32)
    step = replace(step, payloads=(rows.view(np.uint8),), ids=np.zeros((1, 1), np.int32), weights=one)
    with gemm_bench(device, case, make, weights) as bench:
        same(bench.run(step)[0] + np.float32(0.0), values.astype(np.float32) + np.float32(0.0), "codes")  # -0 is 0
