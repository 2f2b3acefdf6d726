"""Shared experts: every token goes through all of them, on the rank where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nvep.arrays import DeviceArray
from nvep.config import partial_dtype
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals
from nvep.inputs import InputSpec
from nvep.moe.grouped_gemm import ExpertShape
from nvep.moe.grouped_gemm.base import MemoryLine
from nvep.moe.grouped_gemm.gather import GatherGroupedGemm
from nvep.moe.weights import CheckedWeights, LocalExperts
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, Stream
from nvep.runtime.operation import DeviceOperation
from nvep.runtime.source import KernelSource

ADD_ARGUMENTS = ArgumentStruct("AddArguments", [Field("rows", "u64"), Field("shared", "u64"), Field("count", "u64")])
_ELEMENTS = {"bf16": "ElementsBf16", "fp16": "ElementsFp16", "fp32": "ElementsFp32"}


def add_source(hidden: int, max_tokens: int, partial_format: str) -> KernelSource:
    """The kernel that adds shared experts' rows to routed ones."""
    prelude = f"""#include "formats/elements.cuh"
namespace nvep {{
namespace moe {{
constexpr u32 kHidden = {hidden};
constexpr u32 kMaxTokens = {max_tokens};
using Elements = {_ELEMENTS[partial_format]};
}}  // namespace moe
}}  // namespace nvep
"""
    return KernelSource("moe_add", ADD_ARGUMENTS, prelude)


class SharedExperts(DeviceOperation):
    """Rows of this rank's own tokens through all shared experts, then added to what combine gave.

    Parameters
    ----------
    device : Device
        Where it runs.
    shape : ExpertShape
        Of the layer's routed experts: sizes that are equal are taken from it.
    parts : CheckedWeights
        The shared experts.
    """

    def __init__(self, device: Device, shape: ExpertShape, parts: CheckedWeights) -> None:
        super().__init__(device)
        count, intermediate, hidden = parts.gate.shape
        if hidden != shape.hidden:
            raise ArgumentError("shared.gate", parts.gate.shape, f"rows of {shape.hidden} elements, as the layer has")
        self.shape = replace(
            shape, ranks=1, top_k=count, num_experts=count, local_experts=count, intermediate=intermediate,
            row_format="bf16", weight_format=parts.format, biases=parts.biases is not None, row_scale=1.0,
        )  # fmt: skip
        try:
            experts = LocalExperts(device, parts, np.arange(count, dtype=np.int32))
            self._resources.callback(experts.close)
            self._gemm = GatherGroupedGemm(device, self.shape, experts)
            self._resources.callback(self._gemm.close)
            self._add = device.load(add_source(hidden, shape.max_tokens, shape.partial_format))
            self._lanes = [self._make_lane(lane) for lane in range(shape.lanes)]
            # The address of entry n is a count of n that no copy has to bring there.
            self._counts = self._put(np.arange(shape.max_tokens + 1, dtype=np.int32))
        except BaseException:
            self.close()
            raise
        self._rows = InputSpec("x", (partial_dtype("bf16"),), (("tokens", shape.max_tokens), hidden), alignment=16)

    def _make_lane(self, lane: int) -> Arrivals:
        tokens, count = self.shape.max_tokens, self.shape.top_k
        ids = np.tile(np.arange(count, dtype=np.int32), (1, tokens, 1))
        weights = np.ones((1, tokens, count), np.float32)
        return Arrivals(
            payloads=(),
            expert_ids=DeviceArray(self._put(ids), ids.shape, np.int32, owner=self._owner),
            expert_weights=DeviceArray(self._put(weights), weights.shape, np.float32, owner=self._owner),
            counts=DeviceArray(0, (1,), np.int32, owner=self._owner),
            partial_rows=self._output((1, tokens, self.shape.hidden), partial_dtype(self.shape.partial_format)),
            protocol="",
            lane=lane,
            step=0,
        )

    def run(self, x: Any, num_tokens: Any, lane: int, stream: Stream) -> int:
        """Enqueue the experts on ``x``, bf16 ``[tokens, hidden]`` on the device; returns the count's address for `add`.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError
            Naming the argument.
        """
        view = self._input(x, self._rows, stream)
        tokens, count = self._count(num_tokens, view.shape[0], stream)
        address = count.address if count is not None else self._counts + 4 * tokens
        own = self._lanes[lane]
        shape = (1, self.shape.max_tokens, 2 * self.shape.hidden)
        rows = DeviceArray(view.address, shape, np.uint8, owner=self._owner)
        counts = DeviceArray(address, (1,), np.int32, owner=self._owner)
        self._gemm.run(replace(own, payloads=(rows,), counts=counts), own.partial_rows, stream)
        self._finish(stream, view, count)
        return address

    def add(self, output: DeviceArray, count: int, lane: int, stream: Stream) -> None:
        """Enqueue ``output += rows of the last run``, for the tokens that counted there."""
        arguments = ADD_ARGUMENTS.new(rows=output.address, shared=self._lanes[lane].partial_rows.address, count=count)
        threads = self.shape.max_tokens * self.shape.hidden // 8
        self.device.launch(self._add, self._shape(threads), arguments, stream)

    def memory(self) -> list[MemoryLine]:
        """What it allocated, its weights apart."""
        return [MemoryLine(f"shared {name}", nbytes) for name, nbytes in self._gemm.memory()]
