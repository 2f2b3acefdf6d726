"""A step's arguments, checked before any device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError, ShapeError
from nvep.inputs import InputSpec, InputView, as_input
from nvep.runtime.device import Device, Memory, Stream

_INT32, _INT64, _UINT32, _FLOAT32 = (np.dtype(t) for t in (np.int32, np.int64, np.uint32, np.float32))


@dataclass(frozen=True)
class StepInputs:
    """A checked step: device addresses, and what must stay alive until it ran."""

    payloads: tuple[int, ...]
    expert_ids: int
    ids_are_64_bit: bool
    expert_weights: int
    num_tokens: int
    num_tokens_device: int
    keepalive: tuple[InputView, ...]


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
        self._payloads = [
            InputSpec.rows(name, nbytes, config.max_tokens)
            for name, nbytes in zip(names, config.payload_bytes, strict=True)
        ]
        per_token = (("tokens", config.max_tokens), config.top_k)
        self._ids = InputSpec("expert_ids", (_INT32, _INT64), per_token)
        self._weights = InputSpec("expert_weights", (_FLOAT32,), per_token)
        self._count = InputSpec("num_tokens", (_INT32, _UINT32), (1,))
        self._partial = InputSpec("partial_rows", (dtype,), (num_ranks, config.max_tokens, elements), alignment=16)
        self._out = InputSpec("out", (dtype,), ("tokens", elements), alignment=16, writable=True)
        if not device.emulated:
            try:
                self._allocate_staging()
            except BaseException:
                self.close()
                raise

    def step(self, lane: int, arrays: tuple[Any, Any, Any, Any], stream: Stream) -> StepInputs:
        """Check ``(tokens, expert_ids, expert_weights, num_tokens)`` and make each addressable, in stream order."""
        tokens, ids, weights, count = arrays
        views = self._views(tokens, ids, weights, stream)
        rows = views[0].shape[0]
        count_view: InputView | None = None
        if count is None or isinstance(count, (int, np.integer)):
            num_tokens = rows if count is None else self._check_count(count, rows)
        else:
            num_tokens = rows
            count_view = as_input(count, self._count, device=self._device, stream=stream)
        if views[-2].settled:
            self._check_ids(views[-2].to_numpy()[:num_tokens])
        specs = [*self._payloads, self._ids, self._weights]
        addresses = [self._address(lane, spec.name, view, stream) for spec, view in zip(specs, views, strict=True)]
        return StepInputs(
            payloads=tuple(addresses[:-2]),
            expert_ids=addresses[-2],
            ids_are_64_bit=views[-2].dtype.itemsize == 8,
            expert_weights=addresses[-1],
            num_tokens=num_tokens,
            num_tokens_device=self._address(lane, "num_tokens", count_view, stream) if count_view else 0,
            keepalive=(*views, count_view) if count_view else tuple(views),
        )

    def _views(self, tokens: Any, ids: Any, weights: Any, stream: Stream) -> list[InputView]:
        payloads = tokens if isinstance(tokens, (tuple, list)) else (tokens,)
        if len(payloads) != len(self._payloads):
            raise ArgumentError("tokens", f"{len(payloads)} arrays", f"one array per payload: {len(self._payloads)}")
        arrays = [*payloads, ids, weights]
        specs = [*self._payloads, self._ids, self._weights]
        views = [as_input(a, spec, device=self._device, stream=stream) for a, spec in zip(arrays, specs, strict=True)]
        rows = views[0].shape[0]
        for spec, view in zip(specs, views, strict=True):
            if view.shape[0] != rows:
                raise ShapeError(spec.name, view.shape, f"{rows} tokens, as the first payload has")
        return views

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

    def partial_rows(self, array: Any, exposed: int, stream: Stream) -> tuple[int, InputView]:
        """Device address of partial rows; a host array is copied straight into the rows at ``exposed``."""
        view = as_input(array, self._partial, device=self._device, stream=stream)
        if not view.host:
            return view.address, view
        self._require_no_capture("partial_rows", stream)
        self._device.copy_in(exposed, view.to_numpy(), stream)
        return exposed, view

    def output(self, array: Any, rows: int, stream: Stream) -> InputView:
        """A caller's output array for at least ``rows`` tokens."""
        view = as_input(array, self._out, device=self._device, stream=stream)
        if view.shape[0] < rows:
            raise ShapeError("out", view.shape, f"at least {rows} rows")
        if view.host:
            raise ArgumentError("out", "a host array", f"an array on {self._device.name}")
        return view

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
        per_token = {spec.name: n for spec, n in zip(self._payloads, config.payload_bytes, strict=True)}
        per_token |= {self._ids.name: config.top_k * 8, self._weights.name: config.top_k * 4}
        for lane in range(config.lanes):
            for name, nbytes in per_token.items():
                self._staging[lane, name] = self._device.allocate(config.max_tokens * nbytes)
            self._staging[lane, self._count.name] = self._device.allocate(4)

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
