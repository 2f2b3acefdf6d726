"""The symmetric heap in the memory of one GPU: ranks as threads, and as processes that share the GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nvep.errors import ArgumentError
from nvep.group import RankGroup, local_groups, run_local
from nvep.symmetric import heap_cuda
from nvep.testing.mpirun import run_mpi
from tests.gpu import heap_cuda_programs as programs

PROGRAMS = Path(programs.__file__)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_threads_on_one_gpu_share_and_leak_nothing(ranks: int) -> None:
    run_local(programs.use_and_leak_nothing, ranks, device="cuda", ordinals=[0] * ranks, timeout=100)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_on_one_gpu_share_and_leak_nothing(ranks: int) -> None:
    for name in ("use_and_leak_nothing", "share_by_descriptor"):
        environment = {"NVEP_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0"}
        result = run_mpi(ranks, [sys.executable, str(PROGRAMS), name], timeout=50, env=environment)
        assert result.require_success().stdout == "done\n"


def test_threads_need_no_handles_and_know_that_they_share_the_gpu() -> None:
    def look(group: RankGroup) -> None:
        backend = heap_cuda.CudaBackend(group)
        assert backend._kind == "none"
        assert backend._users == [0]
        assert backend.sharers() == group.ranks_on_device == 3
        unit = backend.round_up(1)
        assert unit >= 4096
        assert backend.round_up(0) == unit
        assert backend.round_up(unit + 1) == 2 * unit

    run_local(look, 3, device="cuda", ordinals=[0, 0, 0], timeout=60)


def test_ordinals_that_do_not_exist() -> None:
    with pytest.raises(ArgumentError, match=r"^ordinals: got \[0, 999\]; allowed: 2 device numbers below \d+$"):
        local_groups(2, device="cuda", ordinals=[0, 999])
