"""The perf suite without a device: cases, routing, floors, targets, and what becomes of replays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nvep.bench import Case, Floors, default_cases, floor_of, full_cases, small
from nvep.bench.cases import PROFILES, ROUTINGS, SPANS, profile
from nvep.bench.inputs import payloads, route
from nvep.bench.kernels import floor_kernels
from nvep.bench.targets import target_us
from nvep.bench.timing import _slowest
from nvep.errors import ArgumentError

APART = Floors("2 x NVIDIA H200", (0, 1), 4000.0, 6000.0, 350.0, 0.7, 1.2, 0.6, 0.5)
SHARED = replace(APART, device="1 x NVIDIA H200", gpus=(0, 0), peer_push_gbs=None)


def test_the_sweeps_hold_no_case_twice_and_build_configurations() -> None:
    default, full = default_cases(), full_cases()
    assert len(set(default)) == len(default) <= 70
    assert set(default) < set(full)
    assert len({case.label() for case in full}) == len(full)
    for case in full:
        assert case.config().payload_bytes == case.payload_bytes
        assert small(case).config().max_tokens <= 8


def test_the_sweeps_cover_the_axes() -> None:
    cases = full_cases()
    assert {c.tokens for c in cases} >= {1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}
    assert {c.top_k for c in cases} == set(range(1, 11))
    assert {c.hidden for c in cases} >= {2048, 2880, 4096, 7168, 8192}
    assert {c.routing for c in cases} == set(ROUTINGS) - {"recorded"}
    assert {(c.hidden, c.experts, c.top_k) for c in cases} >= set(PROFILES.values())
    assert {c.max_blocks for c in cases} >= {4, 8, 16, 32, 64, 132}
    assert {c.ranks for c in cases} == {2, 4, 8}
    assert any(c.flush_l2 for c in cases)
    assert {c.spans for c in cases} == set(SPANS) - {"none"}


@pytest.mark.parametrize(
    ("fmt", "hidden", "expected"),
    [("bf16", 7168, (14336,)), ("fp8", 7168, (7168, 224)), ("nvfp4", 7168, (3584, 448)), ("fp8", 2880, (2880, 96))],
)
def test_scales_travel_as_a_payload_of_their_own(fmt: str, hidden: int, expected: tuple[int, ...]) -> None:
    case = Case(hidden=hidden, format=fmt)
    assert case.payload_bytes == expected
    assert case.config().partial_row_bytes == 2 * hidden


@pytest.mark.parametrize(("name", "value"), [("format", "int8"), ("routing", "odd"), ("spans", "x"), ("tokens", 0)])
def test_a_case_that_means_nothing_is_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=name):
        replace(Case(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("routing", ["uniform", "balanced", "hot", "local"])
def test_experts_of_a_token_are_distinct(routing: str) -> None:
    case = Case(ranks=4, tokens=50, experts=32, top_k=8, routing=routing)
    for rank in range(4):
        ids = route(case, rank, 1)
        assert ids.shape == (50, 8)
        assert ids.dtype == np.int32
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < 32


def test_routing_is_what_its_name_says() -> None:
    case = Case(ranks=4, tokens=64, experts=32, top_k=4)
    owners = case.config().expert_ranks(4)
    balanced = np.concatenate([route(replace(case, routing="balanced"), rank, 0) for rank in range(4)])
    assert set(np.bincount(balanced.ravel(), minlength=32)) == {4 * 64 * 4 // 32}
    hot = np.concatenate([route(replace(case, routing="hot"), rank, 0) for rank in range(4)])
    assert 0.4 < (hot == 0).any(axis=1).mean() < 0.7
    assert (owners[route(replace(case, routing="local"), 2, 0)] == 2).all()
    assert not np.array_equal(route(case, 0, 0), route(case, 0, 1))
    assert not np.array_equal(route(case, 0, 0), route(case, 1, 0))
    with pytest.raises(ArgumentError, match="local"):
        route(replace(case, routing="local", experts=8, top_k=3), 0, 0)


def test_recorded_routing_deals_the_log_out_and_starts_again() -> None:
    case = Case(ranks=2, tokens=3, experts=8, top_k=2, routing="recorded")
    log = np.arange(20, dtype=np.int32).reshape(10, 2) % 8
    assert np.array_equal(route(case, 1, 0, log), log[3:6])
    assert np.array_equal(route(case, 1, 1, log), log[[9, 0, 1]])
    with pytest.raises(ArgumentError, match="recorded"):
        route(case, 0, 0)
    with pytest.raises(ArgumentError, match="trace"):
        route(replace(case, top_k=3), 0, 0, log)
    with pytest.raises(ArgumentError, match="trace"):
        route(replace(case, experts=4), 0, 0, log)


def test_no_two_rows_are_alike_and_all_are_finite() -> None:
    config = Case(tokens=200, hidden=64, format="bf16").config()
    rows = [payloads(config, rank, which, 200)[0] for rank in range(2) for which in range(2)]
    every = np.concatenate(rows)
    assert len({row.tobytes() for row in every}) == 800
    values = every[:, 8:].view(np.uint16).astype(np.uint32) << 16
    assert np.isfinite(values.view(np.float32)).all()


# Rank 0 sends its two tokens to itself and to rank 1, rank 1 keeps its own.
IDS = [np.array([[0, 2], [1, 3]], dtype=np.int32), np.array([[2, 3], [2, 3]], dtype=np.int32)]
CASE = Case(ranks=2, tokens=2, hidden=8192, experts=4, top_k=2)


def test_the_floor_between_gpus_is_what_crosses_the_links() -> None:
    floor = floor_of(CASE, APART, IDS)
    assert floor.link_bytes == 2 * 2 * 16384
    assert floor.remote_bytes == 2 * 2 * 16384
    phase = 0.5 + 0.7 + 2 * 16384 / 350e3
    assert floor.dispatch_us == pytest.approx(phase)
    assert floor.pair_us == pytest.approx(2 * phase)


def test_the_floor_of_ranks_that_share_a_gpu_is_its_memory() -> None:
    floor = floor_of(CASE, SHARED, IDS)
    assert floor.link_bytes == 0
    read_and_written = (4 + 6) * 16384  # four tokens, six rows
    assert floor.combine_us == pytest.approx(0.5 + 0.7 + read_and_written / 6000e3)
    assert floor.remote_bytes == 2 * 2 * 16384


def test_a_step_beyond_the_cache_is_held_to_the_rate_of_memory() -> None:
    case = replace(CASE, tokens=1024)
    ids = [np.tile(chosen, (512, 1)) for chosen in IDS]
    assert floor_of(case, SHARED, ids).dispatch_us == pytest.approx(1.2 + 512 * 10 * 16384 / 4000e3)


def test_targets_belong_to_two_gpus_and_random_routing() -> None:
    assert target_us(Case(tokens=1, protocol="sentinel"), APART) == 5.0
    assert target_us(Case(tokens=4096), APART) == 335.0
    assert target_us(Case(tokens=4096, **profile("qwen3-235b")), APART) == 195.0
    assert target_us(Case(tokens=4096, format="fp8"), APART) == pytest.approx(335 * (7392 + 14336) / 28672)
    for other in (
        Case(tokens=1, protocol="fence"),
        Case(tokens=3),
        Case(tokens=1, routing="hot"),
        Case(tokens=1024, max_blocks=8),
        Case(tokens=1, flush_l2=True),
        Case(tokens=128, format="nvfp4"),
        Case(tokens=128, **profile("mixtral")),
    ):
        assert target_us(other, APART) is None
    assert target_us(Case(tokens=1), SHARED) is None
    assert target_us(Case(tokens=1), replace(APART, device="2 x NVIDIA H100")) is None


def test_the_slowest_rank_counts_and_late_replays_do_not() -> None:
    ranks = [(np.array([1.0, 5.0, 2.0]), np.array([True, False, True])), (np.array([3.0, 1.0, 1.0]), np.ones(3, bool))]
    times, late = _slowest(ranks)
    assert times.tolist() == [3.0, 2.0]
    assert late == 1
    times, late = _slowest([(np.array([1.0, 2.0]), np.zeros(2, bool))])
    assert times.tolist() == [1.0, 2.0]
    assert late == 2


def test_every_floor_kernel_is_there() -> None:
    for name, source in floor_kernels().items():
        assert f"void {name}(" in source.translation_unit()
