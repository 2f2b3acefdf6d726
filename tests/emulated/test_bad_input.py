"""Bad arguments of every phase: a typed error on every rank, before device work, and the exchange goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import nvep
from nvep.errors import ArgumentError, ExchangeClosed, NvepError, StepOrderError
from nvep.exchange import Arrivals, Exchange
from tests.emulated.bad_arguments import (
    ARRIVALS,
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    GOOD,
    LANE,
    NUM_TOKENS,
    OUTPUT,
    PARTIAL,
    PARTIAL_ROWS,
    SCALES,
    STREAM,
    TOKENS,
    ids,
)
from tests.emulated.bad_input import (
    CONFIG,
    LANES,
    RANKS,
    Bad,
    Staged,
    check_error,
    everywhere,
    staged,
)
from tests.host.array_support import Foreign

Call = Callable[[Exchange, dict[str, Arrivals], dict[str, Any]], Any]


def send(name: str) -> Call:
    return lambda exchange, arrivals, change: getattr(exchange, name)(**{**GOOD, **change})


def receive(exchange: Exchange, arrivals: dict[str, Arrivals], change: dict[str, Any]) -> Any:
    return exchange.dispatch_recv(**{"lane": LANES["dispatch_recv"], **change})


def with_arrivals(name: str, state: str, **good: Any) -> Call:
    return lambda exchange, arrivals, change: getattr(exchange, name)(**{"arrivals": arrivals[state], **good, **change})


PHASES: dict[str, tuple[Call, tuple[dict[str, Bad], ...]]] = {
    "dispatch": (send("dispatch"), (TOKENS, EXPERT_IDS, EXPERT_WEIGHTS, NUM_TOKENS, LANE, STREAM)),
    "dispatch_send": (send("dispatch_send"), (TOKENS, EXPERT_IDS, EXPERT_WEIGHTS, NUM_TOKENS, LANE, STREAM)),
    "dispatch_recv": (receive, (LANE, STREAM)),
    "combine": (
        with_arrivals("combine", "combine", partial_rows=PARTIAL),
        (PARTIAL_ROWS, OUTPUT, ARRIVALS, STREAM),
    ),
    "combine_send": (with_arrivals("combine_send", "combine", partial_rows=PARTIAL), (PARTIAL_ROWS, ARRIVALS, STREAM)),
    "combine_recv": (with_arrivals("combine_recv", "combine_recv"), (OUTPUT, ARRIVALS, STREAM)),
    "work": (with_arrivals("work", "combine"), (ARRIVALS, STREAM)),
    "release": (with_arrivals("release", "combine"), (ARRIVALS, STREAM)),
}
CASES = [
    pytest.param(call, bad, id=f"{phase}-{next(iter(bad.change))}-{name}")
    for phase, (call, tables) in PHASES.items()
    for table in tables
    for name, bad in table.items()
]
MASKS = {
    "too short": ([False], r"masked: got \[False\]; allowed: one bool per rank: 2"),
    "too deep": ([[False, False]], r"masked: got \[\[False, False\]\]; allowed: one bool per rank: 2"),
    "number": (1, r"masked: got 1; allowed: one bool per rank: 2"),
    "numbers": ([2, 3], r"masked: got \[2, 3\]; allowed: one bool per rank: 2"),
    "none": (None, r"masked: got None; allowed: one bool per rank: 2"),
    "this rank": ([True, True], r"masked: got 'rank \d'; allowed: other ranks than this one"),
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Staged]:
    with staged() as made:
        yield made
        made.finish()  # whatever was refused changed nothing


def refused(stage: Staged, call: Call, case: Bad) -> None:
    """Every rank raises the same, before device work."""
    texts = []
    for rank, exchange in enumerate(stage.exchanges):
        change = dict(case.change)
        if isinstance(change.get("arrivals"), str):
            change["arrivals"] = stage.arrivals[1 - rank]["combine"]
        stage.watch.seen.clear()
        with pytest.raises(NvepError) as caught:
            call(exchange, stage.arrivals[rank], change)
        check_error(caught.value, case)
        assert stage.watch.seen == []
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("call", "case"), CASES)
def test_arguments(stage: Staged, call: Call, case: Bad) -> None:
    refused(stage, call, case)


@pytest.mark.parametrize("name", MASKS)
def test_masks(stage: Staged, name: str) -> None:
    masked, text = MASKS[name]
    stage.watch.seen.clear()
    for exchange in stage.exchanges:
        with pytest.raises(ArgumentError) as caught:
            exchange.set_mask(masked)
        check_error(caught.value, Bad({}, ArgumentError, text))
    assert stage.watch.seen == []


ALLOWED = {
    "dispatch": {"dispatch", "dispatch_send"},
    "dispatch_recv": {"dispatch_recv"},
    "combine": {"combine", "combine_send", "work", "release"},
    "combine_recv": {"combine_recv"},
}


@pytest.mark.parametrize(
    ("phase", "state"), [(phase, state) for state in LANES for phase in PHASES if phase not in ALLOWED[state]]
)
def test_phases_out_of_order(stage: Staged, phase: str, state: str) -> None:
    lane, call = LANES[state], PHASES[phase][0]
    for rank, exchange in enumerate(stage.exchanges):
        change: dict[str, Any] = (
            {"lane": lane} if "dispatch" in phase else {"arrivals": exchange._arrived(exchange._lanes[lane])}
        )
        stage.watch.seen.clear()
        with pytest.raises(StepOrderError, match=rf"{phase} on lane {lane}: the lane is '.*', it must be '.*'"):
            call(exchange, stage.arrivals[rank], change)
        assert stage.watch.seen == []


def test_arrivals_of_an_earlier_step(stage: Staged) -> None:
    for rank, exchange in enumerate(stage.exchanges):
        stale = dataclasses.replace(stage.arrivals[rank]["combine"], step=0)
        for call in (exchange.release, exchange.work, lambda a, e=exchange: e.combine(PARTIAL, a)):
            with pytest.raises(StepOrderError, match="arrivals of step 0, lane 2 is at step 1"):
                call(stale)


def test_a_refused_call_on_another_stream_hides_no_work(stage: Staged) -> None:
    """Arrivals are read behind the dispatch that filled them, also if a later call named another stream in vain."""
    for rank, exchange in enumerate(stage.exchanges):
        arrivals, other = stage.arrivals[rank]["combine"], exchange.device.create_stream()
        awaited: list[Any] = []
        other.wait = awaited.append  # type: ignore[method-assign, assignment]
        with pytest.raises(ArgumentError):
            exchange.combine(None, arrivals, stream=other)
        producer = arrivals.rows.owner.stream
        assert producer is not other or len(awaited) == 1
        del other.wait
        exchange.work(arrivals, stream=exchange.device.default_stream)


def test_the_host_checks_ids_of_every_host_library(stage: Staged) -> None:
    """Ids that the host can read are refused before the step, whoever owns the memory."""
    wrong = ids(8)
    foreign = Foreign(wrong, (0, 32))
    refused(stage, send("dispatch"), Bad({"expert_ids": foreign}, ArgumentError, r"expert_ids\[3, 0\]: got 8"))


AFTER_CLOSE: dict[str, Callable[[Exchange, Arrivals], Any]] = {
    "dispatch": lambda e, a: e.dispatch(**GOOD),
    "dispatch_send": lambda e, a: e.dispatch_send(**GOOD),
    "dispatch_recv": lambda e, a: e.dispatch_recv(),
    "combine": lambda e, a: e.combine(PARTIAL, a),
    "combine_send": lambda e, a: e.combine_send(PARTIAL, a),
    "combine_recv": lambda e, a: e.combine_recv(a),
    "work": lambda e, a: e.work(a),
    "release": lambda e, a: e.release(a),
    "set_mask": lambda e, a: e.set_mask([False, False]),
    "check": lambda e, a: e.check(),
    "synchronize": lambda e, a: e.synchronize(),
    "statistics": lambda e, a: e.statistics(),
    "drain": lambda e, a: e.drain(),
    "rows": lambda e, a: a.rows.numpy(),
    "counts": lambda e, a: np.asarray(a.counts),
    "ids": lambda e, a: np.from_dlpack(a.expert_ids),
}


@pytest.fixture(scope="module")
def closed() -> Iterator[tuple[list[Exchange], list[Arrivals], list[np.ndarray]]]:
    """Closed exchanges, arrivals of their last step, and NumPy views that were taken before."""
    with ExitStack() as opened:
        groups = nvep.local_groups(RANKS, device="emulated")
        for group in groups:
            opened.callback(group.close)
        exchanges = everywhere(lambda group: Exchange(group, CONFIG), groups)
        arrivals = [e.dispatch(**GOOD) for e in exchanges]
        for exchange, received in zip(exchanges, arrivals):
            exchange.release(received)
        for exchange in exchanges:
            exchange.synchronize()
        views = [np.asarray(received.rows) for received in arrivals]
        everywhere(lambda group: exchanges[group.rank].close(), groups)
        yield exchanges, arrivals, views


@pytest.mark.parametrize("name", AFTER_CLOSE)
def test_closed_exchanges(closed: Any, name: str) -> None:
    for exchange, arrivals in zip(closed[0], closed[1]):
        with pytest.raises(ExchangeClosed, match="closed"):
            AFTER_CLOSE[name](exchange, arrivals)


def test_arrays_of_a_closed_exchange_are_no_inputs(closed: Any, stage: Staged) -> None:
    for received in closed[1]:
        change = {"tokens": (received.rows[0, :5], SCALES)}
        refused(stage, send("dispatch"), Bad(change, ExchangeClosed, r"tokens\[0\]: .*closed"))


def test_views_taken_before_close_can_still_be_read(closed: Any) -> None:
    """The memory of a closed exchange is given back once nobody looks at it."""
    for view in closed[2]:
        assert view[0, 0].tolist() == [1] * 64
