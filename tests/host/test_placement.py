"""Replicated experts: placements that hold together, choices that spread, balance close to what is possible."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvep.errors import ArgumentError
from nvep.moe import Placement, balance


def skewed(experts: int, seed: int = 1) -> np.ndarray:
    """Loads as routers give them: a few experts get many times the mean."""
    return np.random.default_rng(seed).lognormal(0.0, 1.0, experts)


# --- placement --------------------------------------------------------------------------------------------------------


def test_a_placement_names_ranks_and_copies() -> None:
    placement = Placement((0, 1, 1, 2, 0, 3), (0, 0, 1, 1, 2, 2))
    assert (placement.num_logical, placement.num_physical) == (4, 6)
    assert [placement.local(rank) for rank in range(3)] == [[0, 1], [1, 2], [0, 3]]
    replicas = placement.replicas(1)
    assert replicas.starts.tolist() == [0, 2, 4, 5, 6]
    assert replicas.physical.tolist() == [0, 4, 1, 2, 3, 5]
    assert placement.logical_load([5, 1, 2, 3, 4, 6]).tolist() == [9, 3, 3, 6]
    assert placement.rank_load([8, 4, 2, 1]).tolist() == [6, 4, 5]


def test_tokens_take_turns_and_sources_start_apart() -> None:
    placement = Placement((0, 1, 0, 1, 0, 2), (0, 0, 1, 1, 2, 2))
    ids = np.array([[0, 1], [0, 1], [0, 2], [-1, 0]], np.int32)
    assert placement.replicas(0).choose(ids).tolist() == [[0, 1], [2, 3], [4, 5], [-1, 0]]
    assert placement.replicas(1).choose(ids).tolist() == [[2, 3], [4, 1], [0, 5], [-1, 2]]


def test_a_local_copy_is_preferred_on_request() -> None:
    placement = Placement((0, 1, 0, 1, 0, 2), (0, 0, 1, 1, 2, 2))
    ids = np.array([[0, 1], [0, 2], [1, 0]], np.int32)
    assert placement.replicas(1, prefer_local=True).choose(ids).tolist() == [[2, 3], [2, 5], [3, 2]]
    assert placement.replicas(2, prefer_local=True).choose(ids)[:, 0].tolist() == [4, 4, 1]


@pytest.mark.parametrize(
    ("logical", "ranks", "text"),
    [
        ((0, 2), (0, 1), r"logical: got 'no copy of \[1\]'"),
        ((0, 1), (0,), r"ranks: got 1; allowed: one rank per physical expert: 2"),
        ((), (), r"ranks: got 0"),
        ((0, 0), (1, 1), r"ranks: got 'two copies of expert 0 on rank 1'"),
        ((0, -1), (0, 0), r"logical: got -1"),
        ((0, 1.5), (0, 0), r"logical: got 1.5"),
        ("01", (0, 0), r"logical: got '01'"),
        ((0, 1), (0, True), r"ranks: got True"),
    ],
)
def test_placements_that_do_not_hold_together_are_refused(logical: Any, ranks: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Placement(logical, ranks)


def test_a_load_of_another_length_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"physical_load: got \(3,\)"):
        Placement((0, 1), (0, 1)).logical_load([1, 2, 3])


# --- balance ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_rank_gets_its_slots_and_no_expert_twice(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    load = data.draw(st.lists(st.floats(0, 100), min_size=1, max_size=12))
    fitting = [n for n in range(len(load), len(load) * ranks + 1) if n % ranks == 0]
    replicas = data.draw(st.sampled_from(fitting))
    placement = balance(load, ranks, replicas)  # the constructor refuses two copies on one rank
    assert placement.num_logical == len(load)
    assert placement.ranks == tuple(r for r in range(ranks) for _ in range(replicas // ranks))
    assert placement == balance(np.array(load), ranks, replicas)


def test_no_replicas_is_a_placement_too() -> None:
    placement = balance([4, 3, 2, 1], 2, 4)
    assert placement.rank_load([4, 3, 2, 1]).tolist() == [5, 5]


def test_the_heaviest_copy_is_as_light_as_it_can_be() -> None:
    load = [16.0, 4.0, 2.0, 1.0]
    placement = balance(load, 4, 8)
    copies = np.bincount(placement.logical)
    assert copies.tolist() == [4, 2, 1, 1]  # 4 is the most: one a rank


@pytest.mark.parametrize("seed", range(6))
def test_small_cases_are_within_a_tenth_of_the_best(seed: int) -> None:
    """Against every assignment of the same copies to two or three ranks."""
    rng = np.random.default_rng(seed)
    ranks, experts, replicas = (2, 6, 8) if seed % 2 else (3, 5, 6)
    load = rng.lognormal(0, 1, experts)
    placement = balance(load, ranks, replicas)
    copies = list(placement.logical)
    best = np.inf
    for owners in itertools.product(range(ranks), repeat=replicas):
        counts = np.bincount(owners, minlength=ranks)
        pairs = set(zip(copies, owners, strict=True))
        if (counts == replicas // ranks).all() and len(pairs) == replicas:
            best = min(best, Placement(tuple(copies), owners).rank_load(load).max())
    assert placement.rank_load(load).max() <= 1.1 * best


@pytest.mark.parametrize(
    ("experts", "ranks", "replicas", "most"),
    [(256, 32, 288, 1.02), (256, 8, 264, 1.01), (128, 16, 144, 1.02), (64, 8, 72, 1.02), (384, 64, 448, 1.03)],
)
def test_skewed_loads_come_out_nearly_even(experts: int, ranks: int, replicas: int, most: float) -> None:
    """The busiest rank against the bound that no placement beats: the mean, or the heaviest copy."""
    for seed in range(3):
        load = skewed(experts, seed)
        placement = balance(load, ranks, replicas)
        per_rank = placement.rank_load(load)
        heaviest = (load / np.bincount(placement.logical)).max()
        assert per_rank.max() <= most * max(per_rank.mean(), heaviest)
        contiguous = np.add.reduceat(load, np.arange(0, experts, experts // ranks)).max()
        assert per_rank.max() < 0.9 * contiguous


def test_equal_loads_need_nothing_clever() -> None:
    load = np.ones(64)
    assert np.ptp(balance(load, 8, 64).rank_load(load)) == 0


def test_no_load_at_all_still_places_everybody() -> None:
    placement = balance(np.zeros(6), 3, 9)
    assert placement.rank_load(np.zeros(6)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 2, 2), r"load: got \[\]"),
        (([1, -1], 2, 2), r"load: got \[1, -1\]"),
        (([1, float("nan")], 2, 2), r"load: got"),
        (([[1, 2]], 2, 2), r"load: got"),
        (([1, 2], 0, 2), r"ranks: got 0; allowed: an integer from 1"),
        (([1, 2, 3], 2, 2), r"replicas: got 2; allowed: an integer from 3"),
        (([1, 2, 3], 2, 5), r"replicas: got 5; allowed: a multiple of 2, at most 6"),
        (([1, 2, 3], 2, 8), r"replicas: got 8"),
        (([1, 2], 2.0, 2), r"ranks: got 2.0"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        balance(*arguments)
