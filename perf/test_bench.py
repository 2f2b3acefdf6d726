"""The cases of ``nvep bench`` under pytest-benchmark: ``pytest perf``, or ``mpirun -n 2 pytest perf`` for processes.

Every round of a benchmark is one replay of the case's graph: the table shows seconds a step (dispatch + combine) on the
slowest rank, by the device's clock. Without a GPU, and with --benchmark-disable, small cases on the emulated device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from nvep.bench import Case, CaseResult, Floors, default_cases, measure_floors, run_case, small
from nvep.bench.kernels import FloorKernels
from nvep.cli.bench import print_result
from nvep.cli.traces import read_trace
from nvep.config import Settings, mpi_launch
from nvep.group import RankGroup, run_local
from nvep.runtime import choose_device_kind

LAUNCH = mpi_launch()
RANKS = LAUNCH[1] if LAUNCH else 2
EMULATED = choose_device_kind(Settings.from_environment().device) == "emulated"
OTHERS = () if LAUNCH else (4,) if EMULATED else (4, 8)
CASES = default_cases(RANKS, other_ranks=OTHERS)
CASES = list(dict.fromkeys(small(case) for case in CASES)) if EMULATED else CASES
LOG = Path(__file__).parents[1] / "tests" / "data" / "demo_routing.jsonl"
RECORDED = Case(RANKS, hidden=2048, experts=32, top_k=4, routing="recorded")  # as the log was
CASES.append(small(RECORDED) if EMULATED else RECORDED)


class ReplayClock:
    """A clock that stands still but for the replays it is told of."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._left: list[float] = []

    def load(self, microseconds: tuple[float, ...]) -> None:
        self._left = list(microseconds)

    def replay(self) -> None:
        self._seconds += self._left.pop(0) * 1e-6

    def read(self) -> float:
        return self._seconds


CLOCK = ReplayClock()


@lru_cache
def _floors(group: RankGroup | None, ranks: int) -> Floors:
    """Once for each number of ranks."""
    if group is not None:
        return measure_floors(group, FloorKernels(group.device))
    return run_local(lambda g: measure_floors(g, FloorKernels(g.device)), ranks)[0]


@pytest.fixture(scope="session")
def measure() -> Iterator[Callable[[Case], CaseResult]]:
    """Runs a case on a local group, or on the ranks of mpirun."""

    def run(group: RankGroup, case: Case, floors: Floors) -> CaseResult:
        recorded = read_trace(LOG, layer="0").ids if case.routing == "recorded" else None
        return run_case(group, case, floors=floors, kernels=FloorKernels(group.device), recorded=recorded)

    if LAUNCH is None:
        yield lambda case: run_local(lambda g: run(g, case, _floors(None, case.ranks)), case.ranks)[0]
        return
    from mpi4py import MPI

    with RankGroup.from_mpi(MPI.COMM_WORLD) as group:
        yield lambda case: run(group, case, _floors(group, case.ranks))


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_case(benchmark: Any, measure: Callable[[Case], CaseResult], case: Case) -> None:
    result = measure(case)
    assert not result.failed, result.failed
    if result.timing is None:
        pytest.skip(result.refused)
    CLOCK.load(result.timing.pair_us)
    benchmark.pedantic(CLOCK.replay, rounds=len(result.timing.pair_us))
    benchmark.extra_info.update(result.as_json())
    assert min(result.timing.pair_us) > 0
    if LAUNCH is None or LAUNCH[0] == 0:
        print()
        print_result(result)
