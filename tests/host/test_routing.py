"""Routing functions against plain float64 formulas, and what is chosen where values are equal, missing or extreme."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvep.errors import ArgumentError
from nvep.moe.routing import ROUTINGS, Routing
from nvep.reference.routing import exp_nonpositive, logistic, route
from nvep.testing.routing_checks import SHAPES, bias_for, difficult_logits

UNIT = 2.0**-23


def exact_scores(logits: np.ndarray, routing: Routing) -> np.ndarray:
    wide = logits.astype(np.float64)
    if routing.scores == "sigmoid":
        return 1 / (1 + np.exp(-wide))
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def exact_weights(logits: np.ndarray, ids: np.ndarray, routing: Routing) -> np.ndarray:
    weights = np.take_along_axis(exact_scores(logits, routing), ids, axis=1)
    if routing.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return weights * np.float64(np.float32(routing.scale))


def relative_bound(logits: np.ndarray, ids: np.ndarray, routing: Routing) -> np.ndarray:
    """As stated by ``Router.__call__``."""
    wide = logits.astype(np.float64)
    below = 0.0
    if routing.scores == "softmax":
        below = wide.max(axis=1, keepdims=True) - np.take_along_axis(wide, ids, axis=1)
    return UNIT * (8 + routing.num_experts / 64 + routing.top_k / 2 + below)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    rng = np.random.default_rng(2)
    x = -np.concatenate([rng.uniform(0, 87, 300_000), 10.0 ** rng.uniform(-30, 1.9, 300_000), [0.0, 87.0]])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp_nonpositive(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    edges = np.array([0.0, -0.0, -87.01, -1e30, -np.inf, np.nan], np.float32)
    assert exp_nonpositive(edges).tolist() == [1, 1, 0, 0, 0, 0]


def test_the_logistic_function_is_within_four_units_in_the_last_place() -> None:
    x = np.random.default_rng(2).uniform(-87, 87, 300_000).astype(np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert (np.abs(logistic(x) - exact) <= 4 * np.spacing(exact.astype(np.float32))).all()
    assert logistic(np.array([0.0, 200.0, -200.0], np.float32)).tolist() == [0.5, 1.0, 0.0]


# --- routing functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ROUTINGS, *SHAPES])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), spread=st.floats(1e-3, 8))
def test_weights_are_within_the_stated_bound(name: str, seed: int, spread: float) -> None:
    routing = SHAPES.get(name) or ROUTINGS[name]
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((4, routing.num_experts)) * spread).astype(np.float32)
    bias = (rng.standard_normal(routing.num_experts) * 0.1).astype(np.float32) if routing.bias else None
    ids, weights = route(logits, routing, bias=bias)
    exact = exact_weights(logits, ids, routing)
    assert (np.abs(weights - exact) <= relative_bound(logits, ids, routing) * exact).all()


@pytest.mark.parametrize("name", [*ROUTINGS, *SHAPES])
def test_the_best_experts_of_the_best_groups_are_chosen(name: str) -> None:
    """Against a brute-force choice in float64, for logits far enough apart that rounding decides nothing."""
    routing = SHAPES.get(name) or ROUTINGS[name]
    experts, rng = routing.num_experts, np.random.default_rng(6)
    logits = np.stack([rng.permutation(experts) for _ in range(6)]) * (4.0 / experts) - 2.0
    logits = logits.astype(np.float32)
    bias = (rng.permutation(experts) / experts).astype(np.float32) if routing.bias else None
    ids, _ = route(logits, routing, bias=bias)
    for token in range(len(logits)):
        values = logits[token].astype(np.float64)
        if routing.chosen_by_score:
            values = exact_scores(logits[token : token + 1], routing)[0]
        if bias is not None:
            values = values + bias
        allowed = list(range(experts))
        if routing.groups > 1:
            members = np.arange(experts).reshape(routing.groups, -1)
            best = 2 if routing.group_score == "top2" else 1
            scores = [sum(sorted(values[group], reverse=True)[:best]) for group in members]
            kept = sorted(range(routing.groups), key=lambda g: (-scores[g], g))[: routing.top_groups]
            allowed = [int(e) for g in kept for e in members[g]]
        expected = sorted(allowed, key=lambda e: (-values[e], e))[: routing.top_k]
        assert ids[token].tolist() == expected


def test_equal_values_go_to_the_lowest_id() -> None:
    equal = np.zeros((1, 64), np.float32)
    assert route(equal, Routing(64, 4))[0].tolist() == [[0, 1, 2, 3]]
    assert route(equal, Routing(64, 4, groups=8, top_groups=2))[0].tolist() == [[0, 1, 2, 3]]
    mixed = np.where(np.arange(8) % 2, 0.0, -0.0).astype(np.float32)[None]
    assert route(mixed, Routing(8, 3))[0].tolist() == [[0, 1, 2]]
    bias = np.zeros(8, np.float32)
    assert route(mixed, Routing(8, 3, "sigmoid", bias=True), bias=bias)[0].tolist() == [[0, 1, 2]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([0.0, 0.0, 0.0, 5.0], np.float32)
    ids, weights = route(logits, Routing(4, 2, "sigmoid", bias=True), bias=bias)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[1.0, -2.0]])), rtol=1e-6)


def test_llama4_weighs_with_the_sigmoid_of_its_one_choice() -> None:
    ids, weights = route(np.array([[0.5, 3.0, -1.0]], np.float32), Routing(3, 1, "sigmoid"))
    assert ids.tolist() == [[1]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-3.0))]], rtol=1e-6)


def test_a_softmax_over_the_chosen_is_a_renormalised_one() -> None:
    logits = np.random.default_rng(4).standard_normal((5, 32)).astype(np.float32)
    ids, weights = route(logits, ROUTINGS["gpt-oss-20b"])
    chosen = np.exp(np.take_along_axis(logits, ids, axis=1).astype(np.float64))
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_experts_without_a_usable_logit_are_never_chosen(scores: str, renormalise: bool) -> None:
    logits = np.array([[np.nan, 1.0, -np.inf, 2.0], [np.nan] * 4, [-np.inf] * 4], np.float32)
    ids, weights = route(logits, Routing(4, 3, scores, renormalise=renormalise))
    assert ids.tolist() == [[3, 1, -1], [-1] * 3, [-1] * 3]
    assert not weights[1:].any()
    assert weights[0, 2] == 0
    assert (weights[0, :2] > 0).all()


def test_infinite_logits_share_everything() -> None:
    logits = np.array([[np.inf, 3e38, np.inf, 1.0]], np.float32)
    ids, weights = route(logits, Routing(4, 3))
    assert ids.tolist() == [[0, 2, 1]]
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_a_biased_expert_can_be_taken_out() -> None:
    logits = np.full((1, 4), 3.0, np.float32)
    bias = np.array([0.0, -np.inf, np.nan, 0.0], np.float32)
    ids, weights = route(logits, Routing(4, 3, bias=True, renormalise=True), bias=bias)
    assert ids.tolist() == [[0, 3, -1]]
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_scores_that_are_all_zero_give_zero_weights() -> None:
    ids, weights = route(np.full((1, 4), -300.0, np.float32), Routing(4, 2, "sigmoid", renormalise=True))
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_group_with_one_available_expert_counts_that_one() -> None:
    routing = Routing(6, 2, "sigmoid", groups=3, top_groups=1, group_score="top2")
    logits = np.array([[-9.0, -9.0, 4.0, -np.inf, -np.inf, -np.inf]], np.float32)
    assert route(logits, routing)[0].tolist() == [[2, -1]]


@pytest.mark.parametrize("name", [*ROUTINGS, *SHAPES])
def test_difficult_logits_give_usable_outputs(name: str) -> None:
    routing = SHAPES.get(name) or ROUTINGS[name]
    ids, weights = route(difficult_logits(routing.num_experts), routing, bias=bias_for(routing))
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    for row in ids.tolist():
        chosen = [e for e in row if e >= 0]
        assert len(set(chosen)) == len(chosen)
        assert row[len(chosen) :] == [-1] * (routing.top_k - len(chosen))


@settings(max_examples=60, deadline=None)
@given(logits=hnp.arrays(np.float32, (3, 12), elements=st.floats(width=32)))
def test_any_bits_route_somewhere(logits: np.ndarray) -> None:
    options = [("softmax", "sigmoid"), (False, True), ((1, 1), (3, 2)), ("max", "top2")]
    for scores, renormalise, (groups, kept), value in itertools.product(*options):
        routing = Routing(12, 5, scores, renormalise, groups=groups, top_groups=kept, group_score=value)
        ids, weights = route(logits, routing)
        assert np.isfinite(weights).all()
        available = (logits > -np.inf).sum(axis=1)
        assert ((ids >= 0).sum(axis=1) <= np.minimum(available, 5)).all()
        if groups == 1:
            assert ((ids >= 0).sum(axis=1) == np.minimum(available, 5)).all()


def test_no_tokens() -> None:
    ids, weights = route(np.zeros((0, 256), np.float32), ROUTINGS["deepseek-v3"], bias=np.zeros(256, np.float32))
    assert ids.shape == weights.shape == (0, 8)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_experts": 0}, "num_experts: got 0; allowed: an integer from 1 to 4096"),
        ({"num_experts": 5000}, "num_experts: got 5000"),
        ({"top_k": 9}, "top_k: got 9; allowed: an integer from 1 to 8"),
        ({"num_experts": 100, "top_k": 65}, "top_k: got 65; allowed: an integer from 1 to 64"),
        ({"top_k": True}, "top_k: got True"),
        ({"scores": "relu"}, "scores: got 'relu'; allowed: softmax or sigmoid"),
        ({"group_score": "mean"}, "group_score: got 'mean'; allowed: max or top2"),
        ({"groups": 3}, "groups: got 3; allowed: a divisor of the 8 experts"),
        ({"groups": 4, "top_groups": 5}, "top_groups: got 5; allowed: an integer from 1 to 4"),
        ({"groups": 4, "top_k": 3}, "top_k: got 3; allowed: at most the 2 experts of 1 groups"),
        ({"scale": 0.0}, "scale: got 0.0"),
        ({"scale": float("nan")}, "scale: got nan"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Routing(**{"num_experts": 8, "top_k": 2, **fields})
    assert str(raised.value).startswith(text)
