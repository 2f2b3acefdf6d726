"""Own grouped GEMMs on tensor cores: rows gathered by index, only the weights of active experts read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from nvep.arrays import DeviceArray
from nvep.exchange import Arrivals
from nvep.formats import payload_format
from nvep.moe.grouped_gemm.base import ExpertShape, GroupedGemm, MemoryLine
from nvep.moe.weights import LocalExperts
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape, Memory, Stream
from nvep.runtime.source import KernelSource

PLAN_ARGUMENTS = ArgumentStruct(
    "PlanArguments",
    [Field("expert_ids", "u64"), Field("counts", "u64"), Field("plan", "u64"), Field("local_experts", "const int*")],
)
GATHER_ARGUMENTS = ArgumentStruct(
    "GatherArguments",
    [
        Field("rows", "u64"),
        Field("row_scales", "u64"),
        Field("expert_ids", "u64"),
        Field("expert_weights", "u64"),
        Field("partial_rows", "u64"),
        Field("plan", "u64"),
        Field("intermediate", "u64"),
        Field("products", "u64"),
        Field("slots", "u64"),
        Field("tile_counters", "u64"),
        Field("row_counters", "u64"),
        Field("local_experts", "const int*"),
        Field("gate", "u64"),
        Field("up", "u64"),
        Field("down", "u64"),
        Field("gate_scales", "u64"),
        Field("up_scales", "u64"),
        Field("down_scales", "u64"),
        Field("gate_biases", "u64"),
        Field("up_biases", "u64"),
        Field("down_biases", "u64"),
    ],
)
THREADS = 256  # kGatherThreads
_STAGES = 4  # kStages
_TILE_ROWS, _CHUNK_BYTES = 128, 128  # kTileWeightRows, bytes of a row of weights in a stage
_GATE_UP_OUTPUTS, _DOWN_OUTPUTS, _SEGMENTS = 64, 128, 8
_STORES = {"bf16": "StoreBf16", "fp16": "StoreFp16", "fp32": "StoreFp32"}
_ACTIVATIONS = {
    "swiglu": "ActivateSwiglu",
    "geglu": "ActivateGeglu",
    "swiglu_clamped": "ActivateSwigluClamped",
    "plain": "ActivatePlain",
}
# C++ type, rows of a tile's tokens, elements of a chunk
_WEIGHTS = {"bf16": ("WeightBf16", 64, 64), "fp8_block": ("WeightFp8Block", 32, 128)}
KERNELS = ("moe_plan", "moe_gather_gate_up", "moe_gather_down")
_STAGES_OF_A_STEP = ("plan", "gate and up", "down")


def _row_type(shape: ExpertShape) -> tuple[str, str]:
    """Header and C++ type of the rows that arrive."""
    made = payload_format(shape.row_format)
    row, scales = made.row_bytes(shape.hidden), made.scale_row_bytes(shape.hidden)
    if made.name == "bf16":
        return made.header, f"RowsBf16<{row}>"
    return made.header, f"RowsDecoded<{made.cpp_type}, {row}, {scales}>"


def size_prelude(shape: ExpertShape) -> str:
    """Sizes, for every kernel of expert compute."""
    sizes = {
        "kRanks": shape.ranks,
        "kMaxTokens": shape.max_tokens,
        "kRows": shape.rows,
        "kTopK": shape.top_k,
        "kExperts": shape.num_experts,
        "kLocalExperts": shape.local_experts,
        "kHidden": shape.hidden,
        "kIntermediate": shape.intermediate,
    }
    constants = "\n".join(f"constexpr u32 {name} = {value};" for name, value in sizes.items())
    return f"""#include "primitives/types.cuh"
namespace nvep {{
namespace moe {{
{constants}
}}  // namespace moe
}}  // namespace nvep
"""


def expert_prelude(shape: ExpertShape) -> str:
    """What an expert computes beside its matrices."""
    return f"""#include "moe/activation.cuh"
#include "moe/partial_store.cuh"
namespace nvep {{
namespace moe {{
constexpr bool kBiases = {str(shape.biases).lower()};
using Activation = {_ACTIVATIONS[shape.activation]};
using Partial = {_STORES[shape.partial_format]};
}}  // namespace moe
}}  // namespace nvep
"""


def plan_bytes(shape: ExpertShape) -> int:
    """Of a `StepPlan`."""
    return 4 * (shape.local_experts * (1 + shape.rows) + shape.rows * (shape.top_k + 1))


def gather_kernels(shape: ExpertShape) -> dict[str, KernelSource]:
    """Sources of the three kernels of a step, in order."""
    header, rows = _row_type(shape)
    gather = f"""{size_prelude(shape)}{expert_prelude(shape)}#include "{header}"
namespace nvep {{
namespace moe {{
constexpr float kTensorScale = {float(np.float32(shape.row_scale)).hex()}f;
}}  // namespace moe
}}  // namespace nvep
#include "moe/rows.cuh"
#include "moe/weight_formats.cuh"
namespace nvep {{
namespace moe {{
using Weights = {_WEIGHTS[shape.weight_format][0]};
using Rows = {rows};
}}  // namespace moe
}}  // namespace nvep
"""
    sources = {"moe_plan": KernelSource("moe_plan", PLAN_ARGUMENTS, size_prelude(shape))}
    return sources | {name: KernelSource(name, GATHER_ARGUMENTS, gather) for name in KERNELS[1:]}


def shared_bytes(shape: ExpertShape) -> int:
    """Dynamic shared memory of a block of the two projections."""
    _, tokens, chunk = _WEIGHTS[shape.weight_format]
    return _STAGES * (_TILE_ROWS * _CHUNK_BYTES + tokens * chunk * 2)


def lane_memory(shape: ExpertShape, blocks: int) -> dict[str, int]:
    """Bytes of each work area of a lane, for launches of ``blocks`` blocks."""
    _, tokens, _ = _WEIGHTS[shape.weight_format]
    pairs = shape.most_pairs
    token_tiles = shape.local_experts + pairs // tokens
    output_tiles = max(-(-shape.intermediate // _GATE_UP_OUTPUTS), -(-shape.hidden // _DOWN_OUTPUTS))
    joined = shape.top_k > 1 and shape.local_experts > 1
    sizes = {
        "plan": plan_bytes(shape),
        "intermediate": 2 * pairs * shape.intermediate,
        "products": 4 * pairs * shape.hidden if joined else 0,
        "slots": blocks * _SEGMENTS * _TILE_ROWS * tokens * 4,
        "tile_counters": 4 * token_tiles * output_tiles,
        "row_counters": 4 * shape.rows * -(-shape.hidden // _DOWN_OUTPUTS) if joined else 0,
    }
    return {name: -(-size // 256) * 256 for name, size in sizes.items()}


class GatherGroupedGemm(GroupedGemm):
    """Plan, gate/up, down: three launches, sizes read on the device, so a graph may change them.

    A row's result depends on nothing but the row, its experts and their weights: not on other rows, on its place, or on
    the launch.
    """

    name = "gather"

    def __init__(self, device: Device, shape: ExpertShape, experts: LocalExperts) -> None:
        super().__init__(device, shape, experts)
        self._memories: list[Memory] = []
        if shape.local_experts == 0:
            return
        kernels = device.load_all(gather_kernels(shape))
        self._kernels = [kernels[name] for name in KERNELS]
        shared = shared_bytes(shape)
        self._shapes = [self._plan_shape(), *(self._gather_shape(k, shared) for k in self._kernels[1:])]
        blocks = max(launch.blocks for launch in self._shapes[1:])
        self._sizes = lane_memory(shape, blocks)
        self._lanes = [self._lane() for _ in range(shape.lanes)]

    def _plan_shape(self) -> LaunchShape:
        return LaunchShape(self.shape.local_experts, 64 if self.device.emulated else 512)

    def _gather_shape(self, kernel: Any, shared: int) -> LaunchShape:
        most = self.device.resident_blocks(kernel, THREADS, shared_bytes=shared)
        blocks = min(most, self.device.default_blocks) if self.device.emulated else most
        return LaunchShape(blocks, THREADS, dependent=True, shared_bytes=shared)  # always behind the kernel before

    def _lane(self) -> tuple[ctypes.Structure, ctypes.Structure]:
        memory = self.device.allocate(sum(self._sizes.values()))
        self._memories.append(memory)
        address, places = memory.address, {}
        for name, size in self._sizes.items():
            places[name] = address
            address += size
        experts = self.experts
        gather = GATHER_ARGUMENTS.new(local_experts=experts.index.address, **places, **experts.addresses())
        return PLAN_ARGUMENTS.new(plan=places["plan"], local_experts=experts.index.address), gather

    def stages(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> Iterator[str]:
        if self.shape.local_experts == 0:
            return
        plan, gather = self._lanes[arrivals.lane]
        plan.expert_ids = gather.expert_ids = arrivals.expert_ids.address
        plan.counts = arrivals.counts.address
        gather.rows = arrivals.rows.address
        gather.row_scales = arrivals.payloads[-1].address
        gather.expert_weights = arrivals.expert_weights.address
        gather.partial_rows = partial_rows.address
        for i, arguments in enumerate((plan, gather, gather)):
            self.device.launch(self._kernels[i], self._shapes[i], arguments, stream)
            yield _STAGES_OF_A_STEP[i]

    def memory(self) -> list[MemoryLine]:
        if self.shape.local_experts == 0:
            return []
        return [MemoryLine(name, size * self.shape.lanes) for name, size in self._sizes.items()]

    def close(self) -> None:
        while self._memories:
            self._memories.pop().free()
