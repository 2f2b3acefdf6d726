"""From a configuration to memory and kernels: everything here is arithmetic, nothing touches a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from nvep.config import ExchangeConfig
from nvep.exchange.arguments import COMBINE_ARGUMENTS, COUNTERS, DISPATCH_ARGUMENTS, STATUS
from nvep.protocols import PROTOCOLS
from nvep.runtime.source import KernelSource
from nvep.symmetric.layout import Layout, Region
from nvep.transports import TRANSPORTS
from nvep.transports.base import max_targets

_PARTIAL_TYPES = {"bf16": "PartialBf16", "fp16": "PartialFp16", "fp32": "PartialFp32"}
_KERNEL_ARGUMENTS = {
    "dispatch_send": DISPATCH_ARGUMENTS,
    "dispatch_recv": DISPATCH_ARGUMENTS,
    "dispatch": DISPATCH_ARGUMENTS,
    "combine_send": COMBINE_ARGUMENTS,
    "combine_recv": COMBINE_ARGUMENTS,
    "combine": COMBINE_ARGUMENTS,
    "release": COMBINE_ARGUMENTS,
}
KERNEL_NAMES = tuple(_KERNEL_ARGUMENTS)


@dataclass(frozen=True)
class Plan:
    """Memory and kernels of an exchange over ``num_ranks`` ranks."""

    config: ExchangeConfig
    num_ranks: int

    @property
    def heap(self) -> Layout:
        """The symmetric heap of one rank."""
        return heap_layout(self.config, self.num_ranks)

    @property
    def local(self) -> Layout:
        """Private device memory of one rank."""
        transport = TRANSPORTS[self.config.transport]
        words = self.num_ranks * 4
        regions = [
            Region("Counters", ctypes.sizeof(COUNTERS.ctype)),
            Region("Counts", words),
            Region("SendCounts", words),
            Region("MaskSnapshot", words),
            *transport.local_regions(self.config, self.num_ranks),
        ]
        return Layout(regions, self.config.lanes)

    def prelude(self) -> str:
        """Sizes, offsets and type aliases that specialise every exchange kernel."""
        protocol, transport = PROTOCOLS[self.config.protocol], TRANSPORTS[self.config.transport]
        return f"""#include "primitives/shared.cuh"
#include "primitives/types.cuh"
namespace nvep {{
{COUNTERS.cpp()}
{STATUS.cpp()}
namespace config {{
{self._sizes()}
}}  // namespace config
namespace heap {{
{self.heap.cpp()}
}}  // namespace heap
namespace local {{
{self.local.cpp()}
}}  // namespace local
}}  // namespace nvep
#include "protocols/{protocol.name}.cuh"
#include "transports/{transport.name}.cuh"
namespace nvep {{
using Protocol = {protocol.cpp_type};
using Partial = {_PARTIAL_TYPES[self.config.partial_format]};
using Transport = {transport.cpp_template}<Protocol, Partial>;
}}  // namespace nvep
"""

    def _sizes(self) -> str:
        config, payloads = self.config, range(len(self.config.payload_bytes))
        constants = [
            ("u32", "kRanks", self.num_ranks),
            ("u32", "kTopK", config.top_k),
            ("u32", "kMaxTokens", config.max_tokens),
            ("u32", "kMaxTargets", max_targets(config, self.num_ranks)),
            ("i32", "kNumExperts", config.num_experts),
            ("i32", "kInvalidExpert", config.invalid_expert),
            ("u32", "kPayloads", len(payloads)),
            ("u32", "kPartialBytes", config.partial_row_bytes),
        ]
        lines = [f"constexpr {kind} {name} = {value};" for kind, name, value in constants]
        lines.append(_lookup("u32", "payload_bytes", list(config.payload_bytes)))
        lines.append(_lookup("u64", "payload_offset", [self.heap.offset(f"Payload{i}") for i in payloads]))
        return "\n".join(lines)

    def kernels(self) -> dict[str, KernelSource]:
        """Source of every exchange kernel, by name."""
        prelude = self.prelude()
        return {name: KernelSource(name, arguments, prelude) for name, arguments in _KERNEL_ARGUMENTS.items()}


def heap_layout(config: ExchangeConfig, num_ranks: int) -> Layout:
    """Symmetric heap of one rank: regions of a lane, repeated for each lane.

    Parameters
    ----------
    config : ExchangeConfig
        Fixes every size; nothing depends on a step.
    num_ranks : int
        Ranks that exchange.
    """
    protocol, transport = PROTOCOLS[config.protocol], TRANSPORTS[config.transport]
    regions = [
        Region("Poison", 8),
        *protocol.heap_regions(num_ranks),
        *transport.heap_regions(config, num_ranks),
    ]
    return Layout(regions, config.lanes)


def _lookup(kind: str, name: str, values: list[int]) -> str:
    """A C++ function from the number of a payload to a constant: device code cannot index a namespace-scope array."""
    listed = ", ".join(f"{value}ull" for value in values)
    return f"""__host__ __device__ constexpr {kind} {name}(u32 payload) {{
  constexpr {kind} values[] = {{{listed}}};
  return values[payload];
}}"""
