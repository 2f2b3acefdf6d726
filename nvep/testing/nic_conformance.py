"""What every send scheme owes its users, on the soft NIC: a test class names the device and inherits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nvep.errors import NicError, NicTimeout
from nvep.group import RankGroup, run_local
from nvep.nic import RingSpec
from nvep.nic.layouts import ring_prelude
from nvep.nic.soft import LABEL, SoftNic, SoftNicModel
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import Layout, Region, SymmetricHeap
from nvep.testing.nic_streams import SCHEMES, StreamCase, assert_streams, open_rings, run_streams

CONTROL_ARGUMENTS = ArgumentStruct(
    "NicControlArguments",
    [
        *(Field(name, "u64") for name in ("rings", "out", "deadline")),
        *(Field(name, "u32") for name in ("peer", "bytes", "slots", "count", "fanouts", "unused")),
    ],
)
UNFRIENDLY = SoftNicModel(reorder=True, busy_odds=300, seed=7)
SHORT_S = 0.5


def control_source() -> KernelSource:
    """Counters, flush and reset, by one thread."""
    prelude = f'{ring_prelude()}#include "transports/fanout.cuh"\n'
    return KernelSource("nic_control", CONTROL_ARGUMENTS, prelude, KERNEL_ROOT / "testing" / "nic_control.cu")


@pytest.mark.parametrize("scheme", SCHEMES)
class SchemeConformance:
    """Streams through each scheme."""

    device: str

    def test_every_byte_arrives_before_its_signal(self, scheme: str) -> None:
        results = assert_streams(StreamCase(scheme), device=self.device)
        assert all(r.statistics.messages == 4 * 48 for r in results)

    def test_counting_signals_through_small_rings_of_an_unfriendly_adapter(self, scheme: str) -> None:
        case = StreamCase(scheme, warps=4, messages=150, add=True, inline=True, unit=8, model=UNFRIENDLY)
        results = assert_streams(case, device=self.device)
        assert all(r.statistics.descriptors > 2 * case.depth for r in results), "the rings went round"
        assert any(r.statistics.retries > 0 for r in results)

    def test_warps_post_side_by_side(self, scheme: str) -> None:
        assert_streams(StreamCase(scheme, warps=2, messages=192, staged=32, by_warp=True, add=True), device=self.device)

    def test_several_queues_and_odd_sizes(self, scheme: str) -> None:
        assert_streams(StreamCase(scheme, ranks=2, warps=5, queues=3, unit=4, model=UNFRIENDLY), device=self.device)

    def test_many_targets_a_message(self, scheme: str) -> None:
        case = StreamCase(scheme, warps=2, messages=24, targets=17, slot_bytes=128, model=UNFRIENDLY)
        assert_streams(case, device=self.device)

    @pytest.mark.parametrize("placement", ["host", "device"])
    def test_rings_elsewhere(self, scheme: str, placement: str) -> None:
        assert_streams(StreamCase(scheme, ranks=2, model=SoftNicModel(placement=placement)), device=self.device)

    def test_nobody_executes(self, scheme: str) -> None:
        case = StreamCase(scheme, deadline_s=SHORT_S)
        for rank, result in enumerate(run_streams(case, device=self.device, start=lambda nic: None)):
            assert result.senders_gave_up == case.warps
            assert result.wrong == 0
            assert isinstance(result.error, NicTimeout)
            assert result.error.rank == rank
            assert result.error.waits > 0

    def test_an_entry_fails(self, scheme: str) -> None:
        number = 1 << 12  # ring 0 of rank 1
        case = StreamCase(scheme, deadline_s=3 * SHORT_S, model=SoftNicModel(fail=(number, 17)))
        results = run_streams(case, device=self.device)
        assert [r.wrong for r in results] == [0] * case.ranks  # no signal came ahead of what was lost
        error = results[1].error
        assert isinstance(error, NicError)
        assert (error.rank, error.ring, error.index, error.cause) == (1, number, 17, "remote access")
        assert results[1].statistics.errors > 0
        assert not isinstance(results[0].error, NicError)
        assert not isinstance(results[2].error, NicError)

    @pytest.mark.parametrize("called", [True, False], ids=["called", "needed"])
    def test_the_engine_leaves_when_idle_and_comes_back(self, scheme: str, called: bool) -> None:
        def doze(nic: SoftNic) -> None:
            nic.wake()
            end = time.monotonic() + 20
            while nic.running and time.monotonic() < end:
                time.sleep(0.01)
            nic.group.barrier()
            assert not nic.running
            nic.group.barrier()
            if called:
                nic.wake()

        case = StreamCase(scheme, ranks=2, model=SoftNicModel(idle_s=0.05))
        assert_streams(case, device=self.device, start=doze)

    def test_the_engine_is_interrupted(self, scheme: str) -> None:
        def start(nic: SoftNic) -> Callable[[], None] | None:
            if nic.group.rank != 0:
                return None
            thread = threading.Thread(target=_interrupt, args=(nic,))
            thread.start()
            return thread.join

        case = StreamCase(scheme, ranks=2, messages=150, model=SoftNicModel(busy_odds=500))
        assert_streams(case, device=self.device, start=start)


def _interrupt(nic: SoftNic) -> None:
    for _ in range(20):
        nic.wake()
        time.sleep(0.002)
        nic.pause()
    nic.wake()


class NicConformance:
    """What does not depend on a scheme."""

    device: str

    def on_two_ranks(self, program: Callable[[RankGroup, SymmetricHeap, SoftNic], None]) -> None:
        """Run ``program`` on both ranks, between the same steps of the other."""

        def run(group: RankGroup) -> None:
            layout = Layout([Region("Data", 1 << 16), Region("Staging", 1 << 16), Region("Signals", 256)])
            with SymmetricHeap(group, layout) as heap, SoftNic(group, SoftNicModel(idle_s=10.0)) as nic:
                program(group, heap, nic)
                group.barrier()

        run_local(run, 2, device=self.device)

    def test_counters_flush_and_reset(self) -> None:
        def program(group: RankGroup, heap: SymmetricHeap, nic: SoftNic) -> None:
            rings = open_rings(group, heap, nic, [RingSpec("gfd", 64, counters=2)])
            device, stream = group.device, group.device.create_stream()
            kernel, out = device.load(control_source()), device.allocate(128)
            data = np.arange(1 << 13, dtype=np.uint64) * np.uint64(1 + group.rank)
            device.copy_in(heap.address("Staging"), data, stream)
            group.barrier()  # loading a module may wait for a kernel that stays, and does not while there is none
            nic.wake()
            arguments = CONTROL_ARGUMENTS.new(
                rings=rings, out=out.address, deadline=10_000_000_000, peer=1 - group.rank, bytes=512, slots=128,
                count=200, fanouts=130,
            )  # fmt: skip
            device.launch(kernel, LaunchShape(1, 1), arguments, stream)
            words = np.zeros(9, np.uint64)
            device.copy_out(words, out.address, stream)
            nic.check()
            # good, counter reached, flushed, counter, reset, counter, good, counter, flushes
            assert words.tolist() == [1, 1, 1, 200, 1, 0, 1, 130, 3]
            group.barrier()
            landed = np.zeros(1 << 13, np.uint64)
            device.copy_out(landed, heap.address("Data"), stream)
            source = np.arange(1 << 13, dtype=np.uint64) * np.uint64(2 - group.rank)
            expected = source.reshape(128, 64)
            expected[:64] = expected[0]  # a fan-out sends one slot to up to 64
            assert np.array_equal(landed, expected.reshape(-1))
            out.free()

        self.on_two_ranks(program)

    def test_the_label_is_everywhere(self) -> None:
        def program(group: RankGroup, heap: SymmetricHeap, nic: SoftNic) -> None:
            open_rings(group, heap, nic, [RingSpec("gfd", 64)])
            assert nic.label == LABEL
            assert "emulated" in LABEL
            assert [dump.engine for dump in nic.dump()] == [LABEL]

        self.on_two_ranks(program)

    def test_ranks_of_a_process_share_an_engine(self) -> None:
        seen: list[object] = []

        def program(group: RankGroup, heap: SymmetricHeap, nic: SoftNic) -> None:
            open_rings(group, heap, nic, [RingSpec("gfd", 64)])
            seen.append(nic.engine)
            group.barrier()

        self.on_two_ranks(program)
        assert len(seen) == 2
        assert seen[0] is seen[1]

    def test_a_slow_line_delays_the_signal_and_not_the_sender(self) -> None:
        model = SoftNicModel(latency_ns=30_000_000)
        case = StreamCase("gpi", ranks=2, warps=1, messages=8, model=model)
        start = time.perf_counter()
        assert_streams(case, device=self.device)
        assert time.perf_counter() - start > 0.03
        fast = replace(case, model=SoftNicModel(latency_ns=0, gigabits=1e6, message_ns=0, doorbell_ns=0))
        assert_streams(fast, device=self.device)
