"""A double of cuBLAS for the emulated device: records calls, checks their pointers, computes with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nvep.moe.grouped_gemm.cublas import GroupedCall
from nvep.moe.grouped_gemm.reference import host_view
from nvep.runtime.device import Stream
from nvep.runtime.emulated_stream import EmulatedStream

_BF16 = np.dtype(ml_dtypes.bfloat16)


class RecordingCublas:
    """Reads rows at the pointers given, as cuBLAS would, in stream order.

    Attributes
    ----------
    calls : list of GroupedCall
        Everything enqueued so far.
    products : int
        Products computed so far.
    """

    def __init__(self) -> None:
        self.calls: list[GroupedCall] = []
        self.products = 0

    def grouped(self, call: GroupedCall, stream: Stream) -> None:
        assert isinstance(stream, EmulatedStream)
        assert len(call.members) == len(call.rows), "groups disagree"
        self.calls.append(call)
        stream.enqueue(lambda: self._compute(call))

    def _compute(self, call: GroupedCall) -> None:
        total = sum(call.members)
        weights, rows, results = (host_view(p, (total,), np.uint64).tolist() for p in call.pointers)
        sizes = [m for members, m in zip(call.members, call.rows, strict=True) for _ in range(members)]
        start, end = call.source.address, call.source.address + call.source.nbytes
        for i, m in enumerate(sizes):
            inside = start <= rows[i] <= end - 2 * m * call.inner
            assert inside, f"product {i}: rows outside their buffer"
            assert rows[i] % 16 == weights[i] % 16 == results[i] % 16 == 0, f"product {i}: alignment"
            left = host_view(rows[i], (m, call.inner), _BF16).astype(np.float32)
            right = host_view(weights[i], (call.outputs, call.inner), _BF16).astype(np.float32)
            with np.errstate(invalid="ignore", over="ignore"):  # rows that hold no token are multiplied too
                product = np.einsum("mk,nk->mn", left, right)
            host_view(results[i], (m, call.outputs), _BF16)[...] = product.astype(_BF16)
            self.products += 1

    def close(self) -> None:
        """Nothing to free."""
