"""Payload formats in NumPy: what the quantise kernels give, bit by bit, and how far decoded rows may be off.

Arithmetic is float32, every operation rounded; conversions are those of ml_dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.errors import ArgumentError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]

_E4M3_MAX, _E2M1_MAX = np.float32(448.0), np.float32(6.0)
_NAN_CODE = 0x7F  # of e4m3
_SMALLEST_SCALE, _LARGEST_SCALE = np.float32(2.0**-126), np.float32(2.0**126)
_ONE = np.float32(1.0)


@dataclass(frozen=True)
class _Spec:
    """Element format, elements that share a scale (0: none), and how that is kept."""

    element: str
    block: int = 0
    scale: str = ""
    tensor_scale: bool = False


_SPECS = {
    "bf16": _Spec("bf16"),
    "fp16": _Spec("fp16"),
    "fp8_block": _Spec("e4m3", 128, "fp32"),
    "fp8_block_ue8m0": _Spec("e4m3", 128, "ue8m0"),
    "fp8_tensor": _Spec("e4m3", tensor_scale=True),
    "mxfp8": _Spec("e4m3", 32, "ue8m0"),
    "nvfp4": _Spec("e2m1", 16, "e4m3", tensor_scale=True),
}
_SIXTEEN_BITS = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Encoded:
    """Rows as they travel.

    Attributes
    ----------
    payload : numpy.ndarray
        uint8 ``[tokens, row_bytes]``, padded with zeros to a multiple of 16.
    scales : numpy.ndarray or None
        uint8 ``[tokens, scale_row_bytes]``, padded likewise.
    """

    payload: UInt8Array
    scales: UInt8Array | None


def _spec(name: str) -> _Spec:
    if name not in _SPECS:
        raise ArgumentError("name", name, ", ".join(_SPECS))
    return _SPECS[name]


def _pad(rows: UInt8Array) -> UInt8Array:
    padding = -rows.shape[1] % 16
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, padding))))


def _blocks(rows: Float32Array, size: int) -> Float32Array:
    """``[tokens, blocks, size]``; a short last block is filled with zeros."""
    tokens, hidden = rows.shape
    return np.pad(rows, ((0, 0), (0, -hidden % size))).reshape(tokens, -1, size)


def _largest(blocks: Float32Array) -> Float32Array:
    """Largest finite magnitude of each block, 0 if there is none."""
    magnitudes = np.where(np.isfinite(blocks), np.abs(blocks), np.float32(0.0))
    largest: Float32Array = magnitudes.max(axis=-1)
    return largest


def _to_e4m3(values: Float32Array) -> UInt8Array:
    clipped = np.clip(values, -_E4M3_MAX, _E4M3_MAX)  # NaN stays
    codes = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(_NAN_CODE), codes)


def _from_e4m3(codes: UInt8Array) -> Float32Array:
    wide: Float32Array = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return wide


def _to_ue8m0(scales: Float32Array) -> UInt8Array:
    """The power of two at or above."""
    fraction, exponent = np.frexp(scales)  # fraction from 0.5 to below 1
    codes: UInt8Array = (exponent - (fraction == np.float32(0.5)) + 127).astype(np.uint8)
    return codes


def _from_ue8m0(codes: UInt8Array) -> Float32Array:
    result = np.ldexp(_ONE, codes.astype(np.int32) - 127).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), result)


def _inverse(tensor_scale: float | None) -> np.float32:
    scale = _tensor_scale(tensor_scale)
    return _ONE / scale if _SMALLEST_SCALE <= scale <= _LARGEST_SCALE else np.float32(np.nan)


def _tensor_scale(tensor_scale: float | None) -> np.float32:
    if tensor_scale is None:
        raise ArgumentError("tensor_scale", None, "a number, for a format with a scale for all rows")
    return np.float32(tensor_scale)


def _encode_e4m3(rows: Float32Array, spec: _Spec) -> Encoded:
    blocks = _blocks(rows, spec.block)
    wanted = np.maximum(_largest(blocks) / _E4M3_MAX, _SMALLEST_SCALE)
    stored = wanted if spec.scale == "fp32" else _to_ue8m0(wanted)
    used = wanted if spec.scale == "fp32" else _from_ue8m0(stored.astype(np.uint8))
    scaled = blocks * (_ONE / used)[..., None]
    codes = _to_e4m3(np.where(np.isfinite(blocks), scaled, np.float32(np.nan)))
    flat = codes.reshape(len(rows), -1)[:, : rows.shape[1]]
    return Encoded(_pad(flat), _pad(np.ascontiguousarray(stored).view(np.uint8).reshape(len(rows), -1)))


def _encode_nvfp4(rows: Float32Array, tensor_scale: float | None) -> Encoded:
    blocks = _blocks(rows, 16)
    inverse = _inverse(tensor_scale)
    good = np.isfinite(blocks).all(axis=-1) & np.isfinite(inverse)
    stored = _to_e4m3(_largest(blocks) * inverse / _E2M1_MAX)
    stored = np.where(good, stored, np.uint8(_NAN_CODE))
    block_scale = _from_e4m3(stored)
    used = good & (block_scale > 0)
    block_inverse = np.where(used, _ONE / np.where(used, block_scale, _ONE), np.float32(0.0)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scaled = blocks * inverse * block_inverse[..., None]
    scaled = np.where(used[..., None], np.clip(scaled, -_E2M1_MAX, _E2M1_MAX), np.float32(0.0))
    nibbles = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(15)
    flat = nibbles.reshape(len(rows), -1)[:, : rows.shape[1]]
    return Encoded(_pad(flat[:, ::2] | (flat[:, 1::2] << np.uint8(4))), _pad(stored))


def encode(rows: npt.NDArray[np.generic], name: str, *, tensor_scale: float | None = None) -> Encoded:
    """Rows of floats in a payload format.

    Parameters
    ----------
    rows : numpy.ndarray
        bf16, fp16 or float32 ``[tokens, hidden]``; ``hidden`` is a multiple of 8.
    name : str
        The format: a key of ``nvep.formats.FORMATS``.
    tensor_scale : float, optional
        The scale of all rows, for ``fp8_tensor`` and ``nvfp4``.

    Returns
    -------
    Encoded
        What the quantise kernel writes, bit by bit.

    Raises
    ------
    ArgumentError
        No such format, or a scale is missing.
    """
    spec = _spec(name)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = rows.astype(np.float32)
        if spec.element in _SIXTEEN_BITS:
            narrow = wide.astype(_SIXTEEN_BITS[spec.element])
            bits = np.where(np.isnan(wide), np.uint16(0x7FFF), narrow.view(np.uint16))
            return Encoded(_pad(bits.view(np.uint8).reshape(len(rows), -1)), None)
        if spec.element == "e2m1":
            return _encode_nvfp4(wide, tensor_scale)
        if spec.block:
            return _encode_e4m3(wide, spec)
        scaled = np.where(np.isfinite(wide), wide * _inverse(tensor_scale), np.float32(np.nan))
        return Encoded(_pad(_to_e4m3(scaled)), None)


def _element_scales(encoded: Encoded, spec: _Spec, hidden: int) -> Float32Array:
    """Scale of every element of a format with block scales, ``[tokens, hidden]``."""
    assert encoded.scales is not None
    blocks = -(-hidden // spec.block)
    if spec.scale == "fp32":
        scales = np.ascontiguousarray(encoded.scales[:, : 4 * blocks]).view(np.float32)
    else:
        codes = np.ascontiguousarray(encoded.scales[:, :blocks])
        scales = _from_ue8m0(codes) if spec.scale == "ue8m0" else _from_e4m3(codes)
    return np.repeat(scales, spec.block, axis=1)[:, :hidden]


def decode(encoded: Encoded, name: str, hidden: int, *, tensor_scale: float | None = None) -> Float32Array:
    """float32 ``[tokens, hidden]`` of what :func:`encode` gave; scales multiply first, every product is rounded."""
    spec = _spec(name)
    payload = encoded.payload
    if spec.element in _SIXTEEN_BITS:
        dtype = _SIXTEEN_BITS[spec.element]
        wide: Float32Array = np.ascontiguousarray(payload[:, : 2 * hidden]).view(dtype).astype(np.float32)
        return wide
    if spec.element == "e2m1":
        packed = payload[:, : hidden // 2]
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), hidden).astype(np.uint8)
        scales = _element_scales(encoded, spec, hidden) * _tensor_scale(tensor_scale)
        return np.asarray(nibbles.view(ml_dtypes.float4_e2m1fn), np.float32) * scales
    elements = _from_e4m3(np.ascontiguousarray(payload[:, :hidden]))
    if not spec.block:
        return elements * _tensor_scale(tensor_scale)
    return elements * _element_scales(encoded, spec, hidden)


def error_bound(rows: npt.NDArray[np.generic], name: str, *, tensor_scale: float | None = None) -> Float64Array:
    """How far a decoded element may be from the one given: float64 ``[tokens, hidden]``.

    Parameters
    ----------
    rows, name, tensor_scale
        As given to :func:`encode`; ``docs/formats.md`` derives the bounds.

    Returns
    -------
    numpy.ndarray
        Infinite where nothing is promised: elements that are not finite, and those that saturate or overflow.
    """
    spec = _spec(name)
    wide = rows.astype(np.float64)
    size = np.abs(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        limit: Float64Array | float
        if spec.element == "bf16":
            bound, limit = size * 2.0**-8 + 2.0**-134, (2 - 2.0**-8) * 2.0**127
        elif spec.element == "fp16":
            bound, limit = size * 2.0**-11 + 2.0**-25, 65519.0
        else:
            bound, limit = _quantised_bound(rows.astype(np.float32), size, spec, tensor_scale)
        return np.where(np.isfinite(wide) & (size < limit), bound, np.inf)


def _quantised_bound(
    rows: Float32Array, size: Float64Array, spec: _Spec, tensor_scale: float | None
) -> tuple[Float64Array, Float64Array]:
    """Bound, and the magnitude from which it does not hold."""
    unlimited = np.full(size.shape, np.inf)
    rounding = size * 2.0**-20 + 2.0**-148  # float32 products, and products that are subnormal
    if not spec.block:
        scale = np.float64(_tensor_scale(tensor_scale))
        return np.maximum(size / 16, scale / 1024) + rounding, np.full(size.shape, 448.0 * scale)
    blocks = _blocks(rows, spec.block)
    largest = np.repeat(_largest(blocks).astype(np.float64), spec.block, axis=1)[:, : size.shape[1]]
    if spec.element == "e2m1":
        scale = np.float64(_tensor_scale(tensor_scale))
        finite = np.repeat(np.isfinite(blocks).all(axis=-1), spec.block, axis=1)[:, : size.shape[1]]
        bound = largest * (17 / 96) * (1 + 2.0**-20) + scale * (3 / 512) + 2.0**-148
        return bound, np.where(finite & (largest <= 2688.0 * scale), np.inf, 0.0)
    scales = np.maximum(largest / 448, 2.0**-126) * (1 if spec.scale == "fp32" else 2)
    return np.maximum(size / 16, scales / 1024) + rounding, unlimited
