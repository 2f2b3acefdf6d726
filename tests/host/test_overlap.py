"""Schedules of micro-batches as data: what is refused, and that events keep every edge and no other."""

from __future__ import annotations

import random
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError, StepOrderError
from nvep.group import RankGroup, run_local
from nvep.moe.overlap import (
    STEP,
    Phase,
    ReceiveHook,
    Schedule,
    agree_split,
    default_schedule,
    nvtx_probe,
    serial_schedule,
    split_tokens,
)
from nvep.moe.overlap_plan import START, EventPlan, plan_events
from nvep.moe.overlap_schedule import COMPUTE, SENDS
from tests.overlap_kit import random_schedule

CONFIG = ExchangeConfig(num_experts=4, top_k=2, max_tokens=8, row_bytes=64, lanes=3)
TWO = default_schedule(CONFIG, micro_batches=2)


def _without(schedule: Schedule, index: int) -> list[Phase]:
    return [phase for i, phase in enumerate(schedule) if i != index]


# --- schedules --------------------------------------------------------------------------------------------------------


def test_by_default_sends_run_beside_the_attention_of_another_micro_batch() -> None:
    assert str(TWO).splitlines()[:5] == [
        "0.1 attention compute",
        "0.1 dispatch_send communication:1",
        "0.0 attention compute",
        "0.0 dispatch_send communication:0",
        "0.1 dispatch_recv communication:1",
    ]


def test_over_a_network_adapter_receives_stand_between_computations() -> None:
    config = ExchangeConfig(num_experts=4, top_k=2, max_tokens=8, row_bytes=64, lanes=2, transport="gpi")
    receives = {phase.stream for phase in default_schedule(config) if phase.name.endswith("recv")}
    assert receives == {COMPUTE}
    again = default_schedule(config, receive_on="communication")
    assert {p.stream for p in again if p.name.endswith("recv")} == {"communication:0", "communication:1"}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("make", [default_schedule, serial_schedule])
def test_text_is_read_back(make: Any, layers: int) -> None:
    schedule = make(CONFIG, layers=layers)
    assert (schedule.micro_batches, schedule.layers) == (3, layers)
    assert Schedule.parse(f"# a comment\n\n{schedule}  # the end").phases == schedule.phases


def test_a_missing_phase_is_refused() -> None:
    for index in range(len(TWO)):
        with pytest.raises((ArgumentError, StepOrderError), match=TWO.phases[index].name):
            Schedule(tuple(_without(TWO, index)))


def test_a_repeated_phase_is_refused() -> None:
    for phase in TWO:
        with pytest.raises(ArgumentError, match="twice"):
            Schedule((*TWO.phases, phase))


def test_a_phase_before_one_that_it_needs_is_refused() -> None:
    position = {(p.micro_batch, p.name): i for i, p in enumerate(TWO)}
    for phase in TWO:
        for layer, batch, name in TWO.predecessors(phase):
            moved = _without(TWO, position[batch, phase.name])
            moved.insert(position[batch, name], phase)
            with pytest.raises(StepOrderError, match=f"{phase.name} of .* layer {layer} stands before {name}"):
                Schedule(tuple(moved))


def test_a_receive_before_its_send_would_wait_for_ever() -> None:
    phases = list(serial_schedule(CONFIG, micro_batches=1))
    phases[1], phases[2] = phases[2], phases[1]
    with pytest.raises(StepOrderError, match="hold up 'compute' on every rank until a send that no rank"):
        Schedule(tuple(phases))


def test_a_layer_may_not_overtake_the_one_before() -> None:
    two = list(serial_schedule(CONFIG, micro_batches=1, layers=2))
    two.insert(5, two.pop(6))
    with pytest.raises(StepOrderError, match="attention of micro-batch 0 in layer 1 stands before combine_recv"):
        Schedule(tuple(two))


@pytest.mark.parametrize(
    "phase",
    [
        Phase(0, "atention", COMPUTE),
        Phase(-1, "attention", COMPUTE),
        Phase(True, "attention", COMPUTE),
        Phase(0, "attention", "two words"),
        Phase(0, "attention", ""),
        Phase(0, "attention", COMPUTE, -1),
        "0.0 attention compute",
    ],
)
def test_a_bad_entry_is_refused(phase: Any) -> None:
    with pytest.raises(ArgumentError):
        Schedule((*TWO.phases, phase))


@pytest.mark.parametrize("line", ["attention compute", "0 attention compute", "0.0 attention", "x.0 attention compute"])
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ArgumentError, match="line 2"):
        Schedule.parse(f"0.0 attention compute\n{line}\n")


@pytest.mark.parametrize(
    "needs",
    [
        {**STEP, "attention": ("experts",)},
        {name: needed for name, needed in STEP.items() if name != "combine_recv"},
        {**STEP, "combine_send": ("attention",)},
        {**STEP, "dispatch_recv": ("attention",)},
    ],
)
def test_needs_keep_the_order_of_a_lane(needs: Any) -> None:
    with pytest.raises(ArgumentError, match="needs"):
        Schedule(TWO.phases, needs)


def test_fewer_micro_batches_keep_the_order() -> None:
    first = TWO.first(1)
    assert first.phases == tuple(phase for phase in TWO if phase.micro_batch == 0)
    with pytest.raises(ArgumentError):
        TWO.first(3)


# --- events -----------------------------------------------------------------------------------------------------------


def _closure(plan: EventPlan, *, without: tuple[int, int] | None = None) -> list[set[int]]:
    """For each task, and last for the end of the step, everything that streams and events put before it."""
    behind: list[set[int]] = []
    last: dict[str, set[int]] = {COMPUTE: {START}}
    end = len(plan.tasks)
    for index, (queue, waits) in enumerate([*((t.queue, t.waits) for t in plan.tasks), (COMPUTE, plan.joins)]):
        found = set(last.get(queue, ()))
        for waited in waits:
            if (index, waited) != without:
                found |= {waited} | (behind[waited] if waited >= 0 else set())
        behind.append(found)
        last[queue] = found | {index}
    return behind if end else []


def _edges(schedule: Schedule) -> list[tuple[int, int]]:
    """(task, task before it) by the schedule: order of its streams, needs, the start, and the end of everything."""
    position = {(p.layer, p.micro_batch, p.name): i for i, p in enumerate(schedule)}
    last: dict[str, int] = {}
    edges = []
    for index, phase in enumerate(schedule):
        edges += [(index, position[key]) for key in schedule.predecessors(phase)]
        edges.append((index, last.get(phase.stream, START)))
        last[phase.stream] = index
    return edges + [(len(schedule), index) for index in last.values()]


@pytest.mark.parametrize("seed", range(60))
def test_events_keep_every_edge_and_each_is_needed(seed: int) -> None:
    schedule = random_schedule(random.Random(seed))
    plan, edges = plan_events(schedule), _edges(schedule)
    behind = _closure(plan)
    assert [edge for edge in edges if edge[1] not in behind[edge[0]]] == []
    allowed = set(edges)
    for index, waits in enumerate([*(task.waits for task in plan.tasks), plan.joins]):
        for waited in waits:
            assert (index, waited) in allowed
            broken = _closure(plan, without=(index, waited))
            assert any(edge[1] not in broken[edge[0]] for edge in edges), (index, waited)
    awaited = {w for task in plan.tasks for w in task.waits} | set(plan.joins)
    assert {i for i, task in enumerate(plan.tasks) if task.marked} == awaited - {START}


@pytest.mark.parametrize("seed", range(20))
def test_phases_of_a_lane_share_a_queue(seed: int) -> None:
    """So that the exchange, which orders them too, adds no wait of its own."""
    schedule = random_schedule(random.Random(seed))
    used: dict[int, set[str]] = {}
    for task in plan_events(schedule).tasks:
        if task.phase.name not in schedule.computations:
            used.setdefault(task.phase.micro_batch, set()).add(task.queue)
    assert all(len(queues) == 1 for queues in used.values())


def test_a_serial_schedule_needs_no_event() -> None:
    plan = plan_events(serial_schedule(CONFIG, layers=2))
    assert plan.queues == (COMPUTE,)
    assert not any(task.waits for task in plan.tasks)
    assert plan.joins == ()


def test_events_of_the_default_schedule() -> None:
    plan = plan_events(TWO)
    shown = [(str(t.phase), [str(TWO.phases[w]) for w in t.waits]) for t in plan.tasks if t.waits]
    assert shown == [
        (f"0.{b} {after} {stream}", [f"0.{b} {before} {other}"])
        for b, before, other, after, stream in (
            (1, "attention", COMPUTE, "dispatch_send", "communication:1"),
            (0, "attention", COMPUTE, "dispatch_send", "communication:0"),
            (1, "dispatch_recv", "communication:1", "experts", COMPUTE),
            (1, "experts", COMPUTE, "combine_send", "communication:1"),
            (0, "dispatch_recv", "communication:0", "experts", COMPUTE),
            (0, "experts", COMPUTE, "combine_send", "communication:0"),
        )
    ]
    assert [str(TWO.phases[j]) for j in plan.joins] == [
        "0.0 combine_recv communication:0",
        "0.1 combine_recv communication:1",
    ]


# --- ranks that wait for one another ----------------------------------------------------------------------------------


def _all_end(plans: list[EventPlan], rng: random.Random) -> bool:
    """Run the queues of all ranks, in any order that streams, events and messages allow: does every phase end?"""
    done: set[tuple[int, int]] = {(rank, START) for rank in range(len(plans))}
    sent: set[tuple[int, str, int, int]] = set()  # rank, phase, layer, micro-batch
    queues = {
        (rank, queue): [i for i, task in enumerate(plan.tasks) if task.queue == queue]
        for rank, plan in enumerate(plans)
        for queue in plan.queues
    }

    def may_end(rank: int, index: int) -> bool:
        task = plans[rank].tasks[index]
        if any((rank, waited) not in done for waited in task.waits):
            return False
        send = SENDS.get(task.phase.name)
        needed = ((r, send or "", task.phase.layer, task.phase.micro_batch) for r in range(len(plans)))
        return send is None or all(key in sent for key in needed)

    while any(queues.values()):
        ready = [key for key, waiting in queues.items() if waiting and may_end(key[0], waiting[0])]
        if not ready:
            return False
        rank, queue = rng.choice(ready)
        index = queues[rank, queue].pop(0)
        done.add((rank, index))
        phase = plans[rank].tasks[index].phase
        sent.add((rank, phase.name, phase.layer, phase.micro_batch))
    return True


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_makes_ranks_wait_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    plan = plan_events(random_schedule(rng))
    assert all(_all_end([plan] * 3, rng) for _ in range(5))


def test_ranks_with_different_schedules_would_wait_for_ever() -> None:
    """Which is why the runner compares them: each is sound by itself."""
    forwards = serial_schedule(CONFIG, micro_batches=2)
    backwards = Schedule(tuple(replace(phase, micro_batch=1 - phase.micro_batch) for phase in forwards))
    plans = [plan_events(forwards), plan_events(backwards)]
    assert not _all_end(plans, random.Random(0))
    assert all(_all_end([plan] * 2, random.Random(0)) for plan in plans)


# --- how tokens are split ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", range(1, 24))
def test_all_ranks_split_into_as_many_as_the_fullest_can_fill(most: int) -> None:
    counts = set()
    for tokens in range(most + 1):
        split = split_tokens(tokens, most=most, config=CONFIG)
        counts.add(split.micro_batches)
        covered = [t for part in split.slices for t in range(part.start, part.stop)]
        assert covered == list(range(tokens))
        sizes = [part.stop - part.start for part in split.slices]
        assert max(sizes) - min(sizes) <= 1
    assert counts == {min(3, most)}
    assert min(sizes) >= 1


def test_a_second_micro_batch_below_the_smallest_is_left_out() -> None:
    assert split_tokens(5, most=7, config=CONFIG, smallest=4).micro_batches == 1
    assert split_tokens(5, most=8, config=CONFIG, smallest=4).micro_batches == 2
    assert split_tokens(0, most=0, config=CONFIG).slices == (slice(0, 0),)


@pytest.mark.parametrize(("tokens", "most", "smallest"), [(9, 8, 1), (-1, 8, 1), (1, 25, 1), (9, 9, 5), (1, 1, 0)])
def test_a_split_that_cannot_be_is_refused(tokens: int, most: int, smallest: int) -> None:
    with pytest.raises(ArgumentError):
        split_tokens(tokens, most=most, config=CONFIG, smallest=smallest)


def test_ranks_agree_on_the_fullest() -> None:
    def main(group: RankGroup) -> int:
        return agree_split(group, [0, 1, 5][group.rank], config=CONFIG, smallest=2).micro_batches

    assert run_local(main, 3, device="emulated") == [2, 2, 2]


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_a_receive_hook_receives_once() -> None:
    calls: list[int] = []
    hook = ReceiveHook(lambda: calls.append(1) or len(calls))  # type: ignore[func-returns-value]
    assert not hook.done
    assert [hook(), hook(), hook()] == [1, 1, 1]
    assert hook.done


def test_a_receive_hook_that_failed_tries_again() -> None:
    tries = iter([StepOrderError("not yet"), None])

    def receive() -> str:
        error = next(tries)
        if error is not None:
            raise error
        return "arrived"

    hook = ReceiveHook(receive)
    with pytest.raises(StepOrderError):
        hook()
    assert hook() == "arrived"


def test_nvtx_ranges_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert nvtx_probe(0) is None
    calls: list[tuple[str, Any]] = []
    fake = types.ModuleType("nvtx")
    fake.push_range = lambda text, domain: calls.append((text, domain))  # type: ignore[attr-defined]
    fake.pop_range = lambda domain: calls.append(("pop", domain))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    probe = nvtx_probe(3)
    assert probe is not None
    stream: Any = None
    probe.enter(Phase(1, "experts", COMPUTE, 2), stream)
    probe.leave(Phase(1, "experts", COMPUTE, 2), stream)
    assert calls == [("experts 2.1", "nvep rank 3"), ("pop", "nvep rank 3")]
