"""The symmetric heap between processes: shared through descriptors, gone without trace."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nvep.testing.mpirun import MpiResult, run_mpi
from tests.emulated.heap_programs import sockets_of_nvep

PROGRAMS = Path(__file__).parent / "heap_programs.py"


def run(name: str, ranks: int) -> MpiResult:
    return run_mpi(ranks, [sys.executable, str(PROGRAMS), name], timeout=60, env={"NVEP_DEVICE": "emulated"})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heap_is_shared_and_leaves_nothing(ranks: int) -> None:
    assert run("use_and_leak_nothing", ranks).require_success().stdout == "done\n"


def test_a_rank_killed_with_its_heap_mapped_ends_the_job() -> None:
    result = run("die_while_mapped", 3)  # the program checks that nothing it maps has a name
    assert result.returncode not in (0, None)
    assert "dying" in result.stdout
    assert "done" not in result.stdout


def test_a_rank_killed_while_sending_leaves_no_socket_behind() -> None:
    result = run("die_while_sending", 3)
    assert result.returncode not in (0, None)
    [name] = re.findall(r"^dying (@nvep-\w+)-\d$", result.stdout, re.MULTILINE)
    assert [socket for socket in sockets_of_nvep() if name in socket] == []
