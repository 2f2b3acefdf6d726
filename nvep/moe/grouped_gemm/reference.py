"""NumPy in the place of kernels, on the emulated device only: faster there than running them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.arrays import DeviceArray
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals
from nvep.formats import payload_format
from nvep.moe.grouped_gemm.base import ExpertShape, GroupedGemm, MemoryLine
from nvep.moe.stored import FP8_BLOCK
from nvep.moe.weights import LocalExperts
from nvep.reference.formats import Encoded, decode
from nvep.runtime.device import Device, Stream
from nvep.runtime.emulated_stream import EmulatedStream

Float32Array = npt.NDArray[np.float32]
_BF16, _FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def host_view(address: int, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Memory of the emulated device as an array."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    if nbytes == 0:
        return np.empty(shape, kind)
    raw = (ctypes.c_char * nbytes).from_address(address)
    view: npt.NDArray[Any] = np.frombuffer(raw, np.uint8).view(kind).reshape(shape)
    return view


def activate(gate: Float32Array, up: Float32Array, activation: str) -> Float32Array:
    """What joins the two projections, in float32."""
    one, limit = np.float32(1.0), np.float32(7.0)
    steepness: npt.NDArray[Any] = gate
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "plain":
            return gate * up
        if activation == "geglu":
            steepness = np.float32(1.59576912) * (gate + np.float32(0.044715) * gate * gate * gate)
        elif activation == "swiglu_clamped":
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + one
            steepness = np.float32(1.702) * gate
        result: Float32Array = gate / (one + np.exp(-steepness)) * up
        return result


def widen_matrix(stored: npt.NDArray[Any], scales: Float32Array | None) -> Float32Array:
    """A matrix in float32, with the scales of its blocks."""
    wide: Float32Array = stored.astype(np.float32)
    if scales is None:
        return wide
    whole = np.repeat(np.repeat(scales, FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    scaled: Float32Array = wide * whole[: wide.shape[0], : wide.shape[1]]
    return scaled


class ReferenceGroupedGemm(GroupedGemm):
    """One matrix-vector product after another, so that a row's result does not depend on other rows."""

    name = "reference"

    def __init__(self, device: Device, shape: ExpertShape, experts: LocalExperts) -> None:
        super().__init__(device, shape, experts)
        if not device.emulated:
            raise ArgumentError("grouped_gemm", self.name, f"a backend of kernels: {device.name} is not emulated")
        self._made = payload_format(shape.row_format)
        self._tensor_scale = shape.row_scale if self._made.tensor_scale else None
        self._index = host_view(experts.index.address, (shape.num_experts,), np.int32)
        self._matrices = [self._matrix(i) for i in range(3)]
        sizes = (shape.intermediate, shape.intermediate, shape.hidden)
        self._biases = [
            None if experts.biases is None else host_view(experts.biases[i].address, (experts.count, n), np.float32)
            for i, n in enumerate(sizes)
        ]

    def _matrix(self, which: int) -> list[Float32Array]:
        shape, experts = self.shape, self.experts
        rows, columns = (shape.hidden, shape.intermediate) if which == 2 else (shape.intermediate, shape.hidden)
        dtype = _FP8 if shape.weight_format == "fp8_block" else _BF16
        memory = (experts.gate, experts.up, experts.down)[which]
        stored = host_view(memory.address, (experts.count, rows, columns), dtype)
        if experts.scales is None:
            return [widen_matrix(stored[e], None) for e in range(experts.count)]
        blocks = (experts.count, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        scales = host_view(experts.scales[which].address, blocks, np.float32)
        return [widen_matrix(stored[e], scales[e]) for e in range(experts.count)]

    def stages(self, arrivals: Arrivals, partial_rows: DeviceArray, stream: Stream) -> Iterator[str]:
        assert isinstance(stream, EmulatedStream)
        rows, top_k = self.shape.rows, self.shape.top_k
        payloads = [host_view(p.address, (rows, p.shape[-1]), np.uint8) for p in arrivals.payloads]
        ids = host_view(arrivals.expert_ids.address, (rows, top_k), np.int32)
        weights = host_view(arrivals.expert_weights.address, (rows, top_k), np.float32)
        target = host_view(partial_rows.address, (rows, self.shape.hidden), partial_rows.dtype)
        stream.enqueue(lambda: self._compute(payloads, ids, weights, target))
        yield "experts"

    def _compute(self, payloads: list[Any], ids: Any, weights: Any, target: npt.NDArray[Any]) -> None:
        valid = (ids >= 0) & (ids < self.shape.num_experts)
        local = np.where(valid, self._index[np.where(valid, ids, 0)], -1)
        for row in np.flatnonzero((local >= 0).any(axis=1)).tolist():
            scales = payloads[1][row : row + 1] if self._made.scale is not None else np.empty((1, 0), np.uint8)
            x = decode(
                Encoded(payloads[0][row : row + 1], scales),
                self._made.name,
                self.shape.hidden,
                tensor_scale=self._tensor_scale,
            )[0]
            total = np.zeros(self.shape.hidden, np.float32)
            for k, expert in enumerate(local[row].tolist()):
                if expert >= 0:
                    total = total + weights[row, k] * self._expert(x, expert)
            target[row] = total.astype(target.dtype)

    def _expert(self, x: Float32Array, expert: int) -> Float32Array:
        gate, up = (self._project(which, expert, x) for which in range(2))
        inner = activate(gate, up, self.shape.activation).astype(_BF16).astype(np.float32)
        return self._project(2, expert, inner)

    def _project(self, which: int, expert: int, x: Float32Array) -> Float32Array:
        with np.errstate(invalid="ignore", over="ignore"):  # rows may hold anything
            result: Float32Array = self._matrices[which][expert] @ x
        biases = self._biases[which]
        return result if biases is None else result + biases[expert]

    def memory(self) -> list[MemoryLine]:
        return []

    def close(self) -> None:
        self._matrices = []
