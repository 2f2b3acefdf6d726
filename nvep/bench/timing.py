"""How a case is timed: replays of a graph of unrolled steps, all ranks from the same point, the slowest rank counts.

docs/benchmarks.md says what every figure means.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nvep.bench.cases import Case
from nvep.bench.inputs import Inputs
from nvep.bench.kernels import FloorKernels, Stamps
from nvep.exchange import Exchange
from nvep.runtime.device import Graph, Stream

PHASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "joined": ("dispatch", "combine"),
    "split": ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"),
}
_FLUSH_BYTES, _EMULATED_FLUSH_BYTES = 256 << 20, 1 << 20  # several times any second-level cache of a GPU
_WARM_UP = 2
_MARKED_REPLAYS = 12
# The stream is kept busy while the host enqueues a replay: else the graph would start when the host is done with it.
_DELAY_NS, _DELAY_NS_PER_RANK = 500_000, 250_000


@dataclass(frozen=True)
class Timing:
    """Microseconds, by replay, of the slowest rank.

    Attributes
    ----------
    pair_us : tuple of float
        Dispatch + combine, the mean over a replay's steps.
    spans_us : dict of str to float
        By phase: the median over replays of the mean over steps.
    late : int
        Replays dropped because some rank's host was not ahead of its device.
    """

    pair_us: tuple[float, ...]
    spans_us: dict[str, float]
    late: int


def time_exchange(exchange: Exchange, case: Case, *, inputs: Inputs, kernels: FloorKernels) -> Timing:
    """Time ``case`` on its exchange. Collective; the same result on every rank."""
    timer = _Timer(exchange, case, inputs, kernels)
    exchange.group.barrier()  # nobody instantiates a graph or allocates while a peer's kernel waits for him
    try:
        gathered = np.array(exchange.group.allgather(timer.spans()))
        spans = gathered.max(axis=0)  # [replays, phases]
        if case.flush_l2:
            pairs, late = gathered.sum(axis=2).max(axis=0), 0
        else:
            pairs, late = _slowest(exchange.group.allgather(timer.pairs()))
        exchange.synchronize(timer.stream)
        exchange.group.barrier()
    finally:
        timer.close()
    medians = np.median(spans, axis=0).tolist()
    return Timing(tuple(pairs.tolist()), dict(zip(PHASES[case.spans], medians, strict=True)), late)


def _slowest(gathered: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, int]:
    """Slowest rank of every replay for which all hosts were ahead of their devices; all replays if there is none."""
    slowest = np.max([times for times, _ in gathered], axis=0)
    in_time = np.all([ahead for _, ahead in gathered], axis=0)
    return (slowest[in_time] if in_time.any() else slowest), int((~in_time).sum())


class _Timer:
    """One rank's graphs."""

    def __init__(self, exchange: Exchange, case: Case, inputs: Inputs, kernels: FloorKernels) -> None:
        self._exchange, self._case, self._inputs, self._kernels = exchange, case, inputs, kernels
        self._device = exchange.device
        self.stream: Stream = self._device.create_stream()
        self._stamps = Stamps(self._device, kernels, steps=case.unrolled, each=2 + len(PHASES[case.spans]))
        flushed = _EMULATED_FLUSH_BYTES if self._device.emulated else _FLUSH_BYTES
        self._flushed = self._device.allocate(flushed if case.flush_l2 else 0)
        self._delay_ns = 0 if self._device.emulated else _DELAY_NS + _DELAY_NS_PER_RANK * case.ranks
        self._align, self._steps, self._marked = (
            self._capture(count, marked=marked)
            for count, marked in ((1, False), (case.unrolled, False), (case.unrolled, True))
        )

    def _capture(self, steps: int, *, marked: bool) -> Graph:
        with self._device.capture(self.stream) as graph:
            for index in range(steps):
                if marked and self._case.flush_l2:
                    self._flush()
                for _ in range(2 * marked):
                    self._stamps.mark(self.stream)
                for _ in self._step(index):
                    if marked:
                        self._stamps.mark(self.stream)
        return graph

    def _flush(self) -> None:
        """Replace what the cache holds, and bring the ranks together again by a step of no tokens."""
        exchange, stream = self._exchange, self.stream
        self._device.fill(self._flushed.address, 0, self._flushed.nbytes, stream)
        exchange.release(exchange.dispatch(*self._inputs[0], num_tokens=0, stream=stream), stream=stream)

    def _step(self, index: int) -> Iterator[None]:
        """Enqueue a step, pausing behind each phase."""
        exchange, stream = self._exchange, self.stream
        if self._case.spans != "split":
            arrivals = exchange.dispatch(*self._inputs[index], stream=stream)
            yield
            exchange.combine(arrivals.partial_rows, arrivals, stream=stream)
            yield
            return
        exchange.dispatch_send(*self._inputs[index], stream=stream)
        yield
        arrivals = exchange.dispatch_recv(stream=stream)
        yield
        exchange.combine_send(arrivals.partial_rows, arrivals, stream=stream)
        yield
        exchange.combine_recv(arrivals, stream=stream)
        yield

    def _start(self) -> None:
        if self._delay_ns:
            self._kernels.launch("delay", self.stream, nanoseconds=self._delay_ns)
        self._align.launch(self.stream)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Microseconds a step of each replay, and whether it was enqueued before the device got to it."""
        times, ahead = [], []
        for _ in range(_WARM_UP + self._case.replays):
            begin = time.perf_counter()
            self._start()
            start = self.stream.record()
            self._steps.launch(self.stream)
            end = self.stream.record()
            ahead.append(not self._delay_ns or (time.perf_counter() - begin) * 1e9 < self._delay_ns)
            end.synchronize()
            times.append(end.elapsed_ms(start) * 1e3 / self._case.unrolled)
        return np.array(times[_WARM_UP:]), np.array(ahead[_WARM_UP:])

    def spans(self) -> np.ndarray:
        """Microseconds of each phase, the mean over the steps of a replay: float64 ``[replays, phases]``."""
        rounds = []
        for _ in range(_WARM_UP + min(self._case.replays, _MARKED_REPLAYS)):
            self._start()
            self._marked.launch(self.stream)
            rounds.append(self._stamps.spans_us(self.stream).mean(axis=0))
        return np.array(rounds[_WARM_UP:])

    def close(self) -> None:
        """Free graphs and memory, on which nothing may run."""
        for graph in (self._align, self._steps, self._marked):
            graph.close()
        self._stamps.close()
        self._flushed.free()
