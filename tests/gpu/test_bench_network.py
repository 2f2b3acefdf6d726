"""The network sweep's figures on a GPU that all ranks of a local group share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvep.bench.network import NetworkCase
from nvep.bench.network_run import NetworkResult, run_network_cases
from nvep.config import NETWORK_TRANSPORTS
from nvep.group import run_local

CASE = NetworkCase(ranks=4, tokens=8, hidden=2048, blocks=4, delays=(0, 512))


def _run(*cases: NetworkCase) -> list[NetworkResult]:
    return run_local(lambda group: run_network_cases(group, cases), cases[0].ranks, device="cuda")[0]


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
def test_a_scheme_gives_every_figure(transport: str) -> None:
    case = replace(CASE, transport=transport)
    plain, accounted = _run(case, replace(case, accounted=True, delays=(0,)))
    assert plain.timing is not None, plain.refused or plain.failed
    assert min(plain.timing.hold_us.values()) > 0
    assert min(plain.timing.in_flight_us.values()) > 2.0  # the modelled latency
    assert plain.exposed_us[512] < plain.exposed_us[0]  # other work hides the flight
    assert accounted.timing is not None, accounted.refused or accounted.failed
    for phase, found in accounted.timing.account_us.items():
        assert 0 < found["total"] < 3 * accounted.timing.hold_us[phase]


def test_cases_and_sizes_follow_one_another() -> None:
    results = _run(replace(CASE, transport="nvlink"), CASE, replace(CASE, tokens=128), replace(CASE, tokens=256))
    assert [result.timing is not None for result in results] == [True] * 4
