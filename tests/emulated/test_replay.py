"""``nvep replay`` from the command line's entry down: local groups, MPI, and planted errors that it must find."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.cli import replay_steps
from nvep.cli.main import main
from nvep.cli.replay_check import Received
from nvep.testing.mpirun import run_mpi

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
EXPERTS, TOP_K = 13, 3


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")


def write_log(path: Path, tokens: int) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    with path.open("w") as file:
        file.write(json.dumps({"type": "meta", "top_k": TOP_K, "num_experts": EXPERTS}) + "\n")
        for number, row in enumerate(ids.tolist()):
            weights = rng.random(TOP_K).tolist()
            record = {"type": "route", "req_id": "r1", "token_idx": number, "layer": 5}
            file.write(json.dumps({**record, "topk_ids": row, "topk_weights": weights}) + "\n")
    return ids


def expected_traffic(ids: np.ndarray, owners: np.ndarray, ranks: int) -> dict[str, Any]:
    """Rows and load by another road than the reference's: one-hot over ranks."""
    source = np.concatenate([np.full(len(ids) * (r + 1) // ranks - len(ids) * r // ranks, r) for r in range(ranks)])
    sent = (owners[ids][:, :, None] == np.arange(ranks)).any(axis=1)
    rows = int(sent.sum())
    return {
        "tokens": len(ids),
        "rows_sent": rows,
        "rows_local": int(sent[np.arange(len(ids)), source].sum()),
        "rows_saved_by_dedup": ids.size - rows,
        "load_by_rank": np.bincount(owners[ids].ravel(), minlength=ranks).tolist(),
    }


# ranks, tokens, tokens per step, hidden: shares of unequal length, ranks without tokens, steps that some ranks sit out
CASES = [(1, 20, 8, 16), (2, 33, 8, 64), (3, 50, 7, 24), (4, 9, 2, 8), (5, 3, 1, 8), (8, 65, 4, 72)]


@pytest.mark.parametrize(("ranks", "tokens", "per_step", "hidden"), CASES)
def test_local_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, tokens: int, per_step: int, hidden: int
) -> None:
    ids = write_log(tmp_path / "log.jsonl", tokens)
    out = tmp_path / "out.json"
    options = ["--ranks", ranks, "--tokens-per-step", per_step, "--hidden", hidden, "--json", out]
    assert main(["replay", str(tmp_path / "log.jsonl"), *map(str, options)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"replay: {ranks} ranks, {tokens} tokens, verified"
    report = json.loads(out.read_text())
    expected = expected_traffic(ids, np.arange(EXPERTS) * ranks // EXPERTS, ranks)
    assert {name: report[name] for name in expected} == expected
    assert report["bytes_sent"] == report["rows_sent"] * (hidden * 2 + TOP_K * 8)
    assert report["steps"] == math.ceil(math.ceil(tokens / ranks) / per_step)
    assert (report["verified"], report["emulated"], report["ranks"], report["group"]) == (True, True, ranks, "local")
    assert (report["transport"], report["protocol"], report["layer"]) == ("nvlink", "fence", "5")
    assert 0.0 < report["step_ms"]["median"] <= report["step_ms"]["p99"]


@pytest.mark.parametrize("placement", ["round-robin", "file"])
def test_placements(tmp_path: Path, placement: str) -> None:
    ids = write_log(tmp_path / "log.jsonl", 40)
    owners = np.arange(EXPERTS) % 3
    if placement == "file":
        owners = np.array([2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2])  # rank 1 owns nothing
        placement = str(tmp_path / "placement.json")
        Path(placement).write_text(json.dumps(owners.tolist()))
    out = tmp_path / "out.json"
    log = str(tmp_path / "log.jsonl")
    arguments = ["replay", log, "--ranks", "3", "--placement", placement, "--hidden", "8", "--json", str(out)]
    assert main(arguments) == 0
    report = json.loads(out.read_text())
    expected = expected_traffic(ids, owners, 3)
    assert {name: report[name] for name in expected} == expected


def test_limit_takes_the_first_tokens(tmp_path: Path) -> None:
    ids = write_log(tmp_path / "log.jsonl", 40)
    out = tmp_path / "out.json"
    log = str(tmp_path / "log.jsonl")
    assert main(["replay", log, "--ranks", "2", "--limit", "25", "--hidden", "8", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rows_sent"] == expected_traffic(ids[:25], np.arange(EXPERTS) * 2 // EXPERTS, 2)["rows_sent"]


def flip(array: np.ndarray, *index: int) -> None:
    array[index].reshape(-1).view(np.uint8)[0] ^= 1


PLANTED: dict[str, tuple[Callable[[Received], None], str]] = {
    "row": (lambda r: flip(r.rows, 2, 1), "row of source 2, slot 1, byte 0: expected "),
    "expert id": (lambda r: flip(r.expert_ids, 0, 0), "expert id of source 0, slot 0, byte 0: expected "),
    "id of an empty slot": (lambda r: flip(r.expert_ids, 0, 5), "slot 5, byte 0: expected ffffffff, found feffffff"),
    "weight": (lambda r: flip(r.expert_weights, 0, 1), "weight of source 0, slot 1, byte 0: expected "),
    "count": (lambda r: flip(r.counts, slice(1, 2)), "count of source 1, byte 0: expected "),  # type: ignore[arg-type]
    "combined": (lambda r: flip(r.combined, 3), "combined row of token 3, byte 0: expected "),
}


@pytest.mark.parametrize("what", PLANTED)
def test_one_flipped_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    corrupt, report = PLANTED[what]
    honest = replay_steps.RankReplay._run_step
    seen = []

    def run_step(self: replay_steps.RankReplay, *arguments: Any) -> Received:
        received = honest(self, *arguments)
        if self.group.rank == 1:
            seen.append(received)
            if len(seen) == 3:
                corrupt(received)
        return received

    monkeypatch.setattr(replay_steps.RankReplay, "_run_step", run_step)
    write_log(tmp_path / "log.jsonl", 60)
    out = tmp_path / "out.json"
    options = ["--ranks", "3", "--tokens-per-step", "6", "--hidden", "32", "--json", str(out)]
    assert main(["replay", str(tmp_path / "log.jsonl"), *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "replay: 3 ranks, 60 tokens, DIFFERENT"
    assert lines[-2].startswith("DIFFERENT at rank 1, step 2, ")
    assert report in lines[-2]
    assert json.loads(out.read_text())["verified"] is False


def test_an_output_that_is_never_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its experts, a step would give what the last one left behind, were it not poisoned."""
    monkeypatch.setattr(replay_steps.ScaleExperts, "__call__", lambda self, arrivals: arrivals.partial_rows)
    path = tmp_path / "log.jsonl"
    path.write_text('{"layer": 5, "topk_ids": [0, 3], "topk_weights": [0.5, 0.25]}\n' * 20)
    options = ["--ranks", "2", "--tokens-per-step", "1", "--hidden", "8", "--experts", "4"]
    assert main(["replay", str(path), *options]) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_mpirun(tmp_path: Path, ranks: int) -> None:
    ids = write_log(tmp_path / "log.jsonl", 50)
    out = tmp_path / "out.json"
    log = str(tmp_path / "log.jsonl")
    command = [sys.executable, "-m", "nvep.cli", "replay", log, "--hidden", "40", "--tokens-per-step", "5"]
    result = run_mpi(ranks, [*command, "--json", str(out)], timeout=100).require_success()
    assert result.stdout.splitlines()[-1] == f"replay: {ranks} ranks, 50 tokens, verified"
    assert result.stdout.count("replay: ") == 1
    report = json.loads(out.read_text())
    expected = expected_traffic(ids, np.arange(EXPERTS) * ranks // EXPERTS, ranks)
    assert {name: report[name] for name in expected} == expected
    assert report["group"] == "mpi"


@pytest.mark.parametrize(
    ("line", "options", "error"),
    [
        ('{"layer": 5, "topk_ids": [2, 2, 1]}', [], "log.jsonl:12: an expert id is repeated in [2, 2, 1]"),
        ("", ["--ranks", "3"], "--ranks: got 3; allowed: 2 under mpirun -n 2, or nothing"),
    ],
)
def test_an_error_under_mpirun_is_reported_once(tmp_path: Path, line: str, options: list[str], error: str) -> None:
    write_log(tmp_path / "log.jsonl", 10)
    if line:
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(line + "\n")
    command = [sys.executable, "-m", "nvep.cli", "replay", str(tmp_path / "log.jsonl"), *options]
    result = run_mpi(2, command, timeout=100)
    assert result.returncode == 2
    assert result.stderr.count(error) == 1
    assert "replay:" not in result.stdout


def test_an_error_leaves_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.jsonl", 10)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"layer": 5, "topk_ids"\n')
    out = tmp_path / "out.json"
    assert main(["replay", str(tmp_path / "log.jsonl"), "--ranks", "2", "--json", str(out)]) == 2
    assert f"nvep: error: {tmp_path}/log.jsonl:12: not JSON: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layer", [8, 12])
def test_shared_logs(tmp_path: Path, layer: int, ranks: int) -> None:
    path = SHARED / f"qwen1.5-moe-a2.7b-gsm8k-layer{layer}.jsonl"
    if not path.exists():
        pytest.skip("the shared logs are not here")
    out = tmp_path / "out.json"
    assert main(["replay", str(path), "--ranks", str(ranks), "--hidden", "2048", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["verified"], report["tokens"], report["num_experts"]) == (True, 12805, 60)
