"""The sweep of ``nvep bench --transport`` under pytest-benchmark: ``pytest perf/test_network.py``.

A round is one timed step of a case; the table shows send hold time of dispatch on the slowest rank, by the device's
clock, over a soft NIC (emulated). Without a GPU, and with --benchmark-disable, small cases on the emulated device.
"""

from __future__ import annotations

from typing import Any

import pytest

from nvep.bench.network import NetworkCase, default_network_cases, small_network, unique
from nvep.bench.network_run import NetworkResult, run_network_cases
from nvep.cli.bench_network import print_result
from nvep.config import Settings, mpi_launch
from nvep.group import run_local
from nvep.runtime import choose_device_kind

EMULATED = choose_device_kind(Settings.from_environment().device) == "emulated"
CASES = default_network_cases()
CASES = unique(small_network(case) for case in CASES) if EMULATED else CASES
pytestmark = pytest.mark.skipif(mpi_launch() is not None, reason="cases name their own numbers of ranks")


class HoldClock:
    """A clock that goes on by what a case held its GPU."""

    seconds = 0.0

    def hold(self, microseconds: float) -> None:
        self.seconds += microseconds * 1e-6

    def read(self) -> float:
        return self.seconds


CLOCK = HoldClock()


def _run(case: NetworkCase) -> NetworkResult:
    return run_local(lambda group: run_network_cases(group, [case]), case.ranks)[0][0]


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", CASES, ids=NetworkCase.label)
def test_case(benchmark: Any, case: NetworkCase) -> None:
    result = _run(case)
    assert not result.failed, result.failed
    if result.timing is None:
        pytest.skip(result.refused)
    benchmark.pedantic(CLOCK.hold, args=(result.hold_us,), rounds=1)
    benchmark.extra_info.update(result.as_json())
    assert result.hold_us > 0
    print()
    print_result(result)
