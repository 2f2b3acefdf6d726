"""Ranks as processes under mpirun: collectives, agreement, and ranks that fail, stay away or vanish."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from nvep.testing.mpirun import MpiResult, find_mpirun, run_mpi

PROGRAMS = Path(__file__).parent / "group_programs.py"


def run(name: str, ranks: int, *, survive: bool = False) -> MpiResult:
    return run_mpi(ranks, [sys.executable, str(PROGRAMS), name], timeout=60, survive=survive)


def said(result: MpiResult) -> dict[int, list[str]]:
    """What each rank wrote with ``say``."""
    lines: dict[int, list[str]] = {}
    for line in result.stdout.splitlines():
        rank, _, text = line.partition(": ")
        if rank.isdigit():  # not mpirun's own
            lines.setdefault(int(rank), []).append(text)
    return lines


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives(ranks: int) -> None:
    lines = said(run("collectives", ranks).require_success())
    expected = [str(["ok"] * ranks)]
    assert lines == {r: [*expected, f"rank {r} used its group after close()"] for r in range(ranks)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_errors_have_the_same_text_on_every_rank(ranks: int) -> None:
    lines = said(run("agreement", ranks).require_success())
    last = ranks - 1
    values = ", ".join(f"rank {r}: {4 if r == last else 8}" for r in range(ranks))
    for rank in range(ranks):
        assert lines[rank] == [
            f"ConfigMismatch: top_k must be equal on all ranks; {values}",
            "ArgumentError: x: got 1; allowed: none",
            "own 1 and 2" if rank == last else "GroupError: Unpicklable: 1 and 2",
            f"still usable {list(range(ranks))}",
        ]


def test_a_device_that_one_rank_lacks_is_an_error_on_all() -> None:
    lines = said(run("device_errors", 2).require_success())
    allowed = "allowed: an mpi4py intracommunicator"
    assert len(lines) == 2
    for rank in range(2):
        assert lines[rank][:2] == [
            "DeviceError: no GPU on this rank",
            "ConfigMismatch: the kind of device must be equal on all ranks; rank 0: 'emulated', rank 1: 'cuda'",
        ]
        assert len(lines[rank]) == 5
        assert all(text.startswith("comm: got ") and text.endswith(allowed) for text in lines[rank][2:])


def test_abort_ends_the_job_with_its_reason() -> None:
    result = run("abort", 3)
    assert not result.timed_out
    assert result.returncode != 0
    assert "rank 1 of 3 ends the job: out of paper" in result.stderr


def test_an_uncaught_exception_ends_the_job_and_names_its_rank() -> None:
    result = run("uncaught", 3)
    assert not result.timed_out
    assert result.returncode != 0
    assert "RuntimeError: a rank went wrong" in result.stderr
    assert "raised by rank 1 of 3, which ends the job" in result.stderr
    assert "in uncaught" in result.stderr  # the traceback
    assert "said before" in result.stdout


def test_a_rank_that_stays_away_is_named() -> None:
    lines = said(run("missing", 3).require_success())
    expected = "rank 1 did not reach a collective: rank {} waited 0.3 s"
    assert lines == {r: [expected.format(r)] * 2 for r in (0, 2)}


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_survivors_name_a_lost_rank_and_close(how: str) -> None:
    if find_mpirun()[1]:
        pytest.skip("Open MPI's mpirun cannot leave the survivors of a killed rank alone")
    result = run(how, 3, survive=True)
    assert not result.timed_out, result.stderr
    expected = "rank 1 did not reach a collective: rank {} waited 0.5 s; in time: True"
    assert said(result) == {r: [expected.format(r)] for r in (0, 2)}


def test_a_rank_that_makes_no_group_is_noticed() -> None:
    lines = said(run("never_comes", 3))
    for rank in (0, 2):
        where = f"rank {rank} of 3 waited 1 s in RankGroup.from_mpi"
        assert lines[rank] == [f"not all ranks came: {where}"]


def test_a_killed_rank_ends_a_plain_job_at_once() -> None:
    result = run("killed", 3)
    assert result.returncode not in (0, None)
    assert result.seconds < 20.0


def test_a_job_at_its_time_limit_shows_where_it_hangs_and_leaves_nothing(tmp_path: Path) -> None:
    source = f"""
import os, pathlib, time
from mpi4py import MPI
pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
def waits_forever(): time.sleep(600)
print("started", flush=True)
waits_forever()
"""
    result = run_mpi(2, source, timeout=3.0)
    assert result.timed_out
    assert "started" in result.stdout
    assert result.stderr.count("in waits_forever") == 2
    with pytest.raises(AssertionError, match="was killed at its time limit"):
        result.require_success()
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 2
    end = time.monotonic() + 5.0
    while any(_alive(pid) for pid in processes):
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_get_variables_and_options_and_their_status_comes_back() -> None:
    words = "os.environ['A_WORD'] + os.environ['PYTHONFAULTHANDLER']"
    source = f"import os, sys; os.write(1, ({words}).encode()); sys.exit(7)"
    result = run_mpi(1, source, timeout=30, env={"A_WORD": "word"}, extra=["-prepend-rank"])
    assert result.returncode == 7
    assert "word1" in result.stdout
    with pytest.raises(AssertionError, match="ended with status 7"):
        result.require_success()


def test_a_machine_without_mpirun_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nvep.testing import mpirun

    mpirun.find_mpirun.cache_clear()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(mpirun.MpiMissing, match="install the mpich wheel"):
            run_mpi(1, "pass", timeout=10)
    finally:
        mpirun.find_mpirun.cache_clear()
