"""One rank's part of a replay: steps of dispatch, synthetic experts and combine, each checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.cli.replay_check import AnyArray, Difference, Received, StepChecker
from nvep.cli.traces import RoutingTrace
from nvep.config import ExchangeConfig
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup
from nvep.moe.synthetic import ScaleExperts
from nvep.reference import RankTokens
from nvep.runtime.device import Event, Memory

POISON = 0xA5  # as an expert id, a count, a weight or a row it is nothing that a step could have produced


@dataclass
class RankResult:
    """What one rank measured over a replay.

    Attributes
    ----------
    rows_received, rows_local : int
        Rows in this rank's receive buffers, by the counts read from it, and those of them that it sent itself.
    pairs : int
        (token, expert) pairs that its experts worked on, by the headers read from its receive buffers.
    step_ms : list of float
        By step: dispatch + experts + combine on the stream, without the copy taken for checking.
    difference : Difference or None
        The first one found.
    different_steps : int
        Steps with a difference.
    """

    rows_received: int = 0
    rows_local: int = 0
    pairs: int = 0
    step_ms: list[float] = field(default_factory=list)
    difference: Difference | None = None
    different_steps: int = 0


def step_tokens(
    trace: RoutingTrace, config: ExchangeConfig, *, num_ranks: int, step: int, seed: int
) -> list[RankTokens]:
    """What every rank brings to a step: ``max_tokens`` of its contiguous share of the log, with random bf16 rows."""
    total = len(trace.ids)
    result = []
    for rank in range(num_ranks):
        first, end = total * rank // num_ranks, total * (rank + 1) // num_ranks
        start = min(first + step * config.max_tokens, end)
        stop = min(start + config.max_tokens, end)
        rows = random_rows(np.random.default_rng([seed, rank, step]), stop - start, config.row_bytes)
        result.append(RankTokens([rows], trace.ids[start:stop], trace.weights[start:stop]))
    return result


def number_of_steps(trace: RoutingTrace, config: ExchangeConfig, *, num_ranks: int) -> int:
    """Steps until the rank with the most tokens has none left."""
    largest_share = math.ceil(len(trace.ids) / num_ranks)
    return math.ceil(largest_share / config.max_tokens)


def random_rows(rng: np.random.Generator, tokens: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Finite bf16 numbers of both signs between 2^-8 and 2^8, so that sums of them round in many ways."""
    bits = rng.integers(0, 1 << 64, (tokens, row_bytes // 8), dtype=np.uint64, endpoint=False).view(np.uint16)
    exponents = ((bits >> 7) & 0xF) + 119
    return ((bits & 0x807F) | (exponents << 7)).view(np.uint8)


class StepBuffers:
    """Device memory of a step: what is sent, copies of what arrives, and combine's output.

    The copies are taken on the stream between experts and combine, because peers may write to the arrivals after it.

    Parameters
    ----------
    exchange : Exchange
        Owner of the arrivals; the memory lives on its device until ``close``.
    arrivals : Arrivals
        Views of fixed addresses; those of any step.
    """

    def __init__(self, exchange: Exchange, arrivals: Arrivals) -> None:
        self._device = exchange.device
        self._stream = exchange.device.default_stream
        self._memory: list[Memory] = []
        self._owner = ArrayOwner(self._device, stream=self._stream)
        config = exchange.config
        self._inputs = [
            self._allocate((config.max_tokens, config.row_bytes), np.dtype(np.uint8)),
            self._allocate((config.max_tokens, config.top_k), np.dtype(np.int32)),
            self._allocate((config.max_tokens, config.top_k), np.dtype(np.float32)),
        ]
        self._arrived = (arrivals.rows, arrivals.expert_ids, arrivals.expert_weights, arrivals.counts)
        self.copies = [self._allocate(array.shape, array.dtype) for array in self._arrived]
        partial_rows = arrivals.partial_rows
        self.combined = self._allocate((config.max_tokens, partial_rows.shape[-1]), partial_rows.dtype)
        self._poisoned = (*self._arrived, *self.copies, partial_rows, self.combined)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        memory = self._device.allocate(math.prod(shape) * dtype.itemsize)
        self._memory.append(memory)
        return DeviceArray(memory.address, shape, dtype, owner=self._owner)

    def put(self, tokens: RankTokens) -> list[DeviceArray]:
        """Copy a step's tokens in; return rows, ids and weights as views of that length."""
        arrays: tuple[AnyArray, ...] = (tokens.payloads[0], tokens.expert_ids, tokens.expert_weights)
        for buffer, array in zip(self._inputs, arrays):
            if len(array):
                self._device.copy_in(buffer.address, np.ascontiguousarray(array), self._stream)
        return [buffer[: len(array)] for buffer, array in zip(self._inputs, arrays)]

    def take(self) -> None:
        """Enqueue the copies of the arrivals."""
        for source, copy in zip(self._arrived, self.copies):
            self._device.copy(copy.address, source.address, source.nbytes, self._stream)

    def poison(self) -> None:
        """Enqueue overwriting all that a step writes; only inside a step, while this rank owns its arrivals."""
        for array in self._poisoned:
            self._device.fill(array.address, POISON, array.nbytes, self._stream)

    def close(self) -> None:
        for memory in self._memory:
            memory.free()


class RankReplay:
    """Replays the steps of one rank; every method is collective.

    Parameters
    ----------
    group : RankGroup
        Who takes part.
    trace : RoutingTrace
        The whole log, equal on all ranks.
    config : ExchangeConfig
        Of the exchange.
    seed : int
        Of the random rows.
    """

    def __init__(self, group: RankGroup, trace: RoutingTrace, *, config: ExchangeConfig, seed: int) -> None:
        self.group = group
        self.trace = trace
        self.config = config
        self.seed = seed
        self.steps = number_of_steps(trace, config, num_ranks=group.size)
        self._checker = StepChecker(group.rank, config)

    def run(self, on_step: Callable[[int], None]) -> RankResult:
        """Replay every step; ``on_step(n)`` is called after the n-th."""
        result = RankResult()
        with Exchange(self.group, self.config) as exchange:
            experts = self.group.together(lambda: ScaleExperts(exchange))
            arrivals = self._empty_step(exchange, None)
            exchange.synchronize()
            buffers = self.group.together(lambda: StepBuffers(exchange, arrivals))
            try:
                for step in range(self.steps):
                    sources = self._tokens(step)
                    inputs = buffers.put(sources[self.group.rank])
                    self._empty_step(exchange, buffers)
                    received = self._run_step(exchange, experts, buffers, inputs, result)
                    self._account(sources, received, step, result)
                    on_step(step + 1)
            finally:
                buffers.close()
        return result

    def _tokens(self, step: int) -> list[RankTokens]:
        return step_tokens(self.trace, self.config, num_ranks=self.group.size, step=step, seed=self.seed)

    def _empty_step(self, exchange: Exchange, buffers: StepBuffers | None) -> Arrivals:
        """A step without tokens, in which everything that the next one writes is poisoned.

        It also aligns the ranks: none passes ``release`` before all have reached it.
        """
        nothing = self._tokens(self.steps)[self.group.rank]
        arrivals = exchange.dispatch(nothing.payloads[0], nothing.expert_ids, nothing.expert_weights)
        if buffers is not None:
            buffers.poison()
        exchange.release(arrivals)
        return arrivals

    def _run_step(
        self,
        exchange: Exchange,
        experts: ScaleExperts,
        buffers: StepBuffers,
        inputs: list[DeviceArray],
        result: RankResult,
    ) -> Received:
        stream = exchange.device.default_stream
        events = [stream.record()]
        arrivals = exchange.dispatch(*inputs)
        partial_rows = experts(arrivals)
        events.append(stream.record())
        buffers.take()
        events.append(stream.record())
        output = exchange.combine(partial_rows, arrivals, out=buffers.combined)
        events.append(stream.record())
        exchange.synchronize()
        result.step_ms.append(_milliseconds(events))
        rows, ids, weights, counts = (copy.numpy() for copy in buffers.copies)
        if arrivals.protocol == "sentinel":
            rows, ids, weights, counts = _compact(rows, ids, weights)
        return Received(rows, ids, weights, counts, output.numpy())

    def _account(self, sources: list[RankTokens], received: Received, step: int, result: RankResult) -> None:
        owned = self.config.expert_ranks(self.group.size) == self.group.rank
        for source, count in enumerate(received.counts.tolist()):
            ids = received.expert_ids[source, : max(0, min(count, self.config.max_tokens))]
            known = ids[(ids >= 0) & (ids < self.config.num_experts)]
            result.pairs += int(owned[known].sum())
        result.rows_received += int(received.counts.sum())
        result.rows_local += int(received.counts[self.group.rank])
        difference = self._checker.check(step, sources, received)
        if difference is not None:
            result.difference = result.difference or difference
            result.different_steps += 1


def _milliseconds(events: list[Event]) -> float:
    """From first to last event, without the copy between the two in the middle."""
    start, computed, copied, end = events
    return computed.elapsed_ms(start) + end.elapsed_ms(copied)


def _compact(rows: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sentinel's arrivals as Fence would show them: rows that hold a token first, in token order, and their number."""
    occupied = (ids >= 0).any(axis=-1)
    order = np.argsort(~occupied, axis=1, kind="stable")[..., None]
    moved = (np.take_along_axis(array, order, axis=1) for array in (rows, ids, weights))
    return (*moved, occupied.sum(axis=1, dtype=np.int32))
