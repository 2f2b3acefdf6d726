"""Experts by a library's grouped GEMMs: pointers made on the device, rows in place or packed first."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from nvep.arrays import DeviceArray
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals
from nvep.moe.grouped_gemm.base import ExpertShape, GroupedGemm, MemoryLine
from nvep.moe.grouped_gemm.cublas import Cublas, GroupedCall, NvmathCublas, Region
from nvep.moe.grouped_gemm.gather import PLAN_ARGUMENTS, expert_prelude, plan_bytes, size_prelude
from nvep.moe.weights import LocalExperts
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape, Memory, Stream
from nvep.runtime.source import KernelSource

LIBRARY_ARGUMENTS = ArgumentStruct(
    "LibraryArguments",
    [
        *(Field(name, "u64") for name in ("rows", "expert_ids", "expert_weights", "partial_rows", "plan")),
        *(Field(name, "u64") for name in ("firsts", "packed", "projected", "intermediate", "outputs", "pointers")),
        Field("local_experts", "const int*"),
        *(Field(name, "u64") for name in ("gate", "up", "down")),
        *(Field(f"{name}_biases", "u64") for name in ("gate", "up", "down")),
        Field("entries", "u32"),
    ],
)
STRATEGIES = {"pairs": "PlacePairs", "slices": "PlaceSlices", "packed": "PlacePacked"}
_MOST_SLICE_ROWS = 64  # up to here a product over the whole buffer takes as long as one over a row
KERNELS = ("moe_pointers", "moe_pack", "moe_activate", "moe_weigh")


def choose_strategy(shape: ExpertShape) -> str:
    """``"pairs"`` for very few rows, ``"slices"`` for few, ``"packed"`` for many."""
    if shape.rows * shape.top_k <= shape.local_experts:
        return "pairs"
    return "slices" if shape.rows <= _MOST_SLICE_ROWS else "packed"


def places(shape: ExpertShape, strategy: str) -> int:
    """Rows of the projections' results."""
    counts = {"pairs": shape.rows * shape.top_k, "slices": shape.rows * shape.local_experts}
    return counts.get(strategy, shape.most_pairs)


def library_kernels(shape: ExpertShape, strategy: str) -> dict[str, KernelSource]:
    """Sources of the kernels around the library's, by name."""
    results = 2 * places(shape, strategy) * shape.intermediate
    prelude = f"""{size_prelude(shape)}namespace nvep {{
namespace moe {{
constexpr unsigned long long kUpResults = {results};
}}  // namespace moe
}}  // namespace nvep
#include "moe/library.cuh"
{expert_prelude(shape)}namespace nvep {{
namespace moe {{
using Place = {STRATEGIES[strategy]};
}}  // namespace moe
}}  // namespace nvep
"""
    sources = {"moe_plan": KernelSource("moe_plan", PLAN_ARGUMENTS, size_prelude(shape))}
    return sources | {name: KernelSource(name, LIBRARY_ARGUMENTS, prelude) for name in KERNELS}


def lane_memory(shape: ExpertShape, strategy: str) -> dict[str, int]:
    """Bytes of each work area of a lane."""
    rows = places(shape, strategy)
    entries = rows if strategy == "pairs" else shape.local_experts
    sizes = {
        "plan": plan_bytes(shape),
        "firsts": 4 * shape.local_experts,
        "packed": 2 * rows * shape.hidden if strategy == "packed" else 0,
        "projected": 4 * rows * shape.intermediate,
        "intermediate": 2 * rows * shape.intermediate,
        "outputs": 2 * rows * shape.hidden,
        "pointers": 8 * 9 * entries,
    }
    return {name: -(-size // 256) * 256 for name, size in sizes.items()}


class LibraryGroupedGemm(GroupedGemm):
    """bf16 rows and weights; projections are rounded to bf16, which is what the library stores.

    With ``"pairs"`` and ``"slices"`` the library reads rows in the receive buffer, and all sizes are known beforehand.
    ``"packed"`` copies rows and waits for the counts: such a step cannot be captured.

    Parameters
    ----------
    device, shape, experts
        As in `GroupedGemm`.
    strategy : str, optional
        A key of ``STRATEGIES``; default: by the sizes.
    cublas : Cublas, optional
        Default: nvmath's, on a GPU.

    Raises
    ------
    ArgumentError
        The formats are not bf16, or the device is emulated and no ``cublas`` was given.
    DeviceError
        nvmath's cuBLAS cannot be used.
    """

    name = "nvmath"
    strategy: str | None = None

    def __init__(
        self,
        device: Device,
        shape: ExpertShape,
        experts: LocalExperts,
        *,
        strategy: str | None = None,
        cublas: Cublas | None = None,
    ) -> None:
        super().__init__(device, shape, experts)
        if shape.row_format != "bf16" or shape.weight_format != "bf16":
            raise ArgumentError("grouped_gemm", self.name, "a backend that takes other rows and weights than bf16")
        if cublas is None and device.emulated:
            raise ArgumentError("grouped_gemm", self.name, f"a backend without cuBLAS: {device.name} is emulated")
        self.strategy = strategy or self.strategy or choose_strategy(shape)
        self._memories: list[Memory] = []
        self._cublas: Cublas | None = None
        if shape.local_experts == 0:
            return
        self._cublas = cublas or NvmathCublas(device)
        self._kernels = device.load_all(library_kernels(shape, self.strategy))
        self._sizes = lane_memory(shape, self.strategy)
        self._lanes = [self._lane() for _ in range(shape.lanes)]
        blocks = device.default_blocks if device.emulated else 4 * device.multiprocessors
        self._wide = LaunchShape(blocks, 64 if device.emulated else 256)

    def _lane(self) -> tuple[ctypes.Structure, ctypes.Structure]:
        memory = self.device.allocate(sum(self._sizes.values()))
        self._memories.append(memory)
        address, areas = memory.address, {}
        for name, size in self._sizes.items():
            areas[name] = address
            address += size
        experts = self.experts
        parts = {name: where for name, where in experts.addresses().items() if not name.endswith("_scales")}
        arguments = LIBRARY_ARGUMENTS.new(local_experts=experts.index.address, **areas, **parts)
        return PLAN_ARGUMENTS.new(plan=areas["plan"], local_experts=experts.index.address), arguments

    def stages(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> Iterator[str]:
        if self.shape.local_experts == 0:
            return
        plan, arguments = self._lanes[arrivals.lane]
        plan.expert_ids = arguments.expert_ids = arrivals.expert_ids.address
        plan.counts = arrivals.counts.address
        arguments.rows = arrivals.rows.address
        arguments.expert_weights = arrivals.expert_weights.address
        arguments.partial_rows = partial_rows.address
        if self.strategy == "packed":
            if self.device.is_capturing(stream):
                raise ArgumentError("stream", "a stream that is captured", "any other: packed rows need counts first")
            self.device.launch(self._kernels["moe_plan"], self._plan_shape(), plan, stream)
        groups = self._groups(plan, stream)
        if not groups:
            return
        arguments.entries = sum(members for members, _ in groups)
        self.device.launch(self._kernels["moe_pointers"], LaunchShape(1, self._wide.threads), arguments, stream)
        source = Region(arguments.rows, 2 * self.shape.rows * self.shape.hidden)
        if self.strategy == "packed":
            self.device.launch(self._kernels["moe_pack"], self._wide, arguments, stream)
            source = Region(arguments.packed, self._sizes["packed"])
        yield "plan"
        yield from self._project(arguments, groups, source, stream)

    def _plan_shape(self) -> LaunchShape:
        return LaunchShape(self.shape.local_experts, 64 if self.device.emulated else 512)

    def _groups(self, plan: ctypes.Structure, stream: Stream) -> list[tuple[int, int]]:
        """Products and rows of each group."""
        shape = self.shape
        if self.strategy == "pairs":
            return [(shape.rows * shape.top_k, 1)]
        if self.strategy == "slices":
            return [(shape.local_experts, shape.rows)]
        counts = np.empty(shape.local_experts, np.uint32)
        self.device.copy_out(counts, plan.plan, stream)
        return [(1, int(count)) for count in counts.tolist() if count]

    def _project(
        self, arguments: ctypes.Structure, groups: list[tuple[int, int]], source: Region, stream: Stream
    ) -> Iterator[str]:
        shape, entries = self.shape, int(arguments.entries)
        members, rows = tuple(m for m, _ in groups), tuple(r for _, r in groups)
        first = arguments.pointers
        pointers = (first, first + 16 * entries, first + 32 * entries)
        call = GroupedCall(pointers, members * 2, rows * 2, shape.intermediate, shape.hidden, source)
        assert self._cublas is not None
        self._cublas.grouped(call, stream)
        self.device.launch(self._kernels["moe_activate"], self._wide, arguments, stream)
        yield "gate and up"
        first += 48 * entries
        pointers = (first, first + 8 * entries, first + 16 * entries)
        source = Region(arguments.intermediate, self._sizes["intermediate"])
        self._cublas.grouped(GroupedCall(pointers, members, rows, shape.hidden, shape.intermediate, source), stream)
        self.device.launch(self._kernels["moe_weigh"], self._wide, arguments, stream)
        yield "down"

    def memory(self) -> list[MemoryLine]:
        if self.shape.local_experts == 0:
            return []
        return [MemoryLine(name, size * self.shape.lanes) for name, size in self._sizes.items()]

    def close(self) -> None:
        if self._cublas is not None:
            self._cublas.close()
        self._cublas = None
        while self._memories:
            self._memories.pop().free()


class PackedGroupedGemm(LibraryGroupedGemm):
    """Rows of each expert copied side by side first: the layout that others use."""

    name = "packed"
    strategy = "packed"
