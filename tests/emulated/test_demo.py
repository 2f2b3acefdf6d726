"""``nvep demo`` from the command line's entry down: the same text from any number of ranks, and errors it must find."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.cli import demo
from nvep.cli.demo_exchange import ExpertParallel
from nvep.cli.demo_model import PROMPTS, Generated
from nvep.cli.main import main
from nvep.cli.traces import read_trace
from nvep.testing.mpirun import run_mpi

DATA = Path(__file__).resolve().parents[1] / "data" / "demo_routing.jsonl"
LAYERS, EXPERTS, TOP_K, ROW_BYTES = 4, 32, 4, 320
PROMPT_BYTES = sum(map(len, PROMPTS))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def routed_rows(log: Path, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows from rank to rank and pairs by rank that follow from a router log, by another road than the demo's."""
    owners = np.arange(EXPERTS) * ranks // max(EXPERTS, ranks)
    rows, pairs = np.zeros((ranks, ranks), int), np.zeros(ranks, int)
    sizes = [len(PROMPTS) // ranks + (r < len(PROMPTS) % ranks) for r in range(ranks)]
    source_of = np.repeat(np.arange(ranks), sizes)
    for line in log.read_text().splitlines()[1:]:
        record = json.loads(line)
        targets = [int(owners[e]) for e in record["topk_ids"]]
        for target in set(targets):
            rows[source_of[int(record["req_id"].removeprefix("text"))], target] += 1
        pairs += np.bincount(targets, minlength=ranks)
    return rows, pairs


def table(out: str) -> str:
    return " ".join(out.split())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_text_is_that_of_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["demo", "--ranks", str(ranks), "--tokens", "16", "--record-routing", str(log)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"demo: {ranks} ranks, {16 * len(PROMPTS)} tokens, identical to the reference"
    rows, pairs = routed_rows(log, ranks)
    local = f"{np.trace(rows) / rows.sum():.0%}"
    shown = table(out)
    assert f"rows sent {rows.sum():,}, {local} of them local" in shown
    assert "counts in the receive buffers equal those from routing" in shown
    dispatched, combined = int(rows.sum()) * (ROW_BYTES + TOP_K * 8), int(rows.sum()) * ROW_BYTES * 2
    assert f"bytes sent {dispatched:,} in dispatch with headers, {combined:,} in combine" in shown
    assert f"rows saved {pairs.sum() - rows.sum():,} of {pairs.sum():,} by sending" in shown
    assert f"experts' load {', '.join(f'{n:,}' for n in pairs)} by rank" in shown
    assert "emulated device (CPU)" in shown
    assert err.count("100 %") == 1


def test_more_ranks_than_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "10", "--tokens", "2"]) == 0
    assert last_line(capsys) == "demo: 10 ranks, 16 tokens, identical to the reference"


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_mpirun(ranks: int) -> None:
    command = [sys.executable, "-m", "nvep.cli", "demo", "--tokens", "12"]
    result = run_mpi(ranks, command, timeout=100).require_success()
    lines = result.stdout.splitlines()
    assert lines[-1] == f"demo: {ranks} ranks, {12 * len(PROMPTS)} tokens, identical to the reference"
    assert result.stdout.count("demo: ") == 1
    assert {line.split(",")[0] for line in lines if line.startswith("rank ")} == {f"rank {r}" for r in range(ranks)}
    assert len({m.group() for m in re.finditer(r"text \d", result.stdout)}) == len(PROMPTS)
    assert result.stderr.count("100 %") == 1


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (2, 1), (3, 20), (4, 7), (8, 1)])
def test_one_flipped_byte_is_found(capsys: pytest.CaptureFixture[str], ranks: int, tokens: int) -> None:
    assert main(["demo", "--ranks", str(ranks), "--tokens", str(tokens), "--sabotage"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"demo: {ranks} ranks, {tokens * len(PROMPTS)} tokens, DIFFERENT"
    assert f"sabotage: rank {ranks - 1} flipped a bit of byte " in out
    assert re.search(r"different: text \d of rank \d, byte 0: '.*', reference '.*'", out)


def test_one_flipped_byte_is_found_under_mpirun() -> None:
    command = [sys.executable, "-m", "nvep.cli", "demo", "--tokens", "3", "--sabotage"]
    result = run_mpi(2, command, timeout=100)
    assert result.returncode == 1
    assert "demo: 2 ranks, 24 tokens, DIFFERENT" in result.stdout.splitlines()


def plant_wrong_count(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ExpertParallel._count_arrivals

    def lying(self: ExpertParallel, layer: int, arrivals: Any) -> None:
        honest(self, layer, arrivals)
        if self._rank == 1 and len(self.traffic.received) == 11:
            self.traffic.received[-1][0] += 1

    monkeypatch.setattr(ExpertParallel, "_count_arrivals", lying)


def plant_wrong_load(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ExpertParallel._count_arrivals

    def lying(self: ExpertParallel, layer: int, arrivals: Any) -> None:
        honest(self, layer, arrivals)
        if self._rank == 1 and len(self.traffic.received) == 11:
            self.traffic.load[layer, 31] -= 1

    monkeypatch.setattr(ExpertParallel, "_count_arrivals", lying)


def plant_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo.reference_texts

    def other(*arguments: Any) -> Generated:
        texts = honest(*arguments)
        return Generated((*texts.texts[:6], texts.texts[6][:2] + b"#", texts.texts[7]), 1.0, 1.0)

    monkeypatch.setattr(demo, "reference_texts", other)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (plant_wrong_count, "different: rows from rank 0 to rank 1, step 2, layer 2: "),
        (plant_wrong_load, "different: expert 31 of layer 2: "),
        (plant_wrong_text, "different: text 6 of rank 1, byte 2: 'e', reference '#'"),
    ],
)
def test_planted_differences_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plant: Any, found: str
) -> None:
    plant(monkeypatch)
    assert main(["demo", "--ranks", "2", "--tokens", "3"]) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("different")] == [
        next(line for line in out.splitlines() if line.startswith(found))
    ]
    assert out.splitlines()[-1].endswith("DIFFERENT")
    assert ("DIFFER from those" in table(out)) == (plant is not plant_wrong_text)


def test_recorded_routing_is_replayed_and_equal_for_every_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [tmp_path / "one.jsonl", tmp_path / "three.jsonl", DATA]
    for ranks, log in zip((1, 3), logs):
        assert main(["demo", "--ranks", str(ranks), "--tokens", "8", "--record-routing", str(log)]) == 0
    for layer in range(LAYERS):
        traces = [read_trace(log, layer=str(layer)) for log in logs]
        for trace in traces:
            assert (trace.num_experts, trace.ids.shape) == (EXPERTS, (PROMPT_BYTES + 7 * len(PROMPTS), TOP_K))
            np.testing.assert_array_equal(trace.ids, traces[0].ids)
            np.testing.assert_allclose(trace.weights, traces[0].weights, atol=5e-3)
    capsys.readouterr()
    assert main(["replay", str(logs[1]), "--layer", "3", "--ranks", "2", "--hidden", "160"]) == 0
    assert last_line(capsys) == f"replay: 2 ranks, {PROMPT_BYTES + 7 * len(PROMPTS)} tokens, verified"


@pytest.mark.parametrize("ranks", [1, 4, 10])
def test_page(tmp_path: Path, ranks: int) -> None:
    path, log = tmp_path / "page.html", tmp_path / "log.jsonl"
    options = ["--html", str(path), "--record-routing", str(log)]
    assert main(["demo", "--ranks", str(ranks), "--tokens", "10", *options]) == 0
    page = path.read_text()
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    traffic, load, times = pictures
    rows, pairs = routed_rows(log, ranks)
    titles = [title.text for title in traffic.iter("title")]
    cells = [f"rank {s} to rank {t}: {rows[s, t]:,} rows" for s in range(ranks) for t in range(ranks)]
    assert titles == cells
    assert len(list(load.iter("title"))) == LAYERS * EXPERTS
    shown = [text.text for text in load.iter("text")]
    assert all(f"{count:,}" in shown for count in pairs)
    assert len(list(times.iter("circle"))) % LAYERS == 0
    assert page.count("<article>") == ranks
    assert page.count("<blockquote>") == len(PROMPTS)
    assert '<span class="verdict good">identical to the reference</span>' in page
    assert "old when h" in page
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", page)


def test_page_of_a_sabotaged_run(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["demo", "--ranks", "2", "--tokens", "4", "--sabotage", "--html", str(path)]) == 1
    page = path.read_text()
    assert '<span class="verdict bad">DIFFERENT</span>' in page
    assert "Sabotage: rank 1 flipped a bit" in page
    assert "text 0 of rank 0, byte 0" in page


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tokens", "0"], "--tokens: got 0; allowed: 1 or more"),
        (["--ranks", "0"], "--ranks: got 0; allowed: 1 or more"),
        (["--html", "/no/such/folder/x"], "--html: got '/no/such/folder/x'; allowed: a file in an existing directory"),
        (["--record-routing", "/no/folder/x"], "--record-routing: got '/no/folder/x'; allowed: a file in an existing"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], error: str) -> None:
    assert main(["demo", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count(f"nvep: error: {error}") == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "2", "--tokens", "1", "--html", str(tmp_path)]) == 2
    assert f"--html: got '{tmp_path}'; allowed: a file that can be written" in capsys.readouterr().err
