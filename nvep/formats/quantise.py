"""Rows of floats to a payload format and back, one launch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nvep.arrays import DeviceArray
from nvep.config import PARTIAL_ELEMENT_BYTES, partial_dtype
from nvep.errors import ArgumentError
from nvep.formats.base import UNIT_ELEMENTS, PayloadFormat
from nvep.inputs import InputSpec, InputView
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, Stream
from nvep.runtime.operation import DeviceOperation
from nvep.runtime.source import KernelSource

QUANTISE_ARGUMENTS = ArgumentStruct(
    "QuantiseArguments",
    [
        Field("rows", "u64"),
        Field("payload", "u64"),
        Field("scales", "u64"),
        Field("tensor_scale", "const float*"),
        Field("num_tokens_device", "const unsigned int*"),
        Field("num_tokens", "u32"),
    ],
)
DEQUANTISE_ARGUMENTS = ArgumentStruct(
    "DequantiseArguments",
    [
        Field("payload", "u64"),
        Field("scales", "u64"),
        Field("rows", "u64"),
        Field("tensor_scale", "const float*"),
        Field("num_rows", "u32"),
    ],
)
_ELEMENTS = {"bf16": "ElementsBf16", "fp16": "ElementsFp16", "fp32": "ElementsFp32"}
_TENSOR_SCALE = InputSpec("tensor_scale", (np.dtype(np.float32),), (1,))
_MOST_ROWS = 1 << 28  # row numbers are 32-bit in the kernels, and arrivals have as many rows as all ranks send


def _prelude(payload_format: PayloadFormat, hidden: int, alias: str, elements: str) -> str:
    return f"""#include "formats/elements.cuh"
#include "{payload_format.header}"
namespace nvep {{
namespace config {{
constexpr u32 kHidden = {hidden};
constexpr u32 kRowBytes = {payload_format.row_bytes(hidden)};
constexpr u32 kScaleRowBytes = {payload_format.scale_row_bytes(hidden)};
}}  // namespace config
using Format = {payload_format.cpp_type};
using {alias} = {_ELEMENTS[elements]};
}}  // namespace nvep
"""


def quantise_source(payload_format: PayloadFormat, hidden: int, elements: str) -> KernelSource:
    """The kernel of :class:`Quantiser` for rows of ``elements``: ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return KernelSource("quantise", QUANTISE_ARGUMENTS, _prelude(payload_format, hidden, "Source", elements))


def dequantise_source(payload_format: PayloadFormat, hidden: int, elements: str) -> KernelSource:
    """The kernel of :class:`Dequantiser` for rows of ``elements``: ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return KernelSource("dequantise", DEQUANTISE_ARGUMENTS, _prelude(payload_format, hidden, "Target", elements))


class _Converter(DeviceOperation):
    """What both directions share."""

    def __init__(
        self, device: Device, payload_format: PayloadFormat, hidden: int, most: tuple[str, int], elements: str
    ) -> None:
        if not isinstance(payload_format, PayloadFormat):
            raise ArgumentError("payload_format", payload_format, "a PayloadFormat: a value of nvep.formats.FORMATS")
        if elements not in PARTIAL_ELEMENT_BYTES:
            raise ArgumentError("elements", elements, ", ".join(PARTIAL_ELEMENT_BYTES))
        name, rows = most
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or not 0 < rows <= _MOST_ROWS:
            raise ArgumentError(name, rows, f"an integer from 1 to {_MOST_ROWS}")
        super().__init__(device)
        self.format = payload_format
        self.hidden, self.most = payload_format.check_hidden(hidden), int(rows)
        self._dtype = partial_dtype(elements)

    def _tensor_scale(self, array: Any, stream: Stream) -> InputView | None:
        if not self.format.tensor_scale:
            if array is not None:
                raise ArgumentError("tensor_scale", array, f"None: {self.format.name} has no scale for all rows")
            return None
        if array is None:
            raise ArgumentError("tensor_scale", None, f"a float32 array [1] on {self.device.name}")
        return self._input(array, _TENSOR_SCALE, stream)


class Quantiser(_Converter):
    """Rows of floats to a payload format: one launch, into the payloads that ``Exchange.dispatch`` takes.

    Parameters
    ----------
    device : Device
        Where rows are and payloads will be, for example ``group.device``.
    payload_format : PayloadFormat
        What rows become.
    hidden : int
        Elements of a row, a multiple of 8.
    max_tokens : int
        Most rows in a call.
    elements : str
        Element type of the rows given: ``"bf16"``, ``"fp16"`` or ``"fp32"``.

    Raises
    ------
    ArgumentError
        A value is not allowed.
    CompilationError
        The kernel does not compile.
    """

    def __init__(
        self, device: Device, payload_format: PayloadFormat, *, hidden: int, max_tokens: int, elements: str = "bf16"
    ) -> None:
        super().__init__(device, payload_format, hidden, ("max_tokens", max_tokens), elements)
        shape = (("tokens", self.most), self.hidden)
        self._rows = InputSpec("rows", (self._dtype,), shape, alignment=16)
        try:
            self._kernel = device.load(quantise_source(payload_format, self.hidden, elements))
            self._outputs = tuple(
                self._output((self.most, nbytes), np.uint8) for nbytes in payload_format.payload_bytes(self.hidden)
            )
        except BaseException:
            self.close()
            raise

    def __call__(
        self, rows: Any, *, tensor_scale: Any = None, num_tokens: Any = None, stream: Any = None
    ) -> tuple[DeviceArray, ...]:
        """Enqueue the encoding of ``rows``.

        Parameters
        ----------
        rows : array
            ``[tokens, hidden]``, on the device.
        tensor_scale : array, optional
            float32 ``[1]`` on the device, from 2**-126 to 2**126: for formats that have one (``fp8_tensor``,
            ``nvfp4``). With any other value everything becomes NaN.
        num_tokens : array or int, optional
            Rows that count; int32 or uint32 ``[1]`` on the device if the host does not know. Default: all.
        stream : stream, optional
            Default: the device's own.

        Returns
        -------
        tuple of DeviceArray
            uint8 ``[tokens, row_bytes]`` and, for formats with block scales, uint8 ``[tokens, scale_row_bytes]``:
            what ``Exchange.dispatch`` takes as ``tokens``. Valid until the next call; contents of rows beyond
            ``num_tokens`` are not defined.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError
            Naming the argument.
        """
        work = self.device.as_stream(stream)
        view = self._input(rows, self._rows, work)
        scale = self._tensor_scale(tensor_scale, work)
        rows_given = view.shape[0]
        tokens, count = self._count(num_tokens, rows_given, work)
        arguments = QUANTISE_ARGUMENTS.new(
            rows=view.address,
            payload=self._outputs[0].address,
            scales=self._outputs[-1].address,
            tensor_scale=scale.address if scale else 0,
            num_tokens_device=count.address if count else 0,
            num_tokens=tokens,
        )
        if tokens:
            self.device.launch(self._kernel, self._shape(tokens * self.hidden // UNIT_ELEMENTS), arguments, work)
        self._finish(work, view, scale, count)
        return tuple(output[:rows_given] for output in self._outputs)


class Dequantiser(_Converter):
    """Encoded rows back to rows of floats: one launch, for expert kernels that take no quantised rows.

    Parameters
    ----------
    device, payload_format, hidden, elements
        As in `Quantiser`; ``elements`` is the type that rows become.
    max_rows : int
        Most rows in a call.

    Raises
    ------
    ArgumentError
        A value is not allowed.
    CompilationError
        The kernel does not compile.
    """

    def __init__(
        self, device: Device, payload_format: PayloadFormat, *, hidden: int, max_rows: int, elements: str = "bf16"
    ) -> None:
        super().__init__(device, payload_format, hidden, ("max_rows", max_rows), elements)
        sizes = zip(("payload", "scales"), payload_format.payload_bytes(self.hidden))
        self._specs = [InputSpec.rows(name, nbytes, self.most) for name, nbytes in sizes]
        try:
            self._kernel = device.load(dequantise_source(payload_format, self.hidden, elements))
            self._out = self._output((self.most, self.hidden), self._dtype)
        except BaseException:
            self.close()
            raise

    def __call__(self, payloads: Sequence[Any], *, tensor_scale: Any = None, stream: Any = None) -> DeviceArray:
        """Enqueue the decoding of ``payloads``.

        Parameters
        ----------
        payloads : sequence of array
            As `Quantiser` returns them, or as they arrived, on the device.
        tensor_scale : array, optional
            As given to the quantiser.
        stream : stream, optional
            Default: the device's own.

        Returns
        -------
        DeviceArray
            ``[rows, hidden]``, computed in float32 and rounded once; valid until the next call.

        Raises
        ------
        ArgumentError, ShapeError
            Naming the argument.
        """
        work = self.device.as_stream(stream)
        if len(payloads) != len(self._specs):
            allowed = f"{len(self._specs)}: {', '.join(spec.name for spec in self._specs)}"
            raise ArgumentError("payloads", f"{len(payloads)} arrays", allowed)
        views = [self._input(array, spec, work) for array, spec in zip(payloads, self._specs, strict=True)]
        rows = views[0].shape[0]
        if views[-1].shape[0] != rows:
            raise ArgumentError("scales", views[-1].shape, f"{rows} rows, as the payload has")
        scale = self._tensor_scale(tensor_scale, work)
        arguments = DEQUANTISE_ARGUMENTS.new(
            payload=views[0].address,
            scales=views[-1].address,
            rows=self._out.address,
            tensor_scale=scale.address if scale else 0,
            num_rows=rows,
        )
        if rows:
            self.device.launch(self._kernel, self._shape(rows * self.hidden // UNIT_ELEMENTS), arguments, work)
        self._finish(work, *views, scale)
        return self._out[:rows]
