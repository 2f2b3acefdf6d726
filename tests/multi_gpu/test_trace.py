"""``nvep trace`` over GPUs whose clocks differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nvep.cli.main import main as nvep_command
from nvep.testing.mpirun import run_mpi
from tests.trace_kit import check_order, spans_of

OPTIONS = ["trace", "--overlap", "on", "off", "--tokens", "128", "--hidden", "4096", "--blocks", "16"]


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_clocks_are_brought_together(processes: bool, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = [*OPTIONS, "--out", str(out)]
    if processes:
        run_mpi(2, [sys.executable, "-m", "nvep.cli.main", *options], timeout=100).require_success()
    else:
        assert nvep_command(options) == 0
    document = json.loads(out.read_text())
    for mode, figures in document["otherData"]["modes"].items():
        assert 0 < figures["clock_error_us"] < 20
        check_order(spans_of(document, mode), ranks=2, layers=2, error_us=2 * figures["clock_error_us"])
