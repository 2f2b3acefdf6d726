"""Runs `nvep.testing.fault_program` under mpirun and checks what the survivors reported."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvep.testing.mpirun import MpiResult, run_mpi

STEP = 5  # the first is 0, of epoch 1
_LIMIT = 60.0
_CLEAN_UP = 5.0  # seconds in which the kernel and mpirun may take leftovers away
_AWAITED = {"between": ("D.recv", 1), "sent": ("C.recv", 1), "arrived": ("C.recv", 1), "returned": ("D.recv", 2)}


@dataclass(frozen=True)
class FaultCase:
    """Which rank of a job is hit by which signal (``kill``, ``stop``), and where (`nvep.testing.fault_program`)."""

    signal: str
    place: str
    deadline: float = 3.0
    ranks: int = 4
    victim: int = 2
    device: str = "emulated"
    delay: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How the job ended, seconds from the fault to its end, and what survivors wrote, by rank."""

    result: MpiResult
    seconds: float
    moment: float
    reports: dict[int, dict[str, Any]]


def run_fault(case: FaultCase, folder: Path, *, survive: bool) -> Outcome:
    """Run the job; with ``survive`` mpirun lets the other ranks run on."""
    options = {
        "folder": folder,
        "victim": case.victim,
        "signal": case.signal,
        "place": case.place,
        "step": STEP,
        "delay": case.delay,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "nvep.testing.fault_program", *words]
    env = {"NVEP_DEADLINE": str(case.deadline), "NVEP_DEVICE": case.device}
    result = run_mpi(case.ranks, command, timeout=_LIMIT, env=env, survive=survive)
    ended = time.monotonic()
    assert (folder / "fault.json").exists(), f"the fault never came\n{result.stdout}\n{result.stderr}"
    moment = json.loads((folder / "fault.json").read_text())["moment"]
    reports = {int(p.stem.removeprefix("rank")): json.loads(p.read_text()) for p in folder.glob("rank*.json")}
    return Outcome(result, ended - moment, moment, reports)


def check_job_ends(case: FaultCase, folder: Path) -> None:
    """Plain mpirun: the job ends with an error long before any deadline, and leaves nothing."""
    outcome = run_fault(case, folder, survive=False)
    assert outcome.result.returncode not in (0, None), outcome.result
    assert outcome.seconds < 2.0, f"the job ended {outcome.seconds:.1f} s after the fault"
    assert outcome.reports == {}, "a rank lived to see its deadline"
    require_clean(folder, case.ranks)


def check_survivors(case: FaultCase, folder: Path) -> None:
    """Every survivor raises PeerTimeout naming the victim within deadline + 10 %, and can close what it has."""
    outcome = run_fault(case, folder, survive=True)
    shown = f"{outcome.reports}\n{outcome.result.stdout}\n{outcome.result.stderr}"
    survivors = set(range(case.ranks)) - {case.victim}
    assert set(outcome.reports) == survivors, shown
    for rank, report in outcome.reports.items():
        where = f"rank {rank}: {shown}"
        assert report["error"] == "PeerTimeout", where
        assert report["suspect"] == case.victim, where
        assert report["reporter"] in survivors, where
        if case.place in _AWAITED:
            phase, epochs = _AWAITED[case.place]
            assert (report["phase"], report["epoch"]) == (phase, STEP + epochs), where
        waited = report["moment"] - outcome.moment
        assert 0.9 * case.deadline <= waited <= 1.1 * case.deadline, f"{waited:.3f} s; {where}"
        assert report["close_exchange"] + report["close_group"] < 1.0, where
    assert outcome.result.returncode not in (0, None), shown
    require_clean(folder, case.ranks)


def require_clean(folder: Path, ranks: int) -> None:
    """No process of the job, no file of it in /dev/shm, and no socket name of nvep is left."""
    files = [path for rank in range(ranks) for path in json.loads((folder / f"start{rank}.json").read_text())["files"]]
    end = time.monotonic() + _CLEAN_UP
    while left := _processes(str(folder)) + [path for path in files if Path(path).exists()] + _socket_names():
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)


def _processes(word: str) -> list[str]:
    """Processes that have ``word`` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:  # gone meanwhile
            continue
        if word.encode() in words:
            found.append(f"process {entry.parent.name}")
    return found


def _socket_names() -> list[str]:
    """Sockets that other jobs have open for a moment are among them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if "@nvep-" in line]
