"""Arrays that nvep hands out: views of device memory that other libraries read in place.

The lowest layer: devices and streams are known by the few methods below. What comes in is `nvep.inputs`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from nvep import dlpack
from nvep.dlpack import broken_axis, contiguous_strides, select
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, ShapeError

_CARRIERS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
CLOSED = "the exchange that owned this array is closed"


class ArrayStream(Protocol):
    """Work in order, as far as arrays need to know it."""

    @property
    def handle(self) -> int: ...

    def synchronize(self) -> None: ...

    def record(self) -> Any: ...

    def wait(self, event: Any) -> None: ...


class ArrayDevice(Protocol):
    """Where memory lives: ``kind`` is ``"cuda"`` or ``"emulated"``."""

    @property
    def kind(self) -> str: ...

    @property
    def ordinal(self) -> int: ...

    def copy_out(self, array: np.ndarray, address: int, stream: Any) -> None: ...

    def as_stream(self, stream: Any) -> Any: ...

    def order(self, consumer_handle: int, producer: Any) -> None:
        """Make the foreign stream ``consumer_handle`` wait for the work so far of ``producer``."""


class _Lease:
    """Held by the lifetime, until it ends, and by everything that reads its memory in place."""

    __slots__ = ("__weakref__", "keepalive")

    def __init__(self, keepalive: object) -> None:
        self.keepalive = keepalive


class _Lifetime:
    """Shared by an owner and its siblings."""

    __slots__ = ("lease", "reason")

    def __init__(self, keepalive: object) -> None:
        self.lease: _Lease | None = _Lease(keepalive)
        self.reason = ""


class ArrayOwner:
    """Keeps the memory behind arrays alive, and knows the stream that fills them.

    Parameters
    ----------
    device : Device
        Where the memory lives.
    stream : Stream, optional
        Producer of the current contents. Assign `stream` again when another stream takes over.
    keepalive : object, optional
        Referenced as long as an array, or a view of one in another library, lives.
    """

    def __init__(self, device: ArrayDevice, *, stream: ArrayStream | None = None, keepalive: object = None) -> None:
        self.device = device
        self.stream = stream
        self._lifetime = _Lifetime(keepalive)

    def sibling(self) -> ArrayOwner:
        """An owner of the same lifetime with a stream of its own."""
        other = ArrayOwner(self.device)
        other._lifetime = self._lifetime
        return other

    @property
    def expired(self) -> bool:
        return self._lifetime.lease is None

    def lease(self) -> object:
        """What a reader in place holds on to.

        Raises
        ------
        ExchangeClosed
            After `expire`.
        """
        if self._lifetime.lease is None:
            raise ExchangeClosed(self._lifetime.reason)
        return self._lifetime.lease

    def expire(self, reason: str = CLOSED, *, then: Callable[[], object] | None = None) -> None:
        """Make every further access to the arrays, those of siblings too, raise ExchangeClosed. Idempotent.

        Parameters
        ----------
        reason : str
            The error's text.
        then : callable, optional
            Frees the memory. Called before this returns if nothing reads it in place (NumPy views, DLPack consumers),
            otherwise when the last reader is collected, in that thread; not at interpreter exit.
        """
        life = self._lifetime
        if life.lease is None:
            return
        read = weakref.ref(life.lease)
        life.lease, life.reason = None, reason
        last = read()
        if then is not None and last is None:
            then()
        elif then is not None:
            weakref.finalize(last, then).atexit = False


class DeviceArray:
    """A view of device memory, never changed. It owns nothing: `owner` does, and says until when.

    Contents are produced in stream order: consumers through DLPack or the CUDA array interface are ordered behind
    ``owner.stream``, host accesses wait for it.

    Parameters
    ----------
    address : int
        First element, in bytes.
    shape : tuple of int
        Elements per axis.
    dtype : dtype_like
        NumPy or ml_dtypes element type.
    owner : ArrayOwner
        Device, producing stream and lifetime.
    strides : tuple of int, optional
        In bytes, not negative; C-contiguous by default.
    readonly : bool
        Consumers are told not to write.
    """

    __slots__ = ("__weakref__", "_accepted", "_address", "dtype", "owner", "readonly", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: Any,
        *,
        owner: ArrayOwner,
        strides: Sequence[int] | None = None,
        readonly: bool = False,
    ) -> None:
        self.dtype: Final[np.dtype[Any]] = np.dtype(dtype)
        if self.dtype.hasobject or not self.dtype.isnative or self.dtype.itemsize == 0:
            raise DTypeError("dtype", str(self.dtype), "a native element type of fixed size without Python objects")
        self._address: Final = address
        self.shape: Final = tuple(shape)
        own = contiguous_strides(self.shape, self.dtype.itemsize) if strides is None else tuple(strides)
        self.strides: Final = own
        self.owner: Final = owner
        self.readonly: Final = readonly
        self._accepted: tuple[object, tuple[Any, ...]] | None = None  # `nvep.inputs`: who accepted it, as what

    @property
    def address(self) -> int:
        """Address of the first element. Raises ExchangeClosed once the owner has expired."""
        self.owner.lease()
        return self._address

    @property
    def device(self) -> ArrayDevice:
        return self.owner.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """C-contiguous."""
        return broken_axis(self.shape, self.strides, self.dtype.itemsize) is None

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a DeviceArray without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        where = f"cuda:{self.device.ordinal}" if self.device.kind == "cuda" else "emulated"
        state = "expired" if self.owner.expired else f"{self._address:#x}"
        access = ", read-only" if self.readonly else ""
        return f"DeviceArray({self.dtype.name}{list(self.shape)}, {where}, {state}{access})"

    def _like(self, address: int, shape: Any, strides: Any, dtype: Any = None) -> DeviceArray:
        dtype = self.dtype if dtype is None else dtype
        return DeviceArray(address, shape, dtype, owner=self.owner, strides=strides, readonly=self.readonly)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as another element type; the last axis is resized where sizes differ, and must be contiguous.

        Raises
        ------
        ShapeError
            The last axis is not contiguous, or does not hold a whole number of the new elements.
        """
        dtype = np.dtype(dtype)
        old, new = self.dtype.itemsize, dtype.itemsize
        if old == new:
            return self._like(self._address, self.shape, self.strides, dtype)
        if not self.shape or self.strides[-1] != old or new == 0 or self.shape[-1] * old % new:
            allowed = f"a contiguous last axis that is a multiple of {new} bytes ({dtype.name})"
            raise ShapeError("view", (self.shape, self.strides), allowed)
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        return self._like(self._address, shape, (*self.strides[:-1], new), dtype)

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same elements of a contiguous array with other axes; one extent may be -1.

        Raises
        ------
        ShapeError
            The array is not contiguous, or the sizes differ.
        """
        wanted = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        known = math.prod(n for n in wanted if n != -1)
        if wanted.count(-1) == 1 and known and self.size % known == 0:
            wanted[wanted.index(-1)] = self.size // known
        if not self.contiguous or math.prod(wanted) != self.size or any(n < 0 for n in wanted):
            have = f"shape {self.shape}, strides {self.strides}"
            raise ShapeError("shape", tuple(wanted), f"{self.size} elements of a contiguous array ({have})")
        return self._like(self._address, wanted, None)

    def __getitem__(self, index: Any) -> DeviceArray:
        """Basic indexing: integers, slices with positive steps, one ellipsis. Always a view."""
        offset, shape, strides = select(index, self.shape, self.strides)
        return self._like(self._address + offset, shape, strides)

    def _carrier(self) -> np.ndarray:
        """Integers over the same memory, holding the lease; the host must not read it on ``cuda``."""
        typestr = _CARRIERS.get(self.dtype.itemsize, f"|V{self.dtype.itemsize}")
        return dlpack.host_array(
            self._address, self.shape, self.strides, typestr=typestr, readonly=self.readonly, keep=self.owner.lease()
        )

    def _wait(self) -> None:
        if self.owner.stream is not None:
            self.owner.stream.synchronize()

    def numpy(self) -> np.ndarray:
        """A host copy, after waiting for the producing stream.

        Returns
        -------
        numpy.ndarray
            C-contiguous and writable; `shape` and `dtype` of this array.
        """
        self.owner.lease()
        if self.device.kind != "cuda":
            self._wait()
            return np.array(self._carrier().view(self.dtype), order="C")
        if self.contiguous:
            host = np.empty(self.shape, self.dtype)
            if host.size:
                self.device.copy_out(host, self._address, self.device.as_stream(self.owner.stream))
            return host
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides)) + self.dtype.itemsize
        raw = np.empty(span, np.uint8)
        self.device.copy_out(raw, self._address, self.device.as_stream(self.owner.stream))
        return np.array(np.ndarray(self.shape, self.dtype, raw, strides=self.strides), order="C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Not __array_interface__: it has no typestr for bf16 and fp8, and its readers would hold no lease.
        if copy:
            host = self.numpy()
        elif self.device.kind == "cuda":
            raise TypeError("the host cannot read a DeviceArray on cuda in place: call .numpy() for a copy")
        else:
            self._wait()
            host = self._carrier().view(self.dtype)
        if dtype is None or np.dtype(dtype) == host.dtype:
            return host
        if copy is False:
            raise ValueError(f"no view of {self.dtype.name} as {np.dtype(dtype).name} without a copy")
        return host.astype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3. bf16 and fp8 have no typestr: they appear as ``<V2`` and ``|V1``, as torch and ml_dtypes have it.

        Consumers refuse these rather than misread them (torch, CuPy, numba); DLPack carries them.
        """
        if self.device.kind != "cuda":
            raise AttributeError("__cuda_array_interface__")
        self.owner.lease()
        itemsize, stream = self.dtype.itemsize, self.owner.stream
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str if self.dtype.isbuiltin == 1 else f"{'<' if itemsize > 1 else '|'}V{itemsize}",
            "data": (self._address if self.size else 0, self.readonly),
            "strides": None if self.contiguous else self.strides,
            "stream": None if stream is None else stream.handle or 1,  # 0 is ambiguous there: 1 is the legacy stream
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device.ordinal) if self.device.kind == "cuda" else (dlpack.CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export as the array API standard defines it; on ``cuda`` the consumer's ``stream`` waits for the producer.

        Parameters
        ----------
        stream : int or None
            On ``cuda``: None or 1 the legacy default stream, 2 the per-thread one, -1 no ordering, else a handle.
        max_version : tuple of int, optional
            Highest DLPack version understood; below 1.0 the older capsule is made.
        dl_device : tuple of int, optional
            Where the consumer wants it: this device, or the host (a copy on ``cuda``).
        copy : bool or None
            True is possible towards the host only.

        Raises
        ------
        BufferError
            No such export.
        ExchangeClosed
            The owner has expired.
        """
        code = dlpack.element_code(self.dtype)
        if code is None or self.dtype.itemsize not in _CARRIERS:
            raise BufferError(f"DLPack has no element type for {self.dtype}")
        versioned = max_version is not None and max_version[0] >= 1
        here = self.__dlpack_device__()
        target = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        host = target == (dlpack.CPU, 0)
        if target != here and not host:
            raise BufferError(f"this array is on DLPack device {here}: it cannot be exported to {target}")
        if copy is not True and target == here:
            self._order(stream)
            return dlpack.make_capsule(self._carrier(), code, here, versioned=versioned)
        if copy is False or not host:
            raise BufferError(f"copy={copy} is not possible from DLPack device {here} to {target}")
        carrier = self.numpy().view(_CARRIERS[self.dtype.itemsize])
        return dlpack.make_capsule(carrier, code, target, versioned=versioned, copied=True)

    def _order(self, consumer: int | None) -> None:
        """Order a consumer's stream behind the producer; the host waits instead where there are no foreign streams."""
        self.owner.lease()
        if self.device.kind != "cuda":
            if consumer not in (None, -1):
                raise ArgumentError("stream", consumer, "None: this array is in host memory")
            self._wait()
            return
        handle = 1 if consumer is None else consumer
        if isinstance(handle, bool) or not isinstance(handle, int) or handle == 0 or handle < -1:
            raise ArgumentError("stream", consumer, "None, -1, 1, 2 or a stream handle (0 is ambiguous)")
        producer = self.owner.stream
        if handle != -1 and producer is not None and producer.handle != handle:
            self.device.order(handle, producer)
