"""How long a whole MoE layer takes: graph replays of unrolled steps, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.bench.moe import MoECase, repeated_weights
from nvep.config import partial_dtype
from nvep.group import RankGroup
from nvep.moe import MoELayer

_STEPS, _REPLAYS, _WARM_UP = 10, 7, 2


@dataclass(frozen=True)
class LayerTiming:
    """Microseconds.

    Attributes
    ----------
    step_us : float
        A step of a graph of ten, median over replays, slowest rank.
    parts_us : dict of str to float
        Of a step launched part by part (`MoELayer.profile`), slowest rank.
    """

    step_us: float
    parts_us: dict[str, float]


@contextmanager
def _inputs(layer: MoELayer, case: MoECase) -> Iterator[tuple[DeviceArray, DeviceArray, DeviceArray]]:
    """Random tokens of this rank, on its device."""
    device = layer.group.device
    rng = np.random.default_rng((layer.group.rank, case.tokens))
    x = rng.standard_normal((case.tokens, case.hidden), np.float32).astype(partial_dtype("bf16"))
    ids = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.top_k].astype(np.int32)
    weights = np.full(ids.shape, 1 / case.top_k, np.float32)
    owner, arrays = ArrayOwner(device), []
    memories = [device.allocate(array.nbytes) for array in (x, ids, weights)]
    for memory, array in zip(memories, (x, ids, weights)):
        device.copy_in(memory.address, array, device.default_stream)
        arrays.append(DeviceArray(memory.address, array.shape, array.dtype, owner=owner))
    device.default_stream.synchronize()
    try:
        yield arrays[0], arrays[1], arrays[2]
    finally:
        device.synchronize()
        owner.expire()
        for memory in memories:
            memory.free()


def time_layer(group: RankGroup, case: MoECase, **options: Any) -> LayerTiming:
    """Time ``case``, whose ``ranks`` is the group's size. Collective; the same result on every rank."""
    sizes: dict[str, Any] = {"top_k": case.top_k, "max_tokens": case.tokens, "row_format": case.formats}
    with (
        MoELayer(group, repeated_weights(case), grouped_gemm=case.backend, **sizes, **options) as layer,
        _inputs(layer, case) as inputs,
    ):
        group.barrier()
        parts = layer.profile(*inputs)
        step_us = _time_replays(layer, inputs)
    gathered = group.allgather((step_us, parts))
    slowest = {name: max(other[name] for _, other in gathered) for name in parts}
    return LayerTiming(max(us for us, _ in gathered), slowest)


def _time_replays(layer: MoELayer, inputs: tuple[DeviceArray, DeviceArray, DeviceArray]) -> float:
    group, device = layer.group, layer.group.device
    stream = device.create_stream()
    with device.capture(stream) as graph:
        for _ in range(_STEPS):
            layer(*inputs, stream=stream)
    group.barrier()  # nobody instantiates a graph while a peer's kernel waits for him
    times = []
    for _ in range(_WARM_UP + _REPLAYS):
        start = stream.record()
        graph.launch(stream)
        end = stream.record()
        layer.exchange.synchronize(stream)
        times.append(end.elapsed_ms(start) * 1e3 / _STEPS)
        group.barrier()
    graph.close()
    return median(times[_WARM_UP:])
