"""What the machine allows: bandwidths, latencies and launches, measured by bare kernels, and the floor of a case."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from nvep.bench.cases import Case
from nvep.bench.inputs import Ids
from nvep.bench.kernels import FloorKernels
from nvep.errors import PeerTimeout
from nvep.group import RankGroup
from nvep.group.placement import physical_device
from nvep.runtime.device import LaunchShape, Stream
from nvep.symmetric import SymmetricHeap
from nvep.symmetric.layout import Layout, Region

_DEADLINE_NS = 20_000_000_000
_REPEATS = 5


@dataclass(frozen=True)
class Floors:
    """Measured on the ranks of one group; GB/s are 10^9 bytes, latencies in microseconds.

    Attributes
    ----------
    device : str
        The device, or devices.
    gpus : tuple of int
        For each rank, the lowest rank on the same GPU: equal entries share one.
    local_copy_gbs, cached_copy_gbs : float
        Bytes read plus bytes written a second by a copy kernel on one GPU, in memory and within the second-level cache.
    peer_push_gbs : float or None
        Bytes a second that each of two GPUs stores into the other at once; None where all ranks share a GPU.
    flag_us, flag_ordered_us : float or None
        One way of a word between two ranks, relaxed and with release and acquire: half a round trip. None for one rank.
    launch_us, dependent_launch_us : float
        An empty kernel of a graph, plain and with programmatic dependent launch.
    """

    device: str
    gpus: tuple[int, ...]
    local_copy_gbs: float
    cached_copy_gbs: float
    peer_push_gbs: float | None
    flag_us: float | None
    flag_ordered_us: float | None
    launch_us: float
    dependent_launch_us: float


@dataclass(frozen=True)
class CaseFloor:
    """Microseconds that the machine needs for a phase, and the bytes behind it.

    Attributes
    ----------
    dispatch_us, combine_us : float
        Of each phase; `pair_us` is their sum.
    link_bytes : int
        Most bytes that leave or enter one GPU, dispatch and combine together; 0 where all ranks share a GPU.
    remote_bytes : int
        Bytes that go from a rank to another one, all ranks together, dispatch and combine.
    """

    dispatch_us: float
    combine_us: float
    link_bytes: int
    remote_bytes: int

    @property
    def pair_us(self) -> float:
        return self.dispatch_us + self.combine_us


def measure_floors(group: RankGroup, kernels: FloorKernels) -> Floors:
    """Measure on the ranks of ``group``. Collective; the same result on every rank.

    Raises
    ------
    PeerTimeout
        Two ranks did not see one another's words.
    """
    names = group.allgather((physical_device(group.device), group.device.name))
    gpus = tuple([name for name, _ in names].index(name) for name, _ in names)
    megabytes = 8 if group.device.emulated else 256
    layout = Layout([Region("Flag", 8), Region("Landing", megabytes << 20)])
    with SymmetricHeap(group, layout) as heap, ExitStack() as cleanup:
        bench = _Bench(group, heap, kernels, cleanup)
        launch, dependent = bench.launch_us(False), bench.launch_us(True)
        local, cached = bench.local_copy_gbs(megabytes << 20), bench.cached_copy_gbs(launch)
        push = bench.peer_push_gbs(gpus, megabytes << 20)
        flag, ordered = bench.flag_us(False), bench.flag_us(True)
        group.barrier()
    kinds = sorted({name.split(" (", 1)[0] for _, name in names})
    device = f"{len(set(gpus))} x {', '.join(kinds)}" if not group.device.emulated else names[0][1]
    return Floors(device, gpus, local, cached, push, flag, ordered, launch, dependent)


class _Bench:
    """One rank's measurements; every method is collective."""

    def __init__(self, group: RankGroup, heap: SymmetricHeap, kernels: FloorKernels, cleanup: ExitStack) -> None:
        self._group, self._heap, self._kernels = group, heap, kernels
        self._device = group.device
        self._stream: Stream = self._device.create_stream()
        self._source = self._device.allocate(heap.layout.region("Landing").nbytes)
        self._result = self._device.allocate(8)
        cleanup.callback(self._source.free)
        cleanup.callback(self._result.free)
        self._words = 0

    def _graph_us(self, enqueue: Callable[[], None], count: int) -> float:
        """Microseconds of one of ``count`` repetitions in a graph: the median of replays behind a delay."""
        with self._device.capture(self._stream) as graph:
            for _ in range(count):
                enqueue()
        times = []
        for _ in range(_REPEATS + 1):
            if not self._device.emulated:
                self._kernels.launch("delay", self._stream, nanoseconds=500_000)
            start = self._stream.record()
            graph.launch(self._stream)
            end = self._stream.record()
            end.synchronize()
            times.append(end.elapsed_ms(start) * 1e3 / count)
        graph.close()
        return statistics.median(times[1:])

    def _alone(self, measure: Callable[[], float]) -> float:
        """``measure()`` on rank 0, while the others wait."""
        found: list[float] = self._group.allgather(measure() if self._group.rank == 0 else 0.0)
        return found[0]

    def launch_us(self, dependent: bool) -> float:
        shape = LaunchShape(1, 32, dependent=dependent)
        count = 4 if self._device.emulated else 100
        return self._alone(
            lambda: self._graph_us(lambda: self._kernels.launch("empty", self._stream, shape=shape), count)
        )

    def _copy_us(self, target: int, nbytes: int, blocks: int, count: int) -> float:
        shape = LaunchShape(blocks, self._device.default_threads)
        fields = {"source": self._source.address, "target": target, "count": nbytes // 16}
        return self._graph_us(lambda: self._kernels.launch("copy", self._stream, shape=shape, **fields), count)

    def _block_counts(self) -> tuple[int, ...]:
        processors = self._device.multiprocessors
        return (4,) if self._device.emulated else (processors // 2, processors, 2 * processors, 8 * processors)

    def local_copy_gbs(self, nbytes: int) -> float:
        """Read plus written, the best number of blocks."""
        target = self._heap.address("Landing")
        best = self._alone(lambda: min(self._copy_us(target, nbytes, b, 2) for b in self._block_counts()))
        return 2 * nbytes / best / 1e3

    def cached_copy_gbs(self, launch_us: float) -> float:
        """The same for 8 MiB, which stay in the second-level cache; the launch is taken off."""
        nbytes, target = 4 << 20, self._heap.address("Landing")
        best = self._alone(lambda: min(self._copy_us(target, nbytes, b, 10) for b in self._block_counts()))
        return 2 * nbytes / max(best - launch_us, 1e-3) / 1e3

    def peer_push_gbs(self, gpus: tuple[int, ...], nbytes: int) -> float | None:
        """One rank a GPU stores to the next GPU, all at once; the slowest, with the best number of blocks."""
        if len(set(gpus)) < 2:
            return None
        leaders = sorted(set(gpus))
        me = self._group.rank
        found: list[float] = []
        for blocks in self._block_counts():
            self._group.barrier()
            time_us = 0.0
            if me in leaders:
                peer = leaders[(leaders.index(me) + 1) % len(leaders)]
                time_us = self._copy_us(self._heap.address("Landing", rank=peer), nbytes, blocks, 2)
            found.append(max(self._group.allgather(time_us)))
        return nbytes / min(found) / 1e3

    def flag_us(self, ordered: bool) -> float | None:
        """Half a round trip between rank 0 and the last rank."""
        me, last = self._group.rank, self._group.size - 1
        rounds = 20 if self._device.emulated else 1000
        times: list[float] = []
        for _ in range(_REPEATS if last else 0):
            nanoseconds = 0
            self._device.fill(self._result.address, 0, 8, self._stream)
            self._stream.synchronize()
            self._group.barrier()  # nothing is left to do but to launch while the other kernel waits
            if me in (0, last):
                nanoseconds = self._ping(last - me, rounds, ordered)
            base, self._words = self._words, self._words + rounds + 1
            times.append(max(self._group.allgather(nanoseconds)) / rounds / 2e3)
            if times[-1] == 0:
                raise PeerTimeout(last, "flag", base, 0)
        return statistics.median(times) if times else None

    def _ping(self, peer: int, rounds: int, ordered: bool) -> int:
        self._kernels.launch(
            "flag",
            self._stream,
            source=self._heap.address("Flag"),
            target=self._heap.address("Flag", rank=peer),
            result=self._result.address,
            count=rounds,
            base=self._words + 1,
            nanoseconds=_DEADLINE_NS,
            first=int(peer != 0),
            ordered=int(ordered),
        )
        found = np.zeros(1, dtype=np.uint64)
        self._device.copy_out(found, self._result.address, self._stream)
        return int(found[0])


def floor_of(case: Case, floors: Floors, ids: list[Ids]) -> CaseFloor:
    """The floor of a case whose ranks route ``ids`` (by rank, one input set).

    A phase is one launch, one way of a flag, and its bytes: over the busiest direction of a GPU's links at the push
    rate, or through the memory of the GPU with most of them at the copy rate, whichever takes longer. Through memory go
    every token read once and every row written once in dispatch, every partial row read once and every sum written
    once in combine.
    """
    payload, partial = sum(case.payload_bytes), 2 * case.hidden
    owners = case.config().expert_ranks(case.ranks)
    rows = np.zeros((case.ranks, case.ranks), dtype=np.int64)  # [source, target]
    sent = np.zeros(case.ranks, dtype=np.int64)  # tokens that go anywhere
    for source, chosen in enumerate(ids):
        goes = np.zeros((len(chosen), case.ranks), dtype=bool)
        np.put_along_axis(goes, owners[chosen], True, axis=1)
        rows[source], sent[source] = goes.sum(axis=0), goes.any(axis=1).sum()
    gpus = np.array(floors.gpus)
    crossing = np.where(gpus[:, None] != gpus[None, :], rows, 0)
    leaving = [max(crossing[gpus == g].sum(), crossing[:, gpus == g].sum()) for g in set(floors.gpus)]
    link_rows = int(max(leaving))
    memory_rows = [(rows[:, gpus == g].sum(), sent[gpus == g].sum()) for g in set(floors.gpus)]
    through = max(int(r + t) for r, t in memory_rows)
    remote = int(rows.sum() - np.trace(rows))
    dispatch, combine = (_phase_us(floors, nbytes, link_rows=link_rows, rows=through) for nbytes in (payload, partial))
    return CaseFloor(dispatch, combine, link_rows * (payload + partial), remote * (payload + partial))


_CACHED_BYTES = 16 << 20


def _phase_us(floors: Floors, row_bytes: int, *, link_rows: int, rows: int) -> float:
    nbytes = rows * row_bytes
    memory_us = nbytes / (floors.cached_copy_gbs if nbytes <= _CACHED_BYTES else floors.local_copy_gbs) / 1e3
    link_us = link_rows * row_bytes / floors.peer_push_gbs / 1e3 if floors.peer_push_gbs else 0.0
    launch = min(floors.launch_us, floors.dependent_launch_us)
    return launch + (floors.flag_us or 0.0) + max(memory_us, link_us)
