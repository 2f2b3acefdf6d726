"""Clocks brought together by barriers, and trace files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nvep.bench.cases import Case
from nvep.bench.clocks import clock_offsets
from nvep.bench.timeline import PhaseSpan, Timeline, TimelineCase, waited_for
from nvep.bench.trace_events import Arrow, Span, trace_document, trace_text
from nvep.errors import ArgumentError
from nvep.moe.overlap import serial_schedule
from nvep.moe.overlap_plan import plan_events

SMALL = Case(tokens=4, hidden=64, experts=4, top_k=2)


# --- clocks -----------------------------------------------------------------------------------------------------------


def _barriers(offsets: np.ndarray, *, rounds: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What ranks, whose clocks lag by ``offsets``, note around barriers."""
    rng = np.random.default_rng(seed)
    start = np.arange(rounds)[:, None] * 1e6
    entered = start + rng.random((rounds, len(offsets))) * spread
    left = entered.max(axis=1, keepdims=True) + rng.random(entered.shape) * spread
    return (np.floor(t - offsets).astype(np.int64) for t in (entered, left))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(8))
def test_offsets_lie_within_their_error(seed: int) -> None:
    true = np.array([0.0, 12345.0, -9e8, 0.0])
    entered, left = _barriers(true, rounds=30, spread=3000.0, seed=seed)
    found = clock_offsets(entered, left)
    assert found.offset_ns[0] == found.error_ns[0] == 0
    assert (np.abs(found.offset_ns - true) <= found.error_ns + 1).all()
    assert 0 < found.error_ns[1:].max() < 3000


def test_more_rounds_narrow_the_error() -> None:
    true = np.array([0.0, 5e6])
    few, many = (clock_offsets(*_barriers(true, rounds=n, spread=2000.0, seed=3)).error_ns[1] for n in (1, 60))
    assert many < few


# --- files ------------------------------------------------------------------------------------------------------------


def test_events_of_a_trace() -> None:
    spans = [
        Span("rank 0", "compute", "attention", "computation", 1.0, 3.5, {"layer": 0}),
        Span("rank 0", "sends", "dispatch_send", "communication", 4.0, 5.0, {}),
        Span("rank 1", "compute", "attention", "computation", 2.0, 2.0, {}),
    ]
    text = trace_text(trace_document(spans, [Arrow(0, 1, "event"), Arrow(1, 2, "messages")], {"emulated": True}))
    document = json.loads(text)
    assert document["otherData"] == {"emulated": True}
    events = document["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == {"name": "rank 1"}
    assert names["thread_name", 0, 1] == {"name": "sends"}
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        ("attention", 0, 0, 1.0, 2.5),
        ("dispatch_send", 0, 1, 4.0, 1.0),
        ("attention", 1, 0, 2.0, 0.0),
    ]
    flows = [(e["ph"], e["id"], e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert flows == [("s", 0, 0, 0, 3.5), ("f", 0, 0, 1, 4.0), ("s", 1, 0, 1, 5.0), ("f", 1, 1, 0, 5.0)]


def _timeline(starts: list[list[float]], ends: list[list[float]]) -> Timeline:
    schedule = serial_schedule(TimelineCase(SMALL, micro_batches=1).config())
    spans = [
        PhaseSpan(rank, phase, starts[rank][i], ends[rank][i])
        for rank in range(len(starts))
        for i, phase in enumerate(schedule)
    ]
    return Timeline("off", tuple(spans), plan_events(schedule), 0.0, (1.0,), 0.0, 0.0, ("",))


def test_a_receive_waits_for_the_last_send() -> None:
    starts = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    ends = [[1, 2, 3, 4, 4.5, 6], [1, 1.5, 3, 4, 5, 6]]
    assert waited_for(_timeline(starts, ends)) == [(1, 8, "messages"), (10, 5, "messages")]


def test_what_a_timeline_sums_up() -> None:
    timeline = _timeline([[0, 10, 12, 13, 30, 33]], [[10, 13, 14, 30, 32, 40]])
    assert timeline.summary(0) == pytest.approx(
        {"step": 40, "computation": 27, "communication": 14, "hidden": 1, "exposed": 13}
    )


@pytest.mark.parametrize("case", [TimelineCase(SMALL, micro_batches=5), TimelineCase(Case(hidden=100, tokens=4))])
def test_a_case_that_cannot_be_is_refused(case: TimelineCase) -> None:
    with pytest.raises(ArgumentError):
        case.config()
