"""How a point of the network sweep is timed: graphs of steps with marks, each send from a point where all ranks meet.

docs/benchmarks.md says what every figure means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nvep.bench.inputs import Inputs
from nvep.bench.network import NetworkCase
from nvep.bench.network_account import account_us, clear_account, read_account
from nvep.bench.network_kernels import STEP_MARKS, NetworkKernels
from nvep.exchange import Exchange
from nvep.runtime.device import Graph

PHASES = ("dispatch", "combine")
_MARKS = 5  # two with nothing between them, after the send, after the delay or the last arrival, after the receive
_WARM_UP = 1
assert len(PHASES) * _MARKS == STEP_MARKS
Marks = npt.NDArray[np.float64]  # microseconds, [ranks, replays, steps, phases, marks]
ByPhase = dict[str, float]


@dataclass(frozen=True)
class NetworkTiming:
    """Microseconds on the slowest rank, by phase: the mean over the steps of a replay, the median over replays.

    Attributes
    ----------
    hold_us : dict
        How long the send occupies the GPU.
    receive_us : dict
        The receive right behind it, waiting included.
    in_flight_us : dict
        From the end of the last send to the last signal's arrival anywhere. Empty for the base line.
    landing_us : dict
        The receive once everything is there. Empty for the base line.
    exposed_us : dict
        Send and receive together, by phase and by microseconds of other work between them.
    adapter : dict
        A step of all ranks: ``messages``, ``bytes``, ``doorbells``; ``stalls`` and ``stalled_us``: what sending threads
        waited for room in a ring: back-pressure, part of the hold time. Empty for the base line.
    account_us : dict
        Of an accounted case: by phase, what a block of a send did, by stage.
    """

    hold_us: ByPhase
    receive_us: ByPhase
    in_flight_us: ByPhase
    landing_us: ByPhase
    exposed_us: dict[str, dict[int, float]]
    adapter: dict[str, float]
    account_us: dict[str, ByPhase] = field(default_factory=dict)


def time_network(exchange: Exchange, case: NetworkCase, *, inputs: Inputs, kernels: NetworkKernels) -> NetworkTiming:
    """Time ``case`` on its exchange. Collective; the same result on every rank."""
    group = exchange.group
    timer = _Timer(exchange, case, inputs, kernels)
    group.barrier()  # nobody instantiates a graph or allocates while a peer's kernel waits for him
    before = timer.counts()
    if case.accounted:
        clear_account(exchange)
    try:
        delayed = {delay: timer.marks(graph) for delay, graph in timer.delayed.items()}
        account = group.allgather(read_account(exchange)) if case.accounted else []
        arrival = timer.marks(timer.arrival) if timer.arrival else None
        exchange.synchronize(kernels.stream)
        kernels.check()
        counts = {name: count - before[name] for name, count in timer.counts().items()}
        group.barrier()
    finally:
        timer.close()
    everyone = group.allgather(counts)
    launches = timer.accounted_steps * group.size
    exposed = {delay: _exposed(marks) for delay, marks in delayed.items()}
    first = delayed[case.delays[0]]
    return NetworkTiming(
        hold_us=_span(first, 1),
        receive_us=_span(first, 3),
        in_flight_us={} if arrival is None else _in_flight(arrival),
        landing_us={} if arrival is None else _span(arrival, 3),
        exposed_us={phase: {delay: found[phase] for delay, found in exposed.items()} for phase in PHASES},
        adapter={name: sum(found[name] for found in everyone) / timer.steps for name in counts},
        account_us=account_us(np.sum(account, axis=0, dtype=np.uint64), launches) if account else {},
    )


def _cost(marks: Marks) -> Marks:
    """What a mark costs, by rank and replay, shaped to be taken off."""
    return np.asarray((marks[..., 1] - marks[..., 0]).mean(axis=(2, 3), keepdims=True))


def _figure(slowest: Marks) -> ByPhase:
    """From ``[replays, steps, phases]``."""
    medians = np.median(slowest.mean(axis=1), axis=0)
    return {phase: float(value) for phase, value in zip(PHASES, medians, strict=True)}


def _exposed(marks: Marks) -> ByPhase:
    around = (marks[..., 2] - marks[..., 1]) + (marks[..., 4] - marks[..., 3]) - 2 * _cost(marks)
    return _figure(around.max(axis=0))


def _span(marks: Marks, begin: int) -> ByPhase:
    """From a mark to the next one."""
    return _figure((marks[..., begin + 1] - marks[..., begin] - _cost(marks)).max(axis=0))


def _in_flight(marks: Marks) -> ByPhase:
    """Ranks start together, so times since a rank's own start are comparable, whosever clock they are by."""
    since = marks - marks[..., 1:2]
    return _figure(since[..., 3].max(axis=0) - since[..., 2].max(axis=0))


class _Timer:
    """One rank's graphs."""

    def __init__(self, exchange: Exchange, case: NetworkCase, inputs: Inputs, kernels: NetworkKernels) -> None:
        self._exchange, self._case, self._inputs, self._kernels = exchange, case, inputs, kernels
        self.steps = 0
        self.delayed = {delay: self._capture(delay) for delay in case.delays}
        self.arrival = self._capture(None) if exchange.network is not None else None

    @property
    def accounted_steps(self) -> int:
        """Steps of the graphs with delays, warm-up included."""
        return len(self.delayed) * (_WARM_UP + self._case.replays) * self._case.unrolled

    def _capture(self, delay: int | None) -> Graph:
        """Steps with ``delay`` microseconds between send and receive, or, for None, with the wait for all signals."""
        exchange, stream = self._exchange, self._kernels.stream
        with exchange.device.capture(stream) as graph:
            for step in range(self._case.unrolled):
                first = step * STEP_MARKS
                self._begin(first)
                exchange.dispatch_send(*self._inputs[step], stream=stream)
                self._between(first, 0, delay)
                arrivals = exchange.dispatch_recv(stream=stream)
                self._kernels.mark(first + 4)
                self._begin(first + _MARKS)
                exchange.combine_send(arrivals.partial_rows, arrivals, stream=stream)
                self._between(first + _MARKS, 1, delay)
                exchange.combine_recv(arrivals, stream=stream)
                self._kernels.mark(first + _MARKS + 4)
        return graph

    def _begin(self, first: int) -> None:
        self._kernels.align()
        self._kernels.mark(first)
        self._kernels.mark(first + 1)

    def _between(self, first: int, phase: int, delay: int | None) -> None:
        self._kernels.mark(first + 2)
        if delay is None:
            self._kernels.await_signals(self._exchange, phase)
        elif delay:
            self._kernels.delay(delay)
        self._kernels.mark(first + 3)

    def marks(self, graph: Graph) -> Marks:
        """Replay. Collective."""
        rounds = []
        for _ in range(_WARM_UP + self._case.replays):
            self._exchange.wake()
            graph.launch(self._kernels.stream)
            self.steps += self._case.unrolled
            rounds.append(self._kernels.times(self._case.unrolled))
        kept = np.array(rounds[_WARM_UP:]).reshape(-1, self._case.unrolled, len(PHASES), _MARKS)
        kept -= kept.min()
        return np.array(self._exchange.group.allgather(kept.astype(np.float64) / 1e3))

    def counts(self) -> dict[str, float]:
        """What this rank's adapter and senders counted so far."""
        if self._exchange.network is None:
            return {}
        found = self._exchange.network.statistics()
        counts = {name: float(getattr(found, name)) for name in ("messages", "bytes", "doorbells", "stalls")}
        return counts | {"stalled_us": found.stalled_ns / 1e3}

    def close(self) -> None:
        """Free the graphs, of which none runs."""
        for graph in (*self.delayed.values(), *([self.arrival] if self.arrival else [])):
            graph.close()
