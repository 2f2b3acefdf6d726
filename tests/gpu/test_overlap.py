"""Overlapped micro-batches on a GPU that all ranks of a local group share: the emulated checks, and more."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from nvep.bench.cases import Case
from nvep.bench.timeline import Timeline, TimelineCase, run_timelines
from nvep.cli.main import main as nvep_command
from nvep.group import RankGroup, run_local
from nvep.moe.overlap import OverlapRunner, default_schedule
from tests import overlap_kit as kit
from tests.overlap_kit import CONFIG, Scenario, Steps

DEVICE = "cuda"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("protocol", ["fence", "sentinel"])
def test_overlap_on_and_off_give_equal_bits(protocol: str, graph: bool) -> None:
    kit.check_default(Scenario(config=replace(CONFIG, protocol=protocol), layers=2), DEVICE, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("transport", ["gdaki", "gpi", "gpi-mc", "free-flow"])
def test_over_a_network_adapter(transport: str, graph: bool) -> None:
    kit.check_default(Scenario((5, 2), replace(CONFIG, transport=transport)), DEVICE, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_random_schedules_that_keep_the_rules_give_equal_bits(graph: bool) -> None:
    rng = random.Random(11)
    scenario = Scenario((9, 0), replace(CONFIG, lanes=3, max_tokens=9), layers=2)
    schedules = [kit.random_schedule(rng, micro_batches=3, layers=2) for _ in range(8)]
    kit.check_schedules(scenario, DEVICE, schedules, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_layers_of_experts(graph: bool) -> None:
    kit.check_layers(DEVICE, graph=graph)


@pytest.mark.parametrize("protocol", ["fence", "sentinel"])
def test_rows_of_a_real_model(protocol: str) -> None:
    config = replace(
        CONFIG, num_experts=64, top_k=8, max_tokens=128, row_bytes=14336, partial_elements=7168, protocol=protocol
    )
    kit.check_default(Scenario((128, 100, 1, 0), config), DEVICE, graph=True)


def test_a_rank_without_tokens_and_one_batch_instead_of_two() -> None:
    def body(steps: Steps) -> None:
        runner = OverlapRunner(steps.exchange, steps.computations)
        for smallest in (1, 3, 1):
            steps.poison()
            steps.check(runner.run(steps.batches(smallest=smallest)), f"smallest {smallest}")

    kit.on_ranks(Scenario((5, 0)), DEVICE, body)


def test_an_engine_drives_the_phases_and_receives_when_it_likes() -> None:
    schedule = default_schedule(CONFIG)

    def body(steps: Steps) -> None:
        runner = OverlapRunner(steps.exchange, steps.computations, schedule=schedule)
        batches = steps.batches()
        steps.poison()
        for phase in runner.drive(batches):
            if phase.name.endswith("send"):
                assert batches[phase.micro_batch].receive() is batches[phase.micro_batch].receive()
        steps.check([batch.output for batch in batches if batch.output is not None], "driven")

    kit.on_ranks(Scenario((6, 3)), DEVICE, body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_phases_run_beside_one_another_only_with_overlap(ranks: int) -> None:
    """Computations of 50 us beside exchanges of several: hidden time is what the phases' sum exceeds the step by."""
    shape = Case(ranks=ranks, tokens=512, hidden=7168, experts=64, top_k=8, protocol="fence", max_blocks=8)
    case = TimelineCase(shape, layers=2, attention_us=50.0, experts_us=50.0)

    def main(group: RankGroup) -> list[Timeline]:
        return run_timelines(group, case, ["on", "off", "single"])

    on, off, single = run_local(main, ranks, device=DEVICE, timeout=100)[0]
    assert on.digests == off.digests == single.digests
    for rank in range(ranks):
        assert off.summary(rank)["hidden"] <= 0
        assert on.summary(rank)["hidden"] > 0.2 * on.summary(rank)["communication"]
    assert on.median_us < off.median_us


def test_a_trace_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", DEVICE)
    out = tmp_path / "trace.json"
    assert nvep_command(["trace", "--out", str(out), "--tokens", "64", "--hidden", "2048", "--replays", "5"]) == 0
    about = json.loads(out.read_text())["otherData"]
    assert about["equal_bits"]
    assert not about["emulated"]
