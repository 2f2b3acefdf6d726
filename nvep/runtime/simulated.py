"""The simulated device: ranks of one process, run by one OS thread from a seed, over a weak memory model.

Virtual time, virtual threads: nothing depends on the machine's speed, and a seed replays exactly. Until
``Simulation.start`` everything happens at once, as by a host before any kernel runs.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvep.errors import ArgumentError, DeviceError, ShapeError
from nvep.runtime.device import BulkCopies, Device, Event, Graph, Kernel, LaunchShape, Stream
from nvep.runtime.emulated import EmulatedMemory
from nvep.runtime.simulated_library import (
    ANY,
    CEvent,
    CLaunch,
    CRule,
    Options,
    SimulatedKernel,
    SimulatorLibrary,
)
from nvep.runtime.source import KernelSource

_handles = itertools.count(0x73696D01)
_SHAPE = LaunchShape(2, 64)
_DIRECTIVES = {"late": 1, "stale": 2, "early": 3}


@dataclass(frozen=True)
class Chance:
    """Odds out of 1024, and bounds.

    Attributes
    ----------
    stale : int
        A strong load takes an older value that it still may.
    early : int
        A strong store goes before later ones where causality lets it.
    preempt, hold : int
        A thread is interrupted before an access; an interrupted thread stays back for long.
    pause : int
        A rank stands still for a while (drawn every 64 decisions).
    spin_bound : int
        Polls after which a waiting thread sees the newest value.
    """

    stale: int = 256
    early: int = 256
    preempt: int = 32
    hold: int = 128
    pause: int = 64
    spin_bound: int = 4


ORDERLY = Chance(stale=0, early=0, preempt=0, hold=0, pause=0)


@dataclass(frozen=True)
class Rule:
    """One line of a schedule written by hand.

    Attributes
    ----------
    directive : str
        ``"late"``: a thread that comes here stays back until nobody else gets on; ``"stale"``: a load takes the oldest
        value it may; ``"early"``: a store goes as far back in coherence order as it may.
    file, line : str, int
        Where; line 0 is everywhere.
    rank, block, thread : int or None
        Whom; None is everybody.
    kernel : str
        In which kernel; empty is any.
    skip, times : int
        How often it does not apply at first, and how often it applies then.
    """

    directive: str
    file: str = ""
    line: int = 0
    rank: int | None = None
    block: int | None = None
    thread: int | None = None
    kernel: str = ""
    skip: int = 0
    times: int = ANY

    def c(self) -> CRule:
        who = [ANY if n is None else n for n in (self.rank, self.block, self.thread)]
        return CRule(
            _DIRECTIVES[self.directive],
            *who,
            self.line,
            self.skip,
            self.times,
            self.file.encode(),
            self.kernel.encode(),
        )


@dataclass(frozen=True)
class TraceEvent:
    """One event of a simulation, as the simulator recorded it (see ``Event`` in trace.h)."""

    number: int
    did: int
    rank: int
    block: int
    thread: int
    kernel: str
    address: int
    value: int
    file: str
    line: int
    order: int
    distance: int


@dataclass(frozen=True)
class SimulationOptions:
    """What a simulation is made for: most ``streams`` of all ranks together and ``blocks`` of a grid, and switches."""

    streams: int = 8
    blocks: int = 4
    axiom: bool = True
    chance: Chance = field(default_factory=Chance)
    rules: tuple[Rule, ...] = ()
    trace: int = 4096
    jump_ns: int = 100_000_000
    budget: int = 50_000_000


class Simulation:
    """Owner of seed and clock; ranks' devices belong to it.

    Parameters
    ----------
    library : SimulatorLibrary
        Where kernels come from.
    seed : int
        Of every decision.
    options : SimulationOptions
    """

    def __init__(self, library: SimulatorLibrary, seed: int, options: SimulationOptions | None = None) -> None:
        self.library = library
        self.options = options or SimulationOptions()
        self.seed = seed
        self.started = False
        self.failure: str | None = None
        self._calls = library.calls
        o, chance = self.options, self.options.chance
        slots = 1 + o.streams * (1 + 4 * o.blocks)
        self._c = Options(
            seed, slots, chance.stale, chance.early, chance.preempt, chance.hold, chance.pause, int(o.axiom),
            chance.spin_bound, o.trace, o.blocks, o.jump_ns, o.budget,
        )  # fmt: skip
        self._sim: int | None = self._calls.nvep_sim_create(ctypes.byref(self._c))
        for rule in o.rules:
            self._calls.nvep_sim_rule(self._sim, ctypes.byref(rule.c()))

    def start(self) -> None:
        """From here on work is queued, and `run` runs it. One OS thread only."""
        self.started = True

    def stop(self) -> None:
        """From here on copies happen at once again; what is queued is never run."""
        self.started = False

    def stream(self, rank: int) -> int:
        """Handle of a new stream of ``rank``."""
        stream: int | None = self._calls.nvep_sim_stream(self._sim, rank)
        if stream is None:
            raise ArgumentError("streams", self.options.streams, "one for every stream that is created")
        return stream

    def axiom_records(self, address: int, nbytes: int) -> None:
        """Words here are records of which the axiom of completed grids speaks."""
        self._calls.nvep_sim_records(self._sim, address, nbytes)

    def alarm(self, address: int) -> None:
        """The first update of the word at ``address`` is the last event kept: what follows only spreads the news."""
        self._calls.nvep_sim_alarm(self._sim, address)

    def forget(self) -> None:
        """Everything has ended and a host waited for it: what happened before orders nothing any more."""
        self._calls.nvep_sim_forget(self._sim)

    def run(self, stream: int | None = None) -> None:
        """Run until ``stream``, or everything, has ended.

        Raises
        ------
        DeviceError
            A data race, a deadlock or another broken rule; the text says where.
        """
        if self.failure is None:
            message: bytes | None = self._calls.nvep_sim_run(self._sim, stream)
            self.failure = None if message is None else message.decode(errors="replace")
        if self.failure is not None:
            raise DeviceError(self.failure)

    @property
    def decisions(self) -> int:
        """Scheduling decisions so far: equal for equal seeds."""
        return int(self._calls.nvep_sim_picks(self._sim))

    def events(self) -> list[TraceEvent]:
        """The last events, oldest first."""
        event, found = CEvent(), []
        for i in range(self._calls.nvep_sim_events(self._sim)):
            self._calls.nvep_sim_event(self._sim, i, ctypes.byref(event))
            file, kernel = (event.file or b"").decode(), (event.kernel or b"").decode()
            found.append(
                TraceEvent(event.number, event.did, event.rank, event.block, event.thread, kernel, event.address,
                           event.value, file, event.line, event.order, event.distance)
            )  # fmt: skip
        return found

    def close(self) -> None:
        """Free the simulator's state. Idempotent."""
        if self._sim is not None:
            self._calls.nvep_sim_destroy(self._sim)
            self._sim = None


class SimulatedEvent(Event):
    """Recorded on a stream; ``edge`` is None for one recorded before the simulation started."""

    def __init__(self, simulation: Simulation, stream: int, edge: int | None) -> None:
        self._simulation = simulation
        self._stream = stream
        self.edge = edge

    def synchronize(self) -> None:
        if not self.done:
            self._simulation.run(self._stream)

    @property
    def done(self) -> bool:
        return self.edge is None or bool(self._simulation.library.calls.nvep_sim_reached(self.edge))

    def elapsed_ms(self, earlier: Event) -> float:
        raise DeviceError("simulated time measures nothing")


class SimulatedStream(Stream):
    """Work in order, run by the simulation."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.handle = next(_handles)
        self.simulation = simulation
        self.queue = simulation.stream(rank)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def synchronize(self) -> None:
        if self.simulation.started:
            self.simulation.run(self.queue)

    def record(self) -> Event:
        calls = self.simulation.library.calls
        edge = calls.nvep_sim_record(self.queue) if self.simulation.started else None
        return SimulatedEvent(self.simulation, self.queue, edge)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        if event.edge is not None:
            self.simulation.library.calls.nvep_sim_await(self.queue, event.edge)


class SimulatedDevice(Device):
    """One rank's device in a simulation.

    Parameters
    ----------
    simulation : Simulation
        Shared by all ranks.
    rank : int
        Whose device it is: accesses of device scope meet only those of the same rank.
    shape : LaunchShape
        Of exchange kernels; ``dependent`` makes every kernel a dependent of the one launched before it.
    """

    kind = "emulated"
    ordinal = 0
    multiprocessors = 1
    bulk = BulkCopies(32, 32, 384, 384)

    def __init__(self, simulation: Simulation, rank: int, *, shape: LaunchShape = _SHAPE) -> None:
        self.name = f"simulated on {platform.machine()}"
        self.simulation = simulation
        self.rank = rank
        self.default_threads = shape.threads
        self.default_blocks = shape.blocks
        self._dependent = shape.dependent
        self._default = SimulatedStream(simulation, rank)
        self._calls = simulation.library.calls

    def make_current(self) -> None:
        """Nothing to bind."""

    def synchronize(self) -> None:
        if self.simulation.started:
            self.simulation.run()

    def allocate(self, nbytes: int) -> EmulatedMemory:
        return self.allocate_host(nbytes)

    def allocate_host(self, nbytes: int) -> EmulatedMemory:
        if nbytes < 0:
            raise ArgumentError("nbytes", nbytes, "0 or more")
        return EmulatedMemory(nbytes)

    def create_stream(self) -> SimulatedStream:
        return SimulatedStream(self.simulation, self.rank) if self.simulation.started else self._default

    @property
    def default_stream(self) -> SimulatedStream:
        return self._default

    def as_stream(self, stream: Any) -> SimulatedStream:
        if stream is None:
            return self._default
        if isinstance(stream, SimulatedStream):
            return stream
        raise ArgumentError("stream", stream, "None or a stream of a simulated device")

    def order(self, consumer_handle: int, producer: Stream) -> None:
        raise DeviceError("other libraries take no part in a simulation")

    def copy_in(self, address: int, array: np.ndarray, stream: Stream) -> None:
        if not array.flags.c_contiguous:
            raise ShapeError("array", array.strides, "a C-contiguous array")
        data = array.tobytes()
        if not self.simulation.started:
            ctypes.memmove(address, data, len(data))
        else:
            self._calls.nvep_sim_copy_in(self.as_stream(stream).queue, address, data, len(data))

    def copy_out(self, array: np.ndarray, address: int, stream: Stream) -> None:
        if not array.flags.c_contiguous:
            raise ShapeError("array", array.strides, "a C-contiguous array")
        self.copy(array.ctypes.data, address, array.nbytes, stream)
        self.as_stream(stream).synchronize()

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if not self.simulation.started:
            ctypes.memmove(target, source, nbytes)
        else:
            self._calls.nvep_sim_copy(self.as_stream(stream).queue, target, source, nbytes)

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        if not self.simulation.started:
            ctypes.memset(address, byte, nbytes)
        else:
            self._calls.nvep_sim_fill(self.as_stream(stream).queue, address, byte, nbytes)

    def load(self, source: KernelSource) -> SimulatedKernel:
        return self.simulation.library.load([source])[0]

    def load_all(self, sources: dict[str, KernelSource]) -> dict[str, Kernel]:
        loaded: Sequence[Kernel] = self.simulation.library.load(list(sources.values()))
        return dict(zip(sources, loaded, strict=True))

    def launch(self, kernel: Kernel, shape: LaunchShape, arguments: ctypes.Structure, stream: Stream) -> None:
        if not isinstance(kernel, SimulatedKernel):
            raise ArgumentError("kernel", kernel, "a kernel loaded by a simulated device")
        if not self.simulation.started:
            raise DeviceError("the simulation has not started")
        data = bytes(arguments)
        launch = CLaunch(
            kernel.entry, data, len(data), kernel.source.name.encode(), shape.blocks, shape.threads,
            shape.dependent or self._dependent, shape.shared_bytes,
        )  # fmt: skip
        if self._calls.nvep_sim_launch(self.as_stream(stream).queue, ctypes.byref(launch)):
            raise ArgumentError("shape.blocks", shape.blocks, f"at most {self.simulation.options.blocks}")

    def resident_blocks(self, kernel: Kernel, threads: int, *, shared_bytes: int = 0) -> int:
        return self.simulation.options.blocks

    def _begin_capture(self, stream: Stream) -> Graph:
        raise DeviceError("graphs are not simulated: they are launches in stream order")

    def _end_capture(self, stream: Stream, graph: Graph, *, keep: bool) -> None:
        raise DeviceError("graphs are not simulated")

    def is_capturing(self, stream: Stream) -> bool:
        return False

    def close(self) -> None:
        """The simulation owns everything."""
