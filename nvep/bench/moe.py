"""How long a rank's expert compute takes on one device, beside reading its active weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import Settings, partial_dtype
from nvep.exchange import Arrivals
from nvep.formats import payload_format
from nvep.moe import MoEWeights
from nvep.moe.grouped_gemm import BACKENDS, ExpertShape, GroupedGemm
from nvep.moe.grouped_gemm.base import local_index
from nvep.moe.naming import ExpertParts
from nvep.moe.stored import LazyExperts
from nvep.moe.weights import LocalExperts
from nvep.runtime import choose_device_kind
from nvep.runtime.device import Device, Memory, Stream

_WEIGHT_TYPES: dict[str, np.dtype[Any]] = {
    "bf16": partial_dtype("bf16"),
    "fp8_block": np.dtype(ml_dtypes.float8_e4m3fn),
}
_COPY_BYTES, _EMULATED_COPY_BYTES = 1 << 30, 1 << 20
_REPLAYS, _WARM_UP = 7, 2


@dataclass(frozen=True)
class MoECase:
    """One rank's share of a layer, when every rank has ``tokens`` tokens that choose experts at random.

    Attributes
    ----------
    ranks, experts, top_k, hidden, intermediate : int
        Of the layer; experts are spread evenly, rank 0 is computed.
    tokens : int
        Tokens of each rank.
    formats : str
        ``"bf16"``, or ``"fp8_block"`` for rows and weights.
    backend : str
        A key of ``nvep.moe.grouped_gemm.BACKENDS``.
    """

    tokens: int
    formats: str = "bf16"
    backend: str = "gather"
    ranks: int = 8
    experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    intermediate: int = 2048

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(
            self.ranks, self.tokens, self.top_k, self.experts, self.local_experts, self.hidden, self.intermediate,
            "bf16", row_format=self.formats, weight_format=self.formats,
        )  # fmt: skip

    def ids(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Headers of the rows that reach rank 0, compact as Fence leaves them, and counts."""
        rng = np.random.default_rng(self.tokens)
        ids = np.full((self.ranks, self.tokens, self.top_k), -1, np.int32)
        counts = np.zeros(self.ranks, np.int32)
        for rank in range(self.ranks):
            chosen = np.argsort(rng.random((self.tokens, self.experts)), axis=1)[:, : self.top_k]
            here = chosen[(chosen < self.local_experts).any(axis=1)]
            counts[rank] = len(here)
            ids[rank, : len(here)] = here
        return ids, counts

    def matrix_bytes(self) -> float:
        """Weights and scales of one expert."""
        elements = 3 * self.hidden * self.intermediate
        return elements * _WEIGHT_TYPES[self.formats].itemsize + (0 if self.formats == "bf16" else elements / 4096)


@dataclass(frozen=True)
class MoETiming:
    """Microseconds of a step's expert compute, and of reading the active weights at the speed of a copy.

    Attributes
    ----------
    us : float
        Median over replays.
    floor_us : float
        Bytes of active experts' weights over the bandwidth (read and write) of a copy in the same run.
    rows, pairs, active : int
        Rows received, pairs of a row and a local expert, experts with any.
    captured : bool
        Timed as a graph; otherwise call by call, which includes what the host takes.
    """

    us: float
    floor_us: float
    rows: int
    pairs: int
    active: int
    captured: bool


def open_device() -> Device:
    """The first GPU, or the emulated device."""
    if choose_device_kind(Settings.from_environment().device) == "cuda":
        from nvep.runtime.cuda import CudaDevice

        return CudaDevice(0)
    from nvep.runtime.emulated import EmulatedDevice

    return EmulatedDevice()


class _Repeated(LazyExperts):
    """The same random matrix for every expert: speed does not depend on what they hold."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], scale: float) -> None:
        self.shape, self.dtype = shape, dtype
        rng = np.random.default_rng(shape[1])
        self._matrix = (rng.standard_normal(shape[1:], np.float32) * np.float32(scale)).astype(dtype)

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        return self._matrix


def repeated_weights(case: MoECase) -> MoEWeights:
    """Weights of ``case`` in its format."""
    e, i, h = case.experts, case.intermediate, case.hidden
    shapes = ((e, i, h), (e, i, h), (e, h, i))
    dtype = _WEIGHT_TYPES[case.formats]
    gate, up, down = (_Repeated(shape, dtype, 0.02 if case.formats == "bf16" else 40.0) for shape in shapes)
    if case.formats == "bf16":
        return MoEWeights(gate, up, down)
    blocks = ((e, -(-s[1] // 128), -(-s[2] // 128)) for s in shapes)
    return MoEWeights(gate, up, down, scales=ExpertParts(*(_Repeated(s, np.dtype(np.float32), 5e-4) for s in blocks)))


@contextmanager
def share(device: Device, case: MoECase) -> Iterator[LocalExperts]:
    """Rank 0's weights, for cases that differ from ``case`` in tokens and backend only."""
    owners = np.arange(case.experts) // case.local_experts
    experts = LocalExperts(device, repeated_weights(case).checked(device), local_index(owners, 0))
    try:
        yield experts
    finally:
        device.synchronize()
        experts.close()


@contextmanager
def _arrivals(device: Device, case: MoECase) -> Iterator[Arrivals]:
    owner, memories = ArrayOwner(device), list[Memory]()
    rows = (case.ranks, case.tokens)
    ids, counts = case.ids()

    def array(shape: tuple[int, ...], dtype: Any, values: npt.NDArray[Any] | None = None) -> DeviceArray:
        memory = device.allocate(max(16, int(np.prod(shape)) * np.dtype(dtype).itemsize))
        memories.append(memory)
        if values is not None:
            device.copy_in(memory.address, np.ascontiguousarray(values), device.default_stream)
        return DeviceArray(memory.address, shape, dtype, owner=owner)

    sizes = payload_format(case.formats).payload_bytes(case.hidden)
    random = np.random.default_rng(1)
    payloads = [array((*rows, n), np.uint8, random.integers(0, 60, (*rows, n), np.uint8)) for n in sizes]
    yield Arrivals(
        payloads=tuple(payloads),
        expert_ids=array(ids.shape, np.int32, ids),
        expert_weights=array(ids.shape, np.float32, np.full(ids.shape, 1 / case.top_k, np.float32)),
        counts=array(counts.shape, np.int32, counts),
        partial_rows=array((*rows, case.hidden), partial_dtype("bf16")),
        protocol="fence",
        lane=0,
        step=0,
    )
    device.synchronize()
    owner.expire()
    for memory in memories:
        memory.free()


def copy_bandwidth(device: Device) -> float:
    """Bytes read and written a microsecond by a copy within the device's memory."""
    nbytes = _EMULATED_COPY_BYTES if device.emulated else _COPY_BYTES
    memory = device.allocate(2 * nbytes)
    stream, times = device.create_stream(), []
    try:
        for _ in range(_WARM_UP + _REPLAYS):
            start = stream.record()
            for _ in range(4):
                device.copy(memory.address + nbytes, memory.address, nbytes, stream)
            times.append(_elapsed_us(stream, start))
    finally:
        memory.free()
    return 8 * nbytes / median(times[_WARM_UP:])


def _elapsed_us(stream: Stream, start: Any) -> float:
    end = stream.record()
    stream.synchronize()
    return float(end.elapsed_ms(start)) * 1e3


def time_experts(device: Device, case: MoECase, experts: LocalExperts, *, bandwidth: float) -> MoETiming:
    """Time one case; ``bandwidth`` is what `copy_bandwidth` gave in this run."""
    ids, counts = case.ids()
    local = ids[(ids >= 0) & (ids < case.local_experts)]
    active = len(np.unique(local))
    gemm = BACKENDS[case.backend](device, case.shape, experts)
    captured = getattr(gemm, "strategy", None) != "packed"
    try:
        with _arrivals(device, case) as arrivals:
            us = _time_steps(device, gemm, arrivals, captured=captured)
    finally:
        gemm.close()
    floor = active * case.matrix_bytes() / bandwidth
    return MoETiming(us, floor, int(counts.sum()), len(local), active, captured)


def _time_steps(device: Device, gemm: GroupedGemm, arrivals: Arrivals, *, captured: bool, steps: int = 5) -> float:
    stream = device.create_stream()

    def run() -> None:
        for _ in range(steps):
            gemm.run(arrivals, arrivals.partial_rows, stream)

    run()
    stream.synchronize()
    graph = None
    if captured:
        with device.capture(stream) as graph:
            run()
    times = []
    for _ in range(_WARM_UP + _REPLAYS):
        start = stream.record()
        if graph is None:
            run()
        else:
            graph.launch(stream)
        times.append(_elapsed_us(stream, start) / steps)
    if graph is not None:
        graph.close()
    return median(times[_WARM_UP:])
