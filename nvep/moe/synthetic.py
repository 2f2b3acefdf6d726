"""Experts that need no weights: they make every bit of an exchange checkable. Used by ``nvep replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvep.arrays import DeviceArray
from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.source import KernelSource

if TYPE_CHECKING:
    from nvep.exchange import Arrivals, Exchange

SCALE_EXPERTS_ARGUMENTS = ArgumentStruct(
    "ScaleExpertsArguments",
    [
        Field("rows", "u64"),
        Field("partial_rows", "u64"),
        Field("expert_ids", "const int*"),
        Field("expert_weights", "const float*"),
        Field("expert_ranks", "const int*"),
        Field("rank", "u32"),
    ],
)
_PARTIAL_TYPES = {"bf16": "PartialBf16", "fp16": "PartialFp16", "fp32": "PartialFp32"}
_BF16_BYTES = 2
_UNIT_BYTES = 16


def scale_experts_source(config: ExchangeConfig, num_ranks: int) -> KernelSource:
    """The kernel of :class:`ScaleExperts`.

    Raises
    ------
    ArgumentError
        ``partial_elements`` is not the number of bf16 elements of a row.
    """
    if config.partial_elements != config.row_bytes // _BF16_BYTES:
        allowed = f"the row's {config.row_bytes // _BF16_BYTES} bf16 elements"
        raise ArgumentError("partial_elements", config.partial_elements, allowed)
    prelude = f"""#include "formats/partial.cuh"
namespace nvep {{
namespace config {{
constexpr u32 kSlots = {num_ranks * config.max_tokens};
constexpr u32 kTopK = {config.top_k};
constexpr i32 kNumExperts = {config.num_experts};
constexpr u32 kRowUnits = {config.row_bytes // _UNIT_BYTES};
}}  // namespace config
using Partial = {_PARTIAL_TYPES[config.partial_format]};
}}  // namespace nvep
"""
    return KernelSource("scale_experts", SCALE_EXPERTS_ARGUMENTS, prelude)


class ScaleExperts:
    """Expert ``e`` multiplies a bf16 row by ``1 + e / 1024``; the device twin of ``nvep.reference.scale_experts``.

    Parameters
    ----------
    exchange : Exchange
        Whose arrivals are computed on. The kernel is loaded here: loading may wait for kernels that spin, so construct
        this before the first step.

    Raises
    ------
    ArgumentError
        The exchange's partial rows have not the length of its rows read as bf16.
    CompilationError
        The kernel does not compile.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._device = exchange.device
        self._kernel = self._device.load(scale_experts_source(exchange.config, exchange.group.size))
        self._shape = LaunchShape(self._device.default_blocks, self._device.default_threads)
        self._expert_ranks = exchange.memory.expert_ranks.address
        self._rank = exchange.group.rank

    def __call__(self, arrivals: Arrivals, *, stream: Any = None) -> DeviceArray:
        """Write ``arrivals.partial_rows`` on ``stream`` and return it; rows of slots that hold no token are left alone.

        Parameters
        ----------
        arrivals : Arrivals
            Of the exchange given at construction, which must still be open.
        stream : stream, optional
            Default: the device's own.
        """
        arguments = SCALE_EXPERTS_ARGUMENTS.new(
            rows=arrivals.rows.address,
            partial_rows=arrivals.partial_rows.address,
            expert_ids=arrivals.expert_ids.address,
            expert_weights=arrivals.expert_weights.address,
            expert_ranks=self._expert_ranks,
            rank=self._rank,
        )
        self._device.launch(self._kernel, self._shape, arguments, self._device.as_stream(stream))
        return arrivals.partial_rows
