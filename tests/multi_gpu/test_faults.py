"""Ranks that die or stop, each with a GPU of its own: the survivor learns it in time, and the job can end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvep.testing import fault_checks
from nvep.testing.fault_checks import FaultCase
from nvep.testing.mpirun import find_mpirun

OPEN_MPI = find_mpirun()[1]


def test_killed_rank_ends_the_job(tmp_path: Path) -> None:
    fault_checks.check_job_ends(FaultCase("kill", "sent", deadline=30.0, ranks=2, victim=1, device="cuda"), tmp_path)


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI ends the job when a rank dies: there are no survivors to ask")
@pytest.mark.parametrize("place", ["between", "sent", "anywhere"])
@pytest.mark.parametrize("signal", ["kill", "stop"])
def test_survivor_names_the_lost_rank(signal: str, place: str, tmp_path: Path) -> None:
    case = FaultCase(signal, place, ranks=2, victim=1, device="cuda", delay=0.0002)
    fault_checks.check_survivors(case, tmp_path)
