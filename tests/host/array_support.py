"""Stand-ins for devices, streams and other libraries, for the tests of arrays. All memory is host memory."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray

NATIVE = [np.dtype(t) for t in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")]
EXTENSION = [
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
]
# Type codes as dlpack.h (1.1) numbers them, written out here a second time on purpose.
CODES = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "float8_e8m0fnu": (14, 8)}
CODES |= {"float32": (2, 32), "float16": (2, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "bool": (6, 8)}


class FakeStream:
    """Remembers who waited for what."""

    numbers = itertools.count(100)

    def __init__(self, handle: int | None = None) -> None:
        self.handle = next(self.numbers) if handle is None else handle
        self.synchronized = 0
        self.waited: list[tuple[str, int]] = []

    def synchronize(self) -> None:
        self.synchronized += 1

    def record(self) -> tuple[str, int]:
        return ("event", self.handle)

    def wait(self, event: tuple[str, int]) -> None:
        self.waited.append(event)


class FakeDevice:
    """Host memory that says it is a device; ``order`` and ``copy_out`` are recorded."""

    def __init__(self, kind: str = "emulated", ordinal: int = 0) -> None:
        self.kind, self.ordinal = kind, ordinal
        self.ordered: list[tuple[int, int]] = []
        self.copies = 0

    def copy_out(self, array: np.ndarray, address: int, stream: Any) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        self.copies += 1

    def as_stream(self, stream: int) -> FakeStream:
        return FakeStream(stream)

    def order(self, consumer_handle: int, producer: FakeStream) -> None:
        self.ordered.append((consumer_handle, producer.handle))


def device_array(host: np.ndarray, device: FakeDevice | None = None, **options: Any) -> DeviceArray:
    """A DeviceArray over the memory of ``host``, which its owner keeps alive."""
    owner = ArrayOwner(device or FakeDevice(), stream=options.pop("stream", None), keepalive=host)
    return DeviceArray(host.ctypes.data, host.shape, host.dtype, owner=owner, strides=host.strides, **options)


def values(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Distinct bytes as far as the type allows; a bool holds 0 or 1."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.arange(count, dtype=np.int64) % (2 if dtype.kind == "b" else 251)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


class Tensor(ctypes.Structure):
    """DLTensor, laid out as dlpack.h says."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETERS: list[Any] = []  # a library's code outlives the tensors that it handed out


def capsule_name(capsule: Any) -> bytes:
    return bytes(_name(capsule))


def read_capsule(capsule: Any) -> tuple[Tensor, ManagedVersioned | None]:
    """The tensor inside an unconsumed capsule, and its versioned frame where it has one."""
    if capsule_name(capsule) == b"dltensor_versioned":
        managed = ManagedVersioned.from_address(_get(capsule, b"dltensor_versioned"))
        return managed.tensor, managed
    return Managed.from_address(_get(capsule, b"dltensor")).tensor, None


class Foreign:
    """Another library: exports one tensor through DLPack and counts what its consumers do.

    Parameters
    ----------
    array : numpy.ndarray
        The memory; integers of the element's size where NumPy lacks the type.
    code : tuple
        Type code, bits, lanes.
    """

    def __init__(self, array: np.ndarray, code: tuple[int, ...], *, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.code, self.device = array, code, device
        self.version: tuple[int, int] | None = (1, 1)
        self.flags = 0
        self.byte_offset = 0
        self.null_strides = False
        self.asked: list[dict[str, Any]] = []
        self._calls: list[int] = []
        self._deleter = _DELETER(self._calls.append)
        _DELETERS.append(self._deleter)
        self._kept: list[Any] = []

    @property
    def deleted(self) -> int:
        return len(self._calls)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        managed: Any = Managed() if self.version is None else ManagedVersioned()
        if self.version is not None:
            managed.version[:] = self.version
            managed.flags = self.flags
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        tensor, ndim = managed.tensor, self.array.ndim
        tensor.data = self.array.ctypes.data - self.byte_offset if self.array.size else None
        tensor.byte_offset = self.byte_offset if self.array.size else 0
        tensor.device[:] = self.device
        tensor.ndim = ndim
        tensor.code, tensor.bits, tensor.lanes = (*self.code, 1)[:3]
        axes = ctypes.c_int64 * max(ndim, 1)
        shape = axes(*self.array.shape)
        strides = axes(*(s // self.array.itemsize for s in self.array.strides))
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        if not self.null_strides:
            tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        self._kept.append((managed, shape, strides))
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _new(ctypes.addressof(managed), name, None)


class OldForeign(Foreign):
    """A producer from before DLPack 1.0: it knows no ``max_version``."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.version = None
        return super().__dlpack__(stream=stream)
