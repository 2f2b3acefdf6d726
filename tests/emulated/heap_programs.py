"""What ranks do with a symmetric heap: used by local groups, and by ``python heap_programs.py NAME`` under mpirun.

Memory is reached through the device only, so the same checks run on GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvep.errors import DeviceError, ExchangeClosed, HeapTooLarge
from nvep.group import RankGroup
from nvep.symmetric import Layout, Region, SymmetricHeap

CELL = 1008  # bytes that one rank writes into another's slice: no divisor of a page
MARK = 0x5A
Stage = tuple[object, str, bool]


def layout_for(ranks: int, *, padding: int = 0) -> Layout:
    regions = [Region("Records", 24), Region("Cells", CELL * ranks), Region("Padding", padding)]
    return Layout(regions, lanes=2)


def read(group: RankGroup, address: int, nbytes: int) -> np.ndarray:
    data = np.empty(nbytes, dtype=np.uint8)
    group.device.copy_out(data, address, group.device.default_stream)
    return data


def write(group: RankGroup, address: int, data: np.ndarray) -> None:
    group.device.copy_in(address, data, group.device.default_stream)
    group.device.default_stream.synchronize()


def cell(writer: int, owner: int, lane: int) -> np.ndarray:
    """What ``writer`` puts into ``owner``'s slice: different for every triple."""
    return np.random.default_rng((writer, owner, lane)).integers(0, 256, CELL, dtype=np.uint8)


def exchange_cells(group: RankGroup) -> None:
    """Every rank writes a pattern into every slice at its own offset and checks all of what it got."""
    ranks = range(group.size)

    def mark(heap: SymmetricHeap) -> None:
        group.device.fill(heap.address("Records", lane=1), MARK + group.rank, 24, group.device.default_stream)

    with SymmetricHeap(group, layout_for(group.size), initialise=mark) as heap:
        assert len(heap.peer_bases) == len(set(heap.peer_bases)) == group.size
        assert heap.base == heap.peer_bases[group.rank]
        assert heap.base % 256 == 0
        for peer in ranks:  # the constructor's barrier: all slices are filled before anybody is here
            expected = np.zeros(heap.nbytes, dtype=np.uint8)
            start = heap.layout.offset("Records", 1)
            expected[start : start + 24] = MARK + peer
            assert np.array_equal(read(group, heap.peer_bases[peer], heap.nbytes), expected)
        group.barrier()
        for lane in range(2):
            for peer in ranks:
                write(group, heap.address("Cells", lane, peer) + CELL * group.rank, cell(group.rank, peer, lane))
        group.barrier()
        for lane in range(2):
            for peer in ranks:
                got = read(group, heap.address("Cells", lane) + CELL * peer, CELL)
                assert np.array_equal(got, cell(peer, group.rank, lane)), (lane, peer)
                seen = read(group, heap.address("Cells", lane, peer) + CELL * group.rank, CELL)
                assert np.array_equal(seen, cell(group.rank, peer, lane)), (lane, peer)
        group.barrier()
    heap.close()
    try:
        heap.address("Cells")
    except ExchangeClosed:
        return
    raise AssertionError("a closed heap gave out an address")


def outlive_a_closed_peer(group: RankGroup) -> None:
    """Rank 0 closes first; its slice stays readable until the others have closed too."""
    heap = SymmetricHeap(group, layout_for(group.size))
    write(group, heap.address("Cells", 0, 0) + CELL * group.rank, cell(group.rank, 0, 0))
    group.barrier()
    if group.rank == 0:
        heap.close()
    group.barrier()
    if group.rank != 0:
        for peer in range(group.size):
            assert np.array_equal(read(group, heap.address("Cells", 0, 0) + CELL * peer, CELL), cell(peer, 0, 0))
    group.barrier()
    heap.close()


def errors_of(group: RankGroup, construct: Callable[[], object], kind: type[Exception]) -> list[str]:
    """Texts that the ranks get; every rank must raise ``kind``."""
    try:
        construct()
    except kind as error:
        return group.allgather(str(error))
    raise AssertionError(f"no {kind.__name__}")


def fail_to_initialise(group: RankGroup, *, padding: int = 0) -> None:
    """The last rank cannot initialise: all raise the same, and nothing stays mapped."""

    def fail(heap: SymmetricHeap) -> None:
        if group.rank == group.size - 1:
            raise DeviceError("no sentinel today")

    layout = layout_for(group.size, padding=padding)
    texts = errors_of(group, lambda: SymmetricHeap(group, layout, initialise=fail), DeviceError)
    assert texts == ["no sentinel today"] * group.size


def ask_for_too_much(group: RankGroup) -> None:
    """Only the last rank's memory is too small by its layout's sum; all raise the same text, which shows that sum."""
    texts = errors_of(group, lambda: SymmetricHeap(group, Layout([Region("Rows", 1 << 50)], lanes=2)), HeapTooLarge)
    assert len(set(texts)) == 1
    assert "Rows" in texts[0]
    assert f"{1 << 51:,} B" in texts[0]


# Under mpirun


def held() -> dict[str, list[str]]:
    """Descriptors, mappings and names that this process holds: compared before and after."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": sorted(os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()),
        "mappings": [line for line in maps if "memfd:nvep" in line],
        "names": [name for name in os.listdir("/dev/shm") if "nvep" in name],
    }


def require_same(before: dict[str, list[str]]) -> None:
    after = held()
    assert after == before, {k: (before[k], after[k]) for k in before if before[k] != after[k]}


def sockets_of_nvep() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if "@nvep" in line]


def named_shared_files() -> list[str]:
    """Files in /dev/shm that this process maps and that would stay there if the job were killed now."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]


def use_and_leak_nothing(group: RankGroup) -> None:
    exchange_cells(group)  # whatever is opened once for good
    before = held()
    assert before["mappings"] == []
    heap = SymmetricHeap(group, layout_for(group.size))
    assert len(held()["mappings"]) == group.size  # the check sees what is mapped
    assert held()["descriptors"] == before["descriptors"]  # closed right after mapping
    heap.close()
    require_same(before)
    exchange_cells(group)
    outlive_a_closed_peer(group)
    fail_to_initialise(group)
    ask_for_too_much(group)
    fail_in_the_middle(group)
    require_same(before)


def fail_in_the_middle(group: RankGroup) -> None:
    from nvep.symmetric import fd_exchange, heap_shared

    exchange, backend = fd_exchange._Exchange, heap_shared.HostBackend
    stages: list[Stage] = [(heap_shared, "_memory_file", False), (heap_shared, "_map", False)]
    stages += [(exchange, name, True) for name in ("listen", "send_all", "receive_all")]
    if group.size > 1:
        stages += [(exchange, "_send", True), (exchange, "_receive", True), (backend, "open_shared", False)]
    fail_at_each_stage(group, stages)


def fail_at_each_stage(group: RankGroup, stages: list[Stage]) -> None:
    """Each stage (owner, function, whether it fails after its work) fails on each rank in turn."""
    for culprit in range(group.size):
        for owner, name, works_first in stages:
            replacement = getattr(owner, name)
            if group.rank == culprit:
                replacement = failing(replacement, name, works_first=works_first)
            with unittest.mock.patch.object(owner, name, replacement):
                texts = errors_of(group, lambda: SymmetricHeap(group, layout_for(group.size)), DeviceError)
            assert set(texts) == {f"{name} failed"}


def failing(original: Callable[..., object], name: str, *, works_first: bool) -> Callable[..., object]:
    def fail(*arguments: object) -> object:
        if works_first:
            original(*arguments)
        raise DeviceError(f"{name} failed")

    return fail


def die_while_mapped(group: RankGroup) -> None:
    heap = SymmetricHeap(group, layout_for(group.size))
    assert named_shared_files() == []
    group.barrier()
    if group.rank == group.size - 1:
        os.write(1, b"dying\n")
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    heap.close()


def die_while_sending(group: RankGroup) -> None:
    from nvep.symmetric import fd_exchange

    def die(exchange: fd_exchange._Exchange, fd: int, rank: int) -> None:
        name = exchange._name(rank).replace(b"\0", b"@")
        assert name.decode() in sockets_of_nvep()
        os.write(1, b"dying " + name + b"\n")
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == group.size - 1:
        fd_exchange._Exchange._send = die  # type: ignore[method-assign]
    SymmetricHeap(group, layout_for(group.size))


def main(functions: dict[str, Callable[[RankGroup], None]]) -> None:
    from mpi4py import MPI

    from nvep.group.mpi import install_abort_hook

    install_abort_hook()
    with RankGroup.from_mpi(MPI.COMM_WORLD) as group:
        functions[sys.argv[1]](group)
        group.barrier()
        if group.rank == 0:
            print("done", flush=True)


if __name__ == "__main__":
    main(globals())
