"""The soft NIC given entries one word at a time: what it must not take, and what it says to what makes no sense."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from nvep.errors import NicError
from nvep.group import RankGroup, run_local
from nvep.nic import RingSpec, layouts
from nvep.nic.live import ask, processes
from nvep.nic.soft import SoftNic, SoftNicModel
from nvep.nic.soft.ready_thread import ReadyQueue, ReadyThread
from nvep.nic.words import Descriptor
from nvep.symmetric import Layout, Region, SymmetricHeap
from nvep.testing.nic_streams import open_rings

DEPTH = 64
OPS, OPCODES = layouts.GFD_OPS, layouts.WQE_OPCODES
LAYOUT = Layout([Region("Data", 4096), Region("Staging", 4096), Region("Signals", 256)])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Hand:
    """Rank 0's ring, written by the host; rank 1 is where its messages go."""

    def __init__(self, group: RankGroup, heap: SymmetricHeap, nic: SoftNic) -> None:
        self.heap, self.nic, self.device = heap, nic, group.device
        self.parts = nic.rings.parts[0]
        self.number = nic.rings.number(0)
        self.device.copy_in(heap.address("Staging"), self.staged(), self.device.default_stream)
        self.device.default_stream.synchronize()

    @staticmethod
    def staged() -> np.ndarray:
        return np.arange(1, 513, dtype=np.uint64)

    def write(self, index: int, words: np.ndarray, begin: int = 0, end: int = 8) -> None:
        offset = index % DEPTH * layouts.ENTRY_BYTES + 8 * begin
        self.nic.rings.store(self.parts.entries, words.reshape(-1)[begin:end], offset)

    def gfd(self, index: int, begin: int = 0, end: int = 8, kind: Descriptor = layouts.GFD, **fields: int) -> None:
        owner = np.uint64(layouts.ring_owner(index, DEPTH))
        self.write(index, kind.encode(**fields) | owner, begin, end)

    def wqe(self, at: int, *segments: np.ndarray, **fields: int) -> None:
        control = {"opcode": OPCODES["rdma_write"], "index": at, "number": self.number, "flags": 8, "segments": 3}
        words = np.concatenate([layouts.WQE_CONTROL.encode(**control | fields), *segments])
        self.write(at, np.pad(words, (0, 8 - len(words))))

    def ring(self, end: int) -> None:
        bell = layouts.DOORBELL.encode(index=end & 0xFFFF, number=self.number)
        self.nic.rings.store(self.parts.doorbell, bell)

    def consumed(self) -> int:
        return int(self.nic.rings.read(self.parts.consumer)[0])

    def completion(self, index: int) -> dict[str, int]:
        words = self.nic.rings.read(self.parts.completions).reshape(-1, 8)[index % DEPTH]
        return {name: int(value) for name, value in layouts.CQE.decode(words).items()}

    def words(self, region: str, rank: int = 1) -> np.ndarray:
        array = np.zeros(LAYOUT.region(region).nbytes // 8, np.uint64)
        self.device.copy_out(array, self.heap.address(region, rank=rank), self.device.default_stream)
        return array

    def failure(self) -> NicError:
        until(lambda: self.nic.rings.alarm != 0)
        with pytest.raises(NicError) as caught:
            self.nic.check()
        return caught.value


def by_hand(spec: RingSpec, program: Callable[[Hand], None]) -> None:
    def run(group: RankGroup) -> None:
        model = SoftNicModel(latency_ns=0, idle_s=20.0)
        with SymmetricHeap(group, LAYOUT) as heap, SoftNic(group, model) as nic:
            open_rings(group, heap, nic, [spec])
            group.barrier()
            if group.rank == 0:
                nic.wake()
                program(Hand(group, heap, nic))
            group.barrier()

    run_local(run, 2, device="emulated")


GFD_RING = RingSpec("gfd", DEPTH, counters=2)
QUEUE = RingSpec("send_queue", DEPTH, peer=1)
PUT = {"op": OPS["put"], "peer": 1, "bytes": 64, "target_handle": 0, "source_handle": 1, "target_offset": 128}


def test_a_torn_descriptor_is_not_taken() -> None:
    def program(hand: Hand) -> None:
        for missing in range(8):
            hand.gfd(missing, 0, missing, **PUT)
            hand.gfd(missing, missing + 1, 8, **PUT)
            time.sleep(0.01)
            assert hand.consumed() == missing
            hand.gfd(missing, missing, missing + 1, **PUT)
            until(lambda end=missing + 1: hand.consumed() == end)  # type: ignore[misc]
        assert hand.words("Data")[16:24].tolist() == list(range(1, 9))

    by_hand(GFD_RING, program)


def test_a_claimed_slot_that_is_not_written_holds_up_what_follows() -> None:
    def program(hand: Hand) -> None:
        hand.gfd(1, **PUT)
        time.sleep(0.02)
        assert hand.consumed() == 0
        assert not hand.words("Data").any()
        hand.gfd(0, **PUT | {"target_offset": 1024})
        until(lambda: hand.consumed() == 2)

    by_hand(GFD_RING, program)


def test_a_fan_out_waits_for_its_continuations() -> None:
    def program(hand: Hand) -> None:
        targets = {f"peer{i}": 1 for i in range(4)} | {f"offset{i}": 64 * i for i in range(4)}
        head = {"op": OPS["fanout"], "targets": 6, "bytes": 16, "source_handle": 1, "source_offset_low": 32}
        hand.gfd(0, kind=layouts.FANOUT_HEAD, **head, **targets)
        time.sleep(0.02)
        assert hand.consumed() == 0
        assert not hand.words("Data").any()
        more = {"op": OPS["more"], "targets": 6, "peer0": 1, "offset0": 512, "peer1": 0, "offset1": 512}
        hand.gfd(1, kind=layouts.FANOUT_MORE, **more)
        until(lambda: hand.consumed() == 2)
        data = hand.words("Data")
        assert [data[8 * i] for i in (0, 1, 2, 3, 8)] == [5] * 5
        assert hand.words("Data", rank=0)[64] == 5

    by_hand(GFD_RING, program)


def test_the_words_of_an_earlier_lap_are_not_taken_again() -> None:
    def program(hand: Hand) -> None:
        signal = {"op": OPS["signal"], "peer": 1, "signal": 3, "value_low": 1}
        for index in range(3 * DEPTH):
            until(lambda behind=index - DEPTH // 2: hand.consumed() >= behind)  # type: ignore[misc]
            hand.gfd(index, **signal)
        until(lambda: hand.consumed() == 3 * DEPTH)
        until(lambda: hand.words("Signals")[3] == 3 * DEPTH)
        time.sleep(0.02)
        assert hand.words("Signals")[3] == 3 * DEPTH
        assert hand.consumed() == 3 * DEPTH

    by_hand(GFD_RING, program)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"op": 0x55}, "local operation"),
        ({"op": OPS["more"]}, "local operation"),
        ({"op": OPS["fanout"]}, "local operation"),
        ({"peer": 2}, "remote access"),
        ({"target_handle": 3}, "remote access"),
        ({"target_offset": 4096 - 60}, "remote access"),
        ({"target_offset": 1 << 62}, "remote access"),
        ({"bytes": 62}, "remote access"),
        ({"source_handle": 9}, "local protection"),
        ({"source_offset": 4096}, "local protection"),
        ({"flags": 2, "counter": 2}, "local operation"),
        ({"op": OPS["inline_put"], "bytes": 12}, "local length"),
        ({"op": OPS["signal"], "signal": 32}, "remote access"),
    ],
)
def test_descriptors_that_make_no_sense(fields: dict[str, int], cause: str) -> None:
    def program(hand: Hand) -> None:
        hand.gfd(0, **PUT | {"target_offset": 0})
        hand.gfd(1, **PUT | fields)
        hand.gfd(2, **PUT | {"target_offset": 512, "flags": 2, "counter": 1})
        failure = hand.failure()
        assert (failure.rank, failure.ring, failure.index, failure.cause) == (0, hand.number, 1, cause)
        until(lambda: hand.consumed() == 3)
        data = hand.words("Data")
        assert data[:8].any()
        assert not data[8:].any(), "nothing behind the failure was executed"
        until(lambda: int(hand.nic.rings.read(hand.parts.counters)[1]) == layouts.COUNTER_ERROR)

    by_hand(GFD_RING, program)


def segments(**changes: int) -> tuple[np.ndarray, np.ndarray]:
    """Remote and data segments of a write of 64 bytes from staging offset 0 to data offset 128 of rank 1."""
    fields = {"key": 0x001, "address": 128, "local_key": 0x1FF, "local_address": 0, "bytes": 64} | changes
    remote = layouts.WQE_REMOTE.encode(key=fields["key"], address=fields["address"])
    data = layouts.WQE_DATA.encode(bytes=fields["bytes"], key=fields["local_key"], address=fields["local_address"])
    return remote, data


def test_entries_wait_for_their_doorbell() -> None:
    def program(hand: Hand) -> None:
        for index in range(3):
            hand.wqe(index, *segments(address=64 * index))
        time.sleep(0.02)
        assert not hand.words("Data").any()
        hand.ring(2)
        until(lambda: hand.completion(1)["opcode"] == 0)
        time.sleep(0.01)
        assert hand.completion(2)["opcode"] == layouts.CQE_OPCODES["invalid"]
        assert hand.words("Data")[:16].tolist() == 2 * list(range(1, 9))
        assert not hand.words("Data")[16:].any()
        done = hand.completion(1)
        assert (done["index"], done["number"], done["bytes"], done["owner"]) == (1, hand.number, 64, 0)
        hand.ring(3)
        until(lambda: hand.completion(2)["opcode"] == 0)

    by_hand(QUEUE, program)


def test_an_atomic_adds_and_an_inline_write_stores() -> None:
    def program(hand: Hand) -> None:
        signals = layouts.WQE_REMOTE.encode(key=0x201, address=40)
        hand.wqe(0, signals, layouts.WQE_ATOMIC.encode(operand=5), opcode=OPCODES["atomic_fetch_add"], segments=4)
        hand.wqe(1, signals, layouts.WQE_ATOMIC.encode(operand=6), opcode=OPCODES["atomic_fetch_add"], segments=4)
        inline = np.concatenate([layouts.WQE_INLINE.encode(bytes=8, is_inline=1, first=7), [np.uint64(1)]])
        hand.wqe(2, layouts.WQE_REMOTE.encode(key=0x201, address=48), inline)
        hand.ring(3)
        until(lambda: hand.completion(2)["opcode"] == 0)
        assert hand.words("Signals")[5:7].tolist() == [11, 1 << 32 | 7]

    by_hand(QUEUE, program)


@pytest.mark.parametrize(
    ("changes", "control", "syndrome"),
    [
        ({}, {"opcode": 0x10}, "local_operation"),
        ({}, {"index": 9}, "local_operation"),
        ({}, {"number": 9}, "local_operation"),
        ({"key": 0x000}, {}, "remote_access"),
        ({"key": 0x901}, {}, "remote_access"),
        ({"address": 4096}, {}, "remote_access"),
        ({"local_key": 0x101}, {}, "local_protection"),
        ({"local_address": 4080}, {}, "local_protection"),
    ],
)
def test_entries_that_make_no_sense(changes: dict[str, int], control: dict[str, int], syndrome: str) -> None:
    def program(hand: Hand) -> None:
        hand.wqe(0, *segments(address=0))
        hand.wqe(1, *segments(**changes), **control)
        hand.wqe(2, *segments(address=512))
        hand.ring(3)
        failure = hand.failure()
        assert (failure.ring, failure.index) == (hand.number, 1)
        until(lambda: hand.completion(2)["opcode"] == layouts.CQE_OPCODES["requester_error"])
        assert hand.completion(0)["opcode"] == 0
        assert hand.completion(1)["syndrome"] == layouts.SYNDROMES[syndrome]
        assert hand.completion(2)["syndrome"] == layouts.SYNDROMES["flushed"]
        assert not hand.words("Data")[8:].any()

    by_hand(QUEUE, program)


# Free Flow's host thread


def test_the_ready_thread_rings_for_contiguous_entries_only() -> None:
    thread = ReadyThread()
    ready, bells = np.zeros(128, np.uint64), np.zeros(2, np.uint64)
    at = int(bells.ctypes.data)
    thread.add([ReadyQueue(int(ready.ctypes.data), at, at + 8, depth=128, number=3)])
    try:

        def rung() -> int:
            assert layouts.DOORBELL.decode(bells[:1])["number"] in (0, 3)
            return int(layouts.DOORBELL.decode(bells[:1])["index"])

        ready[1] = 2
        before = thread.heartbeat
        until(lambda: thread.heartbeat > before + 2)
        assert rung() == 0
        ready[0] = 1
        until(lambda: rung() == 2)
        ready[3:100] = np.arange(4, 101)
        before = thread.heartbeat
        until(lambda: thread.heartbeat > before + 2)
        assert rung() == 2
        ready[2] = 3
        until(lambda: rung() == 100)
        assert int(bells[1] >> np.uint64(32)) == int.from_bytes((100).to_bytes(4, "big"), "little")
        announced, doorbells = thread.rung
        assert announced == 100
        assert doorbells >= 3, "at most 64 entries a doorbell"
        ready[100:] = np.arange(101, 129)
        until(lambda: rung() == 128)
        before = thread.heartbeat
        until(lambda: thread.heartbeat > before + 2)
        assert rung() == 128, "words of an earlier lap say nothing"
        others = np.zeros(130, np.uint64)
        other = int(others.ctypes.data)
        thread.add([ReadyQueue(other, other + 1024, other + 1032, depth=128, number=9)])  # restarts the thread
        thread.remove([9])
        assert thread.running
        ready[0] = 129
        until(lambda: rung() == 129)
    finally:
        thread.close()
    assert not thread.running


def test_a_live_adapter_shows_the_rings_of_all_ranks() -> None:
    def run(group: RankGroup) -> None:
        with SymmetricHeap(group, LAYOUT) as heap, SoftNic(group, SoftNicModel(live=True)) as nic:
            open_rings(group, heap, nic, [GFD_RING, RingSpec("send_queue", DEPTH, peer=1 - group.rank, ready=True)])
            group.barrier()
            if group.rank == 0:
                shown = [(dump.rank, dump.kind, dump.peer) for dump in ask(os.getpid())]
                assert shown == [(0, "gfd", None), (0, "send_queue", 1), (1, "gfd", None), (1, "send_queue", 0)]
            group.barrier()

    run_local(run, 2, device="emulated")
    assert os.getpid() not in processes()
