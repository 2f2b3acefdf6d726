"""Timelines of overlapped steps: when each phase ran on each rank, all on one clock. See docs/overlap.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.bench.cases import Case
from nvep.bench.clocks import ClockOffsets, clock_offsets, one_clock
from nvep.bench.inputs import Ids, Inputs
from nvep.bench.kernels import FloorKernels
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.moe.overlap import (
    MicroBatch,
    OverlapRunner,
    Phase,
    Probe,
    Schedule,
    default_schedule,
    nvtx_probe,
    serial_schedule,
    split_tokens,
)
from nvep.moe.overlap_plan import START, EventPlan
from nvep.moe.synthetic import ScaleExperts
from nvep.runtime.device import Graph, LaunchShape, Stream

MODES = ("on", "off", "single")
_ENTERED, _LEFT, _BEGUN, _FIRST = 0, 1, 2, 3  # marks around the step that brings ranks together; those of phases follow
_BUSY_THREADS = 256
_WARM_UP = 2

Stamps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TimelineCase:
    """A step of ``layers`` layers, computations standing in for attention and experts.

    Attributes
    ----------
    case : Case
        Ranks, tokens of each, rows (bf16), routing, protocol and blocks.
    transport : str
        Of the exchange.
    micro_batches, layers : int
        Of the step.
    attention_us, experts_us : float
        How long a computation keeps its multiprocessors busy, however many tokens it has, as where reading weights
        takes longest. Experts also scale rows, so that every bit can be compared.
    schedule : Schedule, optional
        Of mode ``"on"``; default: `default_schedule`.
    graph : bool
        Replay a graph of the step. Else the host enqueues every step; the emulated device overlaps streams only so.
    """

    case: Case
    transport: str = "nvlink"
    micro_batches: int = 2
    layers: int = 1
    attention_us: float = 20.0
    experts_us: float = 20.0
    schedule: Schedule | None = field(default=None, compare=False)
    graph: bool = True

    def config(self) -> ExchangeConfig:
        """The exchange it runs on; lanes for every micro-batch, in every mode."""
        if self.case.format != "bf16" or self.case.hidden % 8:
            raise ArgumentError("hidden", self.case.hidden, "bf16 rows of a multiple of 8 elements")
        if not 1 <= self.micro_batches <= self.case.tokens:
            raise ArgumentError("micro_batches", self.micro_batches, f"1 to {self.case.tokens}: a token for each")
        return replace(self.case.config(), lanes=self.micro_batches, transport=self.transport)

    def schedule_of(self, mode: str) -> Schedule:
        """``"on"``: overlapped. ``"off"``: the same micro-batches one after the other. ``"single"``: one holds all."""
        config = self.config()
        if mode == "on":
            return self.schedule or default_schedule(config, layers=self.layers)
        if mode not in MODES:
            raise ArgumentError("mode", mode, ", ".join(MODES))
        return serial_schedule(config, layers=self.layers, micro_batches=1 if mode == "single" else None)


@dataclass(frozen=True)
class PhaseSpan:
    """A phase on a rank; microseconds since the first rank began."""

    rank: int
    phase: Phase
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """A replay of a step, the median one, and what the same step takes without marks.

    Attributes
    ----------
    mode : str
        See `TimelineCase.schedule_of`.
    spans : tuple of PhaseSpan
        By rank, then in the order of the schedule.
    plan : EventPlan
        Queues and events.
    marked_us : float
        This replay, on the slowest rank, marks included.
    step_us : tuple of float
        By replay, without marks: from when the ranks were together to the end, on the slowest rank.
    mark_us : float
        What one mark costs.
    clock_error_us : float
        Ranks' clocks agree this well.
    digests : tuple of str
        Of each rank's output.
    """

    mode: str
    spans: tuple[PhaseSpan, ...]
    plan: EventPlan
    marked_us: float
    step_us: tuple[float, ...]
    mark_us: float
    clock_error_us: float
    digests: tuple[str, ...]

    @property
    def median_us(self) -> float:
        return float(np.median(self.step_us))

    def summary(self, rank: int) -> dict[str, float]:
        """Microseconds of a rank in this replay: what its phases take, and what of it lies beside other phases.

        ``hidden`` is computation + communication - step, gaps counted as negative; ``exposed`` is the part of the step
        in which nothing computes.
        """
        mine = [span for span in self.spans if span.rank == rank]
        computing = [s for s in mine if s.phase.name in ("attention", "experts")]
        computation = sum(s.end_us - s.start_us for s in computing)
        total = sum(s.end_us - s.start_us for s in mine)
        step = max(s.end_us for s in mine) - min(s.start_us for s in mine)
        exposed = step - _covered([(s.start_us, s.end_us) for s in computing])
        found = {"step": step, "computation": computation, "communication": total - computation}
        return {**found, "hidden": total - step, "exposed": exposed}


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return float(total)


class _Recorder:
    """One rank's steps in one mode, with and without marks."""

    def __init__(
        self, exchange: Exchange, case: TimelineCase, mode: str, *, stream: Stream, resources: ExitStack
    ) -> None:
        self._exchange, self._case, self._device = exchange, case, exchange.device
        group = exchange.group
        self._kernels = group.together(lambda: FloorKernels(self._device))
        self._experts = group.together(lambda: ScaleExperts(exchange))
        computations = {"attention": self._attend, "experts": self._compute}
        self.runner = OverlapRunner(exchange, computations, schedule=case.schedule_of(mode))
        self.stream = stream
        config = exchange.config
        self._next = _FIRST
        self._marks = _FIRST + 2 * len(self.runner.schedule) + 1
        self._memory = self._device.allocate(8 * self._marks)
        shape, dtype = (case.case.tokens, config.elements), partial_dtype(config.partial_format)
        self._final = self._device.allocate(shape[0] * shape[1] * dtype.itemsize)
        self._output = DeviceArray(self._final.address, shape, dtype, owner=ArrayOwner(self._device))
        for memory in (self._memory, self._final):
            resources.callback(memory.free)
        resources.callback(exchange.drain)

    def mark(self, index: int, stream: Stream) -> None:
        self._kernels.launch("stamp", stream, result=self._memory.address + 8 * index)

    def _busy(self, batch: MicroBatch, microseconds: float) -> None:
        shape = LaunchShape(1, 1) if self._device.emulated else LaunchShape(batch.multiprocessors, _BUSY_THREADS)
        self._kernels.launch("delay", batch.stream, shape=shape, nanoseconds=int(microseconds * 1e3))

    def _attend(self, batch: MicroBatch) -> None:
        if batch.layer:
            batch.tokens = batch.output  # of the layer before
        last = batch.layer == self._case.layers - 1
        batch.out = batch.data if last else None
        self._busy(batch, self._case.attention_us)

    def _compute(self, batch: MicroBatch) -> None:
        assert batch.arrivals is not None
        self._busy(batch, self._case.experts_us)
        self._experts(batch.arrivals, stream=batch.stream)

    def _batches(self, inputs: Inputs) -> list[MicroBatch]:
        rows, ids, weights = inputs[0]
        count, config = self._case.case.tokens, self._exchange.config
        lanes = self.runner.schedule.micro_batches
        split = split_tokens(count, most=count, config=replace(config, lanes=lanes))
        return [MicroBatch(rows[0][s], ids[s], weights[s], data=self._output[s]) for s in split.slices]

    def prepare(self, inputs: Inputs, *, marked: bool, resources: ExitStack) -> Callable[[], None]:
        """What enqueues a step without tokens, which brings the ranks together, and a step. Collective."""
        probes: list[Probe] = [self] if marked else []
        ranges = nvtx_probe(self._exchange.group.rank)
        probes += [ranges] if ranges is not None else []
        batches = self._batches(inputs)

        def enqueue() -> None:
            self._next = _FIRST
            self.mark(_ENTERED, self.stream)
            nothing = self._exchange.dispatch(*inputs[0], num_tokens=0, stream=self.stream)
            self._exchange.release(nothing, stream=self.stream)
            for index in (_LEFT, _BEGUN):
                self.mark(index, self.stream)
            self.runner.run(batches, stream=self.stream, probes=probes)
            self.mark(self._marks - 1, self.stream)

        def record() -> Graph:
            with self._device.capture(self.stream) as graph:
                enqueue()
            return graph

        if not self._case.graph:
            return enqueue
        graph = self._exchange.group.together(record)
        resources.callback(graph.close)
        resources.callback(self.stream.synchronize)
        return lambda: graph.launch(self.stream)

    def enter(self, phase: Phase, stream: Stream) -> None:
        """As a Probe: a mark before each phase and one behind it, on the stream that it runs on."""
        self.mark(self._next, stream)
        self._next += 1

    leave = enter

    def replay(self, enqueue: Callable[[], None], times: int) -> Stamps:
        """Marks of each replay: int64 ``[times, marks]``, nanoseconds of this rank's clock."""
        found = np.zeros((_WARM_UP + times, self._marks), dtype=np.uint64)
        for row in found:
            self._exchange.wake()
            enqueue()
            self._device.copy_out(row, self._memory.address, self.stream)
            self._exchange.check()
        return found[_WARM_UP:].astype(np.int64)

    def digest(self) -> str:
        """Of the output's bytes."""
        return hashlib.sha256(np.ascontiguousarray(self._output.numpy()).view(np.uint8).tobytes()).hexdigest()


def record_timeline(
    exchange: Exchange, case: TimelineCase, mode: str, *, inputs: Inputs, stream: Stream, replays: int = 20
) -> Timeline:
    """Run a step in ``mode``, with and without marks. Collective; the same result on every rank.

    Parameters
    ----------
    exchange : Exchange
        Of ``case.config()``.
    case : TimelineCase
        What to run.
    mode : str
        See `TimelineCase.schedule_of`.
    inputs : Inputs
        This rank's tokens.
    stream : Stream
        Of this rank, for computations.
    replays : int
        Of the step with marks, and of that without.

    Raises
    ------
    ArgumentError
        The case cannot run in this mode.
    PeerTimeout
        A rank did not answer.
    """
    group = exchange.group
    with ExitStack() as resources:
        recorder = _Recorder(exchange, case, mode, stream=stream, resources=resources)
        stamps = []
        for marked in (False, True):
            enqueue = recorder.prepare(inputs, marked=marked, resources=resources)
            stamps.append(np.array(group.allgather(recorder.replay(enqueue, replays))))  # [ranks, replays, marks]
            group.barrier()
        digests = tuple(group.allgather(recorder.digest()))
        plain, marked_stamps = stamps
        return _timeline(recorder.runner, mode, plain=plain, marked=marked_stamps, digests=digests)


def _timeline(runner: OverlapRunner, mode: str, *, plain: Stamps, marked: Stamps, digests: tuple[str, ...]) -> Timeline:
    clocks = _clocks(runner.group, np.concatenate([plain, marked], axis=1))
    durations = (marked[..., -1] - marked[..., _BEGUN]).max(axis=0)
    chosen = int(np.argsort(durations)[len(durations) // 2])
    times = marked[:, chosen] + np.rint(clocks.offset_ns).astype(np.int64)[:, None]
    times = (times - times[:, _BEGUN].min()) / 1e3
    phases = runner.schedule.phases
    spans = tuple(
        PhaseSpan(rank, phase, float(row[_FIRST + 2 * i]), float(row[_FIRST + 2 * i + 1]))
        for rank, row in enumerate(times)
        for i, phase in enumerate(phases)
    )
    return Timeline(
        mode=mode,
        spans=spans,
        plan=runner.plan(runner.schedule.micro_batches),
        marked_us=float(durations[chosen]) / 1e3,
        step_us=tuple(((plain[..., -1] - plain[..., _BEGUN]).max(axis=0) / 1e3).tolist()),
        mark_us=float((marked[..., _BEGUN] - marked[..., _LEFT]).mean()) / 1e3,
        clock_error_us=float(clocks.error_ns.max()) / 1e3,
        digests=digests,
    )


def _clocks(group: RankGroup, stamps: Stamps) -> ClockOffsets:
    """Offsets of ranks' clocks, from marks around the steps without tokens."""
    if group.device.emulated or group.ranks_on_device == group.size:
        return one_clock(group.size)
    return clock_offsets(stamps[..., _ENTERED].T, stamps[..., _LEFT].T)


def waited_for(timeline: Timeline) -> list[tuple[int, int, str]]:
    """(span, later span, why), by position in ``spans``: events between streams, and the last send of each receive."""
    tasks = timeline.plan.tasks
    each = len(tasks)
    ranks = len(timeline.spans) // each
    position = {(t.phase.layer, t.phase.micro_batch, t.phase.name): i for i, t in enumerate(tasks)}
    found = []
    for index, task in enumerate(tasks):
        for rank in range(ranks):
            base = rank * each
            found += [(base + w, base + index, "event") for w in task.waits if w != START]
        if task.phase.name.endswith("recv"):
            sent = position[task.phase.layer, task.phase.micro_batch, task.phase.name.replace("recv", "send")]
            latest = max((rank * each + sent for rank in range(ranks)), key=lambda i: timeline.spans[i].end_us)
            found += [(latest, rank * each + index, "messages") for rank in range(ranks) if latest // each != rank]
    return found


def run_timelines(
    group: RankGroup, case: TimelineCase, modes: Sequence[str], *, recorded: Ids | None = None, replays: int = 20
) -> list[Timeline]:
    """`record_timeline` of each mode over one exchange. Collective; the same result on every rank.

    Parameters
    ----------
    group : RankGroup
        Of ``case.case.ranks`` ranks.
    case : TimelineCase
        What to run.
    modes : sequence of str
        Which of `MODES`, in this order.
    recorded : numpy.ndarray, optional
        int32 ``[tokens, top_k]`` of a router log, for ``routing="recorded"``.
    replays : int
        Of each step.
    """
    config = group.together(case.config)
    with ExitStack() as cleanup:
        inputs = group.together(lambda: Inputs(group, case.case, recorded))
        cleanup.callback(inputs.close)
        exchange = cleanup.enter_context(Exchange(group, config))
        stream = exchange.device.create_stream()  # one for all: every stream takes one of a GPU's few queues
        return [record_timeline(exchange, case, mode, inputs=inputs, stream=stream, replays=replays) for mode in modes]
