"""A step's arguments, checked before any device work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np

from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError, ShapeError
from nvep.exchange.arguments import dispatch_arguments
from nvep.inputs import InputReader, InputSpec, InputView
from nvep.runtime.device import Device, Memory, Stream

_INT32, _INT64, _UINT32, _FLOAT32 = (np.dtype(t) for t in (np.int32, np.int64, np.uint32, np.float32))


# The arguments of D.send that a step sets, which end its struct in this order: they are written at one go.
_STEP_FIELDS = ("expert_ids", "expert_weights", "num_tokens_device", "num_tokens", "ids_are_64_bit", "payloads")


def _step_writer(num_ranks: int, payloads: int) -> tuple[Callable[..., None], int]:
    """What packs `_STEP_FIELDS` with so many payloads, and at which offset."""
    struct = dispatch_arguments(num_ranks)
    fields = struct.fields[-len(_STEP_FIELDS) :]
    assert tuple(field.name for field in fields) == _STEP_FIELDS
    codes = ["I" if field.kind == "u32" else "Q" for field in fields[:-1]]
    return Struct("".join(codes) + f"{payloads}Q").pack_into, getattr(struct.ctype, _STEP_FIELDS[0]).offset


class InputChecker:
    """Checks arrays against a configuration; copies host arrays to the device where the device cannot read them.

    Parameters
    ----------
    config : ExchangeConfig
        Gives shapes and sizes.
    num_ranks : int
        Ranks that exchange.
    device : Device
        Where the kernels run.
    """

    def __init__(self, config: ExchangeConfig, num_ranks: int, device: Device) -> None:
        self._config = config
        self._device = device
        self._staging: dict[tuple[int, str], Memory] = {}
        dtype, elements = partial_dtype(config.partial_format), config.elements
        names = (
            ["tokens"] if len(config.payload_bytes) == 1 else [f"tokens[{i}]" for i in range(len(config.payload_bytes))]
        )

        def reader(name: str, dtypes: tuple[np.dtype[Any], ...], shape: tuple[Any, ...], **more: Any) -> InputReader:
            return InputReader(InputSpec(name, dtypes, shape, **more), device)

        per_token = (("tokens", config.max_tokens), config.top_k)
        payloads = zip(names, config.payload_bytes, strict=True)
        self._arrays = [InputReader(InputSpec.rows(n, nbytes, config.max_tokens), device) for n, nbytes in payloads]
        self._arrays += [reader("expert_ids", (_INT32, _INT64), per_token)]
        self._arrays += [reader("expert_weights", (_FLOAT32,), per_token)]
        self._write, self._offset = _step_writer(num_ranks, len(names))
        self._read = [array.__call__ for array in self._arrays]
        self._count = reader("num_tokens", (_INT32, _UINT32), (1,))
        self._partial = reader("partial_rows", (dtype,), (num_ranks, config.max_tokens, elements), alignment=16)
        self._out = reader("out", (dtype,), ("tokens", elements), alignment=16, writable=True)
        if not device.emulated:
            try:
                self._allocate_staging()
            except BaseException:
                self.close()
                raise

    def step(
        self, lane: int, arrays: tuple[Any, Any, Any, Any], stream: Stream, arguments: ctypes.Structure
    ) -> tuple[int | None, list[InputView], bool]:
        """Check ``(tokens, expert_ids, expert_weights, num_tokens)``, make each addressable in stream order, and say in
        ``arguments`` (`dispatch_arguments`) where it is.

        Returns
        -------
        tuple
            The number of tokens, None where only the device knows it; what kernels read in place; whether something was
            copied on the stream.
        """
        tokens, ids, weights, count = arrays
        payloads = tokens if isinstance(tokens, (tuple, list)) else (tokens,)
        if len(payloads) != len(self._arrays) - 2:
            raise ArgumentError("tokens", f"{len(payloads)} arrays", f"one array per payload: {len(self._arrays) - 2}")
        views = [read(array, stream) for read, array in zip(self._read, (*payloads, ids, weights))]
        rows = views[0].shape[0]
        copied = False
        for view in views:
            if view.shape[0] != rows:
                raise self._uneven(views)
            copied = copied or view.host
        id_view = views[-2]
        num_tokens: int | None = rows
        if count is not None:
            if isinstance(count, (int, np.integer)):
                num_tokens = self._check_count(count, rows)
            else:
                num_tokens = None
                views.append(self._count(count, stream))
                copied = copied or views[-1].host
        if id_view.settled:
            self._check_ids(id_view.to_numpy()[:num_tokens])
        addresses = self._addresses(lane, views, stream) if copied else [view.address for view in views]
        device_count = addresses.pop() if num_tokens is None else 0
        weight_address, id_address = addresses.pop(), addresses.pop()
        known = rows if num_tokens is None else num_tokens
        wide = id_view.dtype.itemsize == 8
        self._write(arguments, self._offset, id_address, weight_address, device_count, known, wide, *addresses)
        return num_tokens, views, copied

    def _uneven(self, views: list[InputView]) -> ShapeError:
        rows = views[0].shape[0]
        index = next(i for i, view in enumerate(views) if view.shape[0] != rows)
        return ShapeError(self._arrays[index].spec.name, views[index].shape, f"{rows} tokens, as the first payload has")

    def _check_count(self, count: int | np.integer[Any], rows: int) -> int:
        if isinstance(count, bool) or not 0 <= int(count) <= rows:
            raise ArgumentError("num_tokens", count, f"0 to {rows}, the rows of tokens")
        return int(count)

    def _check_ids(self, ids: np.ndarray) -> None:
        """Host ids are checked here; ids in device arrays are checked by the kernel, which counts what it replaces."""
        valid = (ids >= 0) & (ids < self._config.num_experts)
        wrong = ~valid & (ids != -1) & (ids != self._config.invalid_expert)
        if wrong.any():
            token, k = np.argwhere(wrong)[0]
            allowed = f"0 to {self._config.num_experts - 1}, or -1 for none"
            raise ArgumentError(f"expert_ids[{token}, {k}]", int(ids[token, k]), allowed)
        ordered = np.sort(np.where(valid, ids, -1), axis=1)
        repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if repeated.any():
            token = int(np.argwhere(repeated)[0][0])
            raise ArgumentError(f"expert_ids[{token}]", ids[token].tolist(), "distinct experts within a token")

    def partial_rows(self, array: Any, exposed: int, stream: Stream) -> InputView:
        """Partial rows on the device; if ``host``, they were copied from there to ``exposed``."""
        view = self._partial(array, stream)
        if not view.host:
            return view
        self._require_no_capture("partial_rows", stream)
        self._device.copy_in(exposed, view.to_numpy(), stream)
        return view._replace(address=exposed, keepalive=None)

    def output(self, array: Any, rows: int, stream: Stream) -> InputView:
        """A caller's output array for at least ``rows`` tokens."""
        view = self._out(array, stream)
        if view.shape[0] < rows:
            raise ShapeError("out", view.shape, f"at least {rows} rows")
        if view.host:
            raise ArgumentError("out", "a host array", f"an array on {self._device.name}")
        return view

    def _addresses(self, lane: int, views: list[InputView], stream: Stream) -> list[int]:
        """Where the device reads: host arrays are copied, and no longer kept in ``views``."""
        addresses = []
        for index, (read, view) in enumerate(zip((*self._arrays, self._count), views)):
            addresses.append(self._address(lane, read.spec.name, view, stream))
            if view.host:
                views[index] = view._replace(keepalive=None)
        return addresses

    def _address(self, lane: int, name: str, view: InputView, stream: Stream) -> int:
        if not view.host or view.nbytes == 0:
            return view.address
        self._require_no_capture(name, stream)
        address = self._staging[lane, name].address
        self._device.copy_in(address, view.to_numpy(), stream)
        return address

    def _require_no_capture(self, name: str, stream: Stream) -> None:
        if self._device.is_capturing(stream):
            raise ArgumentError(name, "a host array", "a device array: a graph would freeze the values of a host array")

    def _allocate_staging(self) -> None:
        """Room for host arrays of every argument, on devices that cannot read them: no step may allocate."""
        config = self._config
        sizes = (*config.payload_bytes, config.top_k * 8, config.top_k * 4)
        per_token = {read.spec.name: nbytes for read, nbytes in zip(self._arrays, sizes, strict=True)}
        for lane in range(config.lanes):
            for name, nbytes in per_token.items():
                self._staging[lane, name] = self._device.allocate(config.max_tokens * nbytes)
            self._staging[lane, self._count.spec.name] = self._device.allocate(4)

    def close(self) -> None:
        """Free staging memory; the streams that used it must be idle."""
        for memory in self._staging.values():
            memory.free()
        self._staging.clear()


def checked_mask(masked: Any, rank: int, known: np.ndarray) -> np.ndarray:
    """A caller's rank mask, for ``rank``, where ``known`` are masked already."""
    sized = isinstance(masked, (list, tuple, np.ndarray)) and len(masked) == len(known)
    if not sized or not all(isinstance(entry, (bool, np.bool_)) for entry in masked):
        raise ArgumentError("masked", masked, f"one bool per rank: {len(known)}")
    wanted = np.array(masked)
    if wanted[rank]:
        raise ArgumentError("masked", f"rank {rank}", "other ranks than this one")
    if (known & ~wanted).any():
        raise ArgumentError("masked", wanted.tolist(), f"a superset of what is masked: {known.tolist()}")
    return wanted
