"""What ranks on GPUs do with a symmetric heap, besides what those on any device do; also run under mpirun by name."""

from __future__ import annotations

import os

from cuda.bindings import driver

from nvep.group import RankGroup
from nvep.runtime.cuda_calls import check
from nvep.symmetric import SymmetricHeap, heap_cuda
from tests.emulated import heap_programs as programs

PADDING = 64 << 20  # per lane, far above what the driver keeps for itself from one moment to the next
SLACK = 32 << 20


def free_bytes(group: RankGroup) -> int:
    """Free memory of this rank's GPU while no rank allocates."""
    group.barrier()
    group.device.make_current()
    free, _ = check("cuMemGetInfo", driver.cuMemGetInfo())
    group.barrier()
    return int(free)


def use_and_leak_nothing(group: RankGroup) -> None:
    assert group.device.kind == "cuda"
    programs.exchange_cells(group)  # whatever the driver opens once for good
    before, descriptors = free_bytes(group), len(os.listdir("/proc/self/fd"))
    heap = SymmetricHeap(group, programs.layout_for(group.size, padding=PADDING))
    assert before - free_bytes(group) >= 2 * PADDING * group.ranks_on_device  # the check sees what is allocated
    heap.close()
    programs.exchange_cells(group)
    programs.outlive_a_closed_peer(group)
    programs.ask_for_too_much(group)
    for _ in range(3):
        programs.fail_to_initialise(group, padding=PADDING)
    fail_in_the_middle(group)
    assert free_bytes(group) >= before - SLACK
    if not group.in_process:
        assert len(os.listdir("/proc/self/fd")) == descriptors


def fail_in_the_middle(group: RankGroup) -> None:
    stages: list[programs.Stage] = [(group.device, "fill", False)]
    if not group.in_process:  # a replaced method would be that of all ranks
        stages += [(heap_cuda.CudaBackend, name, False) for name in ("_map", "create_shared", "open_shared")]
        if group.size == 1:
            stages.pop()
    programs.fail_at_each_stage(group, stages)


def share_by_descriptor(group: RankGroup) -> None:
    assert heap_cuda.CudaBackend(group)._kind == "file descriptor"
    assert group.ranks_on_device == group.size // len(set(group.allgather(group.device.ordinal)))


if __name__ == "__main__":
    programs.main(globals())
