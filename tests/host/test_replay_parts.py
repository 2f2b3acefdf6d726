"""Parts of ``nvep replay`` that need no device: options, placement, shares of the log, percentiles, MPI detection."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvep.cli import launch, replay, replay_check, replay_steps
from nvep.cli.traces import RoutingTrace
from nvep.config import ExchangeConfig, mpi_launch
from nvep.errors import ArgumentError
from nvep.reference import RankTokens

LAUNCHER_VARIABLES = [
    *("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_NTASKS"),
]


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return parser.parse_args(["log", *arguments])


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "--limit: got 0; allowed: 1 or more"),
        (("--experts", "0"), "--experts: got 0; allowed: 1 or more"),
        (("--tokens-per-step", "-1"), "--tokens-per-step: got -1; allowed: 1 or more"),
        (("--seed", "-1"), "--seed: got -1; allowed: 0 or more"),
        (("--hidden", "0"), "--hidden: got 0; allowed: 8 or more"),
        (("--hidden", "2047"), "--hidden: got 2047; allowed: a multiple of 8"),
        (
            ("--json", "/nowhere/at/all/out.json"),
            "--json: got '/nowhere/at/all/out.json'; allowed: a file in an existing",
        ),
    ],
)
def test_options_that_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        replay.check_options(options(*arguments))
    assert str(caught.value).startswith(message)


def test_default_options_are_accepted() -> None:
    replay.check_options(options())


def test_placements(tmp_path: Path) -> None:
    assert replay.read_placement("contiguous", 5, 2) is None
    assert replay.read_placement("round-robin", 5, 2) == (0, 1, 0, 1, 0)
    path = tmp_path / "placement"
    for text in ("[1, 0, 1]", "1 0 1\n", "1,0,1", "1\n0\n1\n"):
        path.write_text(text)
        assert replay.read_placement(str(path), 3, 2) == (1, 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "contiguous, round-robin or a file of ranks"),
        ("0 x 1", "contiguous, round-robin or a file of ranks"),
        ("0 1", "a rank for each of 3 experts, not 2 ranks"),
        ("0 1 2", "ranks from 0 to 1"),
        ("0 1 -1", "ranks from 0 to 1"),
    ],
)
def test_placements_that_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "placement"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match="--placement") as caught:
        replay.read_placement(str(path), 3, 2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 1.0), (99, 98.0), (100, 98.0), (101, 99.0), (1000, 989.0)]
)
def test_nearest_rank_percentile(count: int, expected: float) -> None:
    assert replay._percentile([float(i) for i in range(count)][::-1], 0.99) == expected


# --- tokens of a step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "ranks", "per_step"), [(1, 1, 1), (10, 3, 2), (12, 4, 3), (2, 5, 4), (100, 7, 3)])
def test_steps_cover_the_log_once(tokens: int, ranks: int, per_step: int) -> None:
    ids = np.arange(tokens, dtype=np.int32)[:, None]
    trace = RoutingTrace(ids, np.ones(ids.shape, np.float32), tokens, None, "log")
    config = ExchangeConfig(num_experts=tokens, top_k=1, max_tokens=per_step, row_bytes=16)
    count = replay_steps.number_of_steps(trace, config, num_ranks=ranks)

    def step(number: int) -> list[RankTokens]:
        return replay_steps.step_tokens(trace, config, num_ranks=ranks, step=number, seed=3)

    steps = [step(number) for number in range(count)]
    by_rank = [np.concatenate([s[rank].expert_ids for s in steps]) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(by_rank), ids)
    assert any(len(source.expert_ids) for source in steps[-1])
    assert not any(len(source.expert_ids) for source in step(count))
    assert all(source.payloads[0].shape == (len(source.expert_ids), 16) for s in steps for source in s)


def test_rows_are_finite_varied_and_repeatable() -> None:
    rows = replay_steps.random_rows(np.random.default_rng([1, 2, 3]), 50, 64)
    values = rows.view(ml_dtypes.bfloat16).astype(np.float64)
    assert values.shape == (50, 32)
    assert np.isfinite(values).all()
    assert 2.0**-8 <= np.abs(values).min() < 2.0**-7
    assert 2.0**7 <= np.abs(values).max() < 2.0**8
    assert 0.3 < (values < 0).mean() < 0.7
    assert np.array_equal(rows, replay_steps.random_rows(np.random.default_rng([1, 2, 3]), 50, 64))
    assert not np.array_equal(rows, replay_steps.random_rows(np.random.default_rng([1, 2, 4]), 50, 64))


# --- check ------------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_located_by_bits() -> None:
    expected = np.zeros((3, 4), dtype=np.float32)
    found = expected.copy()
    assert replay_check._first_difference(expected, found) is None
    assert replay_check._first_difference(expected[:0], found[:0]) is None
    found[1, 2] = -0.0  # equal as a number
    assert replay_check._first_difference(expected, found) == (1, 11)
    same_nan = np.full((1, 1), np.nan, dtype=np.float32)
    assert replay_check._first_difference(same_nan, same_nan.copy()) is None


# --- launch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (0, 1)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "8"}, (3, 8)),
        ({"SLURM_NTASKS": "8"}, None),  # a batch script that did not use srun
        ({"PMI_RANK": "", "PMI_SIZE": "x"}, None),
    ],
)
def test_mpi_launchers(no_launcher: pytest.MonkeyPatch, variables: dict[str, str], expected: Any) -> None:
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert mpi_launch() == expected


def test_without_a_launcher_ranks_are_threads(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("NVEP_DEVICE", "emulated")
    assert launch.open_groups_and_run(lambda group: (group.rank, group.in_process), 3) == [(r, True) for r in range(3)]
    assert len(launch.open_groups_and_run(lambda group: None)) == launch.DEFAULT_RANKS
    with pytest.raises(ArgumentError, match="--ranks: got 0; allowed: 1 or more"):
        launch.open_groups_and_run(lambda group: None, 0)
