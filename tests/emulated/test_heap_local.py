"""The symmetric heap within one process, and its parts on their own."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
from pathlib import Path

import pytest

from nvep.errors import ArgumentError, ConfigMismatch, DeviceError, ExchangeClosed, GroupError
from nvep.group import RankGroup, local_groups, run_local
from nvep.symmetric import Layout, Region, SymmetricHeap, fd_exchange, heap_shared
from nvep.symmetric.fd_exchange import exchange_fds
from nvep.symmetric.slices import Slice
from tests.emulated import heap_programs as programs

GIB = 1 << 30


def run(function, ranks: int) -> list:
    return run_local(function, ranks, device="emulated", timeout=60)


def virtual_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmSize"].split()[0]) * 1024


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_reaches_every_slice(ranks: int) -> None:
    run(programs.exchange_cells, ranks)


def test_a_slice_outlives_its_owners_close() -> None:
    run(programs.outlive_a_closed_peer, 3)


def test_too_large_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_map(*arguments: object) -> Slice:
        raise AssertionError("memory was mapped")

    monkeypatch.setattr(heap_shared, "_map", must_not_map)
    run(programs.ask_for_too_much, 3)


def test_the_room_of_all_ranks_counts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_shared, "_available_memory", lambda: 4 * GIB)
    layout = Layout([Region("Rows", GIB + 1)])
    with pytest.raises(MemoryError, match="4,294,983,680 B for 4 rank"):
        run(lambda group: SymmetricHeap(group, layout), 4)
    run(lambda group: SymmetricHeap(group, layout).close(), 3)


def test_ranks_must_agree_on_the_layout() -> None:
    def differ(group: RankGroup) -> None:
        SymmetricHeap(group, Layout([Region("Rows", 256 * (1 + group.rank))]))

    expected = "size of the symmetric heap in bytes must be equal on all ranks; rank 0: 256, rank 1: 512"
    with pytest.raises(ConfigMismatch, match=expected):
        run(differ, 2)


def test_mappings_go_away_after_use_and_after_errors() -> None:
    layout = Layout([Region("Rows", GIB // 2)])

    def use(group: RankGroup) -> int:
        with SymmetricHeap(group, layout):
            group.barrier()
            mapped = virtual_bytes()
            group.barrier()
        return mapped

    run(use, 2)  # threads' stacks and arenas are kept by the allocator
    before = virtual_bytes()
    assert min(run(use, 2)) >= before + GIB  # the measure sees what is mapped
    for _ in range(3):
        run(lambda group: programs.fail_to_initialise(group, padding=GIB // 4), 2)
    assert virtual_bytes() < before + GIB // 2


def test_descriptors_go_away() -> None:
    run(programs.exchange_cells, 2)
    before = sorted(os.listdir("/proc/self/fd"))
    run(programs.exchange_cells, 2)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_empty_layout_is_a_heap_too() -> None:
    with local_groups(1, device="emulated")[0] as group, SymmetricHeap(group, Layout([])) as heap:
        assert heap.nbytes == 0
        assert heap.peer_bases == (heap.base,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"region": "Nothing"}, "region: got 'Nothing'; allowed: Records, Cells, Padding"),
        ({"region": "Cells", "lane": 2}, "lane: got 2; allowed: 0 to 1"),
        ({"region": "Cells", "rank": 1}, "rank: got 1; allowed: 0 to 0"),
        ({"region": "Cells", "rank": -1}, "rank: got -1; allowed: 0 to 0"),
    ],
)
def test_addresses_that_do_not_exist(arguments: dict[str, object], expected: str) -> None:
    with local_groups(1, device="emulated")[0] as group, SymmetricHeap(group, programs.layout_for(1)) as heap:
        assert heap.address("Cells", 1) == heap.base + heap.layout.lane_bytes + 256
        with pytest.raises(ArgumentError, match=f"^{expected}$"):
            heap.address(**arguments)
    with pytest.raises(ExchangeClosed):
        heap.address("Cells")


def test_a_peer_that_unmapped_its_slice_early_is_an_error() -> None:
    unmapped = []
    one = Slice(4096, lambda: unmapped.append(1))
    one.retain()
    one.release()
    assert unmapped == []
    one.release()
    assert unmapped == [1]
    with pytest.raises(GroupError, match="closed its heap"):
        one.retain()


def test_refusals_of_the_system_are_typed() -> None:
    with pytest.raises(DeviceError, match="cannot map 4,611,686,018,427,387,904 bytes"):
        heap_shared._map(1 << 62, heap_shared.mmap.MAP_PRIVATE | heap_shared.mmap.MAP_ANONYMOUS, -1)
    with pytest.raises(DeviceError, match="cannot create a memory file"):
        heap_shared._memory_file(-1)
    with local_groups(1, device="emulated")[0] as group:
        backend = heap_shared.HostBackend(group)
    fd = heap_shared._memory_file(4096)
    with pytest.raises(DeviceError, match="has 4096 bytes instead of 8192"):
        backend.open_shared(fd, 8192)
    os.close(fd)


def test_ranks_on_other_hosts_are_refused() -> None:
    with local_groups(2, device="emulated")[0] as group:
        group.local_size = 1
        with pytest.raises(GroupError, match="must be on one host: 1 of 2 ranks share that of rank 0"):
            heap_shared.HostBackend(group)
        group.local_size, group.in_process = 2, False
        heap_shared.HostBackend(group)


def test_a_memory_file_without_memfd_has_no_name_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError("sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    fd = heap_shared._memory_file(8192)
    try:
        assert os.fstat(fd).st_size == 8192
        assert os.fstat(fd).st_nlink == 0
        first, second = (heap_shared._map(8192, heap_shared.mmap.MAP_SHARED, fd) for _ in range(2))
        ctypes.c_uint64.from_address(first.address).value = 77
        assert ctypes.c_uint64.from_address(second.address).value == 77
        first.release()
        second.release()
    finally:
        os.close(fd)


def test_room_under_a_containers_limit(tmp_path: Path) -> None:
    assert heap_shared._cgroup_room(tmp_path) > 1 << 60
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert heap_shared._cgroup_room(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert heap_shared._cgroup_room(tmp_path) == 450


# Descriptors from everybody to everybody


def swap(group: RankGroup) -> list[int]:
    """Exchange descriptors of files that hold the rank; return what the received ones say."""
    fd = heap_shared._memory_file(4)
    os.pwrite(fd, bytes([group.rank]), 0)
    received = []
    try:
        received = exchange_fds(group, fd, timeout=30)
        assert received[group.rank] == fd
        assert not any(os.get_inheritable(f) for f in received)
        return [os.pread(f, 1, 0)[0] for f in received]
    finally:
        for f in {fd, *received}:
            os.close(f)


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_descriptors_from_all_to_all(ranks: int) -> None:
    needed = 3 * ranks * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        pytest.skip(f"{needed} descriptors in one process, {hard} are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    try:
        before = len(os.listdir("/proc/self/fd"))
        assert run(swap, ranks) == [list(range(ranks))] * ranks
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = fd_exchange._Exchange.listen
    pipes: list[int] = []

    def listen_with_strangers(self: fd_exchange._Exchange) -> None:
        """Connections that are first in the queue: without a word, with a wrong token, with a rank out of range."""
        listen(self)
        read, write = os.pipe()
        pipes.append(read)
        for message in (None, fd_exchange._MESSAGE.pack(b"?" * 16, 1), fd_exchange._MESSAGE.pack(self._token, 9)):
            stranger = self._sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.connect(self._name(self._rank))
            if message is None:
                stranger.close()
            else:
                socket.send_fds(stranger, [message], [write])
        os.close(write)

    monkeypatch.setattr(fd_exchange._Exchange, "listen", listen_with_strangers)
    assert run(swap, 3) == [[0, 1, 2]] * 3
    for read in pipes:
        os.set_blocking(read, False)
        assert os.read(read, 1) == b""  # end of file: nobody kept a stranger's descriptor
        os.close(read)


def test_a_socket_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fd_exchange, "_peer_uid", lambda connection: os.geteuid() + 1)
    with pytest.raises(GroupError, match="the socket of rank 1 belongs to another user"):
        run(swap, 2)


def test_a_rank_that_sends_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    send = fd_exchange._Exchange._send

    def withhold(self: fd_exchange._Exchange, fd: int, rank: int) -> None:
        if self._rank != 1:
            send(self, fd, rank)

    monkeypatch.setattr(fd_exchange._Exchange, "_send", withhold)
    before = len(os.listdir("/proc/self/fd"))

    def swap_briefly(group: RankGroup) -> None:
        fd = heap_shared._memory_file(4)
        try:
            exchange_fds(group, fd, timeout=0.3)
        finally:
            os.close(fd)

    with pytest.raises(GroupError, match="rank 0 got no file descriptor from rank 1 in time"):
        run(swap_briefly, 3)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_of_ranks_do_not_outlive_their_run() -> None:
    run(programs.exchange_cells, 2)
    assert [t.name for t in threading.enumerate() if t.name.startswith("nvep-rank")] == []
