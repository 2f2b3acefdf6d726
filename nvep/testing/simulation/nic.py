"""Streams of messages over the soft NIC under the weak memory model: senders, engine, host thread and receivers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nvep.errors import NvepError
from nvep.group.local import LocalGroup, _Rendezvous
from nvep.nic.layouts import READY_QUEUE, ring_prelude
from nvep.nic.soft import SoftNic, SoftNicModel
from nvep.nic.soft.engine import SoftEngine
from nvep.nic.soft.ready_thread import ReadyQueue
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.simulated import Chance, Rule, SimulatedDevice, SimulatedStream, Simulation, SimulationOptions
from nvep.runtime.simulated_library import SimulatorLibrary
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import SymmetricHeap
from nvep.testing.nic_streams import HANDLES, STREAM_ARGUMENTS, StreamCase, open_rings

READY_ARGUMENTS = ArgumentStruct("NicReadyArguments", [Field(name, "u64") for name in ("queues", "count", "idle_ns")])
_STREAMS = 5  # of a rank: its own, the engine's, and those of sender, receiver and host thread
_IDLE_S = 2.0
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


class _Engine(SoftEngine):
    """Whose host thread is a kernel."""

    def __init__(self, device: SimulatedDevice, model: SoftNicModel) -> None:
        self.queues: list[ReadyQueue] = []
        super().__init__(device, model)

    def add_ready_queues(self, queues: list[ReadyQueue]) -> None:
        self.queues += queues

    def remove_ready_queues(self, numbers: list[int]) -> None:
        """They go with the simulation."""


class _Rank:
    """One simulated rank."""

    def __init__(self, group: LocalGroup, simulation: Simulation, case: StreamCase, cleanup: ExitStack) -> None:
        self.case, self.group, self.simulation = case, group, simulation
        assert isinstance(group.device, SimulatedDevice)
        self.device = group.device
        self.engine = _Engine(SimulatedDevice(simulation, group.rank), case.model)
        self.heap = cleanup.enter_context(SymmetricHeap(group, case.layout()))
        self.nic = cleanup.enter_context(SoftNic(group, case.model, engine=self.engine))
        self.rings = open_rings(group, self.heap, self.nic, case.specs())
        self.kernels = self.device.load_all(case.kernels())
        ready = f'{ring_prelude()}#include "primitives/memory.cuh"\n'
        file = KERNEL_ROOT / "testing" / "nic_ready.cu"
        self.ready = self.device.load(KernelSource("nic_ready", READY_ARGUMENTS, ready, file))
        self.errors = np.zeros(4, np.uint32)
        self._table: Any = None

    def enqueue(self) -> None:
        """All kernels of the rank, each on a stream of its own."""
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
        for name, shape in shapes.items():
            self.device.launch(self.kernels[name], shape, arguments, self._stream())
        if self.engine.queues:
            self._table = _table(self.engine.queues)
            ready = READY_ARGUMENTS.new(
                queues=self._table.ctypes.data, count=len(self.engine.queues), idle_ns=round(_IDLE_S * 1e9)
            )
            self.device.launch(self.ready, LaunchShape(1, 1), ready, self._stream())

    def _stream(self) -> SimulatedStream:
        return SimulatedStream(self.simulation, self.group.rank)

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
            for rank in ranks:
                rank.enqueue()
            simulation.run()
        except NvepError as error:
            symptom = str(error).splitlines()[0]
        simulation.stop()
        for rank in ranks:
            symptom = symptom or rank.symptom()
        return NicRun(symptom, simulation.decisions)
