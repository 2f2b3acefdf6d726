"""``nvep plot`` and the tables of perf/report.py, from figures made up here."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nvep.bench import Case, CaseResult, Floors
from nvep.bench.floors import CaseFloor
from nvep.bench.timing import Timing
from nvep.cli import plot
from nvep.cli.main import main as nvep_command

REPOSITORY = Path(__file__).parents[2]
PEERS = REPOSITORY / "perf" / "peers" / "h200x2.json"
FLOORS = Floors("2 x NVIDIA <H200>", (0, 1), 4000.0, 6000.0, 350.0, 0.7, 1.2, 0.6, 0.5)


def _results(*, emulated: bool = False) -> dict[str, Any]:
    results = [
        CaseResult(
            Case(tokens=tokens, protocol=protocol),
            protocol,
            Timing((5.0 + tokens, 6.0 + tokens), {"dispatch": 2.0, "combine": 3.0}, 0),
            CaseFloor(1.0, 2.0, 1000 * tokens, 2000 * tokens),
            target_us=7.0,
        )
        for tokens in (1, 8)
        for protocol in ("fence", "sentinel")
    ]
    results.append(CaseResult(Case(max_blocks=132), refused="ArgumentError: max_blocks: got 132"))
    return {
        "version": 1,
        "nvep": "0",
        "date": "2026-12-01",
        "emulated": emulated,
        "floors": [{"gpus": [0, 1], "device": FLOORS.device, "local_copy_gbs": 4000.0}],
        "results": [result.as_json() for result in results],
        "host_overhead": [],
    }


def test_curves_by_protocol_with_floor_and_peers_of_the_same_model() -> None:
    (chart,) = plot.charts([_results()], [json.loads(PEERS.read_text())])
    assert chart.figures["nvep fence"] == {1: 5.5 + 1, 8: 5.5 + 8}
    assert chart.floors["floor of this machine"] == {1: 3.0, 8: 3.0}
    assert chart.link_bytes == {1: 1000, 8: 8000}
    names = " ".join([*chart.figures, *chart.floors])
    assert "DeepEP V1 low latency, 2 x NVIDIA H200" in names
    assert "fp8" not in names
    assert "bare prototype" in " ".join(chart.floors)


def test_an_emulated_chart_says_so_and_stands_beside_no_peer() -> None:
    (chart,) = plot.charts([_results(emulated=True)], [json.loads(PEERS.read_text())])
    assert "EMULATED" in chart.title
    assert set(chart.figures) == {"nvep fence", "nvep sentinel"}


def test_ranks_that_share_a_gpu_stand_beside_no_peer() -> None:
    data = _results()
    for result in data["results"][:-1]:
        result["floor"]["link_bytes"] = 0
    (chart,) = plot.charts([data], [json.loads(PEERS.read_text())])
    assert set(chart.figures) == {"nvep fence", "nvep sentinel"}
    assert chart.link_bytes[8] == 16000


def test_one_size_is_no_curve() -> None:
    data = _results()
    data["results"] = data["results"][:2]
    assert plot.charts([data]) == []


def test_the_page_needs_nothing_else() -> None:
    data = _results()
    page = plot.page([data], [json.loads(PEERS.read_text())], [(plot.charts([data])[0], b"picture")])
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"'](?!data:)", page)
    assert "data:image/png;base64," in page
    assert "&lt;H200&gt;" in page
    assert "max_blocks: got 132" in page
    assert "not an official configuration" in page


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    (tmp_path / "bench.json").write_text(json.dumps(_results()))
    assert nvep_command(["plot", str(tmp_path / "bench.json"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'nvep[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pictures_and_page_are_written(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.json").write_text(json.dumps(_results()))
    out = tmp_path / "out"
    assert nvep_command(["plot", str(tmp_path / "bench.json"), "--peers", str(PEERS), "--out", str(out)]) == 0
    assert (out / "bench-1.png").read_bytes().startswith(b"\x89PNG")
    assert "base64" in (out / "bench.html").read_text()
    assert "1 pictures" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "results": []}', '{"version": 1, "results": 3}', None]
)
def test_a_file_that_is_none_of_ours_is_refused(text: str | None, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bench.json"
    if text is not None:
        path.write_text(text)
    assert nvep_command(["plot", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_peers_hold_what_is_drawn() -> None:
    data = json.loads(PEERS.read_text())
    assert data["version"] == plot.PEERS_VERSION
    assert all(data[name] for name in ("hardware", "source", "date"))
    for curve in data["curves"]:
        assert {"name", "hidden", "experts", "top_k", "format"} <= set(curve)
        times = [us for _, us in sorted((int(t), us) for t, us in curve["pair_us"].items())]
        assert times == sorted(times)


def test_tables_of_a_results_file() -> None:
    spec = importlib.util.spec_from_file_location("report", REPOSITORY / "perf" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.report(_results())
    assert "| fence-2x1 | 7.00 | 6.50 | 3.00 | yes |" in text
    assert "| sentinel-2x8 | 7.00 | 13.50 | 3.00 | no |" in text
    assert "| auto-2x128-132b | ArgumentError: max_blocks: got 132 |" in text
    assert "EMULATED" not in text
    assert "EMULATED" in module.report(_results(emulated=True))
