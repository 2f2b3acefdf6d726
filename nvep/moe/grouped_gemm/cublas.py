"""Grouped GEMMs of cuBLAS through nvmath-python's low-level bindings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from nvep.errors import DeviceError
from nvep.runtime.device import Device, Stream

_BF16, _COMPUTE_32F = 14, 68  # CUDA_R_16BF, CUBLAS_COMPUTE_32F
_TRANSPOSED, _PLAIN = 1, 0
_DEVICE_SIZES = 130400  # cuBLASLt's grouped layout, whose sizes are on the device, on Hopper


class Region(NamedTuple):
    """Where operands must lie."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class GroupedCall:
    """``rows[i] @ weights[i].T`` into ``results[i]``, all bf16 and row-major, sums in float32.

    Attributes
    ----------
    pointers : tuple of int
        Addresses of the device arrays with the addresses of weights ``[outputs, inner]``, rows ``[m, inner]`` and
        results ``[m, outputs]``.
    members : tuple of int
        Products in each group.
    rows : tuple of int
        ``m`` of each group's products.
    outputs, inner : int
        Equal for all.
    source : Region
        Where rows lie.
    """

    pointers: tuple[int, int, int]
    members: tuple[int, ...]
    rows: tuple[int, ...]
    outputs: int
    inner: int
    source: Region


class Cublas(Protocol):
    """What a backend needs of the library."""

    def grouped(self, call: GroupedCall, stream: Stream) -> None:
        """Enqueue ``call``."""

    def close(self) -> None: ...


@lru_cache(maxsize=1)
def _found() -> tuple[int, str]:
    """cuBLAS's version, or 0 and why there is none. Needs a current device."""
    try:
        from nvmath.bindings import cublas

        handle = cublas.create()
        version = int(cublas.get_version(handle))
        cublas.destroy(handle)
    except Exception as error:  # whatever a binding raises when a library or driver is not there
        return 0, f"{type(error).__name__}: {error}".splitlines()[0]
    return version, ""


def missing() -> str | None:
    """Why nvmath's cuBLAS cannot be used here, or None."""
    return _found()[1] or None


def device_sizes() -> str:
    """Whether cuBLASLt can take the sizes of groups from the device here, in words."""
    version, why = _found()
    if why:
        return "no (there is no cuBLAS)"
    if version < _DEVICE_SIZES:
        return f"no: cuBLAS {version} is older than {_DEVICE_SIZES}; sizes of grouped GEMMs come from the host"
    return f"cuBLAS {version} has them; nvep gives sizes from the host"


class NvmathCublas:
    """A cuBLAS handle of one device."""

    def __init__(self, device: Device) -> None:
        device.make_current()
        why = missing()
        if why is not None:
            raise DeviceError(f"nvmath's cuBLAS cannot be used: {why}")
        from nvmath.bindings import cublas

        self._cublas: Any = cublas
        self._handle = cublas.create()

    def grouped(self, call: GroupedCall, stream: Stream) -> None:
        groups = len(call.members)

        def each(value: int) -> Any:
            return np.full(groups, value, np.int32)

        one, zero = np.ones(groups, np.float32), np.zeros(groups, np.float32)
        rows, members = np.array(call.rows, np.int32), np.array(call.members, np.int32)
        transposed, plain = each(_TRANSPOSED), each(_PLAIN)
        outputs, inner = each(call.outputs), each(call.inner)
        weights, sources, results = call.pointers
        self._cublas.set_stream(self._handle, stream.handle)
        # cuBLAS is column-major: results^T = weights rows^T, where weights as stored are a transposed matrix.
        self._cublas.gemm_grouped_batched_ex(
            self._handle, transposed.ctypes.data, plain.ctypes.data,
            outputs.ctypes.data, rows.ctypes.data, inner.ctypes.data, one.ctypes.data,
            weights, _BF16, inner.ctypes.data, sources, _BF16, inner.ctypes.data, zero.ctypes.data,
            results, _BF16, outputs.ctypes.data, groups, members.ctypes.data, _COMPUTE_32F,
        )  # fmt: skip

    def close(self) -> None:
        if self._handle:
            self._cublas.destroy(self._handle)
        self._handle = 0
