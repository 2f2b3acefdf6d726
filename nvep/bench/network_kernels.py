"""The kernels that time transports: one brings the ranks together, one ends when all signals of a step are there."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from nvep.bench.kernels import FloorKernels
from nvep.bench.network import MOST_STEPS
from nvep.errors import PeerTimeout
from nvep.exchange import Exchange
from nvep.exchange.arguments import COUNTERS
from nvep.group import RankGroup
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape, Memory, Stream
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import SymmetricHeap
from nvep.symmetric.layout import Layout, Region

_DEADLINE_NS = 20_000_000_000
_SHAPE = LaunchShape(1, 32)
STEP_MARKS = 10  # at most, of one step
ARGUMENTS = ArgumentStruct(
    "BenchNetworkArguments",
    [
        Field("peers", "u64"),
        Field("words", "u64"),
        Field("round", "u64"),
        Field("late", "u64"),
        Field("nanoseconds", "u64"),
        Field("rank", "u32"),
        Field("ranks", "u32"),
        Field("count", "u32"),
        Field("unused", "u32"),
    ],
)


def network_kernels() -> dict[str, KernelSource]:
    """Sources by name."""
    folder = KERNEL_ROOT / "testing"
    names = ("bench_align", "bench_arrival")
    return {name: KernelSource(name, ARGUMENTS, file=folder / f"{name}.cu") for name in names}


class NetworkKernels:
    """They and those of `FloorKernels` on this rank's device, and words between ranks. Construction is collective."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._device = group, group.device
        # One for all cases: a capture waits for none before it. Made by all ranks one after the other, as the driver
        # deals streams out in turn to hardware queues, and those that wait for one another must not share one.
        group.barrier()
        self.stream: Stream = group.device.create_stream()
        group.barrier()
        self._resources = ExitStack()
        self._marks = group.together(lambda: FloorKernels(group.device))
        self._kernels = group.together(lambda: group.device.load_all(network_kernels()))
        heap = self._resources.enter_context(SymmetricHeap(group, Layout([Region("Words", 8 * group.size)])))
        self._words = heap.address("Words")
        peers = np.array([heap.address("Words", rank=r) for r in range(group.size)], dtype=np.uint64)
        self._peers, self._round, self._late = (self._own(nbytes) for nbytes in (peers.nbytes, 8, 8))
        self._times = self._own(8 * MOST_STEPS * STEP_MARKS)
        group.device.copy_in(self._peers.address, peers, group.device.default_stream)
        group.device.default_stream.synchronize()

    def _own(self, nbytes: int) -> Memory:
        memory = self._device.allocate(nbytes)
        self._resources.callback(memory.free)
        return memory

    def mark(self, position: int) -> None:
        """Enqueue a mark in time."""
        self._marks.launch("stamp", self.stream, result=self._times.address + 8 * position)

    def times(self, steps: int) -> npt.NDArray[np.uint64]:
        """Nanoseconds of the first ``steps * STEP_MARKS`` marks, after waiting for the stream."""
        found = np.zeros(steps * STEP_MARKS, dtype=np.uint64)
        self._device.copy_out(found, self._times.address, self.stream)
        return found

    def delay(self, microseconds: int) -> None:
        """Enqueue: keep the stream, and nothing else, busy."""
        self._marks.launch("delay", self.stream, nanoseconds=1000 * microseconds)

    def align(self) -> None:
        """Enqueue: go on when every rank's stream is here."""
        fields = {"peers": self._peers.address, "words": self._words, "round": self._round.address}
        self._launch("bench_align", rank=self._group.rank, ranks=self._group.size, **fields)

    def await_signals(self, exchange: Exchange, direction: int) -> None:
        """Enqueue: go on when every signal of the step under way is there; 0 is dispatch, 1 combine."""
        count = exchange.group.size * exchange.config.queues
        counters = exchange.memory.lane_local(0) + exchange.plan.local.offset("Counters")
        words = exchange.memory.heap.address("Signals") + 8 * direction * count
        epoch = counters + COUNTERS.ctype.dispatched.offset
        self._launch("bench_arrival", words=words, round=epoch, count=count)

    def _launch(self, name: str, **fields: int) -> None:
        arguments = ARGUMENTS.new(late=self._late.address, nanoseconds=_DEADLINE_NS, **fields)
        self._device.launch(self._kernels[name], _SHAPE, arguments, self.stream)

    def check(self) -> None:
        """Raise PeerTimeout if some wait was given up; waits for the stream."""
        late = np.zeros(1, dtype=np.uint64)
        self._device.copy_out(late, self._late.address, self.stream)
        if late[0]:
            raise PeerTimeout(int(late[0]) - 1, "the start of a timed step", 0, self._group.rank)

    def close(self) -> None:
        """Free everything; no kernel runs any more."""
        self._resources.close()
