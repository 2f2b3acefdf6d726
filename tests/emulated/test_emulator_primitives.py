"""Memory primitives, conversions and arithmetic of the emulated device, against NumPy and ml_dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvep.runtime.emulated import EmulatedDevice
from nvep.runtime.jit import compile_kernel
from tests.emulated.emulator_kit import NAMES, run, source


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


def test_values_survive_a_chain_of_all_memory_primitives(device: EmulatedDevice) -> None:
    threads = 48
    words, doubles = np.zeros((threads, 16), np.uint32), np.zeros((threads, 16), np.uint64)
    run(device, "primitives", (1, threads), words=words, doubles=doubles)
    i = np.arange(threads, dtype=np.uint32)
    for k in range(5):
        np.testing.assert_array_equal(words[:, k], i + 1 + k)
    np.testing.assert_array_equal(words[:, 5].view(np.float32), (i + 5).astype(np.float32))
    np.testing.assert_array_equal(words[:, 6].astype(np.uint16), i + 5)
    np.testing.assert_array_equal(words[:, 7].view(np.int32), -(i.astype(np.int32) + 5))
    np.testing.assert_array_equal(words[:, 8:12], words[:, [7, 4, 5, 6]])
    start = i.astype(np.uint64) << np.uint64(40)
    for k in range(6):
        np.testing.assert_array_equal(doubles[:, k], start + np.uint64(1 + k))
    np.testing.assert_array_equal(doubles[:, 6:8], doubles[:, [5, 4]])
    assert (doubles[:, 8] == 1).all()


def _floats_to_convert() -> np.ndarray:
    """Every pattern of the upper 16 bits with lower halves around each rounding boundary, and random ones."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    upper = np.arange(65536, dtype=np.uint32) << 16
    random = np.random.default_rng(3).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    return np.concatenate([(upper[:, None] | lower).ravel(), random]).view(np.float32)


@pytest.fixture(scope="module")
def converted(device: EmulatedDevice) -> dict[str, Any]:
    values = _floats_to_convert()
    arrays: dict[str, Any] = {
        "from_bf16": np.zeros(65536, np.float32),
        "from_half": np.zeros(65536, np.float32),
        "from_e4m3": np.zeros(256, np.float32),
        "values": values,
        "to_bf16": np.zeros(len(values), np.uint16),
        "to_half": np.zeros(len(values), np.uint16),
        "to_e4m3": np.zeros(len(values), np.uint8),
    }
    run(device, "conversions", (4, 128), count=len(values), **arrays)
    return arrays


NARROW = [
    ("bf16", ml_dtypes.bfloat16, np.uint16, 0x7FFF),
    ("half", np.float16, np.uint16, 0x7FFF),
    ("e4m3", ml_dtypes.float8_e4m3fn, np.uint8, 0x7F),
]


@pytest.mark.parametrize(("name", "dtype", "bits", "nan"), NARROW, ids=lambda v: v if isinstance(v, str) else None)
def test_widening_is_exact(converted: dict[str, Any], name: str, dtype: Any, bits: Any, nan: int) -> None:
    got = converted[f"from_{name}"]
    expected = np.arange(len(got), dtype=bits).view(dtype).astype(np.float32)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
    if name == "bf16":  # a shift: NaNs keep their bits
        np.testing.assert_array_equal(got.view(np.uint32), np.arange(65536, dtype=np.uint32) << 16)
    else:
        assert (got.view(np.uint32)[is_nan] == 0x7FFFFFFF).all()


@pytest.mark.parametrize(("name", "dtype", "bits", "nan"), NARROW, ids=lambda v: v if isinstance(v, str) else None)
def test_narrowing_rounds_to_nearest_even(
    converted: dict[str, Any], name: str, dtype: Any, bits: Any, nan: int
) -> None:
    values, got = converted["values"], converted[f"to_{name}"]
    is_nan = np.isnan(values)
    assert is_nan.sum() > 1000
    assert (got[is_nan] == nan).all()
    finite = values[~is_nan]
    if name == "e4m3":
        finite = np.clip(finite, -448, 448)  # ml_dtypes overflows to NaN, cvt.satfinite saturates
    with np.errstate(over="ignore"):
        expected = finite.astype(dtype).view(bits)
    np.testing.assert_array_equal(got[~is_nan], expected)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Round a*b+c once, by exact rational arithmetic, from the two float32 neighbours of the float64 estimate."""
    out = np.zeros(len(a), np.float32)
    for i, (x, y, z) in enumerate(zip(a, b, c)):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = np.float32(float(exact))
        candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        out[i] = min(
            candidates, key=lambda v: (abs(Fraction(float(v)) - exact), int(np.float32(v).view(np.uint32)) & 1)
        )
    return out


def test_arithmetic_is_rounded_as_written(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(5)
    count = 600
    a, b = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    c = -(a * b) + rng.choice(np.array([0, 1e-9, 1.0], np.float32), count)
    c = c.astype(np.float32)
    floats, integers = np.zeros((count, 8), np.float32), np.zeros((count, 8), np.int32)
    run(device, "arithmetic", (5, 128), a=a, b=b, c=c, floats=floats, integers=integers, count=count)
    np.testing.assert_array_equal(floats[:, 0], a * b + c)
    np.testing.assert_array_equal(floats[:, 1], _fused(a, b, c))
    assert (floats[:, 0] != floats[:, 1]).sum() > 100
    np.testing.assert_array_equal(floats[:, 2], floats[:, 0])
    np.testing.assert_array_equal(floats[:, 3], np.minimum(a, b))
    np.testing.assert_array_equal(floats[:, 4], np.maximum(a, b))
    np.testing.assert_array_equal(floats[:, 5], a / b)
    np.testing.assert_allclose(floats[:, 6], 1 / np.abs(a), rtol=1e-6)
    assert not floats[:, 7].any()
    for i, bits in enumerate(int(v) for v in a.view(np.uint32)):
        low = (bits & -bits).bit_length()
        signed = bits - (1 << 32) if bits >> 31 else bits
        expected = [bits.bit_count(), low, 32 - bits.bit_length(), (bits * bits).bit_count(), low + 20, min(signed, 5)]
        assert list(integers[i, :6]) == expected
        assert [int(v) & 0xFFFFFFFF for v in integers[i, 6:]] == [max(bits, 5), 32]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "deep_stack"])
def test_the_same_source_compiles_for_gpus(name: str, arch: str, tmp_path: Path) -> None:
    cubin = compile_kernel(source(name), arch, tmp_path)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.warnings == ""
