"""Payload formats: sizes, the reference's error bounds, and what becomes of values that are not ordinary."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvep.errors import ArgumentError
from nvep.formats import FORMATS, payload_format
from nvep.reference.formats import Encoded, decode, encode, error_bound

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = sorted(FORMATS)
BLOCKED = [name for name in NAMES if FORMATS[name].scale]
EIGHT_BITS = [name for name in NAMES if FORMATS[name].element_bits == 8]


def scale_of(name: str, rows: np.ndarray) -> float | None:
    """A tensor scale that fits the finite values of ``rows``."""
    if not FORMATS[name].tensor_scale:
        return None
    wide = rows.astype(np.float64)
    largest = np.abs(np.where(np.isfinite(wide), wide, 0)).max(initial=0.0)
    return float(np.clip(np.float32(largest * 1.001 / (2688 if name == "nvfp4" else 448)), 2.0**-126, 2.0**126))


def round_trip(rows: np.ndarray, name: str) -> np.ndarray:
    scale = scale_of(name, rows)
    return decode(encode(rows, name, tensor_scale=scale), name, rows.shape[1], tensor_scale=scale)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden", "expected"),
    [
        ("bf16", 7168, (14336,)),
        ("fp16", 24, (48,)),
        ("fp8_block", 7168, (7168, 224)),
        ("fp8_block", 2880, (2880, 96)),  # 23 scales, the last of a block of 64
        ("fp8_block_ue8m0", 2880, (2880, 32)),
        ("fp8_block", 40, (48, 16)),
        ("fp8_tensor", 7168, (7168,)),
        ("mxfp8", 2880, (2880, 96)),  # 90 scales
        ("nvfp4", 2880, (1440, 192)),  # 180 scales
        ("nvfp4", 8, (16, 16)),
    ],
)
def test_bytes_of_a_token(name: str, hidden: int, expected: tuple[int, ...]) -> None:
    assert payload_format(name).payload_bytes(hidden) == expected
    encoded = encode(np.ones((3, hidden), np.float32), name, tensor_scale=1.0)
    got = [encoded.payload] if encoded.scales is None else [encoded.payload, encoded.scales]
    assert [part.shape for part in got] == [(3, nbytes) for nbytes in expected]


@pytest.mark.parametrize("name", NAMES)
def test_an_exchange_carries_rows_and_scales(name: str) -> None:
    made = payload_format(name)
    config = made.exchange_config(2880, num_experts=128, top_k=4, max_tokens=16, extra_payload_bytes=(64,))
    assert config.payload_bytes == (*made.payload_bytes(2880), 64)
    assert config.partial_elements == 2880


def test_options_reach_the_configuration() -> None:
    config = payload_format("mxfp8").exchange_config(
        64, num_experts=8, top_k=2, max_tokens=4, partial_format="fp32", protocol="sentinel"
    )
    assert (config.partial_format, config.protocol, config.partial_row_bytes) == ("fp32", "sentinel", 256)


@pytest.mark.parametrize("hidden", [0, -8, 12, 7.0, True, None, 1 << 21])
def test_hidden_sizes_that_do_not_fit_are_refused(hidden: Any) -> None:
    with pytest.raises(ArgumentError, match=r"hidden: got .*multiple of 8"):
        payload_format("mxfp8").row_bytes(hidden)


@pytest.mark.parametrize("name", ["fp8", "", None, 8])
def test_unknown_formats_are_named(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"format: got .*fp8_block, fp8_block_ue8m0"):
        payload_format(name)


# --- error bounds -----------------------------------------------------------------------------------------------------


def _rows(dtype: np.dtype[Any]) -> st.SearchStrategy[np.ndarray]:
    """Bits of any finite value, rows of one, several and broken blocks; plain numbers as well, which blocks share."""
    bits = np.dtype(f"u{dtype.itemsize}")
    shapes = st.tuples(st.integers(1, 2), st.sampled_from([8, 16, 40, 136, 256]))
    raw = hnp.arrays(bits, shapes).map(lambda a: _finite(a.view(dtype)))
    plain = hnp.arrays(np.float64, shapes, elements=st.floats(-1, 1))
    near = st.tuples(plain, st.floats(-140, 120)).map(lambda p: p[0] * 2.0 ** p[1])
    return (raw | near).map(lambda a: np.clip(a, *_range(dtype)).astype(dtype))


def _finite(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.nan_to_num(values.astype(np.float64), nan=0, posinf=0, neginf=0)


def _range(dtype: np.dtype[Any]) -> tuple[float, float]:
    largest = float(ml_dtypes.finfo(dtype).max)
    return -largest, largest


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decoded_rows_are_within_the_stated_bound(name: str, dtype: np.dtype[Any], data: st.DataObject) -> None:
    rows = data.draw(_rows(dtype))
    scale = scale_of(name, rows)
    error = np.abs(round_trip(rows, name).astype(np.float64) - rows.astype(np.float64))
    bound = error_bound(rows, name, tensor_scale=scale)
    limit = 65519 if name == "fp16" else float(ml_dtypes.finfo(BF16).max)
    assert np.isfinite(bound[np.abs(rows.astype(np.float64)) < limit]).all()
    finite = np.isfinite(bound)
    assert (error[finite] <= bound[finite]).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bf16", "fp16")])
def test_bounds_are_not_slack(name: str) -> None:
    """Somewhere among random rows the error is most of the bound."""
    rows = np.random.default_rng(7).standard_normal((64, 512)).astype(np.float32)
    error = np.abs(round_trip(rows, name).astype(np.float64) - rows)
    bound = error_bound(rows, name, tensor_scale=scale_of(name, rows))
    assert (error / bound).max() > 0.8


@pytest.mark.parametrize(
    ("name", "most"), [("fp8_block", 0.027), ("fp8_block_ue8m0", 0.028), ("mxfp8", 0.028), ("nvfp4", 0.1)]
)
def test_typical_relative_error(name: str, most: float) -> None:
    """Root mean square error of normally distributed rows: what docs/formats.md states."""
    rows = np.random.default_rng(11).standard_normal((64, 2880)).astype(BF16)
    wide = rows.astype(np.float64)
    error = np.sqrt(np.mean((round_trip(rows, name) - wide) ** 2) / np.mean(wide**2))
    assert 0.7 * most < error < most


# --- values that are not ordinary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    rows = np.zeros((2, 136), np.float32)
    rows[1, 8:] = -0.0
    assert not round_trip(rows, name).any()
    assert not encode(rows, name, tensor_scale=1.0).payload[0].any()


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_becomes_nan_and_leaves_its_block_alone(name: str, bad: float) -> None:
    rows = np.random.default_rng(1).standard_normal((1, 136)).astype(np.float32)
    clean = rows.copy()
    clean[0, 5] = 0.0
    rows[0, 5] = bad
    decoded, expected = (
        decode(encode(r, name, tensor_scale=0.01), name, 136, tensor_scale=0.01) for r in (rows, clean)
    )
    assert np.isnan(decoded[0, 5])
    np.testing.assert_array_equal(np.delete(decoded, 5, 1), np.delete(expected, 5, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nvfp4_has_no_nan_so_the_block_becomes_nan(bad: float) -> None:
    rows = np.full((1, 40), 6.0, np.float32)
    rows[0, 20] = bad
    decoded = decode(encode(rows, "nvfp4", tensor_scale=1.0), "nvfp4", 40, tensor_scale=1.0)
    assert np.isnan(decoded[0, 16:32]).all()
    assert (decoded[0, :16] == 6).all()
    assert (decoded[0, 32:] == 6).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_infinities_and_nan_survive_in_16_bits(name: str) -> None:
    rows = np.array([[np.inf, -np.inf, np.nan, 1e38, -1e38, 1, 2, 3]], np.float32)
    decoded = round_trip(rows, name)[0]
    assert decoded[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(decoded[2])
    assert np.isinf(decoded[3:5]).all() == (name == "fp16")


@pytest.mark.parametrize("name", BLOCKED)
def test_tiny_and_huge_blocks_do_not_disturb_each_other(name: str) -> None:
    block = FORMATS[name].block
    assert block is not None
    rows = np.concatenate([np.full((1, block), 2.0**-130), np.full((1, block), 3e38), np.ones((1, block))], axis=1)
    decoded = round_trip(rows.astype(np.float32), name)
    if name != "nvfp4":  # its tensor scale spans 2**19 at most
        np.testing.assert_allclose(decoded[0, -block:], 1.0, rtol=1 / 16)
        np.testing.assert_allclose(decoded[0, :block], 2.0**-130, rtol=1 / 8)
    np.testing.assert_allclose(decoded[0, block : 2 * block], 3e38, rtol=1 / 16 + 1e-6)


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 2.0**-127, 2.0**127])
def test_a_tensor_scale_that_cannot_be_used_gives_nan_everywhere(name: str, scale: float) -> None:
    encoded = encode(np.ones((1, 32), np.float32), name, tensor_scale=scale)
    assert np.isnan(decode(encoded, name, 32, tensor_scale=1.0)).all()


@pytest.mark.parametrize(("name", "most"), [("fp8_tensor", 448.0), ("nvfp4", 2688.0)])
def test_beyond_the_tensor_scale_values_saturate(name: str, most: float) -> None:
    rows = np.array([[most * 10, -most * 10, 1e38, 0, 0, 0, 0, 0]], np.float32)
    decoded = decode(encode(rows, name, tensor_scale=1.0), name, 8, tensor_scale=1.0)
    assert decoded[0, :3].tolist() == [most, -most, most]
    assert np.isinf(error_bound(rows, name, tensor_scale=1.0)[0, :3]).all()


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_a_missing_tensor_scale_is_named(name: str) -> None:
    with pytest.raises(ArgumentError, match="tensor_scale: got None"):
        encode(np.ones((1, 32), np.float32), name)


def test_nvfp4_packs_the_first_element_into_the_low_bits() -> None:
    rows = np.array([[0.5, 6.0, -1.0, 3.0, 0, 0, 0, -6.0]], np.float32)
    encoded = encode(rows, "nvfp4", tensor_scale=1.0)
    assert encoded.payload[0, :4].tolist() == [0x71, 0x5A, 0x00, 0xF0]
    assert encoded.scales is not None
    assert encoded.scales[0].tolist() == [0x38] + [0] * 15


def test_power_of_two_scales_are_the_smallest_that_do_not_saturate() -> None:
    rows = np.zeros((3, 32), np.float32)
    rows[:, 0] = [448.0, 448.0 * 1.001, 224.0]
    encoded = encode(rows, "mxfp8")
    assert encoded.scales is not None
    assert encoded.scales[:, 0].tolist() == [127, 128, 126]


def test_scales_take_no_part_in_the_padding() -> None:
    encoded = encode(np.full((1, 136), 2.0, np.float32), "fp8_block")
    assert isinstance(encoded, Encoded)
    assert encoded.scales is not None
    assert encoded.scales.view(np.float32)[0].tolist() == [np.float32(2 / 448), np.float32(2 / 448), 0, 0]
    assert not encoded.payload[0, 136:].any()
