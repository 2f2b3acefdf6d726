"""``nvep trace`` on the emulated device: the file holds every phase of every rank, in an order that can be."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.cli.main import main as nvep_command
from nvep.moe.overlap import Schedule
from nvep.testing.mpirun import run_mpi
from tests.trace_kit import check_order, spans_of

FEW = ["--replays", "2", "--attention-us", "50", "--experts-us", "50"]


def _trace(folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "trace.json"
    assert nvep_command(["trace", "--out", str(out), *FEW, *options]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")


def test_a_trace_with_and_without_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _trace(tmp_path, "--overlap", "on", "off", "single", "--tokens", "6", "--protocol", "fence")
    about = document["otherData"]
    assert about["emulated"]
    assert about["equal_bits"]
    assert "EMULATED" in about["note"]
    assert list(about["modes"]) == ["on", "off", "single"]
    labels = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert len(labels) == 6
    assert all("EMULATED" in label for label in labels)
    for mode, batches in (("on", 2), ("off", 2), ("single", 1)):
        spans = spans_of(document, mode)
        assert len(spans) == 2 * 2 * batches * 6
        check_order(spans, ranks=2, layers=2)
    for mode in ("off", "single"):
        spans = spans_of(document, mode)
        for rank in range(2):
            mine = sorted(span for (r, _), span in spans.items() if r == rank)
            assert all(a[1] <= b[0] for a, b in pairwise(mine)), "one stream runs one phase at a time"
            assert {row for _, _, row in mine} == {0}
    assert len({row for _, _, row in spans_of(document, "on").values()}) == 3
    flows = [e for e in document["traceEvents"] if e["ph"] in "sf"]
    assert len({e["id"] for e in flows}) * 2 == len(flows) > 0
    shown = capsys.readouterr().out
    assert shown.startswith("EMULATED")
    assert "equal bits in every mode" in shown


def test_a_trace_over_a_network_adapter_is_labelled(tmp_path: Path) -> None:
    document = _trace(tmp_path, "--overlap", "on", "--transport", "gpi", "--layers", "1", "--tokens", "4")
    assert document["otherData"]["network"] == "emulated adapter"
    check_order(spans_of(document, "on"), ranks=2, layers=1)


def test_a_trace_by_a_schedule_of_ones_own_and_a_router_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, schedule = tmp_path / "log.npy", tmp_path / "schedule"
    np.save(log, np.array([[i % 5, (i + 2) % 5] for i in range(40)], np.int32))
    assert nvep_command(["trace", "--print-schedule", "--layers", "1"]) == 0
    text = capsys.readouterr().out
    assert Schedule.parse(text).micro_batches == 2
    schedule.write_text(text.replace("communication:0", "communication").replace("communication:1", "communication"))
    options = ["--schedule", str(schedule), "--layers", "1", "--tokens", "5", "--trace", str(log)]
    document = _trace(tmp_path, *options, "--overlap", "on", "off", "--ranks", "3")
    assert document["otherData"]["case"]["experts"] == 5
    assert document["otherData"]["equal_bits"]
    spans = spans_of(document, "on")
    assert len({row for _, _, row in spans.values()}) == 2
    check_order(spans, ranks=3, layers=1)


def test_a_trace_of_ranks_that_are_processes(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ["trace", "--out", str(out), *FEW, "--tokens", "4", "--overlap", "on"]
    run_mpi(2, [sys.executable, "-m", "nvep.cli.main", *options], timeout=60).require_success()
    check_order(spans_of(json.loads(out.read_text()), "on"), ranks=2, layers=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--micro-batches", "9", "--tokens", "4"], "micro_batches"),
        (["--layers", "0"], "--layers"),
        (["--attention-us", "-1"], "--attention-us"),
        (["--out", "/nowhere/trace.json"], "--out"),
        (["--schedule", "/nowhere"], "--schedule"),
        (["--hidden", "0"], "hidden"),
    ],
)
def test_a_bad_option_is_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvep_command(["trace", *options]) == 2
    assert f"nvep: error: {named}: got" in capsys.readouterr().err
