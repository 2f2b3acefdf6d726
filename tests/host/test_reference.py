"""The oracle itself, against hand-made figures and against independent formulations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvep import reference as ref
from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError

BF16 = np.dtype(ml_dtypes.bfloat16)


def random_ids(rng: np.random.Generator, tokens: int, config: ExchangeConfig) -> np.ndarray:
    ids = [rng.permutation(config.num_experts)[: config.top_k] for _ in range(tokens)]
    return np.array(ids, dtype=np.int32).reshape(tokens, config.top_k)


def random_step(rng: np.random.Generator, tokens: int, config: ExchangeConfig) -> ref.RankTokens:
    payloads = [rng.standard_normal((tokens, n // 2)).astype(BF16).view(np.uint8) for n in config.payload_bytes]
    weights = rng.random((tokens, config.top_k), dtype=np.float32)
    return ref.RankTokens(payloads, random_ids(rng, tokens, config), weights)


# --- routing ----------------------------------------------------------------------------------------------------------


def test_distinct_targets_ignores_invalid_ids() -> None:
    expert_ranks = np.array([2, 0, 2, 1], dtype=np.int32)
    assert ref.distinct_targets([0, 2, 3, 1], expert_ranks) == [0, 1, 2]
    assert ref.distinct_targets([-1, 4, 1 << 30, 2], expert_ranks) == [2]
    assert ref.distinct_targets([-1, -2], expert_ranks) == []


def test_slots_by_hand() -> None:
    expert_ranks = np.array([0, 0, 1, 1], dtype=np.int32)
    ids = np.array([[0, 1], [2, 0], [-1, -1], [3, 2], [9, 1]], dtype=np.int32)
    assert ref.slots(ids, expert_ranks, 3).tolist() == [[0, -1, -1], [1, 0, -1], [-1, -1, -1], [-1, 1, -1], [2, -1, -1]]
    assert ref.counts(ids, expert_ranks, 3).tolist() == [3, 2, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_slots_number_the_tokens_of_each_target(num_ranks: int, num_experts: int, tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expert_ranks = rng.integers(0, num_ranks, num_experts, dtype=np.int32)
    ids = rng.integers(-2, num_experts + 2, (tokens, 5), dtype=np.int32)
    known = (ids >= 0) & (ids < num_experts)
    rank_of = np.where(known, expert_ranks[np.where(known, ids, 0)], -1)
    sent = (rank_of[:, :, None] == np.arange(num_ranks)).any(axis=1)
    expected = np.where(sent, np.cumsum(sent, axis=0) - 1, -1)
    assert np.array_equal(ref.slots(ids, expert_ranks, num_ranks), expected)
    assert np.array_equal(ref.counts(ids, expert_ranks, num_ranks), sent.sum(axis=0))


# --- dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [None, (0, 1, 2, 0, 1, 2, 2)])
def test_dispatch_delivers_every_token_once_per_target(placement: tuple[int, ...] | None) -> None:
    config = ExchangeConfig(
        num_experts=7, top_k=3, max_tokens=6, row_bytes=32, extra_payload_bytes=(16,), placement=placement
    )
    rng = np.random.default_rng(3)
    sources = [random_step(rng, tokens, config) for tokens in (6, 0, 4)]
    arrivals = ref.dispatch(sources, config)
    expert_ranks = config.expert_ranks(3)
    for target, received in enumerate(arrivals):
        for source, step in enumerate(sources):
            tokens = [t for t, ids in enumerate(step.expert_ids) if target in expert_ranks[ids]]
            n = len(tokens)
            assert received.counts[source] == n
            assert received.valid[source].tolist() == [True] * n + [False] * (6 - n)
            for got, sent in zip(received.payloads, step.payloads):
                assert np.array_equal(got[source, :n], sent[tokens])
                assert not got[source, n:].any()
            assert np.array_equal(received.expert_ids[source, :n], step.expert_ids[tokens])
            assert np.array_equal(received.expert_weights[source, :n], step.expert_weights[tokens])
            assert (received.expert_ids[source, n:] == -1).all()


def test_dispatch_replaces_ids_that_are_out_of_range_or_repeated() -> None:
    config = ExchangeConfig(num_experts=4, top_k=3, max_tokens=2, row_bytes=16, invalid_expert=-7)
    ids = np.array([[3, 4, -1], [1, 1, 0]], dtype=np.int32)
    step = ref.RankTokens([np.zeros((2, 16), np.uint8)], ids, np.ones((2, 3), np.float32))
    (received,) = ref.dispatch([step], config)
    assert received.expert_ids[0].tolist() == [[3, -7, -7], [1, -7, 0]]


def test_masked_ranks_neither_send_nor_receive() -> None:
    config = ExchangeConfig(num_experts=6, top_k=6, max_tokens=2, row_bytes=16)
    rng = np.random.default_rng(1)
    sources = [random_step(rng, 2, config) for _ in range(3)]
    arrivals = ref.dispatch(sources, config, masked=[1])
    assert [a.counts.tolist() for a in arrivals] == [[2, 0, 2], [0, 0, 0], [2, 0, 2]]
    partial = [np.full((3, 2, 8), 2.0**rank, dtype=BF16) for rank in range(3)]
    results = ref.combine(partial, [s.expert_ids for s in sources], config=config, masked=[1])
    assert [float(r[0, 0]) for r in results] == [5.0, 0.0, 5.0]


# --- combine ----------------------------------------------------------------------------------------------------------


def combine_values(values: list[float], partial_format: str = "fp32") -> np.ndarray:
    """Sum of one token whose partial row at rank r holds ``values[r]``."""
    n = len(values)
    config = ExchangeConfig(
        num_experts=n, top_k=n, max_tokens=1, row_bytes=16, partial_format=partial_format, partial_elements=8
    )
    dtype = {"fp32": np.dtype(np.float32), "bf16": BF16, "fp16": np.dtype(np.float16)}[partial_format]
    partial = [np.zeros((n, 1, 8), dtype) for _ in range(n)]
    for rank, value in enumerate(values):
        partial[rank][0, 0] = value
    ids = [np.arange(n, dtype=np.int32)[None, ::-1], *[np.zeros((0, n), np.int32)] * (n - 1)]
    return ref.combine(partial, ids, config=config)[0]


def test_combine_adds_target_ranks_in_ascending_order() -> None:
    assert combine_values([1e8, 1.0, -1e8])[0, 0] == 0.0
    assert combine_values([1e8, -1e8, 1.0])[0, 0] == 1.0


def test_combine_rounds_once_to_nearest_even() -> None:
    # bf16 has 8 significant bits: 256 + 1 is a tie, which a second half breaks upwards only if it is summed in float32.
    assert float(combine_values([256.0, 1.0], "bf16")[0, 0]) == 256.0
    assert float(combine_values([256.0, 1.0, 0.5], "bf16")[0, 0]) == 258.0
    assert float(combine_values([258.0, 1.0], "bf16")[0, 0]) == 260.0
    assert np.isinf(combine_values([60000.0, 60000.0], "fp16")[0, 0])


def test_combine_of_one_target_is_exact_and_of_none_is_zero() -> None:
    config = ExchangeConfig(num_experts=2, top_k=1, max_tokens=3, row_bytes=16)
    partial = [np.full((2, 3, 8), -0.0, dtype=BF16), np.full((2, 3, 8), 0.3, dtype=BF16)]
    ids = [np.array([[0], [-1], [1]], np.int32), np.zeros((0, 1), np.int32)]
    first, second = ref.combine(partial, ids, config=config)
    assert first.view(np.uint16)[:, 0].tolist() == [0x8000, 0, np.array(0.3, BF16).view(np.uint16)]
    assert second.shape == (0, 8)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_scale_experts_by_hand() -> None:
    config = ExchangeConfig(
        num_experts=4, top_k=3, max_tokens=2, row_bytes=16, partial_format="fp32", partial_elements=8
    )
    row = np.full((1, 8), 1.0078125, dtype=BF16)
    ids = np.array([[3, 0, 2]], np.int32)
    weights = np.array([[0.3, 0.7, 0.1]], np.float32)
    empty = ref.RankTokens([np.zeros((0, 16), np.uint8)], np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32))
    arrivals = ref.dispatch([ref.RankTokens([row.view(np.uint8)], ids, weights), empty], config)
    f = np.float32
    x = f(1.0078125)
    low = f(f(0.7) * f(x * f(1.0)))
    high = f(f(f(0.3) * f(x * f(1 + 3 / 1024))) + f(f(0.1) * f(x * f(1 + 2 / 1024))))
    for rank, expected in ((0, low), (1, high)):
        partial = ref.scale_experts(arrivals[rank], rank=rank, config=config, num_ranks=2)
        assert partial.shape == (2, 2, 8)
        assert (partial[0, 0] == expected).all()
        assert not partial[0, 1].any()
        assert not partial[1].any()


def test_experts_refuse_partial_rows_of_another_length() -> None:
    config = ExchangeConfig(num_experts=1, top_k=1, max_tokens=1, row_bytes=32, partial_elements=8)
    arrivals = ref.dispatch([random_step(np.random.default_rng(0), 1, config)], config)
    with pytest.raises(ArgumentError, match="partial_elements: got 8; allowed: the row's 16 bf16 elements"):
        ref.scale_experts(arrivals[0], rank=0, config=config, num_ranks=1)


def make_matrices(rng: np.random.Generator, experts: int, hidden: int, inter: int) -> ref.ExpertMatrices:
    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(BF16)

    gate, up, down = draw(experts, inter, hidden), draw(experts, inter, hidden), draw(experts, hidden, inter)
    return ref.ExpertMatrices(gate, up, down)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("placement", [None, "reversed"])
def test_moe_layer_equals_dispatch_experts_combine(num_ranks: int, placement: str | None) -> None:
    owners = None if placement is None else tuple((num_ranks - 1 - e) % num_ranks for e in range(5))
    config = ExchangeConfig(num_experts=5, top_k=3, max_tokens=4, row_bytes=32, placement=owners)
    rng = np.random.default_rng(7)
    matrices = make_matrices(rng, 5, 16, 24)
    sources = [random_step(rng, tokens, config) for tokens in (4, 0, 3)[:num_ranks]]
    sources[0].expert_ids[1] = -1
    arrivals = ref.dispatch(sources, config)
    partial = [
        ref.moe_experts(a, matrices, rank=rank, config=config, num_ranks=num_ranks) for rank, a in enumerate(arrivals)
    ]
    combined = ref.combine(partial, [s.expert_ids for s in sources], config=config)
    for step, expected in zip(sources, combined):
        layer = ref.moe_layer(
            step.payloads[0].view(BF16),
            step.expert_ids,
            expert_weights=step.expert_weights,
            matrices=matrices,
            config=config,
            num_ranks=num_ranks,
        )
        assert np.array_equal(layer.view(np.uint16), expected.view(np.uint16))


def test_moe_layer_against_float64() -> None:
    config = ExchangeConfig(num_experts=6, top_k=2, max_tokens=8, row_bytes=64, partial_format="fp32")
    rng = np.random.default_rng(11)
    matrices = make_matrices(rng, 6, 32, 48)
    step = random_step(rng, 8, config)
    rows = step.payloads[0].view(BF16)
    x = rows.astype(np.float64)
    gate, up, down = (m.astype(np.float64) for m in (matrices.gate, matrices.up, matrices.down))
    g, u = np.einsum("eih,th->tei", gate, x), np.einsum("eih,th->tei", up, x)
    y = np.einsum("ehi,tei->teh", down, g / (1 + np.exp(-g)) * u)
    chosen = np.take_along_axis(y, step.expert_ids[:, :, None], axis=1)
    expected = (chosen * step.expert_weights[:, :, None]).sum(axis=1)
    got = ref.moe_layer(
        rows, step.expert_ids, expert_weights=step.expert_weights, matrices=matrices, config=config, num_ranks=2
    )
    np.testing.assert_allclose(got, expected, atol=2e-2)
