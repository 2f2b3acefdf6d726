"""Streams of messages over the soft NIC under the weak memory model: senders, engine, host thread and receivers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nvep.errors import NvepError
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.group.local import LocalGroup, _Rendezvous
from nvep.nic.layouts import READY_QUEUE, ring_prelude
from nvep.nic.soft import SoftNic, SoftNicModel
from nvep.nic.soft.engine import SoftEngine
from nvep.nic.soft.layouts import CONTROL, STOP_WHEN_IDLE
from nvep.nic.soft.ready_thread import ReadyQueue
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Event, LaunchShape
from nvep.runtime.simulated import Chance, Rule, SimulatedDevice, SimulatedStream, Simulation, SimulationOptions
from nvep.runtime.simulated_library import SimulatorLibrary
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import SymmetricHeap
from nvep.testing.nic_streams import HANDLES, STREAM_ARGUMENTS, StreamCase, open_rings

READY_ARGUMENTS = ArgumentStruct(
    "NicReadyArguments", [Field(name, "u64") for name in ("queues", "count", "idle_ns", "stop")]
)
STOP_ARGUMENTS = ArgumentStruct("NicStopArguments", [Field(n, "u64") for n in ("engine", "when_idle", "host_thread")])
_STREAMS = 6  # of a rank: its own, the engine's, and those of sender, receiver, host thread and end
_IDLE_S = 3.0  # of simulated time: beyond the deadline of an exchange
_BUDGET = 10_000_000  # decisions; a sound run takes about one million


@dataclass(frozen=True)
class NicScenario:
    """A run of streams, complete but for the kernels.

    Attributes
    ----------
    case : StreamCase
    seed : int
        Of the schedule and of what loads return.
    chance : Chance
    rules : tuple of Rule
        A schedule written by hand.
    """

    case: StreamCase
    seed: int
    chance: Chance = field(default_factory=Chance)
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class NicRun:
    """What came of it: None, or what went wrong in one line; and decisions taken."""

    symptom: str | None
    decisions: int


def nic_scenario(scheme: str, seed: int, **changes: Any) -> NicScenario:
    """A scenario of two or three ranks drawn from ``seed``: rings go round, and what has no order is reordered."""
    draw = random.Random(seed)
    model = SoftNicModel(
        latency_ns=draw.choice((0, 2000)), idle_s=_IDLE_S, seed=seed, reorder=draw.random() < 0.7,
        busy_odds=draw.choice((0, 200)), placement=draw.choice(("default", "host", "device")),
    )  # fmt: skip
    by_warp, targets = draw.random() < 0.2, draw.choice((1, 1, 6))
    case = StreamCase(
        scheme, ranks=draw.choice((2, 3)), warps=2, messages=draw.choice((20, 44)), slot_bytes=32,
        staged=draw.choice((8, 64)), add=draw.random() < 0.5, inline=draw.random() < 0.3,
        targets=1 if by_warp else targets, queues=draw.choice((1, 2)), by_warp=by_warp, seed=seed % 4, deadline_s=20.0,
        model=model,
    )  # fmt: skip
    if by_warp:
        case = replace(case, messages=64, staged=32, slot_bytes=16, inline=False)
    if case.targets > 1:
        case = replace(case, messages=12, inline=False)
    return NicScenario(replace(case, **changes), seed)


def ready_source() -> KernelSource:
    """Free Flow's host thread as a kernel."""
    prelude = f'{ring_prelude()}#include "primitives/memory.cuh"\n'
    return KernelSource("nic_ready", READY_ARGUMENTS, prelude, KERNEL_ROOT / "testing" / "nic_ready.cu")


def stop_source() -> KernelSource:
    """Stores the words that end engine and host thread."""
    prelude = '#include "primitives/types.cuh"\n'
    return KernelSource("nic_stop", STOP_ARGUMENTS, prelude, KERNEL_ROOT / "testing" / "nic_stop.cu")


class SimulatedEngine(SoftEngine):
    """Of one rank, and with a kernel for its host thread."""

    def __init__(self, device: SimulatedDevice, model: SoftNicModel) -> None:
        self.queues: list[ReadyQueue] = []
        self._ready_table: np.ndarray | None = None
        self._ready_stop = np.zeros(1, np.uint64)
        self._streams: dict[str, SimulatedStream] = {}
        super().__init__(device, model)

    def add_ready_queues(self, queues: list[ReadyQueue]) -> None:
        self.queues += queues

    def remove_ready_queues(self, numbers: list[int]) -> None:
        """They go with the simulation."""

    def _watch(self) -> None:
        """Nothing runs beside the simulation; the engine's time is long enough."""

    def _start(self) -> None:
        assert isinstance(self._device, SimulatedDevice)
        if self._device.simulation.started:  # it is not once something failed, and nothing runs any more
            super()._start()

    def start_host_thread(self) -> None:
        """Launch it, if anything is to be rung for, until it had nothing to do for a while."""
        device = self._device
        if not self.queues:
            return
        assert isinstance(device, SimulatedDevice)
        if self._ready_table is None:
            self._ready_table = _table(self.queues)
        kernel = device.load(ready_source())
        arguments = READY_ARGUMENTS.new(
            queues=self._ready_table.ctypes.data,
            count=len(self.queues),
            idle_ns=round(self.model.idle_s * 1e9),
            stop=self._ready_stop.ctypes.data,
        )
        device.launch(kernel, LaunchShape(1, 1), arguments, self._stream_of("host thread"))

    def stop_behind(self, events: list[Event]) -> None:
        """Once ``events`` are reached: leave when nothing is left to do. A search would else wait long for idleness."""
        stream = self._stream_of("stop")
        for event in events:
            stream.wait(event)
        arguments = STOP_ARGUMENTS.new(
            engine=self._control_memory.address + CONTROL.ctype.stop.offset,
            when_idle=STOP_WHEN_IDLE,
            host_thread=self._ready_stop.ctypes.data,
        )
        self._device.launch(self._device.load(stop_source()), LaunchShape(1, 1), arguments, stream)

    def forget_stop(self) -> None:
        """As before `stop_behind`. The simulation stands still."""
        self._control[CONTROL.ctype.stop.offset // 8] = 0
        self._ready_stop[0] = 0

    def _stream_of(self, purpose: str) -> SimulatedStream:
        device = self._device
        assert isinstance(device, SimulatedDevice)
        if purpose not in self._streams:
            self._streams[purpose] = SimulatedStream(device.simulation, device.rank)
        return self._streams[purpose]


def adapter_maker(simulation: Simulation, seed: int) -> Callable[[RankGroup], SoftNic]:
    """What makes each rank's simulated adapter, which reorders what it may and is busy now and then."""
    model = SoftNicModel(seed=seed, reorder=seed % 3 != 0, busy_odds=200 * (seed % 2), idle_s=_IDLE_S)

    def make(group: RankGroup) -> SoftNic:
        return SoftNic(group, model, engine=SimulatedEngine(SimulatedDevice(simulation, group.rank), model))

    return make


def engines(exchanges: Iterable[Exchange]) -> Iterator[SimulatedEngine]:
    """Of exchanges over a network adapter."""
    for exchange in exchanges:
        if exchange.network is not None:
            assert isinstance(exchange.network.engine, SimulatedEngine)
            yield exchange.network.engine


class _Rank:
    """One simulated rank."""

    def __init__(self, group: LocalGroup, simulation: Simulation, case: StreamCase, cleanup: ExitStack) -> None:
        self.case, self.group, self.simulation = case, group, simulation
        assert isinstance(group.device, SimulatedDevice)
        self.device = group.device
        self.engine = SimulatedEngine(SimulatedDevice(simulation, group.rank), case.model)
        self.heap = cleanup.enter_context(SymmetricHeap(group, case.layout()))
        self.nic = cleanup.enter_context(SoftNic(group, case.model, engine=self.engine))
        self.rings = open_rings(group, self.heap, self.nic, case.specs())
        self.kernels = self.device.load_all(case.kernels())
        self.errors = np.zeros(4, np.uint32)

    def enqueue(self) -> list[Event]:
        """All kernels of the rank, each on a stream of its own; events behind sender and receiver."""
        case = self.case
        self.nic.wake()
        arguments = STREAM_ARGUMENTS.new(
            rings=self.rings,
            **{name.lower(): self.heap.address(name) for name in HANDLES},
            errors=self.errors.ctypes.data,
            deadline=round(case.deadline_s * 1e9),
            rank=self.group.rank,
        )
        shapes = {"nic_send": LaunchShape(1, 32 * case.warps), "nic_receive": LaunchShape(case.ranks, 32 * case.warps)}
        events = []
        for name, shape in shapes.items():
            stream = SimulatedStream(self.simulation, self.group.rank)
            self.device.launch(self.kernels[name], shape, arguments, stream)
            events.append(stream.record())
        self.engine.start_host_thread()
        return events

    def symptom(self) -> str | None:
        wrong, senders, receivers, _ = self.errors.tolist()
        if wrong or senders or receivers:
            who = f"rank {self.group.rank}"
            return f"{who}: {wrong} wrong words, {senders} senders and {receivers} receivers gave up"
        return None


def _table(queues: list[ReadyQueue]) -> np.ndarray:
    raw = b"".join(
        bytes(READY_QUEUE.new(**{name: getattr(queue, name) for name in queue.__dataclass_fields__}))
        for queue in queues
    )
    return np.frombuffer(bytearray(raw), np.uint64)


def _ranks(simulation: Simulation, case: StreamCase, cleanup: ExitStack) -> Iterator[_Rank]:
    """Construction is collective, so it has a thread per rank; nothing is simulated yet."""
    devices = [SimulatedDevice(simulation, rank) for rank in range(case.ranks)]
    rendezvous = _Rendezvous(case.ranks)
    found: list[_Rank | BaseException | None] = [None] * case.ranks
    lock = threading.Lock()

    def construct(rank: int) -> None:
        group, own = LocalGroup(rank, rendezvous, devices), ExitStack()
        with lock:
            cleanup.push(own)
        try:
            found[rank] = _Rank(group, simulation, case, own)
        except BaseException as error:
            found[rank] = error
            group.abort(str(error))

    threads = [threading.Thread(target=construct, args=(rank,)) for rank in range(case.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for entry in found:
        if isinstance(entry, BaseException):
            raise entry
        assert entry is not None
        yield entry


def run_nic_scenario(library: SimulatorLibrary, scenario: NicScenario) -> NicRun:
    """Run streams on simulated ranks with the kernels of ``library``, true or mutated.

    Raises
    ------
    CompilationError
        The kernels do not compile.
    """
    case = scenario.case
    options = SimulationOptions(
        streams=_STREAMS * case.ranks + 1, blocks=3, chance=scenario.chance, rules=scenario.rules, budget=_BUDGET
    )
    simulation = Simulation(library, scenario.seed, options)
    with ExitStack() as cleanup:
        cleanup.callback(simulation.close)
        ranks = list(_ranks(simulation, case, cleanup))
        cleanup.callback(simulation.stop)
        simulation.start()
        symptom: str | None = None
        try:
            events = [event for rank in ranks for event in rank.enqueue()]
            for rank in ranks:
                rank.engine.stop_behind(events)
            simulation.run()
        except NvepError as error:
            symptom = str(error).splitlines()[0]
        simulation.stop()
        for rank in ranks:
            symptom = symptom or rank.symptom()
        return NicRun(symptom, simulation.decisions)
