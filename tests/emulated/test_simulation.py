"""The true protocols under the simulation, and ``nvep simulate`` itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from nvep.cli.main import main
from nvep.testing.simulation.runner import Simulator, run_scenario, shrink
from nvep.testing.simulation.scenario import ScenarioKind, random_scenario
from nvep.testing.simulation.schedules import axiom_scenario
from nvep.testing.simulation.search import prove_replay, search

# Seeds that once failed: a rank masked while the other lane of one stream was in flight (a program that waits for
# itself), and warps whose polling looked like a standstill. Whatever fails next comes here too.
ONCE_FAILED = [("fence", 25), ("sentinel", 97), ("mixed", 184), ("mixed", 226)]


@cache
def simulator() -> Simulator:
    return Simulator()


@pytest.mark.parametrize("protocol", ["fence", "sentinel", "mixed"])
@pytest.mark.parametrize(("ranks", "seeds"), [(2, 25), (3, 25), (4, 25)])
def test_the_true_protocols_hold(protocol: str, ranks: int, seeds: int) -> None:
    found = search(ScenarioKind(ranks=ranks, protocol=protocol), range(1000, 1000 + seeds), simulator=simulator())
    assert not found.failures, f"{found.failures[0].symptom}\n{found.failures[0].trace}"
    assert found.steps == 6 * seeds


@pytest.mark.parametrize(("protocol", "seed"), ONCE_FAILED)
def test_seeds_that_once_failed(protocol: str, seed: int) -> None:
    run = run_scenario(simulator(), random_scenario(ScenarioKind(protocol=protocol), seed))
    assert run.failure is None, run.failure


def test_a_seed_replays_exactly() -> None:
    scenario = random_scenario(ScenarioKind(protocol="mixed"), 5)
    first, second = (run_scenario(simulator(), scenario) for _ in range(2))
    assert first.decisions == second.decisions > 1000


def test_scenarios_differ_in_what_matters() -> None:
    drawn = [random_scenario(ScenarioKind(protocol="mixed"), seed) for seed in range(60)]
    assert {len(set(s.lanes)) for s in drawn} == {1, 2}
    assert {s.one_stream for s in drawn} == {True, False}
    assert {s.threads for s in drawn} == {32, 64}
    assert {s.blocks for s in drawn} == {1, 2, 3}
    assert any(s.masked is not None for s in drawn)
    assert {s.dependent for s in drawn} == {True, False}
    assert any(s.recovered is not None for s in drawn)
    assert any(s.first_epoch >= (1 << 32) - 2 for s in drawn)
    assert any(len(set(s.protocols)) == 2 for s in drawn)
    names = {operation.name for s in drawn for operation in s.program}
    assert names == {
        "dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv", "release", "mask",
        "leave", "recover",
    }  # fmt: skip


def test_sentinel_rests_on_the_axiom_or_on_strict_ptx() -> None:
    """Every store as early as it may go: without the axiom one goes before the re-arm it must follow, and is lost."""
    assert run_scenario(simulator(), axiom_scenario(axiom=False)).failure is not None
    assert run_scenario(simulator(), axiom_scenario(axiom=True)).failure is None
    assert run_scenario(simulator(), axiom_scenario(axiom=False, strict_ptx=True)).failure is None


def test_random_seeds_find_that_the_axiom_is_missing() -> None:
    weak = ScenarioKind(protocol="sentinel", axiom=False)
    found = search(weak, range(200), simulator=simulator())
    assert found.failures
    failure = found.failures[0]
    assert prove_replay(failure, simulator=simulator())
    assert shrink(simulator(), failure).scenario.steps <= failure.scenario.steps
    strict = ScenarioKind(protocol="sentinel", axiom=False, strict_ptx=True)
    assert not search(strict, range(30), simulator=simulator()).failures


def test_simulate_reports_a_clean_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    command = ["simulate", "--ranks", "2", "--steps", "3", "--protocol", "mixed", "--seeds", "0:5", "--json", str(out)]
    assert main(command) == 0
    report = json.loads(out.read_text())
    assert report["steps"] == 15
    assert report["steps_per_s"] > 0
    assert report["failures"] == []
    assert report["mutations"] == {}
    assert "mixed: 5 seeds, 0 failures" in capsys.readouterr().out


def test_simulate_shows_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    command = ["simulate", "--protocol", "sentinel", "--no-axiom", "--seeds", "0:200", "--json", str(out)]
    assert main(command) == 1
    report = json.loads(out.read_text())
    shown = capsys.readouterr().out
    for failure in report["failures"]:
        assert f"seed {failure['seed']}: replays exactly" in shown
    assert "DispatchWire" in shown or "CombineWire" in shown


def test_simulate_judges_mutations(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", "--mutate", "drop-acquire", "--seeds", "0:20", "--json", str(out)]) == 0
    entry = json.loads(out.read_text())["mutations"]["drop-acquire"]
    assert entry["caught"] is True
    assert entry["seeds_tried"] >= 1
    assert "data race" in entry["symptom"]
    # One step of a lane shares its epoch with nobody: this mutation needs two.
    assert main(["simulate", "--mutate", "shared-epoch", "--steps", "1", "--seeds", "0:3", "--json", str(out)]) == 1
    assert json.loads(out.read_text())["mutations"]["shared-epoch"]["caught"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seeds", "7:3"], "--seeds"),
        (["--seeds", "some"], "--seeds"),
        (["--ranks", "1"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--jobs", "0"], "--jobs"),
        (["--mutate", "nothing"], "--mutate"),
    ],
)
def test_simulate_refuses(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert named in capsys.readouterr().err
