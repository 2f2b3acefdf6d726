"""Payload formats: how a row of activations is encoded while it travels."""

from __future__ import annotations

from nvep.errors import ArgumentError
from nvep.formats.base import PayloadFormat
from nvep.formats.quantise import Dequantiser, Quantiser

FORMATS: dict[str, PayloadFormat] = {
    made.name: made
    for made in (
        PayloadFormat("bf16", "formats/bf16.cuh", "PayloadBf16", 16),
        PayloadFormat("fp16", "formats/fp16.cuh", "PayloadFp16", 16),
        PayloadFormat("fp8_block", "formats/fp8_block.cuh", "PayloadFp8Block128", 8, 128, "fp32"),
        PayloadFormat("fp8_block_ue8m0", "formats/fp8_block.cuh", "PayloadFp8Block128Ue8m0", 8, 128, "ue8m0"),
        PayloadFormat("fp8_tensor", "formats/fp8_tensor.cuh", "PayloadFp8Tensor", 8, tensor_scale=True),
        PayloadFormat("mxfp8", "formats/mxfp8.cuh", "PayloadMxfp8", 8, 32, "ue8m0"),
        PayloadFormat("nvfp4", "formats/nvfp4.cuh", "PayloadNvfp4", 4, 16, "e4m3", tensor_scale=True),
    )
}


def payload_format(name: str) -> PayloadFormat:
    """The payload format called ``name``, a key of ``FORMATS``.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError("format", name, ", ".join(FORMATS))
    return FORMATS[name]


__all__ = ["FORMATS", "Dequantiser", "PayloadFormat", "Quantiser", "payload_format"]
