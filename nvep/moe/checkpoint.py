"""Tensors of a safetensors checkpoint, read piece by piece straight into arrays.

The format's own Python package maps files, and hands out fp8 only through torch. Here every read is one ``fromfile`` of
the bytes asked for, so host memory holds what the caller keeps and nothing else.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nvep.errors import ArgumentError, DTypeError, ShapeError

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20  # the format's limit


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes
    ----------
    name : str
        As in the checkpoint.
    path : Path
        The file.
    kind : str
        Element type as the format spells it, for example ``"BF16"``.
    shape : tuple of int
        Elements per axis.
    offset : int
        First byte in the file.
    """

    name: str
    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    def require(self, kinds: tuple[str, ...], shape: tuple[int | str, ...]) -> StoredTensor:
        """Return the tensor itself if it is as expected; words in ``shape`` stand for any extent.

        Raises
        ------
        DTypeError, ShapeError
            Naming the tensor.
        """
        if self.kind not in kinds:
            raise DTypeError(self.name, self.kind, " or ".join(kinds))
        fits = len(shape) == len(self.shape) and all(isinstance(w, str) or w == h for w, h in zip(shape, self.shape))
        if not fits or 0 in self.shape:
            raise ShapeError(self.name, self.shape, f"({', '.join(str(n) for n in shape)})")
        return self

    def read(self, start: int = 0, stop: int | None = None, *, within: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` of the tensor or, with ``within``, of entry ``within`` of its first axis.

        Raises
        ------
        ArgumentError
            The file has become shorter.
        """
        shape, first = (self.shape, 0) if within is None else (self.shape[1:], within * self.shape[1])
        end = shape[0] if stop is None else min(stop, shape[0])
        dtype, row = DTYPES[self.kind], math.prod(shape[1:])
        count = (end - start) * row
        data = np.fromfile(self.path, dtype, count, offset=self.offset + (first + start) * row * dtype.itemsize)
        if data.size != count:
            raise ArgumentError("path", str(self.path), f"a file that holds all of {self.name}")
        return data.reshape(end - start, *shape[1:])


class Checkpoint:
    """All tensors of a file, of a folder of files, or of an index that names files.

    Parameters
    ----------
    path : path-like
        A ``.safetensors`` file, a folder with ``model.safetensors.index.json`` or with such files, or the index.

    Raises
    ------
    ArgumentError
        There is no such thing, or a file is not intact.
    """

    def __init__(self, path: Any) -> None:
        try:
            self.path = Path(path)
        except TypeError:
            raise ArgumentError("path", path, "a path") from None
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """File of each tensor."""
        if self.path.is_dir():
            index = self.path / _INDEX
            if index.is_file():
                return _read_index(index)
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise ArgumentError("path", str(self.path), f"a folder with {_INDEX} or .safetensors files")
            return {name: file for file in files for name in self._header(file)}
        if not self.path.is_file():
            raise ArgumentError("path", str(self.path), "a file or folder that exists")
        if self.path.suffix == ".json":
            return _read_index(self.path)
        return dict.fromkeys(self._header(self.path), self.path)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def find(self, name: str) -> StoredTensor | None:
        """The tensor called ``name``, if there is one."""
        file = self._files.get(name)
        if file is None:
            return None
        tensor = self._header(file).get(name)
        if tensor is None:
            raise ArgumentError("path", str(file), f"a file with the tensor {name}, as the index says")
        return tensor

    def tensor(self, name: str) -> StoredTensor:
        """The tensor called ``name``.

        Raises
        ------
        ArgumentError
            There is none.
        """
        found = self.find(name)
        if found is None:
            raise ArgumentError("path", str(self.path), f"a checkpoint with the tensor {name}")
        return found

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        if file not in self._headers:
            self._headers[file] = _read_header(file)
        return self._headers[file]


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError("path", str(index), f"an index with a weight_map ({error})") from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            entries = json.loads(stream.read(length))
        size = file.stat().st_size
        start = _LENGTH_BYTES + length
        found = (_stored(file, name, entry, start, size) for name, entry in entries.items() if name != "__metadata__")
        return {tensor.name: tensor for tensor in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError("path", str(file), f"an intact safetensors file ({error})") from error


def _stored(file: Path, name: str, entry: dict[str, Any], start: int, size: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape, kind = tuple(int(n) for n in entry["shape"]), str(entry["dtype"])
    if kind in DTYPES and end - begin != math.prod(shape) * DTYPES[kind].itemsize:
        raise ValueError(f"{name}: {end - begin} bytes for {kind} {shape}")
    if not 0 <= begin <= end <= size - start:
        raise ValueError(f"{name}: bytes {begin} to {end} of {size - start}")
    return StoredTensor(name, file, kind, shape, start + begin)
