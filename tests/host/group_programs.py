"""What ranks under mpirun do in test_group_mpi.py: ``python group_programs.py NAME`` runs one function below.

Each rank prints lines ``rank: text`` that the test compares.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from mpi4py import MPI

import nvep
from nvep.errors import ArgumentError, ConfigMismatch, DeviceError, GroupError
from nvep.group import RankGroup
from nvep.group import mpi as mpi_group
from nvep.group.mpi import MpiGroup, install_abort_hook


def say(text: object) -> None:
    os.write(1, f"{MPI.COMM_WORLD.rank}: {text}\n".encode())  # one write, so that lines of ranks do not mix


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def collectives() -> None:
    with nvep.RankGroup.from_mpi(MPI.COMM_WORLD, device="emulated") as group:
        assert (group.rank, group.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        assert (group.local_rank, group.local_size) == (group.rank, group.size)
        assert not group.in_process
        assert group.device.kind == "emulated"
        assert group.ranks_on_device == 1
        for i in range(50):
            assert group.allgather((i, group.rank)) == [(i, r) for r in range(group.size)]
            group.barrier()
        large = [bytes([r]) * (3_000_000 + r) for r in range(group.size)]
        assert group.allgather(large[group.rank]) == large
        # Collectives of the caller's communicator and of a second group do not meet ours.
        request = MPI.COMM_WORLD.Ibarrier()
        with MpiGroup(MPI.COMM_WORLD, device="emulated") as other:
            assert other.allgather(-group.rank) == [-r for r in range(group.size)]
        group.barrier()
        request.Wait()
        say(group.allgather("ok"))
    group.close()
    try:
        group.barrier()
    except GroupError as error:
        say(error)


def agreement() -> None:
    group = MpiGroup(MPI.COMM_WORLD, device="emulated")
    last = group.size - 1
    group.agree("equal things", [1, 2])
    for step in (
        lambda: group.agree("top_k", 4 if group.rank == last else 8),
        lambda: group.raise_together(ArgumentError("x", group.rank, "none") if group.rank else None),
        lambda: group.raise_together(Unpicklable(1, 2) if group.rank == last else None),
    ):
        try:
            step()
        except Exception as error:
            # The rank that brings an error keeps its own object; what others see has the same text.
            say(f"{type(error).__name__}: {error}" if not isinstance(error, Unpicklable) else f"own {error}")
    say(f"still usable {group.allgather(group.rank)}")
    MPI.Finalize()
    group.close()  # harmless


def device_errors() -> None:
    import nvep.group.mpi

    def fail(device: str | None) -> str:
        if MPI.COMM_WORLD.rank == 1:
            raise DeviceError("no GPU on this rank")
        return "emulated"

    def differ(device: str | None) -> str:
        return "cuda" if MPI.COMM_WORLD.rank == 1 else "emulated"

    for choose in (fail, differ):
        nvep.group.mpi.device_kind = choose
        try:
            MpiGroup(MPI.COMM_WORLD)
        except (DeviceError, ConfigMismatch) as error:
            say(f"{type(error).__name__}: {error}")
    for wrong in (None, MPI.COMM_NULL, "world"):
        try:
            MpiGroup(wrong)  # type: ignore[arg-type]
        except ArgumentError as error:
            say(error)


def abort() -> None:
    group = MpiGroup(MPI.COMM_WORLD, device="emulated")
    if group.rank == 1:
        group.abort("out of paper")
    group.barrier()


def uncaught() -> None:
    install_abort_hook()
    group = MpiGroup(MPI.COMM_WORLD, device="emulated")
    group.barrier()
    if group.rank == 1:
        print("said before", end="")  # unflushed
        raise RuntimeError("a rank went wrong")
    group.barrier()


def missing() -> None:
    """Rank 1 stays away from a collective, then the job ends in good order."""
    group = MpiGroup(MPI.COMM_WORLD, device="emulated")
    if group.rank != 1:
        group.timeout = 0.3
        for _ in range(2):
            try:
                group.barrier()
            except GroupError as error:
                say(error)
    MPI.COMM_WORLD.barrier()
    if group.rank == 1:
        group.barrier()  # the others sent their part before they gave up
    group.close()


def lost(how: signal.Signals) -> None:
    """Rank 1 is lost; the others notice, name it, and can close their group."""
    group = MpiGroup(MPI.COMM_WORLD, device="emulated")
    processes = group.allgather(os.getpid())
    group.timeout = 0.5
    if group.rank == 1:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    try:
        group.barrier()
    except GroupError as error:
        group.close()
        say(f"{error}; in time: {time.monotonic() - start < 3.0}")
    if group.rank == 0:
        time.sleep(1.0)
        if how == signal.SIGSTOP:
            os.kill(processes[1], signal.SIGKILL)
    os._exit(0)  # MPI_Finalize would wait for the lost rank


def never_comes() -> None:
    """Rank 1 does not make a group: the others must not wait for ever."""
    mpi_group.collective_timeout = lambda: 1.0
    if MPI.COMM_WORLD.rank != 1:
        try:
            RankGroup.from_mpi(MPI.COMM_WORLD, device="emulated")
        except GroupError as error:
            print(f"{MPI.COMM_WORLD.rank}: {error}", flush=True)
    time.sleep(4.0)  # a rank that ends takes the others' last words with it
    os._exit(0)


def killed() -> None:
    lost(signal.SIGKILL)


def stopped() -> None:
    lost(signal.SIGSTOP)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
