"""Expert matrices in a checkpoint: one expert at a time is read, and turned into bf16 where it is quantised.

Everything is done a few rows at a time, so that beside the matrix that is returned only a little memory is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.moe.checkpoint import DTYPES, StoredTensor

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8_BLOCK, MXFP4_BLOCK = 128, 32
_ROWS_AT_ONCE = 128
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


class ExpertTensor(Protocol):
    """What weights are made of: a NumPy array, or a matrix for each expert that is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]: ...


class LazyExperts(ABC):
    """One array for each expert, made anew whenever it is asked for.

    Attributes
    ----------
    shape : tuple of int
        ``(experts, ...)``.
    dtype : numpy.dtype
        Element type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = BF16

    @abstractmethod
    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        """The array of one expert, C-contiguous and the caller's own."""

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All experts at once."""
        if copy is False:
            raise ValueError("the experts are read from files: a copy cannot be avoided")
        whole = np.empty(self.shape, self.dtype)
        for expert in range(len(self)):
            whole[expert] = self[expert]
        return whole if dtype is None else whole.astype(dtype)


@dataclass(frozen=True)
class ReplicatedExperts(LazyExperts):
    """Physical experts: copies of logical ones."""

    source: ExpertTensor
    logical: tuple[int, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.logical), *self.source.shape[1:])

    @cached_property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        return self.source.dtype

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        return self.source[self.logical[expert]]


class PerExpert(LazyExperts):
    """A tensor for each expert, as it is stored, or as another element type."""

    def __init__(self, tensors: Sequence[StoredTensor], dtype: Any = None) -> None:
        self._tensors = tuple(tensors)
        self.shape = (len(self._tensors), *self._tensors[0].shape)
        self.dtype = DTYPES[self._tensors[0].kind] if dtype is None else np.dtype(dtype)

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        return self._tensors[expert].read().astype(self.dtype, copy=False)


class Fp8PerExpert(LazyExperts):
    """e4m3 with a scale for each 128 x 128 block, as bf16."""

    def __init__(self, tensors: Sequence[StoredTensor], scales: Sequence[StoredTensor]) -> None:
        self._tensors, self._scales = tuple(tensors), tuple(scales)
        self.shape = (len(self._tensors), *self._tensors[0].shape)

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        rows, columns = self.shape[1:]
        scales = self._scales[expert].read().astype(np.float32)
        result = np.empty((rows, columns), BF16)
        for block, start in enumerate(range(0, rows, FP8_BLOCK)):
            part = self._tensors[expert].read(start, start + FP8_BLOCK).astype(np.float32)
            part *= np.repeat(scales[block], FP8_BLOCK)[:columns]
            result[start : start + FP8_BLOCK] = part.astype(BF16)
        return result


class Stacked(LazyExperts):
    """One tensor of all experts, as it is stored; of interleaved rows those from ``first`` on, in steps of ``step``."""

    def __init__(self, tensor: StoredTensor, *, first: int = 0, step: int = 1) -> None:
        self._tensor, self._first, self._step = tensor, first, step
        self.shape = (tensor.shape[0], tensor.shape[1] // step, *tensor.shape[2:])
        self.dtype = DTYPES[tensor.kind]

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        if self._step == 1:
            return self._tensor.read(within=expert)
        result = np.empty(self.shape[1:], self.dtype)
        for start in range(0, len(result), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(result))
            rows = self._tensor.read(start * self._step, stop * self._step, within=expert)
            result[start:stop] = rows[self._first :: self._step]
        return result


class Transposed(LazyExperts):
    """One tensor of all experts stored ``[experts, in, out]``; columns from ``first`` on, in steps of ``step``."""

    def __init__(self, tensor: StoredTensor, *, first: int = 0, step: int = 1) -> None:
        self._tensor, self._first, self._step = tensor, first, step
        self.shape = (tensor.shape[0], tensor.shape[2] // step, tensor.shape[1])
        self.dtype = DTYPES[tensor.kind]

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        result = np.empty(self.shape[1:], self.dtype)
        for start in range(0, self.shape[2], _ROWS_AT_ONCE):
            rows = self._tensor.read(start, start + _ROWS_AT_ONCE, within=expert)
            result[:, start : start + len(rows)] = rows[:, self._first :: self._step].T
        return result


class Mxfp4(LazyExperts):
    """e2m1 in blocks of 32 with power-of-two scales, as bf16, which holds every such value exactly.

    Parameters
    ----------
    blocks : LazyExperts
        uint8 ``[experts, rows, blocks, 16]``, the first of two elements in the low bits.
    scales : LazyExperts
        uint8 ``[experts, rows, blocks]``: ue8m0.
    """

    def __init__(self, blocks: LazyExperts, scales: LazyExperts) -> None:
        self._blocks, self._scales = blocks, scales
        self.shape = (*blocks.shape[:2], blocks.shape[2] * MXFP4_BLOCK)

    def __getitem__(self, expert: int, /) -> npt.NDArray[Any]:
        blocks, codes = self._blocks[expert], self._scales[expert]
        result = np.empty(self.shape[1:], BF16)
        for start in range(0, len(result), _ROWS_AT_ONCE):
            part, code = (a[start : start + _ROWS_AT_ONCE] for a in (blocks, codes))
            scales = np.where(code == 255, np.float32(np.nan), np.ldexp(np.float32(1.0), code.astype(np.int32) - 127))
            pairs = np.stack([_E2M1[part & 15], _E2M1[part >> 4]], axis=-1)
            values = pairs.reshape(*code.shape, MXFP4_BLOCK) * scales[..., None].astype(np.float32)
            with np.errstate(over="ignore"):
                result[start : start + _ROWS_AT_ONCE] = values.reshape(len(part), -1).astype(BF16)
        return result
