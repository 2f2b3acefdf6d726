"""The network sweep as data, what it is judged by, and its pictures and tables, from figures made up here."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.bench.network import (
    DELAYS,
    NetworkCase,
    default_network_cases,
    full_network_cases,
    small_network,
    unique,
)
from nvep.bench.network_account import BLOCK_STAGES, POST_STAGES, STAGES, account_us
from nvep.bench.network_run import NetworkResult
from nvep.bench.network_targets import HOLD_AT_128, crossover_us, hold_ratios, targets
from nvep.bench.network_timing import NetworkTiming
from nvep.cli import plot, plot_network
from nvep.cli.bench_network import as_json
from nvep.cli.main import main as nvep_command
from nvep.config import NETWORK_TRANSPORTS, TRANSPORTS
from nvep.errors import ArgumentError
from nvep.protocols.signal import SEND_PHASES, SEND_STAGES

REPOSITORY = Path(__file__).parents[2]
HOLD = {"nvlink": 10.0, "gdaki": 20.0, "gpi": 13.0, "gpi-mc": 10.0, "free-flow": 12.0}
EXTRA = {"nvlink": 0.0, "gdaki": 0.0, "gpi": 40.0, "gpi-mc": 5.0, "free-flow": 1000.0}  # in flight, hidden by work


def _result(case: NetworkCase) -> NetworkResult:
    hold = HOLD[case.transport]
    exposed = {delay: hold + max(0.0, EXTRA[case.transport] - delay / 2) for delay in case.delays}
    both = {"dispatch": hold, "combine": hold / 2}
    arrival = both if case.networked else {}
    account = {"dispatch": dict.fromkeys((*STAGES, "total"), 1.0), "combine": {}} if case.accounted else {}
    timing = NetworkTiming(
        both, both, arrival, arrival, {"dispatch": exposed, "combine": exposed}, {"stalls": 1.0}, account
    )
    return NetworkResult(case, "soft NIC (emulated)" if case.networked else "", timing)


def _results() -> list[NetworkResult]:
    cases = default_network_cases()
    return [*map(_result, cases), NetworkResult(replace(cases[0], blocks=64), refused="ArgumentError: max_blocks")]


def test_all_schemes_send_the_same_at_the_same_points() -> None:
    for cases in (default_network_cases(), full_network_cases()):
        points = {t: {c.point() for c in cases if c.transport == t and not c.accounted} for t in TRANSPORTS}
        assert points["gdaki"] == points["gpi"] == points["gpi-mc"] == points["free-flow"]
        assert points["nvlink"] < points["gdaki"]  # where rings have no say
        assert {c.ranks for c in cases} == {2, 4, 8, 16}
        assert {c.ring_memory for c in cases} == {"default", "host", "device"}
        assert DELAYS in {c.delays for c in cases}
        assert len({c.label() for c in cases}) == len(cases)
        assert [c.ranks for c in cases] == sorted(c.ranks for c in cases)
        assert {c.transport for c in cases if c.accounted} == set(NETWORK_TRANSPORTS)
    assert len(default_network_cases()) < len(full_network_cases())


def test_a_step_fits_into_its_rings() -> None:
    for case in full_network_cases(["gpi"]):
        config = case.config()
        assert case.queue_depth in (None, config.queue_depth)
        assert case.queue_depth or config.queue_depth >= case.tokens * min(case.top_k, case.ranks) + case.ranks


def test_of_a_point_the_case_with_most_delays_is_kept() -> None:
    case = NetworkCase()
    assert unique([case, replace(case, delays=DELAYS), case]) == [replace(case, delays=DELAYS)]
    assert len(unique([case, replace(case, accounted=True)])) == 2
    small = unique(small_network(case) for case in default_network_cases())
    assert {case.transport for case in small} == set(TRANSPORTS)
    assert max(case.tokens * case.hidden for case in small) <= 8 * 256


@pytest.mark.parametrize(
    ("name", "value"),
    [("transport", "pigeon"), ("ring_memory", "disk"), ("tokens", 0), ("delays", ()), ("delays", (5, 1)),
     ("unrolled", 17)],
)  # fmt: skip
def test_a_case_that_cannot_be_is_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=name):
        NetworkCase(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ({0: 10, 32: 10}, {0: 9, 32: 9}, 0.0),
        ({0: 10, 32: 10}, {0: 20, 32: 0}, 16.0),
        ({0: 10, 32: 10, 64: 10}, {0: 20, 32: 13, 64: 9}, 56.0),
        ({0: 10, 32: 10}, {0: 20, 32: 10}, math.nan),
    ],
)
def test_curves_cross_between_measured_delays(base: dict[int, float], own: dict[int, float], expected: float) -> None:
    assert crossover_us(base, own) == pytest.approx(expected, nan_ok=True)


def test_targets_say_what_was_found() -> None:
    results = _results()
    found = {(t.transport, t.what.split(" at ")[0].split(",")[0]): t for t in targets(results)}
    assert {transport for transport, _ in found} == set(HOLD_AT_128)
    ratios = dict(hold_ratios(results, "gpi"))
    assert set(ratios.values()) == {0.65}
    by_name = [t for t in targets(results) if "hold at 128" in t.what]
    assert {(t.transport, t.found, t.met) for t in by_name} == {
        ("gpi", 0.65, True),
        ("gpi-mc", 0.5, False),
        ("free-flow", 0.6, True),
    }
    shares = [t for t in targets(results) if "share" in t.what]
    assert [t.found for t in shares] == [1.0, 1.0, 1.0]
    crossings = {t.transport: t for t in targets(results) if "less is exposed" in t.what}
    assert crossings["gpi"].met
    assert not crossings["free-flow"].met  # never: NaN
    assert targets([r for r in results if r.case.transport != "gdaki"]) == []


def test_what_posters_do_is_told_apart_within_posting() -> None:
    sums = np.zeros((SEND_PHASES, SEND_STAGES), dtype=np.uint64)
    names = (*BLOCK_STAGES, *POST_STAGES, "cycles", "nanoseconds", "blocks")
    values = {"routing": 4000, "posting": 8000, "signals": 2000, "claim": 10, "build": 30, "cycles": 20_000}
    values |= {"nanoseconds": 10_000, "blocks": 4}
    sums[0] = [values.get(name, 0) for name in names]
    found = account_us(sums, launches=2)
    assert found["combine"] == {}
    shown = {name: us for name, us in found["dispatch"].items() if us}
    assert shown == {"routing": 0.5, "claim": 0.25, "build": 0.75, "signals": 0.5, "total": 2.0}


def _data(*, emulated: bool = False) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(as_json(_results(), ["NVIDIA <H200>"], emulated=emulated)))
    return data


def test_charts_of_every_shape_and_of_blocks() -> None:
    charts = plot_network.network_charts([_data()])
    base = next(c for c in charts if isinstance(c, plot_network.NetworkChart) and c.exposed)
    assert "soft NIC (emulated)" in base.title
    assert base.hold["dispatch"]["gpi"][128] == 13.0
    assert base.exposed[128]["gpi"] == {0: 106.0, 32: 74.0, 64: 42.0, 128: 26.0, 256: 26.0, 512: 26.0}
    crossovers = base.crossovers()
    assert crossovers["gpi"][128] == pytest.approx(64 + 64 * 2 / 16)
    assert math.isnan(crossovers["free-flow"][128])
    blocks = [c for c in charts if isinstance(c, plot_network.BlocksChart)]
    assert {1, 2, 4, 8, 14} in [set(c.hold["gdaki"]) for c in blocks]
    assert "EMULATED" in plot_network.network_charts([_data(emulated=True)])[0].title


def test_pictures_and_page_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.json").write_text(json.dumps(_data()))
    assert nvep_command(["plot", str(tmp_path / "bench.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "bench-1.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_and_the_report_label_and_judge() -> None:
    data = _data()
    page = plot.page([data], [], [])
    assert "soft NIC (emulated)" in page
    assert "&lt;H200&gt;" in page
    assert "ArgumentError: max_blocks" in page
    assert "<td>no</td>" in page
    assert "<td>yes</td>" not in plot.page([_data(emulated=True)], [], [])
    spec = importlib.util.spec_from_file_location("report", REPOSITORY / "perf" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.report(data)
    assert "soft NIC (emulated)" in text
    assert "| gpi | hold at 128 tokens over GDAKI's, 8 ranks, 8 blocks, rings default | 0.70 | 0.65 | yes |" in text
    assert "ordered publication" in text
