"""The symmetric heap over two GPUs: every rank reaches the memory of the other GPU."""

from __future__ import annotations

import sys

import pytest

from nvep.group import RankGroup, run_local
from nvep.symmetric import heap_cuda
from nvep.testing.mpirun import run_mpi
from tests.gpu import heap_cuda_programs as programs


@pytest.mark.parametrize("ordinals", [[0, 1], [0, 0, 1, 1], [1, 0, 1]])
def test_threads_on_two_gpus_share_and_leak_nothing(ordinals: list[int]) -> None:
    def use(group: RankGroup) -> None:
        assert group.ranks_on_device == ordinals.count(ordinals[group.rank])
        assert heap_cuda.CudaBackend(group)._users == [0, 1]
        programs.use_and_leak_nothing(group)

    run_local(use, len(ordinals), device="cuda", ordinals=ordinals, timeout=100)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_on_two_gpus_share_and_leak_nothing(ranks: int) -> None:
    for name in ("use_and_leak_nothing", "share_by_descriptor"):
        environment = {"NVEP_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}
        result = run_mpi(ranks, [sys.executable, programs.__file__, name], timeout=50, env=environment)
        assert result.require_success().stdout == "done\n"


def test_ranks_are_spread_over_the_gpus() -> None:
    ordinals = run_local(lambda group: group.device.ordinal, 2, device="cuda", timeout=60)
    assert ordinals[0] == 0
    assert ordinals[1] > 0


def test_processes_that_see_different_gpus_do_not_share_one() -> None:
    """Both open ordinal 0 of what they see: only the hardware's identity tells the GPUs apart."""
    source = """
import os
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
from tests.gpu import heap_cuda_programs as programs
from mpi4py import MPI
from nvep.group import RankGroup
with RankGroup.from_mpi(MPI.COMM_WORLD, device="cuda") as group:
    assert (group.device.ordinal, group.ranks_on_device) == (0, 1)
    programs.use_and_leak_nothing(group)
"""
    run_mpi(2, source, timeout=50).require_success()
