"""Overlap of micro-batches: one's messages travel while another computes. See docs/overlap.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from nvep.arrays import DeviceArray
from nvep.errors import ArgumentError
from nvep.exchange import Exchange
from nvep.moe.layer import MoELayer
from nvep.moe.overlap_batch import (
    MicroBatch,
    ReceiveHook,
    Split,
    agree_split,
    compute_multiprocessors,
    exchange_of,
    send_combine,
    send_dispatch,
    split_tokens,
)
from nvep.moe.overlap_plan import START, EventPlan, plan_events
from nvep.moe.overlap_schedule import COMPUTE, STEP, Phase, Schedule, default_schedule, serial_schedule
from nvep.runtime.device import Event, Graph, Stream

__all__ = [
    "STEP",
    "CapturedStep",
    "MicroBatch",
    "NvtxProbe",
    "OverlapRunner",
    "Phase",
    "Probe",
    "ReceiveHook",
    "Schedule",
    "Split",
    "agree_split",
    "compute_multiprocessors",
    "default_schedule",
    "nvtx_probe",
    "send_combine",
    "send_dispatch",
    "serial_schedule",
    "split_tokens",
]

Computation = Callable[[MicroBatch], object]
_HARDWARE_QUEUES = 32  # of a GPU; streams that share one wait for one another's work


class Probe(Protocol):
    """Told of every phase, right before and right behind it is enqueued."""

    def enter(self, phase: Phase, stream: Stream) -> None:
        """``phase`` is enqueued on ``stream`` next, behind the events that it waits for."""

    def leave(self, phase: Phase, stream: Stream) -> None:
        """It was enqueued."""


class OverlapRunner:
    """Enqueues micro-batches by a schedule, with events between streams where phases need one another.

    Construction is collective. Steps are not: every rank enqueues its own, in the same order.

    Parameters
    ----------
    targets : Exchange, MoELayer, or sequence of them
        What dispatches and combines: one for all layers, or one for each, with a lane for each micro-batch.
    computations : mapping
        What runs the phases that are not the exchange's, by name: called with the `MicroBatch`, it enqueues work on
        ``batch.stream``. Kernels are loaded before the first step, as always. ``"experts"`` may be left out where all
        targets are MoELayers: it is then `MoELayer.experts`.
    schedule : Schedule, optional
        Equal on all ranks. Default: `default_schedule` of one layer.
    streams : mapping, optional
        Streams of the schedule by name, except ``"compute"``, and of `EventPlan.queues`; the runner creates those that
        are not given. Runners that are used in turn may share them.

    Raises
    ------
    ArgumentError
        Too few lanes, a computation missing or unknown, more streams than a GPU shared by ranks of this process has
        queues for, or an exchange with ``dependent_launch``, whose launches would not wait for other streams.
    ConfigMismatch
        Ranks have different schedules.
    """

    def __init__(
        self,
        targets: Exchange | MoELayer | Sequence[Exchange | MoELayer],
        computations: Mapping[str, Computation],
        *,
        schedule: Schedule | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> None:
        found = [targets] if isinstance(targets, (Exchange, MoELayer)) else list(targets)
        if not found or not all(isinstance(target, (Exchange, MoELayer)) for target in found):
            raise ArgumentError("targets", targets, "an Exchange or MoELayer, or one for each layer")
        exchanges = [exchange_of(target) for target in found]
        self.group = exchanges[0].group
        self.device = exchanges[0].device
        self.schedule = default_schedule(exchanges[0].config) if schedule is None else schedule
        self._computations = dict(computations)
        if all(isinstance(target, MoELayer) for target in found):
            self._computations.setdefault("experts", self._run_experts)
        self._given = dict(streams or {})
        self._plans: dict[int, EventPlan] = {}
        self.group.together(lambda: self._check(exchanges))
        self.group.agree("schedule", (str(self.schedule), dict(self.schedule.needs)))
        self._targets = found if len(found) > 1 else found * self.schedule.layers
        self._exchanges = list(dict.fromkeys(exchanges))
        self.multiprocessors = compute_multiprocessors(exchanges[0])
        self._streams = {name: self.device.as_stream(stream) for name, stream in self._given.items()}
        self._events: dict[tuple[int, int], Event] = {}
        for name in self._queues - self._streams.keys():
            self._streams[name] = self.device.create_stream()

    def _check(self, exchanges: list[Exchange]) -> None:
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            raise ArgumentError("schedule", schedule, "a Schedule")
        if len(exchanges) not in (1, schedule.layers):
            raise ArgumentError("targets", f"{len(exchanges)} targets", f"1, or {schedule.layers}: one a layer")
        for exchange in exchanges:
            if exchange.config.lanes < schedule.micro_batches:
                raise ArgumentError("lanes", exchange.config.lanes, f"{schedule.micro_batches} or more: one each")
            if exchange.config.dependent_launch:
                raise ArgumentError("dependent_launch", True, "False: phases here follow work of other streams")
        if set(self._computations) != set(schedule.computations):
            raise ArgumentError("computations", sorted(self._computations), ", ".join(schedule.computations))
        names = {phase.stream for phase in schedule} | set(self._queues)
        for name in self._given:
            if name == COMPUTE or name not in names:
                raise ArgumentError("streams", name, ", ".join(sorted(names - {COMPUTE})) + "; compute is given to run")
        queues = (1 + len(self._queues)) * self.group.ranks_on_device
        if self.group.in_process and not self.device.emulated and queues > _HARDWARE_QUEUES:
            allowed = f"at most {_HARDWARE_QUEUES} streams of all ranks that share a GPU: they wait for one another"
            raise ArgumentError("schedule", f"{queues} streams", allowed)

    @cached_property
    def _queues(self) -> set[str]:
        """Names of the streams that steps use, whatever their number of micro-batches, but the caller's."""
        counts = range(1, self.schedule.micro_batches + 1)
        return {queue for count in counts for queue in self.plan(count).queues} - {COMPUTE}

    def plan(self, micro_batches: int) -> EventPlan:
        """Queues and events of a step of so many micro-batches."""
        if micro_batches not in self._plans:
            self._plans[micro_batches] = plan_events(self.schedule.first(micro_batches))
        return self._plans[micro_batches]

    # --- steps --------------------------------------------------------------------------------------------------------

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        stream: Any = None,
        on_yield: Callable[[Phase], object] | None = None,
        probes: Sequence[Probe] = (),
    ) -> list[DeviceArray]:
        """Enqueue a whole step.

        Parameters
        ----------
        batches : sequence of MicroBatch
            As many as `split_tokens` says, alike on all ranks; with fewer than the schedule has, its other phases are
            left out.
        stream : stream, optional
            The caller's: the step starts behind what is enqueued there, and is part of it once this returns. Default:
            the device's own.
        on_yield : callable, optional
            Called with each phase after it was enqueued.
        probes : sequence of Probe
            Told of every phase.

        Returns
        -------
        list of DeviceArray
            Combine's output of each micro-batch in the last layer.

        Raises
        ------
        ArgumentError
            Before any device work: ``batches`` or ``stream`` is not acceptable.
        DTypeError, ShapeError, StepOrderError, PeerTimeout
            As the phases of `Exchange`. What was enqueued before stays so.
        """
        for phase in self.drive(batches, stream=stream, probes=probes):
            if on_yield is not None:
                on_yield(phase)
        return [batch.output for batch in batches if batch.output is not None]

    def drive(
        self, batches: Sequence[MicroBatch], *, stream: Any = None, probes: Sequence[Probe] = ()
    ) -> Iterator[Phase]:
        """The step as a generator, for engines with a scheduler of their own: each ``next`` enqueues one phase.

        Parameters and errors are those of `run`, checked before this returns. All ranks drive it to the end.
        """
        if not 1 <= len(batches) <= self.schedule.micro_batches or not all(isinstance(b, MicroBatch) for b in batches):
            raise ArgumentError("batches", batches, f"1 to {self.schedule.micro_batches} MicroBatch objects")
        if len({id(batch) for batch in batches}) != len(batches):
            raise ArgumentError("batches", batches, "distinct MicroBatch objects")
        main = self.device.as_stream(stream)
        for exchange in self._exchanges:
            exchange.check()
        for index, batch in enumerate(batches):
            batch.index, batch.multiprocessors = index, self.multiprocessors
            batch.arrivals = batch.partial_rows = batch.output = batch.hook = None
        return self._drive(list(batches), main, list(probes))

    def _drive(self, batches: list[MicroBatch], main: Stream, probes: list[Probe]) -> Iterator[Phase]:
        plan = self.plan(len(batches))
        streams = {**self._streams, COMPUTE: main}
        marks: dict[int, Event] = {}

        def mark(index: int, stream: Stream) -> None:
            spare = self._events.get((len(batches), index))
            marks[index] = self._events[len(batches), index] = stream.mark(spare)

        if plan.start_marked:
            mark(START, main)
        for index, task in enumerate(plan.tasks):
            stream, batch = streams[task.queue], batches[task.phase.micro_batch]
            for waited in task.waits:
                stream.wait(marks[waited])
            batch.layer, batch.stream = task.phase.layer, stream
            for probe in probes:
                probe.enter(task.phase, stream)
            self._enqueue(task.phase, batch, stream)
            for probe in reversed(probes):
                probe.leave(task.phase, stream)
            if task.marked:
                mark(index, stream)
            if index == len(plan.tasks) - 1:
                for joined in plan.joins:
                    main.wait(marks[joined])
            yield task.phase

    def _enqueue(self, phase: Phase, batch: MicroBatch, stream: Stream) -> None:
        target = self._targets[phase.layer]
        if phase.name == "dispatch_send":
            send_dispatch(target, batch, lane=phase.micro_batch, stream=stream)
        elif phase.name == "combine_send":
            send_combine(target, batch, stream=stream)
        elif phase.name in ("dispatch_recv", "combine_recv"):
            batch.receive()
        else:
            self._computations[phase.name](batch)

    def _run_experts(self, batch: MicroBatch) -> None:
        layer = self._targets[batch.layer]
        assert isinstance(layer, MoELayer)
        assert batch.arrivals is not None
        layer.experts(batch.arrivals, stream=batch.stream)

    def capture(
        self, batches: Sequence[MicroBatch], *, stream: Any = None, probes: Sequence[Probe] = ()
    ) -> CapturedStep:
        """Record a whole step, all streams of it, as one graph. Collective: no rank replays before all have captured.

        Inputs change by writing to the same arrays. Parameters and errors are those of `run`; a failed capture leaves
        the lanes where they were.
        """
        main = self.device.as_stream(stream)

        def record() -> CapturedStep:
            with ExitStack() as undo:
                with self.device.capture(main) as graph:
                    undo.callback(graph.close)
                    outputs = self.run(batches, stream=main, probes=probes)
                undo.pop_all()
            return CapturedStep(graph, outputs, self._exchanges)

        return self.group.together(record)


class CapturedStep:
    """A step as one graph.

    Attributes
    ----------
    graph : Graph
        Launch it through `launch`.
    outputs : list of DeviceArray
        Combine's output of each micro-batch, written by every launch.
    """

    def __init__(self, graph: Graph, outputs: list[DeviceArray], exchanges: list[Exchange]) -> None:
        self.graph = graph
        self.outputs = outputs
        self._exchanges = exchanges

    def launch(self, stream: Stream) -> None:
        """Enqueue the step on ``stream``.

        Raises
        ------
        PeerTimeout
            An earlier step failed.
        """
        for exchange in self._exchanges:
            exchange.check()
            exchange.wake()
        self.graph.launch(stream)

    def close(self) -> None:
        """Free the graph, whose launches have completed."""
        self.graph.close()


class NvtxProbe:
    """Shows phases as NVTX ranges of the host thread, for Nsight Systems.

    Parameters
    ----------
    nvtx : module
        The package ``nvtx``.
    rank : int
        Shown with every phase.
    """

    def __init__(self, nvtx: Any, rank: int) -> None:
        self._nvtx = nvtx
        self._domain = f"nvep rank {rank}"

    def enter(self, phase: Phase, stream: Stream) -> None:
        self._nvtx.push_range(f"{phase.name} {phase.layer}.{phase.micro_batch}", domain=self._domain)

    def leave(self, phase: Phase, stream: Stream) -> None:
        self._nvtx.pop_range(domain=self._domain)


def nvtx_probe(rank: int) -> NvtxProbe | None:
    """A probe that makes NVTX ranges; None where the package ``nvtx`` is not installed."""
    try:
        return NvtxProbe(import_module("nvtx"), rank)
    except ImportError:
        return None
