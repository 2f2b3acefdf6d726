"""Runs a scenario on simulated ranks and compares every result with the reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nvep.config import Settings
from nvep.errors import CompilationError, NvepError, PeerTimeout
from nvep.exchange import Arrivals, Exchange
from nvep.group.local import LocalGroup, _Rendezvous
from nvep.reference.exchange import ReferenceArrivals
from nvep.runtime.device import Event, LaunchShape
from nvep.runtime.simulated import SimulatedDevice, SimulatedStream, Simulation, SimulationOptions
from nvep.runtime.simulated_library import Overlay, SimulatorLibrary
from nvep.testing.simulation.nic import adapter_maker, engines
from nvep.testing.simulation.render import Places, render_trace
from nvep.testing.simulation.scenario import Operation, Scenario
from nvep.testing.steps import arrivals_of, fill_unused, output_of, same

_MOST_BLOCKS = 3


class Simulator:
    """Compiled kernels, true or mutated, for any number of scenarios.

    Parameters
    ----------
    settings : Settings, optional
        Compiler and cache; default: the environment's.
    overlay : Overlay, optional
        Kernel sources that take the place of the true ones.
    """

    def __init__(self, settings: Settings | None = None, *, overlay: Overlay | None = None) -> None:
        self.library = SimulatorLibrary(settings, overlay=overlay)


@dataclass(frozen=True)
class Failure:
    """A scenario that went wrong.

    Attributes
    ----------
    scenario : Scenario
        Replays it.
    symptom : str
        In one line.
    trace : str
        The last events, interleaved.
    """

    scenario: Scenario
    symptom: str
    trace: str


@dataclass(frozen=True)
class Run:
    """What a scenario did: steps of all ranks together, seconds of simulation, decisions taken, and the failure."""

    steps: int
    seconds: float
    decisions: int
    failure: Failure | None


@dataclass
class _Seen:
    """Copies that a rank took of a step, on its stream."""

    rows: list[np.ndarray] = field(default_factory=list)
    ids: np.ndarray | None = None
    weights: np.ndarray | None = None
    counts: np.ndarray | None = None
    output: np.ndarray | None = None


class _Rank:
    """One rank of a scenario: enqueues its program."""

    def __init__(self, exchange: Exchange, scenario: Scenario) -> None:
        self.exchange = exchange
        self.scenario = scenario
        self.rank = exchange.group.rank
        self.seen = [_Seen() for _ in range(scenario.steps)]
        self._arrivals: dict[int, Arrivals] = {}
        self._expectations: dict[int, ReferenceArrivals] = {}
        device = exchange.device
        assert isinstance(device, SimulatedDevice)
        self.device = device
        second = device.default_stream if scenario.one_stream else SimulatedStream(device.simulation, self.rank)
        self.streams: tuple[SimulatedStream, SimulatedStream] = (device.default_stream, second)

    def enqueue(self, operation: Operation) -> None:
        """Enqueue a phase as a user's program would, with copies of what it shows."""
        scenario, step = self.scenario, operation.step
        lane = scenario.lanes[step]
        stream = self.streams[lane]
        tokens = scenario.tokens(step)
        source = tokens.sources[self.rank]
        inputs = (tuple(source.payloads), source.expert_ids, source.expert_weights)
        self.exchange.protocol = scenario.protocols[step]
        match operation.name:
            case "dispatch":
                self._arrived(step, self.exchange.dispatch(*inputs, lane=lane, stream=stream), stream)
            case "dispatch_send":
                self.exchange.dispatch_send(*inputs, lane=lane, stream=stream)
            case "dispatch_recv":
                self._arrived(step, self.exchange.dispatch_recv(lane=lane, stream=stream), stream)
            case "release":
                self.exchange.release(self._arrivals[step], stream=stream)
            case "combine":
                self._returned(
                    step, self.exchange.combine(self._partial(step), self._arrivals[step], stream=stream), stream
                )
            case "combine_send":
                self.exchange.combine_send(self._partial(step), self._arrivals[step], stream=stream)
            case _:
                self._returned(step, self.exchange.combine_recv(self._arrivals[step], stream=stream), stream)

    def mask(self, masked: list[bool], lane: int, gone: Event) -> Event:
        """Mask a rank between steps of ``lane``, in which it has ended; the other lane's step goes on meanwhile."""
        stream, other = self.streams[lane], self.streams[1 - lane]
        stream.wait(gone)
        stream.wait(other.record())
        self.exchange.set_mask(masked, stream=stream)
        return stream.record()

    def end(self) -> tuple[Event, Event]:
        """Events behind everything that this rank ever does, by lane."""
        return self.streams[0].record(), self.streams[1].record()

    def _partial(self, step: int) -> np.ndarray:
        protocol = self.scenario.protocols[step]
        return fill_unused(self.scenario.tokens(step), self._expected(step), self.rank, protocol=protocol)

    def _expected(self, step: int) -> ReferenceArrivals:
        if step not in self._expectations:
            scenario = self.scenario
            self._expectations[step] = arrivals_of(
                scenario.tokens(step), self.exchange.config, self.rank,
                masked=scenario.masked_in(step), protocol=scenario.protocols[step],
            )  # fmt: skip
        return self._expectations[step]

    def _copy(self, array: Any, stream: SimulatedStream) -> np.ndarray:
        copy = np.empty(array.shape, dtype=array.dtype)
        self.device.copy(copy.ctypes.data, array.address, copy.nbytes, stream)
        return copy

    def _arrived(self, step: int, arrivals: Arrivals, stream: SimulatedStream) -> None:
        self._arrivals[step] = arrivals
        if step < (self.scenario.recovered or 0):
            return  # what a step that may fail shows is undefined, and peers may still be writing it
        seen = self.seen[step]
        seen.rows = [self._copy(rows, stream) for rows in arrivals.payloads]
        seen.ids = self._copy(arrivals.expert_ids, stream)
        seen.weights = self._copy(arrivals.expert_weights, stream)
        seen.counts = self._copy(arrivals.counts, stream)

    def _returned(self, step: int, output: Any, stream: SimulatedStream) -> None:
        if step >= (self.scenario.recovered or 0):
            self.seen[step].output = self._copy(output, stream)

    def compare(self, step: int) -> None:
        """Raise AssertionError unless the step showed what the reference says."""
        scenario, seen, config = self.scenario, self.seen[step], self.exchange.config
        masked = scenario.masked_in(step)
        if self.rank in masked or seen.counts is None or seen.ids is None or seen.weights is None:
            return
        tokens, protocol = scenario.tokens(step), scenario.protocols[step]
        expected = self._expected(step)
        where = f"rank {self.rank}, step {step} ({protocol})"
        same(seen.counts, expected.counts, f"{where}: counts")
        same(seen.ids, expected.expert_ids, f"{where}: expert ids")
        same(seen.weights[expected.valid], expected.expert_weights[expected.valid], f"{where}: expert weights")
        for index, (got, want) in enumerate(zip(seen.rows, expected.payloads, strict=True)):
            same(got[expected.valid], want[expected.valid], f"{where}: payload {index}")
        if seen.output is not None:
            same(seen.output, output_of(tokens, config, self.rank, masked=masked), f"{where}: output")


def _start_host_threads(exchanges: list[Exchange]) -> None:
    """Free Flow's."""
    for engine in engines(exchanges):
        engine.forget_stop()
        engine.start_host_thread()


def _stop_adapters(ranks: list[_Rank]) -> None:
    """They end behind everything that ``ranks`` enqueued."""
    events = [event for rank in ranks for event in rank.end()]
    for engine in engines([rank.exchange for rank in ranks]):
        engine.stop_behind(events)


def _exchanges(devices: list[SimulatedDevice], scenario: Scenario) -> list[Exchange]:
    """Construction is collective, so it has a thread per rank; nothing is simulated yet."""
    adapter = adapter_maker(devices[0].simulation, scenario.seed) if scenario.kind.networked else None
    config = scenario.kind.config(scenario.first_epoch)
    rendezvous = _Rendezvous(len(devices))
    found: list[Exchange | BaseException | None] = [None] * len(devices)

    def construct(rank: int) -> None:
        group = LocalGroup(rank, rendezvous, devices)
        try:
            found[rank] = Exchange(group, config, nic=adapter)
        except BaseException as error:
            found[rank] = error
            group.abort(str(error))

    _in_threads(construct, len(devices))
    for entry in found:
        if isinstance(entry, BaseException):
            raise entry
    return [entry for entry in found if isinstance(entry, Exchange)]


def _in_threads(function: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=function, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_scenario(simulator: Simulator, scenario: Scenario, *, trace: int = 60) -> Run:
    """Run a scenario; a failure carries its last ``trace`` events.

    Raises
    ------
    CompilationError
        The kernels do not compile.
    """
    kind = scenario.kind
    options = SimulationOptions(
        streams=(6 if kind.networked else 2) * kind.ranks,
        blocks=_MOST_BLOCKS,
        axiom=kind.axiom,
        chance=scenario.chance,
        rules=scenario.rules,
    )
    simulation = Simulation(simulator.library, scenario.seed, options)
    exchanges: list[Exchange] = []
    try:
        devices = [
            SimulatedDevice(simulation, rank, shape=LaunchShape(scenario.blocks, scenario.threads, scenario.dependent))
            for rank in range(kind.ranks)
        ]
        exchanges = _exchanges(devices, scenario)
        places = Places(exchanges)
        for start, nbytes in places.records():
            simulation.axiom_records(start, nbytes)
        for exchange in exchanges:
            for lane in range(exchange.config.lanes):
                simulation.alarm(exchange.memory.lane_local(lane) + exchange.plan.local.offset("Counters"))  # ::dead
        return _simulate(simulation, exchanges, scenario, places, trace)
    finally:
        simulation.stop()
        for exchange in exchanges:
            exchange.note_failure(NvepError("the simulation is over"))
            exchange.close()
        simulation.close()


def _simulate(simulation: Simulation, exchanges: list[Exchange], scenario: Scenario, places: Places, trace: int) -> Run:
    started = time.perf_counter()
    symptom: str | None = None
    simulation.start()
    ranks = [_Rank(exchange, scenario) for exchange in exchanges]
    _start_host_threads(exchanges)
    try:
        _enqueue(ranks, scenario)
        _stop_adapters(ranks)
        if scenario.recovered is not None:
            _recover(simulation, ranks, scenario)
        simulation.run()
        for exchange in exchanges:
            if scenario.recovered is None or exchange.group.rank != scenario.masked:
                exchange.check()
        for step in range(scenario.steps):
            for rank in ranks:
                rank.compare(step)
    except CompilationError:
        raise
    except (NvepError, AssertionError) as error:
        kind = "" if simulation.failure else f"{type(error).__name__}: "
        symptom = places.name_addresses(f"{kind}{error}".splitlines()[0])
    seconds = time.perf_counter() - started
    failure = None
    if symptom is not None:
        failure = Failure(scenario, symptom, render_trace(simulation.events()[-trace:], places))
    return Run(scenario.steps, seconds, simulation.decisions, failure)


def _enqueue(ranks: list[_Rank], scenario: Scenario) -> None:
    """Everything at once, with no host synchronisation: the ranks' streams alone decide what waits for what."""
    masked = scenario.masked
    stay = [rank for rank in ranks if rank.rank != masked]
    gone = None if masked is None else _enqueue_masked(ranks[masked], scenario)
    changed: list[Event] = []  # by rank, once the mask is set: what the other lane's next step waits for
    other = -1
    for operation in scenario.program:
        lane = scenario.lanes[operation.step]
        if operation.name == "recover":
            return
        if operation.name == "leave":
            continue
        if operation.name == "mask":
            assert gone is not None
            mask = [rank.rank == masked for rank in ranks]
            changed, other = [rank.mask(mask, lane, gone[lane]) for rank in stay], 1 - lane
            continue
        first = lane == other and operation.name in ("dispatch", "dispatch_send")
        for index, rank in enumerate(stay):
            if first:
                assert gone is not None
                rank.streams[lane].wait(changed[index])
                rank.streams[lane].wait(gone[lane])
            rank.enqueue(operation)
        other = -1 if first else other


def _enqueue_masked(rank: _Rank, scenario: Scenario) -> tuple[Event, Event]:
    """A rank that is masked later takes part until then, and ends."""
    for operation in scenario.program:
        if operation.name == "leave":
            break
        if operation.name != "mask" and rank.rank not in scenario.masked_in(operation.step):
            rank.enqueue(operation)
    return rank.end()


def _recover(simulation: Simulation, ranks: list[_Rank], scenario: Scenario) -> None:
    """Wait for what was enqueued, in vain or not; go on without the rank that left."""
    lost = scenario.masked
    assert lost is not None
    simulation.run()
    stay = [rank for rank in ranks if rank.rank != lost]
    for rank in stay:
        with suppress(PeerTimeout):  # its own, or what a peer said
            rank.exchange.check()
    simulation.stop()
    simulation.forget()
    ranks[lost].exchange.memory.acknowledge()
    errors: list[BaseException] = []

    def recover(index: int) -> None:
        try:
            stay[index].exchange.recover([lost])
        except BaseException as error:
            errors.append(error)
            stay[index].exchange.group.abort(str(error))

    _in_threads(recover, len(stay))
    if errors:
        raise errors[0]
    simulation.start()
    _start_host_threads([rank.exchange for rank in stay])
    behind = [operation.name for operation in scenario.program].index("recover") + 1
    for operation in scenario.program[behind:]:
        for rank in stay:
            rank.enqueue(operation)
    _stop_adapters(stay)


def shrink(simulator: Simulator, failure: Failure) -> Failure:
    """The same failure, or one of the same seed, with as few steps as fail."""
    for steps in range(1, failure.scenario.steps):
        run = run_scenario(simulator, failure.scenario.first_steps(steps))
        if run.failure is not None:
            return replace(run.failure)
    return failure
