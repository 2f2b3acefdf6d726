"""Random steps of an exchange, and their comparison with the reference, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner
from nvep.config import ExchangeConfig, partial_dtype
from nvep.exchange import Arrivals, Exchange
from nvep.exchange.views import view_arrivals
from nvep.reference.exchange import RankTokens, ReferenceArrivals, combine_at, dispatch_to
from nvep.reference.routing import slots

POISON_BYTE = 0xA5


@dataclass(frozen=True)
class Step:
    """What every rank brings to a step, and what every rank's experts return.

    Attributes
    ----------
    config : ExchangeConfig
        Of the exchange that runs it.
    sources : list of RankTokens
        By source rank.
    partial_rows : list of numpy.ndarray
        By target rank: partial format ``[ranks, max_tokens, elements]``, in the order of Fence slots.
    """

    config: ExchangeConfig
    sources: list[RankTokens]
    partial_rows: list[np.ndarray]

    def tokens_in_slots(self, source: int, target: int) -> np.ndarray:
        """Tokens of ``source`` that go to ``target``, in the order of their Fence slots."""
        ranks = len(self.sources)
        taken = slots(self.sources[source].expert_ids, self.config.expert_ranks(ranks), ranks)[:, target]
        return np.flatnonzero(taken >= 0)


def random_ids(rng: np.random.Generator, tokens: int, config: ExchangeConfig) -> np.ndarray:
    """int32 ``[tokens, top_k]`` distinct experts; now and then none, and now and then few experts for many tokens."""
    hot = rng.random() < 0.25
    experts = np.arange(config.num_experts)
    if hot:
        experts = rng.permutation(config.num_experts)[: max(config.top_k, config.num_experts // 4)]
    ids = np.array([rng.permutation(experts)[: config.top_k] for _ in range(tokens)], dtype=np.int32)
    ids = ids.reshape(tokens, config.top_k)
    ids[rng.random(ids.shape) < 0.05] = -1
    return ids


def random_partial(rng: np.random.Generator, shape: tuple[int, ...], config: ExchangeConfig) -> np.ndarray:
    """Normal numbers over a range that no sum leaves, with both zeros and subnormals among them."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 8, shape)
    values[rng.random(shape) < 0.02] = 0.0
    values[rng.random(shape) < 0.02] = -0.0
    values[rng.random(shape) < 0.02] = 6e-8 if config.partial_format == "fp16" else 1e-40
    return np.asarray(values.astype(np.float32).astype(partial_dtype(config.partial_format)))


def random_step(
    seed: tuple[int, ...], config: ExchangeConfig, num_ranks: int, *, counts: list[int] | None = None
) -> Step:
    """A step that every rank computes alike from ``seed``; ``counts`` are the tokens of each rank (default: random)."""
    rng = np.random.default_rng(seed)
    if counts is None:
        counts = [0 if rng.random() < 0.15 else int(rng.integers(0, config.max_tokens + 1)) for _ in range(num_ranks)]
    sources = [
        RankTokens(
            payloads=[rng.integers(0, 256, (n, nbytes), dtype=np.uint8) for nbytes in config.payload_bytes],
            expert_ids=random_ids(rng, n, config),
            expert_weights=rng.random((n, config.top_k), dtype=np.float32),
        )
        for n in counts
    ]
    shape = (num_ranks, config.max_tokens, config.elements)
    return Step(config, sources, [random_partial(rng, shape, config) for _ in range(num_ranks)])


def poison_receive_buffers(exchange: Exchange) -> None:
    """Fill this rank's receive buffers of all lanes with a pattern. Collective: no step may be in flight anywhere."""
    device = exchange.device
    exchange.synchronize()
    exchange.group.barrier()
    for lane in range(exchange.config.lanes):
        for protocol in exchange.config.protocols:
            views = view_arrivals(exchange.memory, lane, protocol, ArrayOwner(device))
            for view in (*views.payloads, views.expert_ids, views.expert_weights, views.partial_rows):
                device.fill(view.address, POISON_BYTE, view.nbytes, device.default_stream)
        address, nbytes = exchange.memory.output(lane), exchange.memory.output_lane_bytes
        device.fill(address, POISON_BYTE, nbytes, device.default_stream)
    device.default_stream.synchronize()
    exchange.group.barrier()


def fill_unused(step: Step, expected: ReferenceArrivals, rank: int, *, protocol: str = "fence") -> np.ndarray:
    """Partial rows of ``rank`` where its arrivals are, NaN in every row without a token: whoever reads one shows it."""
    rows = step.partial_rows[rank]
    if protocol == "sentinel":
        rows = spread(step, rank, rows)
    rows = rows.copy()
    rows[~expected.valid] = np.nan
    return rows


def spread(step: Step, rank: int, rows: np.ndarray) -> np.ndarray:
    """``rows`` ``[ranks, max_tokens, ...]`` from the order of Fence slots to that of Sentinel: token indices."""
    moved = np.zeros_like(rows)
    for source in range(len(step.sources)):
        tokens = step.tokens_in_slots(source, rank)
        moved[source, tokens] = rows[source, : len(tokens)]
    return moved


def arrivals_of(
    step: Step, config: ExchangeConfig, rank: int, *, masked: Collection[int] = (), protocol: str = "fence"
) -> ReferenceArrivals:
    """What ``rank`` must receive in this step."""
    compact = dispatch_to(rank, step.sources, config=config, masked=masked)
    if protocol != "sentinel":
        return compact
    valid = spread(step, rank, compact.valid)
    ids = spread(step, rank, compact.expert_ids)
    ids[~valid] = config.invalid_expert
    return ReferenceArrivals(
        payloads=tuple(spread(step, rank, rows) for rows in compact.payloads),
        valid=valid,
        expert_ids=ids,
        expert_weights=spread(step, rank, compact.expert_weights),
        counts=np.array([0 if s in masked else len(t.expert_ids) for s, t in enumerate(step.sources)], dtype=np.int32),
    )


def output_of(step: Step, config: ExchangeConfig, rank: int, *, masked: Collection[int] = ()) -> np.ndarray:
    """What ``rank`` must get back in this step."""
    ids = step.sources[rank].expert_ids
    return combine_at(rank, step.partial_rows, expert_ids=ids, config=config, masked=masked)


def check_arrivals(arrivals: Arrivals, expected: ReferenceArrivals, where: str) -> None:
    """Compare everything a user may read; ids beyond the counts too."""
    same(arrivals.counts.numpy(), expected.counts, f"{where}: counts")
    same(arrivals.expert_ids.numpy(), expected.expert_ids, f"{where}: expert ids")
    weights = arrivals.expert_weights.numpy()
    same(weights[expected.valid], expected.expert_weights[expected.valid], f"{where}: expert weights")
    for index, (got, want) in enumerate(zip(arrivals.payloads, expected.payloads, strict=True)):
        same(got.numpy()[expected.valid], want[expected.valid], f"{where}: payload {index}")


def same(got: np.ndarray, want: np.ndarray, where: str) -> None:
    """Raise AssertionError naming the first element whose bits differ."""
    assert got.shape == want.shape, f"{where}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{where}: dtype {got.dtype}, expected {want.dtype}"
    if got.tobytes() == want.tobytes():
        return
    bits = np.dtype(f"u{got.dtype.itemsize}")
    left, right = np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits)
    first = tuple(int(i) for i in np.argwhere(left != right)[0])
    raise AssertionError(
        f"{where}: {int((left != right).sum())} of {got.size} elements differ, first at {first}: "
        f"{got[first]!r} ({left[first]:#x}), expected {want[first]!r} ({right[first]:#x})"
    )


class Turnstile:
    """Lets threads of one test wait for one another without the group, so that a rank may stay behind on purpose."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def open(self, name: str) -> None:
        self._event(name).set()

    def wait(self, name: str, timeout: float = 30.0) -> None:
        assert self._event(name).wait(timeout), f"nobody opened {name!r}"


def device_copy(exchange: Exchange, array: np.ndarray) -> Any:
    """``array`` on the exchange's device, with the memory to free."""
    memory = exchange.device.allocate(max(array.nbytes, 16))
    if array.nbytes:
        exchange.device.copy_in(memory.address, array, exchange.device.default_stream)
    return memory
