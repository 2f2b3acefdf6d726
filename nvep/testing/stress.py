"""Many steps from graphs, every row checked on the device: nothing on the host waits between them."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import PROTOCOLS, ExchangeConfig, partial_dtype
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup, run_local
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Event, Kernel, LaunchShape, Memory
from nvep.runtime.source import KERNEL_ROOT, KernelSource

STRESS_ARGUMENTS = ArgumentStruct(
    "StressArguments",
    [
        Field("step", "unsigned int*"),
        Field("num_tokens", "unsigned int*"),
        Field("expert_ids", "int*"),
        Field("expert_weights", "float*"),
        Field("rows", "unsigned int*"),
        Field("arrived_rows", "const unsigned int*"),
        Field("arrived_ids", "const int*"),
        Field("arrived_weights", "const float*"),
        Field("counts", "const int*"),
        Field("partial_rows", "unsigned short*"),
        Field("output", "const unsigned short*"),
        Field("expert_ranks", "const int*"),
        Field("errors", "unsigned int*"),
        Field("rank", "u32"),
        Field("compact", "u32"),
    ],
)
LAUNCHES_AHEAD = 16
KERNELS = ("stress_prepare", "stress_experts", "stress_finish")
PLACES = {1: "expert ids", 2: "weights", 3: "row", 4: "count", 5: "id of an empty row", 6: "output"}


@dataclass(frozen=True)
class StressCase:
    """A run of ``steps`` steps in replays of one graph of ``unrolled`` steps, each with a protocol of its own.

    Attributes
    ----------
    protocols : tuple of str
        The protocols that the steps of the graph are drawn from.
    pause_ns : int
        Longest time for which a rank is kept back twice a step.
    """

    ranks: int = 4
    steps: int = 10_000
    max_tokens: int = 16
    row_bytes: int = 512
    num_experts: int = 24
    top_k: int = 3
    unrolled: int = 20
    protocols: tuple[str, ...] = PROTOCOLS
    strict_ptx: bool = False
    pause_ns: int = 4000

    def config(self) -> ExchangeConfig:
        """Its exchange."""
        return ExchangeConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            row_bytes=self.row_bytes,
            partial_elements=self.row_bytes // 2,
            protocol="auto",
            strict_ptx=self.strict_ptx,
            deadline=30.0,
        )


def run_stress(case: StressCase, *, device: str) -> int:
    """Run on a local group; returns the number of steps that every rank took.

    Raises
    ------
    AssertionError
        Some row, header, count or output was wrong; says where first.
    """
    steps: list[int] = run_local(lambda group: _run_rank(group, case), case.ranks, device=device)
    assert len(set(steps)) == 1, steps
    return steps[0]


def _run_rank(group: RankGroup, case: StressCase) -> int:
    with Exchange(group, case.config()) as exchange:
        stress = _Stress(exchange, case)
        stream = exchange.device.create_stream()
        group.barrier()
        with exchange.device.capture(stream) as graph:
            order = random.Random(0)  # the same on every rank
            for _ in range(case.unrolled):
                exchange.protocol = order.choice(case.protocols)
                stress.enqueue(stream)
        launched: deque[Event] = deque()
        for _ in range(-(-case.steps // case.unrolled)):
            graph.launch(stream)
            # A launch that finds the driver's queue full blocks, and the other ranks of the process with it: this one
            # stays a few graphs ahead of the device, never more.
            launched.append(stream.record())
            if len(launched) > LAUNCHES_AHEAD:
                launched.popleft().synchronize()
        exchange.synchronize(stream)
        group.barrier()
        graph.close()
        return stress.finish()


class _Stress:
    """One rank's buffers and kernels."""

    def __init__(self, exchange: Exchange, case: StressCase) -> None:
        self._exchange = exchange
        config, device = exchange.config, exchange.device
        constants = {
            "kRanks": exchange.group.size,
            "kMaxTokens": config.max_tokens,
            "kTopK": config.top_k,
            "kNumExperts": config.num_experts,
            "kRowWords": config.row_bytes // 4,
            "kElements": config.elements,
            "kLongestPauseNs": case.pause_ns,
        }
        lines = "\n".join(f"constexpr u32 {name} = {value};" for name, value in constants.items())
        prelude = f'#include "primitives/types.cuh"\nnamespace nvep {{\nnamespace stress {{\n{lines}\n}}\n}}\n'
        self._kernels: dict[str, Kernel] = device.load_all(
            {
                name: KernelSource(name, STRESS_ARGUMENTS, prelude, file=KERNEL_ROOT / "testing" / f"{name}.cu")
                for name in KERNELS
            }
        )
        self._memory: list[Memory] = []
        most = config.max_tokens
        self._owner = ArrayOwner(device)
        self._rows = self._array((most, config.row_bytes), np.uint8)
        self._ids = self._array((most, config.top_k), np.int32)
        self._weights = self._array((most, config.top_k), np.float32)
        self._count = self._array((1,), np.uint32)
        self._output = self._array((most, config.elements), partial_dtype(config.partial_format))
        self._step = self._array((1,), np.uint32)
        self._errors = self._array((4,), np.uint32)
        self._shape = LaunchShape(1, min(device.default_threads, 256))

    def _array(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        memory = self._exchange.device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._memory.append(memory)
        return DeviceArray(memory.address, shape, dtype, owner=self._owner)

    def enqueue(self, stream: Any) -> None:
        """One step: inputs, dispatch, check and experts, combine, check."""
        exchange = self._exchange
        self._launch("stress_prepare", None, stream)
        arrivals = exchange.dispatch(self._rows, self._ids, self._weights, num_tokens=self._count, stream=stream)
        self._launch("stress_experts", arrivals, stream)
        exchange.combine(arrivals.partial_rows, arrivals, out=self._output, stream=stream)
        self._launch("stress_finish", None, stream)

    def _launch(self, name: str, arrivals: Arrivals | None, stream: Any) -> None:
        exchange = self._exchange
        fields = {
            "step": self._step.address,
            "num_tokens": self._count.address,
            "expert_ids": self._ids.address,
            "expert_weights": self._weights.address,
            "rows": self._rows.address,
            "output": self._output.address,
            "errors": self._errors.address,
            "expert_ranks": exchange.memory.expert_ranks.address,
            "rank": exchange.group.rank,
        }
        if arrivals is not None:
            fields |= {
                "arrived_rows": arrivals.rows.address,
                "arrived_ids": arrivals.expert_ids.address,
                "arrived_weights": arrivals.expert_weights.address,
                "counts": arrivals.counts.address,
                "partial_rows": arrivals.partial_rows.address,
                "compact": int(arrivals.protocol == "fence"),
            }
        exchange.device.launch(self._kernels[name], self._shape, STRESS_ARGUMENTS.new(**fields), stream)

    def finish(self) -> int:
        """Free everything; returns the steps taken. Raises AssertionError if anything was wrong."""
        steps = int(self._step.numpy()[0])
        count, step, place, detail = (int(word) for word in self._errors.numpy())
        for memory in self._memory:
            memory.free()
        rank = self._exchange.group.rank
        assert count == 0, (
            f"rank {rank}: {count} errors, one in step {step}: {PLACES.get(place)} (rank or token {detail})"
        )
        return steps


def small_sentinel_steps(steps: int) -> StressCase:
    """Steps as short as they get, in Sentinel alone: nothing but the axiom on completed grids keeps them apart."""
    case = StressCase(steps=steps, max_tokens=2, row_bytes=64, num_experts=8, top_k=2, unrolled=200)
    return replace(case, protocols=("sentinel",), pause_ns=1)
