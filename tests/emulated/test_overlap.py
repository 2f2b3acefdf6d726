"""Overlapped micro-batches on the emulated device: whatever the schedule, the bits are those of the reference."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from nvep.errors import ArgumentError, ConfigMismatch, StepOrderError
from nvep.moe.overlap import (
    OverlapRunner,
    Phase,
    compute_multiprocessors,
    default_schedule,
    send_combine,
    send_dispatch,
    serial_schedule,
)
from nvep.runtime.device import Stream
from nvep.runtime.emulated import EmulatedDevice
from tests import overlap_kit as kit
from tests.overlap_kit import CONFIG, Scenario, Steps

DEVICE = "emulated"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("protocol", ["fence", "sentinel"])
def test_overlap_on_and_off_give_equal_bits(protocol: str, graph: bool) -> None:
    kit.check_default(Scenario(config=replace(CONFIG, protocol=protocol), layers=2), DEVICE, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_over_a_network_adapter(graph: bool) -> None:
    kit.check_default(Scenario((5, 2), replace(CONFIG, transport="gpi-mc", protocol="auto")), DEVICE, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_random_schedules_that_keep_the_rules_give_equal_bits(graph: bool) -> None:
    rng = random.Random(7)
    scenario = Scenario((9, 0), replace(CONFIG, lanes=3, max_tokens=9), layers=2)
    schedules = [kit.random_schedule(rng, micro_batches=rng.randint(1, 3), layers=2) for _ in range(12)]
    schedules = [s for s in schedules if s.micro_batches == 3] + [kit.random_schedule(rng, micro_batches=3, layers=2)]
    kit.check_schedules(scenario, DEVICE, schedules, graph=graph)


def test_other_computations_may_run_beside_the_exchange() -> None:
    needs = {**kit.STEP, "shared_experts": ("attention",)}
    schedule = kit.random_schedule(random.Random(3), micro_batches=2, layers=1, needs=needs)
    ran: list[list[int]] = []

    def body(steps: Steps) -> None:
        mine: list[int] = []
        ran.append(mine)
        computations = {**steps.computations, "shared_experts": lambda batch: mine.append(batch.index)}
        steps.poison()
        steps.check(OverlapRunner(steps.exchange, computations, schedule=schedule).run(steps.batches()), "shared")

    kit.on_ranks(Scenario((4, 3)), DEVICE, body)
    assert [sorted(mine) for mine in ran] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_layers_of_experts(graph: bool) -> None:
    kit.check_layers(DEVICE, graph=graph)


# --- one micro-batch instead of two -----------------------------------------------------------------------------------


def test_one_batch_where_the_second_would_be_empty_everywhere() -> None:
    def body(steps: Steps) -> list[int]:
        runner = OverlapRunner(steps.exchange, steps.computations)
        enqueued = []
        for smallest in (1, 3, 1):
            seen: list[Phase] = []
            batches = steps.batches(smallest=smallest)
            steps.poison()
            steps.check(runner.run(batches, on_yield=seen.append), f"smallest {smallest}")
            assert {p.micro_batch for p in seen} == set(range(len(batches)))
            enqueued.append(len(batches))
        return enqueued

    assert kit.on_ranks(Scenario((5, 1)), DEVICE, body) == [[2, 1, 2]] * 2


def test_a_rank_without_tokens_takes_part() -> None:
    def body(steps: Steps) -> None:
        steps.poison()
        outputs = OverlapRunner(steps.exchange, steps.computations).run(steps.batches())
        assert len(outputs) == 2
        steps.check(outputs, "a rank with none")

    kit.on_ranks(Scenario((2, 0)), DEVICE, body)


def test_hosts_that_are_late_change_nothing() -> None:
    def body(steps: Steps) -> None:
        rng = random.Random(steps.exchange.group.rank)
        runner = OverlapRunner(steps.exchange, steps.computations)
        for index in range(3):
            steps.poison()
            outputs = runner.run(steps.batches(), on_yield=lambda phase: time.sleep(rng.choice((0.0, 0.003))))
            steps.check(outputs, f"step {index}")

    kit.on_ranks(Scenario((6, 2, 5)), DEVICE, body)


# --- engines ----------------------------------------------------------------------------------------------------------


def test_an_engine_drives_the_phases_and_receives_when_it_likes() -> None:
    schedule = default_schedule(CONFIG)

    def body(steps: Steps) -> None:
        runner = OverlapRunner(steps.exchange, steps.computations, schedule=schedule)
        batches = steps.batches()
        steps.poison()
        driven = []
        for phase in runner.drive(batches):
            driven.append(phase)
            batch = batches[phase.micro_batch]
            if phase.name.endswith("send"):
                first = batch.receive()
                assert batch.receive() is first
        assert tuple(driven) == schedule.phases
        steps.check([batch.output for batch in batches if batch.output is not None], "driven")

    kit.on_ranks(Scenario((6, 3)), DEVICE, body)


def test_an_engine_without_the_runner() -> None:
    """Two micro-batches interleaved by hand, receives called twice."""

    def body(steps: Steps) -> None:
        exchange, batches = steps.exchange, steps.batches()
        stream = exchange.device.default_stream
        steps.poison()
        for batch in batches:
            batch.stream = stream
            steps.computations["attention"](batch)
        hooks = [send_dispatch(exchange, batch, lane=i, stream=stream) for i, batch in enumerate(batches)]
        for batch, hook in zip(batches, hooks):
            assert not hook.done
            assert hook() is hook() is batch.arrivals
            steps.computations["experts"](batch)
        combined = [send_combine(exchange, batch, stream=stream) for batch in batches]
        steps.check([hook() for hook in combined], "by hand")
        assert [hook() for hook in combined] == [batch.output for batch in batches]
        with pytest.raises(StepOrderError, match="not received"):
            send_combine(exchange, batches[0], stream=stream)

    kit.on_ranks(Scenario((6, 3)), DEVICE, body)


def test_probes_see_every_phase_and_the_stream_it_runs_on() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[tuple[str, Phase, int]] = []

        def enter(self, phase: Phase, stream: Stream) -> None:
            self.seen.append(("enter", phase, stream.handle))

        def leave(self, phase: Phase, stream: Stream) -> None:
            self.seen.append(("leave", phase, stream.handle))

    def body(steps: Steps) -> None:
        runner, recorder = OverlapRunner(steps.exchange, steps.computations), Recorder()
        own = steps.exchange.device.create_stream()
        runner.run(steps.batches(), stream=own, probes=[recorder])
        steps.exchange.drain()
        pairs = list(zip(recorder.seen[::2], recorder.seen[1::2]))
        assert [a[1] for a, _ in pairs] == list(runner.schedule.phases)
        assert all((a[0], b[0], a[1:]) == ("enter", "leave", b[1:]) for a, b in pairs)
        assert {a[2] for a, _ in pairs if a[1].stream == "compute"} == {own.handle}
        assert len({a[2] for a, _ in pairs}) == 3

    kit.on_ranks(Scenario((2, 2)), DEVICE, body)


def test_streams_may_be_given() -> None:
    def body(steps: Steps) -> None:
        device = steps.exchange.device
        schedule = serial_schedule(CONFIG)
        phases = tuple(replace(p, stream="mine") if "send" in p.name or "recv" in p.name else p for p in schedule)
        mine = device.create_stream()
        runner = OverlapRunner(
            steps.exchange, steps.computations, schedule=replace(schedule, phases=phases), streams={"mine": mine.handle}
        )
        steps.poison()
        steps.check(runner.run(steps.batches()), "own stream")
        assert runner.plan(2).queues == ("compute", "mine")

    kit.on_ranks(Scenario((3, 2)), DEVICE, body)


def test_multiprocessors_are_shared_out() -> None:
    budgets = kit.on_ranks(Scenario((2, 2)), DEVICE, lambda steps: compute_multiprocessors(steps.exchange))
    assert budgets == [1, 1]

    def with_gpu(steps: Steps) -> list[int]:
        config = replace(steps.exchange.config, max_blocks=8)
        facts: Any = type("Facts", (), {})()
        facts.device, facts.config, facts.group = type("D", (), {"multiprocessors": 132})(), config, facts
        found = []
        for facts.ranks_on_device in (1, 4):
            found.append(compute_multiprocessors(facts))
        return found

    assert kit.on_ranks(Scenario((2,)), DEVICE, with_gpu) == [[116, 17]]


# --- refused before any device work -----------------------------------------------------------------------------------


def test_bad_calls_enqueue_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    launch = EmulatedDevice.launch

    def counted(self: EmulatedDevice, kernel: Any, *rest: Any) -> None:
        launches.append(kernel.source.name)
        launch(self, kernel, *rest)

    monkeypatch.setattr(EmulatedDevice, "launch", counted)

    def body(steps: Steps) -> None:
        exchange, known = steps.exchange, steps.computations
        three = default_schedule(replace(CONFIG, lanes=3))
        for arguments, options in (
            ((exchange, known), {"schedule": three}),
            ((exchange, {"attention": known["attention"]}), {}),
            ((exchange, {**known, "more": known["attention"]}), {}),
            ((exchange, known), {"schedule": "0.0 attention compute"}),
            ((exchange, known), {"streams": {"compute": 1}}),
            ((exchange, known), {"streams": {"nowhere": 1}}),
            (([exchange, exchange], known), {}),
            (([], known), {}),
        ):
            with pytest.raises(ArgumentError):
                OverlapRunner(*arguments, **options)
        runner, batches = OverlapRunner(exchange, known), steps.batches()
        for bad in ([], batches * 2, [batches[0]] * 2, [1, 2]):
            with pytest.raises(ArgumentError, match="batches"):
                runner.drive(bad)
        with pytest.raises(ArgumentError, match="stream"):
            runner.run(batches, stream="fast")
        assert launches == []
        steps.poison()
        steps.check(runner.run(batches), "after refusals")

    kit.on_ranks(Scenario((4,)), DEVICE, body)


def test_a_dependent_launch_would_not_wait_for_other_streams() -> None:
    def body(steps: Steps) -> None:
        with pytest.raises(ArgumentError, match="dependent_launch"):
            OverlapRunner(steps.exchange, steps.computations)

    kit.on_ranks(Scenario((2,), replace(CONFIG, dependent_launch=True)), DEVICE, body)


def test_ranks_with_different_schedules_are_told() -> None:
    def body(steps: Steps) -> str:
        make = (default_schedule, serial_schedule)[steps.exchange.group.rank]
        with pytest.raises(ConfigMismatch, match="schedule must be equal") as caught:
            OverlapRunner(steps.exchange, steps.computations, schedule=make(CONFIG))
        return str(caught.value)

    texts = kit.on_ranks(Scenario((2, 2)), DEVICE, body)
    assert texts[0] == texts[1]


def test_a_capture_that_fails_leaves_the_lanes_as_they_were() -> None:
    def body(steps: Steps) -> None:
        def fail(batch: Any) -> None:
            if failing:
                raise ValueError("an expert failed")
            steps.computations["experts"](batch)

        failing = True
        runner = OverlapRunner(steps.exchange, {**steps.computations, "experts": fail})
        with pytest.raises(ValueError, match="expert"):
            runner.capture(steps.batches())
        failing = False
        steps.poison()
        steps.check(runner.run(steps.batches()), "after a failed capture")

    kit.on_ranks(Scenario((3, 2)), DEVICE, body)
