"""Plain kernels: one thread per output element. Right on every device, fast on none."""

from __future__ import annotations

from nvep.arrays import DeviceArray
from nvep.exchange import Arrivals
from nvep.moe.grouped_gemm.base import ExpertShape, GroupedGemm
from nvep.moe.weights import LocalExperts
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape, Stream
from nvep.runtime.source import KernelSource

EXPERT_ARGUMENTS = ArgumentStruct(
    "ExpertArguments",
    [
        Field("rows", "u64"),
        Field("expert_ids", "u64"),
        Field("expert_weights", "u64"),
        Field("intermediate", "u64"),
        Field("partial_rows", "u64"),
        Field("local_experts", "const int*"),
        Field("gate", "const unsigned short*"),
        Field("up", "const unsigned short*"),
        Field("down", "const unsigned short*"),
    ],
)
_STORES = {"bf16": "StoreBf16", "fp16": "StoreFp16", "fp32": "StoreFp32"}


def plain_kernels(shape: ExpertShape) -> dict[str, KernelSource]:
    """Sources of both kernels for one set of sizes."""
    prelude = f"""#include "primitives/types.cuh"
namespace nvep {{
namespace moe {{
constexpr u32 kRows = {shape.rows};
constexpr u32 kTopK = {shape.top_k};
constexpr u32 kHidden = {shape.hidden};
constexpr u32 kIntermediate = {shape.intermediate};
}}  // namespace moe
}}  // namespace nvep
#include "moe/expert_rows.cuh"
namespace nvep {{
namespace moe {{
using Partial = {_STORES[shape.partial_format]};
}}  // namespace moe
}}  // namespace nvep
"""
    return {name: KernelSource(name, EXPERT_ARGUMENTS, prelude) for name in ("moe_gate_up", "moe_down")}


class PlainGroupedGemm(GroupedGemm):
    """Reads rows, ids and weights in place; no counts on the host, so a graph may change them."""

    name = "plain"

    def __init__(self, device: Device, shape: ExpertShape, experts: LocalExperts) -> None:
        super().__init__(device, shape, experts)
        self._kernels = device.load_all(plain_kernels(shape))
        self._lane_bytes = shape.rows * shape.top_k * shape.intermediate * 2
        self._intermediate = device.allocate(shape.lanes * self._lane_bytes)
        self._arguments = EXPERT_ARGUMENTS.new(
            local_experts=experts.index.address,
            gate=experts.gate.address,
            up=experts.up.address,
            down=experts.down.address,
        )
        blocks = device.default_blocks * 4
        self._shape = LaunchShape(min(blocks, shape.rows), device.default_threads)

    def run(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> None:
        arguments = self._arguments
        arguments.intermediate = self._intermediate.address + arrivals.lane * self._lane_bytes
        arguments.rows = arrivals.rows.address
        arguments.expert_ids = arrivals.expert_ids.address
        arguments.expert_weights = arrivals.expert_weights.address
        arguments.partial_rows = partial_rows.address
        for name in ("moe_gate_up", "moe_down"):
            self.device.launch(self._kernels[name], self._shape, arguments, stream)

    def close(self) -> None:
        self._intermediate.free()
