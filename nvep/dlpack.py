"""DLPack capsules, made and read with ctypes: every dtype nvep moves, which the libraries' own exporters leave out.
Beside them the arithmetic of shapes and strides that arrays in and out share.

Making: NumPy exports an array of plain integers over the given address, whether or not the host can read it, and the
capsule's tensor is then given its real element type and device. Destructor and deleter stay NumPy's C functions: a
Python callback in their place would lose an exception that is being raised while a capsule is dropped, and would crash
after the interpreter has shut down.

Structures and codes are those of DLPack 1.1 (``dlpack.h``).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from nvep.errors import ArgumentError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY, IS_COPIED = 1, 2
MAX_VERSION = (1, 1)

_NATIVE_CODES = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
}
_EXTENSION_CODES = {
    "bfloat16": (4, 16),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
_CODES = {**_NATIVE_CODES, **_EXTENSION_CODES}
_PACKED_FP4 = (17, 4, 2)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


# For reading, many times cheaper than a field at a time: what precedes the tensor, the tensor, what may follow it.
_HEAD, _TENSOR, _TAIL = struct.Struct("IIPPQ"), struct.Struct("PiiiBBHPPQ"), struct.Struct("PP")
_Bytes = ctypes.c_char * (_HEAD.size + _TENSOR.size)  # one size for all: nothing is read beyond what is unpacked


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# Capsules keep a pointer to their name, also past the life of this module: these buffers are never freed.
_NAMES = tuple(
    ctypes.create_string_buffer(name)
    for name in (b"dltensor", b"dltensor_versioned", b"used_dltensor", b"used_dltensor_versioned")
)
for _buffer in _NAMES:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_buffer))
_PLAIN, _VERSIONED, _USED_PLAIN, _USED_VERSIONED = (ctypes.addressof(b) for b in _NAMES)

_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_status_call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_pointer_call = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_set_name = _status_call(("PyCapsule_SetName", ctypes.pythonapi))
_pointer = _pointer_call(("PyCapsule_GetPointer", ctypes.pythonapi))

_dtypes: dict[tuple[int, int, int], np.dtype[Any]] = {}
_deleters: dict[int, Any] = {}


class Imported(NamedTuple):
    """A tensor read from a capsule; valid while ``keepalive`` lives. ``strides`` are in bytes, None if C-contiguous."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    device_type: int
    device_id: int
    readonly: bool
    keepalive: object


_imported: Callable[[tuple[Any, ...]], Imported] = partial(tuple.__new__, Imported)  # sooner than by its constructor


class _Taken:
    """Owns a consumed tensor: the producer's deleter runs once, when this dies.

    Not at interpreter exit: the memory ends with the process, and the producer may have ended before.
    """

    __slots__ = ("_deleter", "_pointer")

    def __init__(self, pointer: int, deleter: Any) -> None:
        self._pointer = pointer
        self._deleter = deleter

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._deleter is not None and not _exiting():
            self._deleter(self._pointer)


class _Span:
    """What NumPy needs to make an array over an address; NumPy keeps it, and so ``keep``, alive."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, interface: dict[str, object], keep: object) -> None:
        self.__array_interface__ = interface
        self.keep = keep


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def broken_axis(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int] | None:
    """Innermost axis whose stride is not C-contiguous, and the stride it should have; None if all are."""
    if 0 in shape:
        return None
    expected = itemsize
    for axis in range(len(shape) - 1, -1, -1):
        extent = shape[axis]
        if extent != 1 and strides[axis] != expected:
            return axis, expected
        expected *= extent
    return None


def select(
    index: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Byte offset, shape and strides of a basic index: integers, slices with positive steps, one ellipsis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), None)
    if at is not None:
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    if len(entries) > len(shape):
        raise IndexError(f"{len(entries)} indices for {len(shape)} axes")
    offset, axes = 0, []
    for entry, extent, stride in zip(entries, shape, strides):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            if step < 1:
                raise ArgumentError("index", entry, "slices with positive steps")
            count = max(0, -(-(stop - start) // step))
            offset += start * stride if count else 0
            axes.append((count, stride * step))
        elif isinstance(entry, (int, np.integer)) and not isinstance(entry, bool):
            if not -extent <= entry < extent:
                raise IndexError(f"index {entry} is out of range for an axis of {extent}")
            offset += int(entry) % extent * stride
        else:
            raise ArgumentError("index", entry, "integers, slices and an ellipsis")
    axes += zip(shape[len(entries) :], strides[len(entries) :])
    return offset, tuple(n for n, _ in axes), tuple(s for _, s in axes)


@lru_cache  # a name takes NumPy longer than all else that an export does
def element_code(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """DLPack type code and bits of an element type; None if DLPack has none."""
    return _CODES.get(dtype.name) if dtype.isnative else None


def element_dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """NumPy or ml_dtypes element type; pairs of fp4 in a byte come as ``uint8``.

    Raises
    ------
    BufferError
        There is no such NumPy type.
    """
    key = (code, bits, lanes)
    known = _dtypes.get(key)
    if known is not None:
        return known
    names = {(*v, 1): n for n, v in _CODES.items()} | {_PACKED_FP4: "uint8"}
    name = names.get(key)
    if name is None:
        raise BufferError(f"DLPack element type code {code}, {bits} bits, {lanes} lanes has no NumPy equivalent")
    if name in _EXTENSION_CODES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    else:
        found = np.dtype(name)
    _dtypes[key] = found
    return found


def host_array(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], *, typestr: str, readonly: bool, keep: object
) -> np.ndarray:
    """NumPy array over ``address`` (never read here), which keeps ``keep`` alive."""
    if 0 in shape:  # NumPy refuses null even where there is nothing to read
        empty = np.empty(shape, typestr)
        empty.flags.writeable = not readonly
        return empty
    interface = {"version": 3, "shape": shape, "typestr": typestr, "data": (address, readonly), "strides": strides}
    return np.asarray(_Span(interface, keep))


def make_capsule(
    carrier: np.ndarray, code: tuple[int, int], device: tuple[int, int], *, versioned: bool, copied: bool = False
) -> Any:
    """Capsule of the carrier's address, shape and strides with the element type and device given.

    Parameters
    ----------
    carrier : numpy.ndarray
        Integers (or complex128) of the element's size; it lives until the capsule's deleter runs.
    code : tuple
        From `element_code`.
    device : tuple
        DLPack device type and number.
    versioned : bool
        DLPack 1.x; otherwise the older form, which cannot say read-only.
    copied : bool
        Tell the consumer that it got a copy.

    Raises
    ------
    BufferError
        Read-only, and the consumer asked for the older form.
    """
    capsule = carrier.__dlpack__(max_version=(1, 0)) if versioned else carrier.__dlpack__()
    if versioned:
        managed = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
        managed.minor = MAX_VERSION[1]
        managed.flags |= IS_COPIED if copied else 0
        tensor = managed.tensor
    else:
        tensor = _Managed.from_address(_pointer(capsule, _PLAIN)).tensor
    tensor.code, tensor.bits = code
    tensor.device_type, tensor.device_id = device
    if carrier.size == 0:
        tensor.data = None
    return capsule


def take_capsule(capsule: Any) -> Imported:
    """Consume a ``__dlpack__`` capsule; on an error it is left as it was.

    Raises
    ------
    BufferError
        It is no fresh DLPack capsule, of a newer major version, or of an element type NumPy lacks.
    """
    flags = 0
    try:
        pointer, used = _pointer(capsule, _VERSIONED), _USED_VERSIONED
    except ValueError:
        pointer, used = _plain_pointer(capsule), _USED_PLAIN
        _, deleter = _TAIL.unpack_from(_Bytes.from_address(pointer), _TENSOR.size)
        tensor = _TENSOR.unpack_from(_Bytes.from_address(pointer))
    else:
        raw = _Bytes.from_address(pointer)
        major, minor, _, deleter, flags = _HEAD.unpack_from(raw)
        if major > MAX_VERSION[0]:
            raise BufferError(f"DLPack version {major}.{minor}; at most {MAX_VERSION[0]}.x is understood")
        tensor = _TENSOR.unpack_from(raw, _HEAD.size)
    data, device_type, device_id, ndim, code, bits, lanes, extents, steps, offset = tensor
    dtype = _dtypes.get((code, bits, lanes)) or element_dtype(code, bits, lanes)
    integers = _extents(ndim)
    shape = tuple(integers.from_address(extents)) if ndim else ()
    strides = None
    if ndim and steps:
        itemsize = dtype.itemsize
        strides = tuple([step * itemsize for step in integers.from_address(steps)])
    if deleter and deleter not in _deleters:
        _deleters[deleter] = _DELETER(deleter)
    _set_name(capsule, used)
    keepalive = _Taken(pointer, _deleters[deleter] if deleter else None)
    readonly = bool(flags & READ_ONLY)
    return _imported((data + offset, shape, strides, dtype, device_type, device_id, readonly, keepalive))


def _plain_pointer(capsule: Any) -> int:
    try:
        return int(_pointer(capsule, _PLAIN))
    except ValueError:
        name = type(capsule).__name__
        raise BufferError(f"{name} is not a DLPack capsule, or was consumed before") from None


@lru_cache
def _extents(count: int) -> Any:
    return ctypes.c_int64 * count
