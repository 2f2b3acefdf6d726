"""The synthetic experts' kernel against the reference, bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvep
from nvep import reference
from nvep.errors import ArgumentError
from nvep.moe.synthetic import ScaleExperts

BF16 = np.dtype(ml_dtypes.bfloat16)


def draw(rng: np.random.Generator, tokens: int, config: nvep.ExchangeConfig) -> reference.RankTokens:
    rows = (rng.standard_normal((tokens, config.row_bytes // 2)) * 10.0).astype(BF16)
    ids = np.array([rng.permutation(config.num_experts)[: config.top_k] for _ in range(tokens)], dtype=np.int32)
    ids = ids.reshape(tokens, config.top_k)
    ids[::3, 0] = -1
    return reference.RankTokens([rows.view(np.uint8)], ids, rng.standard_normal(ids.shape, dtype=np.float32))


@pytest.mark.parametrize(
    ("partial_format", "experts", "top_k", "row_bytes", "tokens"),
    [
        ("bf16", 1, 1, 16, (3,)),
        ("fp16", 7, 4, 80, (5, 0, 9)),
        ("fp32", 7, 4, 80, (5, 0, 9)),
        ("bf16", 300, 64, 32, (9, 4)),
        ("bf16", 3, 3, 2064, (1, 2, 3, 0, 9)),
    ],
)
def test_every_partial_row(
    partial_format: str, experts: int, top_k: int, row_bytes: int, tokens: tuple[int, ...]
) -> None:
    ranks = len(tokens)
    config = nvep.ExchangeConfig(
        num_experts=experts,
        top_k=top_k,
        max_tokens=9,
        row_bytes=row_bytes,
        partial_format=partial_format,
        partial_elements=row_bytes // 2,
        placement=tuple((2 * e + 1) % ranks for e in range(experts)),
    )
    rng = np.random.default_rng(5)
    sources = [draw(rng, n, config) for n in tokens]

    def one_rank(group: Any) -> tuple[np.ndarray, np.ndarray]:
        mine = sources[group.rank]
        with nvep.Exchange(group, config) as exchange:
            run = ScaleExperts(exchange)
            arrivals = exchange.dispatch(mine.payloads[0], mine.expert_ids, mine.expert_weights)
            partial_rows = run(arrivals)
            seen = partial_rows.numpy()
            output = exchange.combine(partial_rows, arrivals)
            exchange.synchronize()
            return seen, output.numpy()

    results = nvep.run_local(one_rank, ranks, device="emulated")
    expected = []
    for rank, arrivals in enumerate(reference.dispatch(sources, config)):
        expected.append(reference.scale_experts(arrivals, rank=rank, config=config, num_ranks=ranks))
        found = results[rank][0]
        assert np.array_equal(found[arrivals.valid].view(np.uint8), expected[rank][arrivals.valid].view(np.uint8))
    combined = reference.combine(expected, [s.expert_ids for s in sources], config=config)
    for (_, output), good in zip(results, combined):
        assert np.array_equal(output.view(np.uint8), good.view(np.uint8))


def test_rows_of_another_length_than_the_partial_rows_are_refused() -> None:
    config = nvep.ExchangeConfig(num_experts=2, top_k=1, max_tokens=1, row_bytes=32, partial_elements=8)

    def one_rank(group: Any) -> None:
        with nvep.Exchange(group, config) as exchange:
            ScaleExperts(exchange)

    with pytest.raises(ArgumentError, match="partial_elements: got 8; allowed: the row's 16 bf16 elements"):
        nvep.run_local(one_rank, 1, device="emulated")
