"""``nvep bench`` on the emulated device: wrong results are noticed, marks tell phases apart, the command reports."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvep.bench.check as check
from nvep.bench import Case, CaseResult, Floors, measure_floors, run_case, run_cases, small
from nvep.bench.inputs import Inputs, weights
from nvep.bench.kernels import FloorKernels, Stamps
from nvep.bench.overhead import host_overhead
from nvep.cli.main import main as nvep_command
from nvep.config import PROTOCOLS, ExchangeConfig
from nvep.group import RankGroup, run_local
from nvep.reference import RankTokens, dispatch_to
from nvep.testing.mpirun import run_mpi

SMALL = small(Case())
FLOORS = Floors("emulated", (0, 0), 4.0, 4.0, None, 1.0, 1.0, 1.0, 1.0)


def _run(case: Case) -> CaseResult:
    def main(group: RankGroup) -> CaseResult:
        return run_case(group, case, floors=FLOORS, kernels=FloorKernels(group.device))

    results = run_local(main, case.ranks, device="emulated")
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("spans", ["joined", "split"])
def test_a_case_gives_a_time_for_every_replay_and_phase(protocol: str, spans: str) -> None:
    result = _run(replace(SMALL, protocol=protocol, spans=spans, format="fp8"))
    assert result.timing is not None
    assert result.failed == result.refused == ""
    assert len(result.timing.pair_us) == SMALL.replays
    assert min(result.timing.pair_us) > 0
    assert len(result.timing.spans_us) == {"joined": 2, "split": 4}[spans]
    assert result.median_us <= result.p99_us <= max(result.timing.pair_us)
    found = result.as_json()
    assert found["ratio"] == pytest.approx(found["median_us"] / found["floor_us"])
    json.dumps(found)


def test_a_flushed_step_is_timed_by_its_phases() -> None:
    result = _run(replace(SMALL, flush_l2=True, protocol="fence"))
    assert result.timing is not None
    assert len(result.timing.pair_us) == SMALL.replays
    assert min(result.timing.pair_us) > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("what", ["payloads", "weights", "_partial"])
def test_wrong_results_are_noticed_and_not_timed(protocol: str, what: str, monkeypatch: Any) -> None:
    true = getattr(check, what)

    def planted(*arguments: Any) -> Any:
        """Something else than what the exchange carried, in one byte of one row."""
        values = true(*arguments)
        array = np.array(values[0] if isinstance(values, list) else values)
        array[-1, -1] = array[-1, -1] + 1
        return [array, *values[1:]] if isinstance(values, list) else array

    if what == "_partial":  # the rows that are sent come from there, too: only what is expected may differ
        wrong_sums = check._wrong_sums

        def with_planted(*arguments: Any) -> str:
            with monkeypatch.context() as patch:
                patch.setattr(check, "_partial", planted)
                patch.setattr(check, "_PERIOD", SMALL.tokens)
                return wrong_sums(*arguments)

        monkeypatch.setattr(check, "_PERIOD", SMALL.tokens)
        monkeypatch.setattr(check, "_wrong_sums", with_planted)
    else:
        monkeypatch.setattr(check, what, planted)
    result = _run(replace(SMALL, protocol=protocol, ranks=1))
    assert result.timing is None
    assert {"payloads": "payload 0", "weights": "weights", "_partial": "sum of token 7"}[what] in result.failed


@pytest.mark.parametrize("place", ["rows", "ids", "counts"])
def test_the_check_agrees_with_the_reference(place: str) -> None:
    """What the reference says arrives passes; the same with one value changed does not."""
    case = replace(SMALL, tokens=5)
    config = case.config()

    def main(group: RankGroup) -> tuple[str, str]:
        inputs = Inputs(group, case)
        ids = group.allgather(inputs.ids[0])
        sources = [
            RankTokens(check.payloads(config, rank, 0, 5), chosen, weights(case, rank, 0))
            for rank, chosen in enumerate(ids)
        ]
        arrived = dispatch_to(group.rank, sources, config=config)
        placed = [(chosen, check.slots(chosen, config.expert_ranks(2), 2)) for chosen in ids]
        found = [*arrived.payloads, arrived.expert_weights, arrived.expert_ids, arrived.counts]
        exchange: Any = _Stub(group, config)
        right = check._wrong_arrivals(exchange, case, found, placed=placed, compact=True)
        {"rows": found[0], "ids": found[-2], "counts": found[-1]}[place].flat[0] += 1
        wrong = check._wrong_arrivals(exchange, case, found, placed=placed, compact=True)
        inputs.close()
        return right, wrong

    for rank, (right, wrong) in enumerate(run_local(main, 2, device="emulated")):
        assert right == ""
        assert wrong.startswith(f"rank {rank}: ")


class _Stub:
    """As much of an exchange as comparing needs."""

    def __init__(self, group: RankGroup, config: ExchangeConfig) -> None:
        self.group, self.config = group, config


def test_what_a_machine_refuses_does_not_end_the_run() -> None:
    cases = [replace(SMALL, ranks=3), replace(SMALL, routing="local", experts=8, top_k=6), SMALL]

    def main(group: RankGroup) -> list[CaseResult]:
        return run_cases(group, cases, floors=FLOORS, kernels=FloorKernels(group.device))

    results = run_local(main, 2, device="emulated")[0]
    assert ["ranks" in results[0].refused, "local" in results[1].refused] == [True, True]
    assert results[2].timing is not None


def test_marks_measure_what_lies_between_them() -> None:
    def main(group: RankGroup) -> np.ndarray:
        stream = group.device.create_stream()
        kernels = FloorKernels(group.device)
        stamps = Stamps(group.device, kernels, steps=2, each=4)
        with group.device.capture(stream) as graph:
            for _ in range(2):
                stamps.mark(stream)
                stamps.mark(stream)
                kernels.launch("delay", stream, nanoseconds=20_000_000)
                stamps.mark(stream)
                stamps.mark(stream)
        graph.launch(stream)
        spans = stamps.spans_us(stream)
        graph.close()
        stamps.close()
        return spans

    spans = run_local(main, 1, device="emulated")[0]
    assert (spans[:, 0] >= 19_000).all()
    assert (spans[:, 1] < 19_000).all()


def test_floors_are_measured() -> None:
    floors = run_local(lambda group: measure_floors(group, FloorKernels(group.device)), 2, device="emulated")
    assert floors[0] == floors[1]
    assert floors[0].gpus == (0, 0)
    assert floors[0].peer_push_gbs is None
    found = floors[0]
    assert min(found.local_copy_gbs, found.cached_copy_gbs, found.launch_us, found.dependent_launch_us) > 0
    assert found.flag_us is not None
    assert found.flag_us > 0
    alone = run_local(lambda group: measure_floors(group, FloorKernels(group.device)), 1, device="emulated")[0]
    assert alone.flag_us is None


def test_host_overhead_is_cpu_time() -> None:
    found = run_local(lambda group: host_overhead(group, replace(SMALL, tokens=1, ranks=1)), 1, device="emulated")[0]
    assert 0 < found.cpu_us < 1e5
    assert found.dispatch_us > 0
    assert found.combine_us > 0


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")


@pytest.mark.usefixtures("emulated")
def test_the_command_prints_and_writes(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "bench.json"
    options = ["--tokens", "1", "2", "--protocol", "fence", "--hidden", "128", "--json", str(out)]
    assert nvep_command(["bench", *options]) == 0
    printed = capsys.readouterr().out
    assert "EMULATED" in printed
    found = json.loads(out.read_text())
    assert found["emulated"]
    assert [r["case"]["tokens"] for r in found["results"]] == [1, 2]
    assert all(r["label"] in printed and r["median_us"] > 0 for r in found["results"])
    assert found["floors"][0]["launch_us"] > 0


@pytest.mark.usefixtures("emulated")
def test_a_recorded_log_brings_its_experts(capsys: Any) -> None:
    log = Path(__file__).parents[1] / "data" / "demo_routing.jsonl"
    assert nvep_command(["bench", "--trace", str(log), "--layer", "1", "--tokens", "2", "--protocol", "fence"]) == 0
    assert "e32-k4-recorded" in capsys.readouterr().out


@pytest.mark.usefixtures("emulated")
def test_the_status_says_that_a_case_failed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(check, "_wrong_arrivals", lambda *_, **__: "planted")
    assert nvep_command(["bench", "--tokens", "1", "--protocol", "fence"]) == 1
    assert "WrongResult" in capsys.readouterr().out


@pytest.mark.usefixtures("emulated")
def test_host_overhead_by_the_command(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "bench.json"
    assert nvep_command(["bench", "--host-overhead", "--protocol", "fence", "--json", str(out)]) == 0
    assert "us of CPU time" in capsys.readouterr().out
    assert json.loads(out.read_text())["host_overhead"][0]["cpu_us"] > 0


@pytest.mark.usefixtures("emulated")
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path, capsys: Any) -> None:
    assert nvep_command(["bench", "--json", str(tmp_path / "no" / "bench.json")]) == 2
    captured = capsys.readouterr()
    assert "--json" in captured.err
    assert captured.out == ""


def test_under_mpirun_rank_0_reports(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = ["-m", "nvep.cli", "bench", "--tokens", "2", "--protocol", "fence", "--json", str(out)]
    result = run_mpi(2, [sys.executable, *command], env={"NVEP_DEVICE": "emulated"}, timeout=60).require_success()
    assert result.stdout.count("fence-2x2") == 1
    assert [r["case"]["ranks"] for r in json.loads(out.read_text())["results"]] == [2]
