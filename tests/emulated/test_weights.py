"""Layers whose weights come from a checkpoint, with experts on several ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nvep import ExchangeConfig, MoELayer, run_local
from nvep.moe import MoEWeights, Router, Routing, balance
from nvep.reference import ExpertMatrices, route
from nvep.testing.moe_bounds import output_bounds, require_inside
from tests.host import checkpoints as make

RANKS, TOKENS, ROUTING = 4, 5, Routing(make.EXPERTS, 2, renormalise=True)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(9)
    rows = (rng.standard_normal((RANKS, TOKENS, make.HIDDEN)) / 16).astype(make.BF16)
    return rows, rng.standard_normal((RANKS, TOKENS, make.EXPERTS)).astype(np.float32)


def test_a_layer_from_a_checkpoint_gives_the_bits_of_one_from_arrays(tmp_path: Path) -> None:
    matrices = make.bf16_matrices()
    path = make.save_sharded(tmp_path, make.per_expert("mixtral", matrices))
    rows, logits = inputs()

    def outputs(weights: MoEWeights) -> list[np.ndarray]:
        def step(group: Any) -> np.ndarray:
            with MoELayer(group, weights, top_k=2, max_tokens=TOKENS) as layer:
                return layer(rows[group.rank], *route(logits[group.rank], ROUTING)).numpy().copy()

        return run_local(step, RANKS, device="emulated")

    stored = outputs(MoEWeights.from_safetensors(path, layer=3, naming="mixtral"))
    for got, expected in zip(stored, outputs(MoEWeights(*matrices)), strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
        assert got.any()


def test_replicated_experts_from_a_checkpoint_compute_the_same_layer(tmp_path: Path) -> None:
    """Router with replicas, physical experts, one layer: within the bounds of the layer without replicas' numbers."""
    matrices = make.bf16_matrices()
    path = make.save(tmp_path, make.per_expert("deepseek", matrices))
    placement = balance([8.0, 1.0, 4.0, 1.0, 2.0, 1.0], RANKS, 12)
    rows, logits = inputs()
    weights = MoEWeights.from_safetensors(path, layer=3, naming="deepseek").replicated(placement)

    def step(group: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with (
            MoELayer(group, weights, top_k=2, max_tokens=TOKENS, placement=placement.ranks) as layer,
            Router(group.device, ROUTING, max_tokens=TOKENS, replicas=placement.replicas(group.rank)) as router,
        ):
            ids, scale = router(logits[group.rank])
            output = layer(rows[group.rank], ids, scale).numpy().copy()
            return output, ids.numpy().copy(), scale.numpy().copy()

    copies = list(placement.logical)
    physical = ExpertMatrices(*(stack[copies] for stack in matrices))
    for rank, (output, ids, scale) in enumerate(run_local(step, RANKS, device="emulated")):
        logical, _ = route(logits[rank], ROUTING)
        np.testing.assert_array_equal(np.array(copies)[ids], logical)
        config = _config(placement.num_physical, placement.ranks)
        bounds = output_bounds(rows[rank], ids, scale, matrices=physical, config=config, num_ranks=RANKS)
        require_inside(output, bounds, f"rank {rank}")


def _config(experts: int, ranks: tuple[int, ...]) -> ExchangeConfig:
    return ExchangeConfig(num_experts=experts, top_k=2, max_tokens=TOKENS, row_bytes=2 * make.HIDDEN, placement=ranks)
