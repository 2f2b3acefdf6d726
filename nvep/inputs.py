"""Arrays that nvep takes in: checked, ordered behind their producer, and used in place.

Accepted are NumPy arrays (with ml_dtypes), nvep's own `DeviceArray`, DLPack producers (torch, CuPy, JAX) and objects
with ``__cuda_array_interface__`` or ``__array_interface__``. Nothing is copied. Where an object offers several, DLPack
is used first: it alone tells element type, GPU and stream order together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nvep import dlpack
from nvep.arrays import ArrayDevice, ArrayStream, DeviceArray
from nvep.dlpack import Imported, broken_axis, contiguous_strides
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, ShapeError

ARRAYS = "an array: NumPy, DLPack (torch, CuPy, JAX), __cuda_array_interface__ or __array_interface__"
_UNKNOWN_GPU = -1
_HOST = (dlpack.CPU, dlpack.CUDA_HOST)
_GPU = (dlpack.CUDA, dlpack.CUDA_MANAGED)
_LEGACY = 1  # the legacy default stream, whose handle may also be written 0
_BYTE = np.dtype(np.uint8)
_MOST_LAYOUTS = 1024  # that a reader remembers
_new: Any = tuple.__new__  # makes a NamedTuple in half the time of its constructor

_Producer = ArrayStream | int | None
_Read = tuple[Imported, _Producer]
_Reader = Callable[[Any, str, ArrayDevice, ArrayStream | None], _Read]


class InputView(NamedTuple):
    """An accepted array; its memory is valid while ``keepalive`` is referenced.

    Attributes
    ----------
    address : int
        First element; null is possible where there are no elements.
    shape, strides : tuple of int
        Elements per axis; bytes, C-contiguous.
    dtype : numpy.dtype
        NumPy or ml_dtypes.
    host : bool
        Host memory that the device does not read: copy `to_numpy` to it. Never so on the emulated device.
    settled : bool
        The contents are final and the host can read them now (`to_numpy`). Never so for a `DeviceArray` of an
        emulated device, whose kernels may still write it.
    readonly : bool
        Must not be written.
    keepalive : object
        Reference this until the last kernel that reads the array has finished.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    host: bool
    settled: bool
    readonly: bool
    keepalive: object

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to_numpy(self) -> np.ndarray:
        """NumPy view of a ``settled`` array; it keeps the memory alive by itself."""
        typestr = f"|V{self.dtype.itemsize}"
        raw = dlpack.host_array(
            self.address, self.shape, self.strides, typestr=typestr, readonly=self.readonly, keep=self.keepalive
        )
        return raw.view(self.dtype)


@dataclass(frozen=True)
class InputSpec:
    """What an argument must be. Build it once, use it for every call.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    dtypes : tuple of numpy.dtype
        Allowed element types; empty for any of fixed size in native byte order.
    shape : tuple
        For each axis an extent, the name of a free one, or ``(name, most)``.
    alignment : int
        Of the address, in bytes, a power of two (at least the element type's own is required in any case).
    writable : bool
        An output: read-only arrays are refused.
    row_bytes : int, optional
        Rows instead of a shape (see `rows`).
    """

    name: str
    dtypes: tuple[np.dtype[Any], ...] = ()
    shape: tuple[int | str | tuple[str, int], ...] = ()
    alignment: int = 1
    writable: bool = False
    row_bytes: int | None = None

    @staticmethod
    def rows(name: str, row_bytes: int, max_tokens: int, *, alignment: int = 16, writable: bool = False) -> InputSpec:
        """Rows of opaque bytes: any element type and any axes after the first, if a token has ``row_bytes`` bytes."""
        shape = (("tokens", max_tokens), "any")
        return InputSpec(name, (), shape, alignment=alignment, writable=writable, row_bytes=row_bytes)

    def describe_shape(self) -> str:
        """The allowed shape, for people."""
        axes = [f"{a[0]} <= {a[1]}" if isinstance(a, tuple) else str(a) for a in self.shape]
        if self.row_bytes is not None:
            return f"({axes[0]}, ...) with {self.row_bytes} bytes per token"
        return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def as_input(obj: Any, spec: InputSpec, *, device: ArrayDevice, stream: ArrayStream | None = None) -> InputView:
    """Accept an array, or say what is wrong with it.

    Parameters
    ----------
    obj : array
        See the module. Host arrays are accepted on every device, arrays of a GPU on that GPU only.
    spec : InputSpec
        What it must be.
    device : Device
        Where it will be read; the calling thread is bound to it (torch refuses to export for another GPU).
    stream : Stream, optional
        Its later work is ordered behind what fills the array. None: no ordering (graph capture).

    Returns
    -------
    InputView
        Rows come with shape ``[tokens, row_bytes]`` and dtype ``uint8``.

    Raises
    ------
    DTypeError, ShapeError, ArgumentError
        Naming argument, value and what is allowed.
    ExchangeClosed
        A `DeviceArray` whose owner has expired.
    """
    reader = _READERS.get(type(obj)) or _choose_reader(obj, spec.name)
    found, producer = reader(obj, spec.name, device, stream)
    view = _accept(found, spec, device, own=isinstance(obj, DeviceArray))
    if producer is not None and stream is not None:
        _order(producer, stream, device)
    return view


class InputReader:
    """`as_input` for one argument, called at every step: it remembers what it accepted.

    It holds on to no array. What may change from call to call is read anew: lifetime and producing stream of a
    `DeviceArray`, of other arrays everything.
    """

    __slots__ = ("_accepted", "_device", "spec")

    def __init__(self, spec: InputSpec, device: ArrayDevice) -> None:
        self.spec = spec
        self._device = device
        self._accepted: dict[tuple[Any, ...], tuple[tuple[Any, ...], int]] = {}  # by layout: a view, address bits

    def __call__(self, obj: Any, stream: ArrayStream) -> InputView:
        """See `as_input` for what is accepted, returned and raised."""
        if type(obj) is DeviceArray:
            owner, known = obj.owner, obj._accepted
            lease = owner._lifetime.lease
            if known is None or known[0] is not self or lease is None:
                return self._own(obj, stream)
            producer = owner.stream
            if producer is not None and producer.handle != stream.handle:
                stream.wait(producer.record())
            return _new(InputView, (*known[1], lease))  # type: ignore[no-any-return]
        reader = _READERS.get(type(obj)) or _choose_reader(obj, self.spec.name)
        found, foreign = reader(obj, self.spec.name, self._device, stream)
        address, layout = found[0], self._accepted.get(found[1:7])
        if layout is None or address & layout[1] or not address:
            view = self._check(found)
        else:
            view = _new(InputView, (address, *layout[0], found[7]))
        if foreign is not None:
            _order(foreign, stream, self._device)
        return view

    def _own(self, obj: DeviceArray, stream: ArrayStream) -> InputView:
        """A `DeviceArray` met for the first time, or expired, or last read by another reader."""
        if obj.device is not self._device or obj.owner.expired:
            return as_input(obj, self.spec, device=self._device, stream=stream)
        found, producer = _read_own(obj, self.spec.name, self._device, stream)
        view = _accept(found, self.spec, self._device, own=True)
        obj._accepted = self, view[:-1]
        if producer is not None:
            _order(producer, stream, self._device)
        return view

    def _check(self, found: Imported) -> InputView:
        view = _accept(found, self.spec, self._device, own=False)
        if len(self._accepted) >= _MOST_LAYOUTS:
            self._accepted.clear()
        bits = 0 if view.host else max(self.spec.alignment, found.dtype.alignment) - 1
        self._accepted[found[1:7]] = view[1:-1], bits
        return view


def _accept(found: Imported, spec: InputSpec, device: ArrayDevice, *, own: bool) -> InputView:
    """A view of what was read, or an error; ``own``: from a `DeviceArray`."""
    address, shape, strides, dtype, device_type, _, readonly, keepalive = found
    if device_type != dlpack.CPU or device.kind == "cuda":
        _check_device(spec.name, found, device)
    if (dtype not in spec.dtypes) if spec.dtypes else (dtype.hasobject or not dtype.isnative or not dtype.itemsize):
        raise DTypeError(spec.name, str(dtype), _dtype_names(spec))
    _check_shape(spec, shape, dtype.itemsize)
    if strides is None:
        strides = contiguous_strides(shape, dtype.itemsize)
    else:
        _check_strides(spec.name, shape, strides, dtype.itemsize)
    host = device_type in _HOST and device.kind == "cuda"
    _check_address(spec, found, in_place=not host)
    if readonly and spec.writable:
        raise ArgumentError(spec.name, "a read-only array", "a writable array")
    if spec.row_bytes is not None:
        shape, dtype, strides = (shape[0], spec.row_bytes), _BYTE, (spec.row_bytes, 1)
    settled = device_type in _HOST and (host or not own)
    return InputView(address, shape, dtype, strides, host, settled, readonly, keepalive)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_device(name: str, found: Imported, device: ArrayDevice) -> None:
    kind, number = found.device_type, found.device_id
    if kind in _HOST or (kind == dlpack.CUDA_MANAGED and device.kind == "cuda"):
        return
    if device.kind != "cuda":
        raise ArgumentError(name, f"an array on {_place(kind, number)}", "host memory: this rank's device is emulated")
    if kind != dlpack.CUDA or number not in (device.ordinal, _UNKNOWN_GPU):
        allowed = f"cuda:{device.ordinal}, this rank's device, or host memory"
        raise ArgumentError(name, f"an array on {_place(kind, number)}", allowed)


def _place(kind: int, number: int) -> str:
    return f"cuda:{number}" if kind in _GPU else f"DLPack device {kind}:{number}"


def _dtype_names(spec: InputSpec) -> str:
    if spec.dtypes:
        return " or ".join(d.name for d in spec.dtypes)
    return "any element type of fixed size in native byte order, without Python objects"


def _check_shape(spec: InputSpec, shape: tuple[int, ...], itemsize: int) -> None:
    if spec.row_bytes is not None:
        most = spec.shape[0]
        fits = bool(shape) and math.prod(shape[1:]) * itemsize == spec.row_bytes
        if not fits or (isinstance(most, tuple) and shape[0] > most[1]):
            given = f"{shape} of {itemsize}-byte elements"
            raise ShapeError(spec.name, given, spec.describe_shape())
        return
    if len(shape) != len(spec.shape) or not all(
        have == want if isinstance(want, int) else isinstance(want, str) or have <= want[1]
        for want, have in zip(spec.shape, shape)
    ):
        raise ShapeError(spec.name, shape, spec.describe_shape())


def _check_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    broken = broken_axis(shape, strides, itemsize)
    if broken is not None:
        axis, expected = broken
        given = f"strides {strides} of shape {shape}"
        raise ShapeError(name, given, f"a C-contiguous array: axis {axis} must step {expected} bytes")


def _check_address(spec: InputSpec, found: Imported, *, in_place: bool) -> None:
    if not found.address:
        if 0 not in found.shape:
            raise ArgumentError(spec.name, "a null pointer", f"memory for an array of shape {found.shape}")
        return
    needed = max(spec.alignment, found.dtype.alignment)
    if in_place and found.address % needed and 0 not in found.shape:
        raise ShapeError(spec.name, hex(found.address), f"an address that is a multiple of {needed} bytes")


def _order(producer: ArrayStream | int, stream: ArrayStream, device: ArrayDevice) -> None:
    if isinstance(producer, int):
        if producer != (stream.handle or _LEGACY):
            stream.wait(device.as_stream(producer).record())
    elif producer.handle != stream.handle:
        stream.wait(producer.record())


# --- readers: one for each way to learn where an array is -------------------------------------------------------------


def _read_numpy(obj: Any, name: str, device: ArrayDevice, stream: ArrayStream | None) -> _Read:
    address, readonly = obj.__array_interface__["data"]
    return Imported(address, obj.shape, obj.strides, obj.dtype, dlpack.CPU, 0, readonly, obj), None


def _read_own(obj: DeviceArray, name: str, device: ArrayDevice, stream: ArrayStream | None) -> _Read:
    try:
        lease = obj.owner.lease()
    except ExchangeClosed as error:
        raise ExchangeClosed(f"{name}: {error}") from None
    producer = obj.owner.stream
    kind, number = obj.__dlpack_device__()
    if producer is not None and kind == dlpack.CPU and device.kind == "cuda":
        producer.synchronize()  # a GPU stream cannot wait for a worker thread
        producer = None
    return Imported(obj.address, obj.shape, obj.strides, obj.dtype, kind, number, obj.readonly, lease), producer


def _read_dlpack(obj: Any, name: str, device: ArrayDevice, stream: ArrayStream | None) -> _Read:
    try:
        if device.kind == "cuda" and obj.__dlpack_device__()[0] in _GPU:
            handle = -1 if stream is None else stream.handle or _LEGACY
            capsule = _export(obj, stream=handle)
        else:
            capsule = _export(obj)
        return dlpack.take_capsule(capsule), None
    except Exception as error:  # whatever the other library raises
        interface = _versioned_interface(obj)
        if interface is None:
            raise ArgumentError(name, _kind_of(obj), f"an array that can be exported ({error})") from error
    return _parse_interface(obj, interface, name)


def _export(obj: Any, **options: int) -> Any:
    try:
        return obj.__dlpack__(max_version=dlpack.MAX_VERSION, **options)
    except TypeError:  # a producer older than DLPack 1.0
        return obj.__dlpack__(**options)


def _read_interface(obj: Any, name: str, device: ArrayDevice, stream: ArrayStream | None) -> _Read:
    try:
        interface = obj.__cuda_array_interface__
    except Exception as error:  # whatever the other library raises
        raise ArgumentError(name, _kind_of(obj), f"an array that can be exported ({error})") from error
    return _parse_interface(obj, interface, name)


def _versioned_interface(obj: Any) -> dict[str, Any] | None:
    """The CUDA array interface where it says on which stream the contents are produced."""
    try:
        interface: dict[str, Any] = obj.__cuda_array_interface__
    except Exception:  # offering none, or refusing for the same reason as before
        return None
    return interface if interface.get("version", 0) >= 3 else None


def _parse_interface(obj: Any, interface: dict[str, Any], name: str) -> _Read:
    if interface.get("mask") is not None:
        raise ArgumentError(name, "a masked array", "an array without mask")
    dtype = np.dtype(interface["typestr"])
    own = getattr(obj, "dtype", None)
    if dtype.kind == "V" and isinstance(own, np.dtype) and own.itemsize == dtype.itemsize:
        dtype = own  # bf16 and fp8 have no typestr
    address, readonly = interface["data"]
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    strides = None if strides is None else tuple(strides)
    found = _new(Imported, (address or 0, shape, strides, dtype, dlpack.CUDA, _UNKNOWN_GPU, readonly, obj))
    return found, interface.get("stream")


def _read_array_interface(obj: Any, name: str, device: ArrayDevice, stream: ArrayStream | None) -> _Read:
    return _read_numpy(np.asarray(obj), name, device, stream)


_READERS: dict[type, _Reader] = {np.ndarray: _read_numpy, DeviceArray: _read_own}


def _choose_reader(obj: Any, name: str) -> _Reader:
    """Reader for a type not met before, remembered."""
    kind = type(obj)
    if isinstance(obj, np.ndarray):
        if hasattr(obj, "mask"):
            raise ArgumentError(name, "a masked array", "an array without mask")
        reader: _Reader = _read_numpy
    elif hasattr(kind, "__dlpack__"):
        reader = _read_dlpack
    elif hasattr(obj, "__cuda_array_interface__"):
        reader = _read_interface
    elif hasattr(obj, "__array_interface__"):
        reader = _read_array_interface
    else:
        raise ArgumentError(name, _kind_of(obj), ARRAYS)
    _READERS[kind] = reader
    return reader


def _kind_of(obj: Any) -> str | None:
    """What to show instead of the contents: arrays may be large, or on a GPU."""
    return None if obj is None else f"{type(obj).__module__}.{type(obj).__qualname__}"
