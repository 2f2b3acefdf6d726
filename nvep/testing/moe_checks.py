"""Checks of `MoELayer` that hold on every device: each runs a local group and compares with bounds and reference."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig, partial_dtype
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup, run_local
from nvep.moe import MoELayer, MoEWeights
from nvep.reference import ExpertMatrices, RankTokens, ReferenceArrivals, combine_at, dispatch_to, moe_layer
from nvep.runtime.device import Stream
from nvep.testing.moe_bounds import output_bounds, partial_bounds, require_inside
from nvep.testing.steps import check_arrivals, random_ids, same

BF16 = partial_dtype("bf16")
NAN_BYTE = 0xFF  # NaN in every partial format, and in bf16 rows
ZERO_BYTE = 0x00  # in the ids: expert 0, so that a header nobody wrote would be computed on
LIMIT = 100.0  # seconds that the ranks of one check may take


@dataclass(frozen=True)
class MoECase:
    """Sizes of a layer and of its group."""

    ranks: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens: int = 12
    partial_format: str = "bf16"
    placement: tuple[int, ...] | None = None
    grouped_gemm: str = "auto"

    @property
    def config(self) -> ExchangeConfig:
        """What the layer makes of these sizes."""
        return ExchangeConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            row_bytes=2 * self.hidden,
            partial_format=self.partial_format,
            placement=self.placement,
        )

    def rng(self, *seed: int) -> np.random.Generator:
        """Different numbers for every case and seed, the same on every rank."""
        return np.random.default_rng((zlib.crc32(repr(self).encode()), *seed))

    def weights(self) -> MoEWeights:
        """Normal numbers scaled so that outputs are of order one."""
        e, i, h = self.experts, self.intermediate, self.hidden
        rng = self.rng(0)
        gate, up, down = (
            (rng.standard_normal(shape) * np.sqrt(3.0 / shape[2])).astype(BF16)
            for shape in ((e, i, h), (e, i, h), (e, h, i))
        )
        return MoEWeights(gate, up, down)

    def step(self, index: int) -> list[RankTokens]:
        """Fresh tokens of every rank: each count from none to ``max_tokens`` comes up, and some ids are -1."""
        rng = self.rng(1, index)
        most = self.max_tokens
        counts = [int(rng.choice((0, 1, most, int(rng.integers(0, most + 1))))) for _ in range(self.ranks)]
        counts[index % self.ranks] = 0 if index % 2 else most
        return [
            RankTokens(
                payloads=[rng.standard_normal((n, self.hidden)).astype(BF16).view(np.uint8)],
                expert_ids=random_ids(rng, n, self.config),
                expert_weights=rng.standard_normal((n, self.top_k)).astype(np.float32),
            )
            for n in counts
        ]


CASES = {
    "one-rank": MoECase(1, 5, 2, hidden=40, intermediate=24),
    "two-ranks-top-1": MoECase(2, 7, 1, hidden=24, intermediate=40, partial_format="fp16"),
    "three-ranks-fp32": MoECase(3, 8, 3, hidden=8, intermediate=8, partial_format="fp32", grouped_gemm="gather"),
    "four-ranks": MoECase(4, 10, 4, hidden=72, intermediate=56),
    "a-rank-that-owns-none": MoECase(4, 6, 2, 40, 72, partial_format="fp32", placement=(3, 0, 0, 1, 3, 1)),
    "eight-ranks": MoECase(8, 12, 4, hidden=56, intermediate=40, max_tokens=7, partial_format="fp16"),
    "more-ranks-than-experts": MoECase(8, 5, 3, hidden=24, intermediate=24, max_tokens=5),
}
ODD = MoECase(
    3, 7, 3, hidden=40, intermediate=24, max_tokens=9, placement=(2, 0, 0, 2, 2, 0, 0), grouped_gemm="gather"
)  # rank 1 owns none


def matrices_of(weights: MoEWeights) -> ExpertMatrices:
    """The same arrays for the reference."""
    return ExpertMatrices(weights.gate, weights.up, weights.down)


def rows_of(tokens: RankTokens) -> npt.NDArray[np.generic]:
    """A source's rows, bf16 ``[tokens, hidden]``."""
    rows: npt.NDArray[np.generic] = tokens.payloads[0].view(BF16)
    return rows


def run(case: MoECase, device: str, body: Callable[[MoELayer, MoEWeights], Any], **options: Any) -> list[Any]:
    """``body(layer, weights)`` on every rank of a local group."""
    weights = case.weights()

    def main(group: RankGroup) -> Any:
        sizes: dict[str, Any] = {
            "top_k": case.top_k,
            "max_tokens": case.max_tokens,
            "partial_format": case.partial_format,
            "grouped_gemm": case.grouped_gemm,
        }
        with MoELayer(group, weights, placement=case.placement, **sizes, **options) as layer:
            return body(layer, weights)

    return run_local(main, case.ranks, device=device, timeout=LIMIT)


def poison(exchange: Exchange) -> None:
    """Make every row that a step does not write poisonous. Collective: no step may be in flight anywhere.

    Receive buffers, partial rows and outputs become NaN; ids become expert 0, which a header left unwritten would name.
    """
    heap, device = exchange.memory.heap, exchange.device
    stream = device.default_stream
    exchange.synchronize()
    exchange.group.barrier()
    for region in ("Payload0", "ExpertWeights", "PartialRows", "ExpertIds"):
        byte = ZERO_BYTE if region == "ExpertIds" else NAN_BYTE
        device.fill(heap.address(region), byte, heap.layout.region(region).nbytes, stream)
    device.fill(exchange.memory.output(0), NAN_BYTE, exchange.memory.output_lane_bytes, stream)
    stream.synchronize()
    exchange.group.barrier()


def check_output(
    got: npt.NDArray[np.generic], tokens: RankTokens, case: MoECase, weights: MoEWeights, where: str
) -> None:
    """A rank's output against the bounds; the reference must lie in the same intervals."""
    rows, ids, scale = rows_of(tokens), tokens.expert_ids, tokens.expert_weights
    matrices, config = matrices_of(weights), case.config
    bounds = output_bounds(rows, ids, scale, matrices=matrices, config=config, num_ranks=case.ranks)
    expected = moe_layer(rows, ids, expert_weights=scale, matrices=matrices, config=config, num_ranks=case.ranks)
    require_inside(expected, bounds, f"{where}: the reference")
    assert got.dtype == expected.dtype, f"{where}: dtype {got.dtype}, expected {expected.dtype}"
    require_inside(got, bounds, where)


def check_calls(case: MoECase, device: str, *, calls: int = 5) -> None:
    """Several calls with changing token counts; counts given as the arrays' length, or as a number below it."""

    def body(layer: MoELayer, weights: MoEWeights) -> None:
        rank = layer.group.rank
        for index in range(calls):
            tokens = case.step(index)[rank]
            n = len(tokens.expert_ids)
            arrays = [rows_of(tokens), tokens.expert_ids, tokens.expert_weights]
            if index % 2:  # arrays longer than the step: what is beyond must not be read
                arrays = [_lengthened(a, case.max_tokens) for a in arrays]
                arrays[1] = arrays[1].astype(np.int64)
            poison(layer.exchange)
            output = layer(*arrays, num_tokens=n if index % 2 else None)
            layer.exchange.synchronize()
            check_output(output.numpy(), tokens, case, weights, f"rank {rank}, call {index}, {n} tokens")

    run(case, device, body)


def _unread(dtype: np.dtype[Any]) -> int:
    """Byte for what lies beyond a step's count: NaN, or ids far out of range, which would be counted."""
    return NAN_BYTE >> 1 if dtype.kind == "i" else NAN_BYTE


def _lengthened(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    result = np.empty((rows, *array.shape[1:]), dtype=array.dtype)
    result.view(np.uint8)[...] = _unread(array.dtype)
    result[: len(array)] = array
    return result


def check_phases(case: MoECase, device: str, *, split: bool) -> None:
    """The layer taken apart: dispatch bit for bit, each partial row within its bounds, combine bit for bit.

    Split, every phase and the experts run on streams of their own, and the host waits for nothing in between.
    """
    partial_of: dict[int, npt.NDArray[Any]] = {}

    def body(layer: MoELayer, weights: MoEWeights) -> None:
        rank, exchange = layer.group.rank, layer.exchange
        streams = [exchange.device.create_stream() if split else None for _ in range(5)]
        for index in range(3):
            sources, where = case.step(index), f"rank {rank}, step {index}"
            poison(exchange)
            arrivals, partial, output = _enqueue(layer, sources[rank], streams)
            exchange.synchronize(streams[-1])
            expected = dispatch_to(rank, sources, config=case.config)
            check_arrivals(arrivals, expected, where)
            partial_of[rank] = partial.numpy()
            _check_partial(partial_of[rank], expected, (case, rank, weights), where)
            layer.group.barrier()  # every rank's partial rows are in partial_of
            every = [partial_of[r] for r in range(case.ranks)]
            want = combine_at(rank, every, expert_ids=sources[rank].expert_ids, config=case.config)
            same(output.numpy(), want, f"{where}: output")
            layer.group.barrier()

    run(case, device, body)


def _enqueue(
    layer: MoELayer, tokens: RankTokens, streams: list[Stream | None]
) -> tuple[Arrivals, DeviceArray, DeviceArray]:
    exchange = layer.exchange
    inputs = (rows_of(tokens), tokens.expert_ids, tokens.expert_weights)
    if streams[0] is None:
        arrivals = exchange.dispatch(*inputs)
        partial = layer.experts(arrivals)
        return arrivals, partial, exchange.combine(partial, arrivals)
    exchange.dispatch_send(*inputs, stream=streams[0])
    arrivals = exchange.dispatch_recv(stream=streams[1])
    partial = layer.experts(arrivals, stream=streams[2])
    exchange.combine_send(partial, arrivals, stream=streams[3])
    return arrivals, partial, exchange.combine_recv(arrivals, stream=streams[4])


def _check_partial(
    rows: npt.NDArray[Any], expected: ReferenceArrivals, layer: tuple[MoECase, int, MoEWeights], where: str
) -> None:
    case, rank, weights = layer
    owned = case.config.expert_ranks(case.ranks) == rank
    for source, slot in np.argwhere(expected.valid).tolist():
        ids, scales = expected.expert_ids[source, slot].tolist(), expected.expert_weights[source, slot].tolist()
        choice = [(e, w) for e, w in zip(ids, scales, strict=True) if e >= 0 and owned[e]]
        row = expected.payloads[0][source, slot].view(BF16)
        bounds = partial_bounds(row, choice, matrices=matrices_of(weights), config=case.config)
        require_inside(rows[source, slot], bounds, f"{where}: partial row [{source}, {slot}]")
    unused = rows[~expected.valid]
    assert np.isnan(unused.astype(np.float32)).all(), f"{where}: experts wrote rows that hold no token"


@contextmanager
def device_inputs(
    layer: MoELayer, case: MoECase, stream: Stream
) -> Iterator[tuple[list[DeviceArray], Callable[..., None]]]:
    """Device arrays for rows, ids, weights and the count, and a function that fills them on ``stream``."""
    device, most = layer.group.device, case.max_tokens
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((most, case.hidden), BF16),
        ((most, case.top_k), np.int32),
        ((most, case.top_k), np.float32),
        ((1,), np.int32),
    ]
    owner = ArrayOwner(device, stream=stream)
    memories = [device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in shapes]
    arrays = [
        DeviceArray(m.address, shape, dtype, owner=owner) for m, (shape, dtype) in zip(memories, shapes, strict=True)
    ]

    def write(tokens: RankTokens) -> None:
        n = len(tokens.expert_ids)
        values = (rows_of(tokens), tokens.expert_ids, tokens.expert_weights, np.array([n], dtype=np.int32))
        for array, value in zip(arrays, values, strict=True):
            device.fill(array.address, _unread(array.dtype), array.nbytes, stream)
            if value.nbytes:
                device.copy_in(array.address, value, stream)

    try:
        yield arrays, write
    finally:
        stream.synchronize()
        owner.expire()
        for memory in memories:
            memory.free()


def check_device_counts(case: MoECase, device: str, *, replay: bool) -> None:
    """Inputs and token counts in device memory, called directly or as replays of one captured graph."""

    def body(layer: MoELayer, weights: MoEWeights) -> None:
        rank, owner = layer.group.rank, layer.group.device
        stream = owner.create_stream()
        with device_inputs(layer, case, stream) as ((x, ids, scale, count), write):
            if replay:
                with owner.capture(stream) as graph:
                    output = layer(x, ids, scale, num_tokens=count, stream=stream)
            for index in range(5):
                tokens = case.step(index)[rank]
                poison(layer.exchange)
                write(tokens)
                if replay:
                    graph.launch(stream)
                else:
                    output = layer(x, ids, scale, num_tokens=count, stream=stream)
                layer.exchange.synchronize(stream)
                got, n = output.numpy(), len(tokens.expert_ids)
                assert got.shape == (case.max_tokens, case.hidden)
                check_output(got[:n], tokens, case, weights, f"rank {rank}, replay={replay}, call {index}, {n} tokens")
                assert np.isnan(got[n:].astype(np.float32)).all(), "output rows beyond the count were written"
            assert layer.exchange.statistics().invalid_ids == 0, "ids beyond the count were read"
            if replay:
                graph.close()

    run(case, device, body)


def outputs(case: MoECase, device: str, **options: Any) -> list[list[npt.NDArray[Any]]]:
    """By rank, what three calls give: for comparing runs bit for bit."""

    def body(layer: MoELayer, weights: MoEWeights) -> list[npt.NDArray[Any]]:
        result = []
        for index in range(3):
            tokens = case.step(index)[layer.group.rank]
            result.append(layer(rows_of(tokens), tokens.expert_ids, tokens.expert_weights).numpy())
        return result

    return run(case, device, body, **options)


def check_repeatable(case: MoECase, device: str) -> None:
    """The same bits from run to run, whatever the number of blocks."""
    first = outputs(case, device)
    for name, again in (("a second run", outputs(case, device)), ("one block", outputs(case, device, max_blocks=1))):
        for rank, (left, right) in enumerate(zip(first, again, strict=True)):
            for call, (want, got) in enumerate(zip(left, right, strict=True)):
                same(got, want, f"{name}: rank {rank}, call {call}")


def check_two_layers(device: str) -> None:
    """Layers of different sizes in one group, their calls interleaved without waiting: neither disturbs the other."""
    small, large = MoECase(3, 4, 2, 16, 8, max_tokens=3), MoECase(3, 7, 3, 104, 88, partial_format="fp32")

    def main(group: RankGroup) -> None:
        with ExitStack() as opened:
            layers = []
            for case in (small, large):
                weights = case.weights()
                sizes: dict[str, Any] = {"top_k": case.top_k, "max_tokens": case.max_tokens}
                layer = MoELayer(group, weights, partial_format=case.partial_format, **sizes)
                layers.append((case, weights, opened.enter_context(layer)))
            for index in range(4):
                calls = []
                for case, weights, layer in layers:
                    poison(layer.exchange)
                    tokens = case.step(index)[group.rank]
                    output = layer(rows_of(tokens), tokens.expert_ids, tokens.expert_weights)
                    calls.append((output, tokens, case, weights))
                for output, tokens, case, weights in calls:
                    check_output(output.numpy(), tokens, case, weights, f"rank {group.rank}, step {index}")

    run_local(main, small.ranks, device=device, timeout=LIMIT)
