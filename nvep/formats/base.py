"""What a payload format is: its sizes, and the exchange configuration that carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.config import ROW_ALIGNMENT, ExchangeConfig
from nvep.errors import ArgumentError

UNIT_ELEMENTS = 8  # kUnitElements in nvep_kernels/formats/elements.cuh
_MAX_HIDDEN = 1 << 20
_SCALE_BYTES = {"fp32": 4, "ue8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class PayloadFormat:
    """How a row of activations is encoded while it travels: opaque bytes to the exchange, numbers to expert kernels.

    A token has one payload, its encoded row, and where the format has block scales a second one, the row's scales.
    Both are padded with zeros to multiples of 16 bytes. The last block of a row may be short.

    Attributes
    ----------
    name : str
        Key in ``nvep.formats.FORMATS``.
    header, cpp_type : str
        The device half, in ``nvep_kernels``.
    element_bits : int
        Bits of an encoded element.
    block : int or None
        Neighbouring elements of a row that share a scale.
    scale : str or None
        How a block's scale is stored: ``"fp32"``, ``"ue8m0"`` (a power of two in one byte) or ``"e4m3"``.
    tensor_scale : bool
        There is a float32 scale for all rows, chosen beforehand by the caller and not sent.
    """

    name: str
    header: str
    cpp_type: str
    element_bits: int
    block: int | None = None
    scale: str | None = None
    tensor_scale: bool = False

    def check_hidden(self, hidden: object) -> int:
        """Return ``hidden`` if rows of so many elements can be encoded.

        Raises
        ------
        ArgumentError
            It is not a multiple of 8 from 8 to 2**20.
        """
        good = isinstance(hidden, (int, np.integer)) and not isinstance(hidden, bool)
        if not good or not 0 < hidden <= _MAX_HIDDEN or hidden % UNIT_ELEMENTS:  # type: ignore[operator]
            raise ArgumentError("hidden", hidden, f"a multiple of {UNIT_ELEMENTS} up to {_MAX_HIDDEN}")
        return int(hidden)  # type: ignore[call-overload, no-any-return]

    def row_bytes(self, hidden: int) -> int:
        """Bytes of an encoded row of ``hidden`` elements, with the padding to 16.

        Raises
        ------
        ArgumentError
            As in `check_hidden`.
        """
        return _padded(self.check_hidden(hidden) * self.element_bits // 8)

    def scales(self, hidden: int) -> int:
        """Number of scales of a row, 0 for a format without block scales."""
        return 0 if self.block is None else -(-self.check_hidden(hidden) // self.block)

    def scale_row_bytes(self, hidden: int) -> int:
        """Bytes of the scales of a row, with the padding to 16; 0 for a format without block scales."""
        return 0 if self.scale is None else _padded(self.scales(hidden) * _SCALE_BYTES[self.scale])

    def payload_bytes(self, hidden: int) -> tuple[int, ...]:
        """Bytes of each payload of a token: the row, and the scales if there are any."""
        scales = self.scale_row_bytes(hidden)
        return (self.row_bytes(hidden), scales) if scales else (self.row_bytes(hidden),)

    def exchange_config(
        self, hidden: int, *, num_experts: int, top_k: int, max_tokens: int, **options: Any
    ) -> ExchangeConfig:
        """An exchange that dispatches rows of ``hidden`` elements in this format and combines whole partial rows.

        Parameters
        ----------
        hidden : int
            Elements of a row.
        num_experts, top_k, max_tokens : int
            As in `ExchangeConfig`.
        **options
            Further fields of `ExchangeConfig`. ``extra_payload_bytes`` come after the scales.

        Raises
        ------
        ArgumentError
            A value is not allowed.
        """
        row, *scales = self.payload_bytes(hidden)
        further = tuple(options.pop("extra_payload_bytes", ()))
        fields = {"partial_elements": hidden, **options}
        return ExchangeConfig(
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=max_tokens,
            row_bytes=row,
            extra_payload_bytes=(*scales, *further),
            **fields,
        )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
