"""``nvep bench --transport`` on the emulated device: figures of every kind, wrong steps noticed, output labelled."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvep.bench.check as check
from nvep.bench.network import NetworkCase, small_network
from nvep.bench.network_account import STAGES
from nvep.bench.network_kernels import NetworkKernels
from nvep.bench.network_run import NetworkResult, run_network_cases
from nvep.cli.main import main as nvep_command
from nvep.config import NETWORK_TRANSPORTS
from nvep.group import RankGroup, run_local
from nvep.testing.mpirun import run_mpi

SMALL = small_network(NetworkCase(ranks=2, delays=(0, 64, 512)))
LABEL = "soft NIC (emulated)"


def _run(*cases: NetworkCase) -> list[NetworkResult]:
    results = run_local(lambda g: run_network_cases(g, cases), cases[0].ranks, device="emulated")
    assert all(found == results[0] for found in results)
    return results[0]


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
def test_a_scheme_gives_every_figure(transport: str) -> None:
    (result,) = _run(replace(SMALL, transport=transport))
    assert result.label == LABEL
    assert result.timing is not None
    timing = result.timing
    for found in (timing.hold_us, timing.receive_us, timing.in_flight_us, timing.landing_us):
        assert set(found) == {"dispatch", "combine"}
        assert min(found.values()) > 0
    assert list(timing.exposed_us["dispatch"]) == [0, 64, 512]
    assert timing.exposed_us["dispatch"][0] > timing.hold_us["dispatch"]
    assert set(result.exposed_us) == {0, 64, 512}
    json.dumps(result.as_json())


def test_the_base_line_has_nothing_in_flight() -> None:
    (result,) = _run(replace(SMALL, transport="nvlink"))
    assert result.timing is not None
    assert result.label == ""
    assert result.timing.in_flight_us == result.timing.landing_us == result.timing.adapter == {}


def test_all_schemes_send_the_same_messages() -> None:
    """Bytes, rows and near peers alike: they differ in doorbells alone."""
    sent, doorbells = set(), {}
    for transport in NETWORK_TRANSPORTS:
        (result,) = _run(replace(SMALL, transport=transport, ranks=4, domain_size=2))
        assert result.timing is not None
        sent.add((result.timing.adapter["messages"], result.timing.adapter["bytes"]))
        doorbells[transport] = result.timing.adapter["doorbells"]
    assert len(sent) == 1
    assert min(sent)[0] > 0
    assert doorbells["gpi"] == doorbells["gpi-mc"] == 0
    assert min(doorbells["gdaki"], doorbells["free-flow"]) > 0


# Which stages a scheme has; what it does not do takes no time.
OWN = {
    "gdaki": {"claim", "build", "ordered publication", "lock", "doorbell"},
    "gpi": {"claim", "build"},
    "gpi-mc": {"claim", "build"},
    "free-flow": {"claim", "build", "ready word"},
}


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
def test_hold_time_is_accounted_for(transport: str) -> None:
    (result,) = _run(replace(SMALL, transport=transport, accounted=True))
    assert result.timing is not None
    for phase, found in result.timing.account_us.items():
        posts = {"claim", "build", "ordered publication", "lock", "doorbell", "ready word"}
        assert {name for name in posts if found[name] > 0} == OWN[transport]
        assert {name for name in STAGES if found[name] > 0} >= {"staging", "fence", "arrival", "signals"}
        assert (found["routing"] > 0) == (phase == "dispatch")
        assert found["total"] == pytest.approx(sum(found[name] for name in STAGES))


def test_shallow_rings_are_told_apart_by_what_senders_waited() -> None:
    tokens = replace(SMALL, transport="gpi", tokens=64)
    deep, shallow = _run(tokens, replace(tokens, queue_depth=64))
    assert deep.timing is not None
    assert shallow.timing is not None
    assert deep.timing.adapter["stalls"] == deep.timing.adapter["stalled_us"] == 0
    assert shallow.timing.adapter["stalls"] > 0
    assert shallow.timing.adapter["stalled_us"] > 0


def test_cases_that_share_an_exchange_run_together() -> None:
    cases = [SMALL, replace(SMALL, transport="gpi"), replace(SMALL, tokens=2)]
    found = [(r.case.transport, r.case.tokens) for r in _run(*cases)]
    assert found == [("gdaki", 2), ("gdaki", 8), ("gpi", 8)]


def test_what_a_machine_refuses_does_not_end_the_run() -> None:
    first, second = _run(SMALL, replace(SMALL, ranks=3))
    assert first.timing is not None
    assert "ranks" in second.refused


def test_near_peers_and_other_ring_memory() -> None:
    results = _run(replace(SMALL, ranks=4, domain_size=2), replace(SMALL, ranks=4, ring_memory="device"))
    assert all(result.timing is not None for result in results)


def test_streams_meet_where_ranks_are_aligned() -> None:
    """A rank that comes late holds the others up, and nobody is past the point before it."""

    def main(group: RankGroup) -> np.ndarray:
        kernels = NetworkKernels(group)
        for index in range(2):
            kernels.mark(3 * index)
            kernels.delay(30_000 if group.rank == index else 0)
            kernels.mark(3 * index + 1)
            kernels.align()
            kernels.mark(3 * index + 2)
        times = kernels.times(1)[:6].astype(np.int64)
        kernels.check()
        group.barrier()
        kernels.close()
        return times

    times = np.array(run_local(main, 3, device="emulated")).reshape(3, 2, 3)
    assert (times[:, :, 2].min(axis=0) >= times[:, :, 1].max(axis=0)).all()
    assert (times[:, :, 1] - times[:, :, 0]).max() >= 29_000_000


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")


@pytest.mark.usefixtures("emulated")
def test_the_command_prints_and_writes(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "bench.json"
    options = ["--ranks", "2", "--tokens", "2", "8", "--delay", "0", "64", "--json", str(out)]
    assert nvep_command(["bench", "--transport", "all", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count(LABEL) == 2
    assert "EMULATED" in printed
    assert "hold of D.send over GDAKI's" in printed
    found = json.loads(out.read_text())["network"]
    assert found["adapter"] == LABEL
    assert [r["case"]["tokens"] for r in found["results"]] == [2, 8] * 5
    assert all(r["name"] in printed and r["timing"]["hold_us"]["dispatch"] > 0 for r in found["results"])


@pytest.mark.usefixtures("emulated")
def test_the_command_shows_where_hold_time_goes(capsys: Any) -> None:
    assert nvep_command(["bench", "--transport", "gdaki", "nvlink", "--ranks", "2", "--tokens", "2", "--account"]) == 0
    printed = capsys.readouterr().out
    assert "ordered publication" in printed
    assert "nvlink" not in printed


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--transport", "gpi", "--protocol", "fence"], "--protocol"),
        (["--delay", "32"], "--delay"),
        (["--ring-memory", "host"], "--ring-memory"),
        (["--transport", "gpi", "--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], name: str, capsys: Any) -> None:
    assert nvep_command(["bench", *options]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.usefixtures("emulated")
def test_the_status_says_that_a_case_failed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(check, "_wrong_arrivals", lambda *_, **__: "planted")
    assert nvep_command(["bench", "--transport", "gpi", "--ranks", "2", "--tokens", "1"]) == 1
    assert "WrongResult" in capsys.readouterr().out


def test_under_mpirun_rank_0_reports() -> None:
    command = ["-m", "nvep.cli", "bench", "--transport", "gdaki", "--tokens", "2"]
    result = run_mpi(2, [sys.executable, *command], env={"NVEP_DEVICE": "emulated"}, timeout=90).require_success()
    assert result.stdout.count("gdaki-2x2") == 1
