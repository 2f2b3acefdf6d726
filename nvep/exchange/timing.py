"""How an exchange is timed: pairs of dispatch and combine, unrolled in one graph, the slowest rank of each replay."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local


@dataclass(frozen=True)
class PairCase:
    """Random routing of ``tokens`` a rank over DeepSeek-V3-like rows.

    Attributes
    ----------
    ranks, tokens : int
        Ranks of the local group, and tokens of each.
    hidden : int
        bf16 elements of a row.
    experts, top_k : int
        Routing.
    protocol : str
        ``"fence"`` or ``"sentinel"``.
    unrolled, replays : int
        Steps in the timed graph, and how often it is replayed.
    """

    ranks: int
    tokens: int
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    protocol: str = "fence"
    unrolled: int = 20
    replays: int = 12


@dataclass(frozen=True)
class PairResult:
    """Microseconds a pair on the slowest rank, and rows and bytes that crossed between ranks, all ranks together."""

    device: str
    median_us: float
    best_us: float
    worst_us: float
    remote_rows: int
    remote_bytes: int


def time_pairs(case: PairCase, *, device: str) -> PairResult:
    """Time dispatch + combine of a local group, back to back, with no expert work between them."""
    results: list[PairResult] = run_local(lambda group: time_group(group, case), case.ranks, device=device)
    return results[0]


def time_group(group: RankGroup, case: PairCase) -> PairResult:
    """The same on the ranks of a group, which all get the result (collective; ``case.ranks`` is the group's size).

    Every replay starts behind an untimed step, which brings the ranks to the same point. Partial rows are read in
    place.
    """
    config = ExchangeConfig(
        num_experts=case.experts,
        top_k=case.top_k,
        max_tokens=case.tokens,
        row_bytes=2 * case.hidden,
        protocol=case.protocol,
        deadline=20.0,
    )
    times, remote_rows = _time_rank(group, config, case)
    gathered = group.allgather((times, remote_rows))
    slowest = [max(replay) for replay in zip(*(times for times, _ in gathered), strict=True)]
    remote = sum(rows for _, rows in gathered)
    return PairResult(
        device=group.device.name,
        median_us=statistics.median(slowest),
        best_us=min(slowest),
        worst_us=max(slowest),
        remote_rows=remote,
        remote_bytes=remote * config.row_bytes,
    )


def _time_rank(group: RankGroup, config: ExchangeConfig, case: PairCase) -> tuple[list[float], int]:
    device = group.device
    rng = np.random.default_rng(group.rank)
    rows = rng.integers(0, 1 << 16, (case.tokens, case.hidden), dtype=np.uint16)
    ids = np.array([rng.permutation(case.experts)[: case.top_k] for _ in range(case.tokens)], dtype=np.int32)
    weights = rng.random((case.tokens, case.top_k), dtype=np.float32)
    with Exchange(group, config) as exchange:
        arrays = [_on_device(exchange, a) for a in (rows, ids, weights)]
        stream = device.create_stream()
        graphs = []
        for steps in (1, case.unrolled):
            with device.capture(stream) as graph:
                for _ in range(steps):
                    arrivals = exchange.dispatch(*(a for a, _ in arrays), stream=stream)
                    exchange.combine(arrivals.partial_rows, arrivals, stream=stream)
            graphs.append(graph)
        times = []
        group.barrier()
        for _ in range(case.replays + 2):
            graphs[0].launch(stream)
            start = stream.record()
            graphs[1].launch(stream)
            end = stream.record()
            end.synchronize()
            times.append(end.elapsed_ms(start) * 1e3 / case.unrolled)
        exchange.synchronize(stream)
        group.barrier()
        for graph in graphs:
            graph.close()
        for _, memory in arrays:
            memory.free()
    owners = config.expert_ranks(group.size)[ids]
    remote = sum(len(set(row)) - (group.rank in row) for row in owners.tolist())
    return times[2:], remote


def _on_device(exchange: Exchange, array: np.ndarray) -> tuple[DeviceArray, Any]:
    memory = exchange.device.allocate(array.nbytes)
    exchange.device.copy_in(memory.address, array, exchange.device.default_stream)
    exchange.device.default_stream.synchronize()
    return DeviceArray(memory.address, array.shape, array.dtype, owner=ArrayOwner(exchange.device)), memory
