"""From a configuration to memory and kernels: everything here is arithmetic, nothing touches a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from nvep.config import ExchangeConfig
from nvep.exchange.arguments import COUNTERS, STATUS, combine_arguments, common_arguments, dispatch_arguments
from nvep.exchange.bulk import BulkPlan
from nvep.protocols import PROTOCOLS
from nvep.protocols.base import initial_records, record_regions
from nvep.runtime.device import BulkCopies
from nvep.runtime.source import KernelSource
from nvep.symmetric.layout import Layout, Region
from nvep.transports import TRANSPORTS

_BULK = BulkCopies()
ROUTE_BYTES = 8  # Route in nvep_kernels/transports/slots.cuh
_PARTIAL_TYPES = {"bf16": "PartialBf16", "fp16": "PartialFp16", "fp32": "PartialFp32"}
_KERNEL_ARGUMENTS = {
    "dispatch_send": dispatch_arguments,
    "dispatch_recv": dispatch_arguments,
    "dispatch": dispatch_arguments,
    "combine_send": combine_arguments,
    "combine_recv": combine_arguments,
    "combine": combine_arguments,
    "release": combine_arguments,
}
KERNEL_NAMES = tuple(_KERNEL_ARGUMENTS)


@dataclass(frozen=True)
class Plan:
    """Memory and kernels of an exchange over ``num_ranks`` ranks, on devices that copy in bulk or not."""

    config: ExchangeConfig
    num_ranks: int
    bulk: BulkCopies | None = _BULK

    @property
    def heap(self) -> Layout:
        """The symmetric heap of one rank."""
        return heap_layout(self.config, self.num_ranks)

    @property
    def local(self) -> Layout:
        """Private device memory of one rank."""
        words = self.num_ranks * 4
        regions = [
            Region("Counters", ctypes.sizeof(COUNTERS.ctype)),
            Region("Counts", words),
            Region("SendCounts", words),
            Region("MaskSnapshot", words),
            Region("Routes", self.config.max_tokens * self.config.max_targets(self.num_ranks) * ROUTE_BYTES),
        ]
        for protocol in self.config.protocols:
            regions += PROTOCOLS[protocol].local_regions(self.config, self.num_ranks)
        return Layout(regions, self.config.lanes)

    def initial_words(self, first_epoch: int) -> dict[str, np.ndarray]:
        """Contents of heap regions of a lane before the step ``first_epoch``; others start as zeros or filled."""
        words = initial_records(self.num_ranks, first_epoch)
        for name in self.config.protocols:
            words |= PROTOCOLS[name].initial_words(self.num_ranks, first_epoch)
            words |= PROTOCOLS[name].initial_signals(self.config, self.num_ranks, first_epoch)
        return words

    def filled_regions(self) -> dict[str, int]:
        """Heap regions of a lane that start filled with a byte."""
        filled: dict[str, int] = {}
        for name in self.config.protocols:
            filled |= PROTOCOLS[name].filled_regions()
        return filled

    def prelude(self, protocol: str) -> str:
        """Sizes, offsets and type aliases that specialise every exchange kernel for a protocol."""
        transport = TRANSPORTS[self.config.transport]
        return f"""#include "primitives/shared.cuh"
#include "primitives/types.cuh"
namespace nvep {{
{COUNTERS.cpp()}
{STATUS.cpp()}
{common_arguments(self.num_ranks).cpp()}
namespace config {{
{self._sizes(protocol)}
}}  // namespace config
namespace heap {{
{self.heap.cpp()}
}}  // namespace heap
namespace local {{
{self.local.cpp()}
}}  // namespace local
}}  // namespace nvep
{transport.prelude()}
#include "{transport.header(protocol)}"
namespace nvep {{
using Partial = {_PARTIAL_TYPES[self.config.partial_format]};
using Transport = {transport.cpp_template(protocol)}<Partial>;
}}  // namespace nvep
"""

    def _sizes(self, protocol: str) -> str:
        config, payloads = self.config, range(len(self.config.payload_bytes))
        constants: list[tuple[str, str, object]] = [
            ("u32", "kRanks", self.num_ranks),
            ("u32", "kTopK", config.top_k),
            ("u32", "kMaxTokens", config.max_tokens),
            ("u32", "kMaxTargets", config.max_targets(self.num_ranks)),
            ("i32", "kNumExperts", config.num_experts),
            ("i32", "kInvalidExpert", config.invalid_expert),
            ("u32", "kPayloads", len(payloads)),
            ("u32", "kPartialBytes", config.partial_row_bytes),
            ("u32", "kTokenBytes", sum(config.payload_bytes)),
            ("u32", "kChunkBytes", config.chunk_bytes),
            ("bool", "kStrictPtx", str(config.strict_ptx).lower()),
        ]
        constants += BulkPlan(config, self.bulk).constants()
        constants += [("u32", name, value) for name, value in PROTOCOLS[protocol].constants(config).items()]
        lines = [f"constexpr {kind} {name} = {value};" for kind, name, value in constants]
        lines.append(_lookup("u32", "payload_bytes", list(config.payload_bytes)))
        regions = PROTOCOLS[protocol].arrivals
        layout = self.heap if regions.symmetric else self.local
        lines.append(_lookup("u64", "payload_offset", [layout.offset(f"{regions.payload}{i}") for i in payloads]))
        lines.append(self._expert_rank())
        return "\n".join(lines)

    def _expert_rank(self) -> str:
        """A C++ function from a valid expert id to its rank: arithmetic without a placement, as in ExchangeConfig."""
        if self.config.placement is None:
            blocks = max(self.config.num_experts, self.num_ranks)
            body = f"(void)placed; return static_cast<u32>(id) * {self.num_ranks}u / {blocks}u;"
        else:
            body = "return static_cast<u32>(placed[id]);"
        return f"__device__ __forceinline__ u32 expert_rank(i32 id, const i32* placed) {{ {body} }}"

    def kernels(self, protocol: str) -> dict[str, KernelSource]:
        """Source of every exchange kernel of a protocol, by name."""
        prelude = self.prelude(protocol)
        arguments = _KERNEL_ARGUMENTS.items()
        return {name: KernelSource(name, of_ranks(self.num_ranks), prelude) for name, of_ranks in arguments}


def heap_layout(config: ExchangeConfig, num_ranks: int) -> Layout:
    """Symmetric heap of one rank: regions of a lane, repeated for each lane.

    Parameters
    ----------
    config : ExchangeConfig
        Fixes every size; nothing depends on a step.
    num_ranks : int
        Ranks that exchange.
    """
    regions = [Region("Poison", 8 * num_ranks), Region("Left", 8 * num_ranks), *record_regions(num_ranks)]
    for protocol in config.protocols:
        regions += PROTOCOLS[protocol].heap_regions(config, num_ranks)
    return Layout(regions, config.lanes)


def _lookup(kind: str, name: str, values: list[int]) -> str:
    """A C++ function from the number of a payload to a constant: device code cannot index a namespace-scope array."""
    listed = ", ".join(f"{value}ull" for value in values)
    return f"""__host__ __device__ constexpr {kind} {name}(u32 payload) {{
  constexpr {kind} values[] = {{{listed}}};
  return values[payload];
}}"""
