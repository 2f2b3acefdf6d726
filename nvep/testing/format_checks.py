"""Conformance suite of payload formats, for every device: kernels against the reference, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, ShapeError
from nvep.formats import FORMATS, Dequantiser, PayloadFormat, Quantiser
from nvep.reference.formats import Encoded, decode, encode
from nvep.runtime.device import Device

NAMES = sorted(FORMATS)
ELEMENTS = ("bf16", "fp16", "fp32")
# DeepSeek-V3; gpt-oss, whose last block of 128 is short; sizes that leave padding in rows and behind scales.
HIDDEN = (7168, 2880, 136, 40, 8)


@contextmanager
def on_device(device: Device, *arrays: np.ndarray) -> Iterator[list[DeviceArray]]:
    """Copies of host arrays in device memory."""
    memories = [device.allocate(max(array.nbytes, 16)) for array in arrays]
    owner = ArrayOwner(device)
    try:
        for memory, array in zip(memories, arrays, strict=True):
            if array.nbytes:
                device.copy_in(memory.address, array, device.default_stream)
        device.default_stream.synchronize()
        yield [DeviceArray(m.address, a.shape, a.dtype, owner=owner) for m, a in zip(memories, arrays, strict=True)]
    finally:
        device.synchronize()
        for memory in memories:
            memory.free()


def difficult_rows(hidden: int, elements: str, tokens: int = 24) -> np.ndarray:
    """Rows of many kinds: normal numbers over many binades, zeros, subnormals, infinities, NaN, arbitrary bits."""
    rng = np.random.default_rng(hidden)
    dtype = partial_dtype(elements)
    largest = {"bf16": 3.3895e38, "fp16": 65504.0, "fp32": 3.4028e38}[elements]
    rows = rng.standard_normal((tokens, hidden)) * 2.0 ** rng.integers(-20, 12, (tokens, 1))
    rows[1] = 0.0
    rows[2, : hidden // 2] = -0.0
    rows[3] *= 2.0 ** rng.integers(-150, 100, hidden)
    rows[4] = 2.0**-140 * rng.standard_normal(hidden)
    rows[5] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -5.0, -0.25], hidden)  # ties of e2m1
    rows[6] = largest * rng.uniform(0.5, 1, hidden)
    with np.errstate(over="ignore"):
        narrow: np.ndarray = rows.astype(dtype)
    special = np.array([np.nan, np.inf, -np.inf, 0.0], dtype)
    narrow[7, rng.integers(0, hidden, 4)] = special
    narrow[8, 0] = narrow[9, -1] = special[0]
    bits = rng.integers(0, 256, (4, hidden * dtype.itemsize), dtype=np.uint8)
    narrow[10:14] = bits.view(dtype)
    return narrow


def tensor_scale_for(made: PayloadFormat) -> np.ndarray | None:
    return np.array([0.0375], np.float32) if made.tensor_scale else None


class FormatChecks:
    """Subclass it where a ``device`` fixture exists."""

    @pytest.mark.parametrize("elements", ELEMENTS)
    @pytest.mark.parametrize("name", NAMES)
    def test_encoded_rows_are_the_references_bits(self, device: Device, name: str, elements: str) -> None:
        for hidden in HIDDEN:
            rows = difficult_rows(hidden, elements)
            self._check_encoding(device, FORMATS[name], rows, elements)

    @staticmethod
    def _check_encoding(device: Device, made: PayloadFormat, rows: np.ndarray, elements: str) -> None:
        hidden = rows.shape[1]
        scale = tensor_scale_for(made)
        number = None if scale is None else float(scale[0])
        expected = encode(rows, made.name, tensor_scale=number)
        inputs = [rows] if scale is None else [rows, scale]
        with (
            on_device(device, *inputs) as arrays,
            Quantiser(device, made, hidden=hidden, max_tokens=len(rows) + 3, elements=elements) as quantise,
        ):
            got = quantise(arrays[0], tensor_scale=arrays[1] if scale is not None else None)
            assert len(got) == (1 if expected.scales is None else 2)
            same(got[0].numpy(), expected.payload, f"{made.name} of {elements} {hidden}: payload")
            if expected.scales is not None:
                same(got[1].numpy(), expected.scales, f"{made.name} of {elements} {hidden}: scales")

    @pytest.mark.parametrize("elements", ELEMENTS)
    @pytest.mark.parametrize("name", NAMES)
    def test_decoded_rows_are_the_references_bits(self, device: Device, name: str, elements: str) -> None:
        made, scale = FORMATS[name], tensor_scale_for(FORMATS[name])
        number = None if scale is None else float(scale[0])
        for hidden in HIDDEN[1:4]:
            encoded = any_bits(made, hidden)
            with np.errstate(over="ignore", invalid="ignore"):
                wide = decode(encoded, name, hidden, tensor_scale=number)
                expected = wide.astype(partial_dtype(elements))
            payloads = [encoded.payload] if encoded.scales is None else [encoded.payload, encoded.scales]
            with (
                on_device(device, *payloads, *([] if scale is None else [scale])) as arrays,
                Dequantiser(device, made, hidden=hidden, max_rows=64, elements=elements) as dequantise,
            ):
                got = dequantise(arrays[: len(payloads)], tensor_scale=None if scale is None else arrays[-1]).numpy()
            nan = np.isnan(expected.astype(np.float32))
            assert np.isnan(got.astype(np.float32))[nan].all()
            bits = np.dtype(f"u{expected.dtype.itemsize}")
            same(got.view(bits)[~nan], expected.view(bits)[~nan], f"{name} to {elements} {hidden}")

    def test_only_the_rows_that_count_are_encoded(self, device: Device) -> None:
        rows = difficult_rows(40, "bf16", 20)
        with (
            on_device(device, rows, np.array([15], np.int32), np.array([99], np.uint32)) as (given, count, too_many),
            Quantiser(device, FORMATS["mxfp8"], hidden=40, max_tokens=20) as quantise,
        ):
            expected = encode(rows, "mxfp8")
            assert expected.scales is not None
            for tokens, argument in ((7, 7), (15, count), (20, too_many), (20, None), (0, 0)):
                for output in quantise._outputs:
                    device.fill(output.address, 0xEE, output.nbytes, device.default_stream)
                payload, scales = (part.numpy() for part in quantise(given, num_tokens=argument))
                same(payload[:tokens], expected.payload[:tokens], f"payload of {tokens}")
                same(scales[:tokens], expected.scales[:tokens], f"scales of {tokens}")
                assert (payload[tokens:] == 0xEE).all()
                assert (scales[tokens:] == 0xEE).all()

    def test_no_tokens_is_a_step_like_any_other(self, device: Device) -> None:
        with (
            on_device(device, np.zeros((0, 40), np.float32)) as (empty,),
            Quantiser(device, FORMATS["fp8_block"], hidden=40, max_tokens=4, elements="fp32") as quantise,
        ):
            assert [part.shape for part in quantise(empty)] == [(0, 48), (0, 16)]

    def test_a_tensor_scale_that_cannot_be_used_gives_nan(self, device: Device) -> None:
        rows = np.ones((2, 40), np.float32)
        for name in ("fp8_tensor", "nvfp4"):
            for bad in (0.0, -1.0, np.nan, np.inf):
                scale = np.array([bad], np.float32)
                expected = encode(rows, name, tensor_scale=bad)
                with (
                    on_device(device, rows, scale) as (given, factor),
                    Quantiser(device, FORMATS[name], hidden=40, max_tokens=2, elements="fp32") as quantise,
                ):
                    got = quantise(given, tensor_scale=factor)
                    same(got[0].numpy(), expected.payload, f"{name} with scale {bad}")

    def test_a_graph_replays_with_new_rows_and_counts(self, device: Device) -> None:
        first, second = difficult_rows(40, "bf16", 14), difficult_rows(40, "bf16", 14)[::-1].copy()
        stream = device.create_stream()
        with (
            on_device(device, first, np.array([14], np.int32)) as (rows, count),
            Quantiser(device, FORMATS["fp8_block"], hidden=40, max_tokens=14) as quantise,
        ):
            with device.capture(stream) as graph:
                payload, _ = quantise(rows, num_tokens=count, stream=stream)
            for given, tokens in ((first, 14), (second, 9)):
                device.copy_in(rows.address, given, stream)
                device.copy_in(count.address, np.array([tokens], np.int32), stream)
                graph.launch(stream)
                stream.synchronize()
                same(payload.numpy()[:tokens], encode(given, "fp8_block").payload[:tokens], f"{tokens} rows")
            graph.close()

    def test_bad_arguments_are_named(self, device: Device) -> None:
        with pytest.raises(ArgumentError, match=r"hidden: got 12; allowed: a multiple of 8"):
            Quantiser(device, FORMATS["bf16"], hidden=12, max_tokens=1)
        with pytest.raises(ArgumentError, match=r"elements: got 'fp64'; allowed: bf16, fp16, fp32"):
            Quantiser(device, FORMATS["bf16"], hidden=8, max_tokens=1, elements="fp64")
        with pytest.raises(ArgumentError, match=r"max_tokens: got 0"):
            Quantiser(device, FORMATS["bf16"], hidden=8, max_tokens=0)
        with pytest.raises(ArgumentError, match=r"max_rows: got True"):
            Dequantiser(device, FORMATS["bf16"], hidden=8, max_rows=True)
        with pytest.raises(ArgumentError, match=r"payload_format: got 'bf16'"):
            Quantiser(device, "bf16", hidden=8, max_tokens=1)  # type: ignore[arg-type]
        rows, one = np.zeros((2, 16), np.float32), np.ones(1, np.float32)
        with (
            on_device(device, rows, rows[:, :8].copy(), one) as (given, narrow, scale),
            Quantiser(device, FORMATS["fp8_tensor"], hidden=16, max_tokens=2, elements="fp32") as quantise,
            Dequantiser(device, FORMATS["mxfp8"], hidden=16, max_rows=2) as dequantise,
        ):
            calls: list[tuple[Any, type[Exception], str]] = [
                (lambda: quantise(given), ArgumentError, r"tensor_scale: got None"),
                (lambda: quantise(narrow, tensor_scale=scale), ShapeError, r"rows: got \(2, 8\)"),
                (lambda: quantise(given.view(np.int32), tensor_scale=scale), DTypeError, r"rows: got 'int32'"),
                (lambda: quantise(given, tensor_scale=scale, num_tokens=3), ArgumentError, r"num_tokens: got 3"),
                (lambda: dequantise([given]), ArgumentError, r"payloads: got '1 arrays'; allowed: 2"),
                (lambda: dequantise([given, given]), ShapeError, r"payload: got .*16 bytes"),
            ]
            for call, error, text in calls:
                with pytest.raises(error, match=text):
                    call()

    def test_outputs_expire_with_their_owner(self, device: Device) -> None:
        with on_device(device, np.ones((1, 16), np.float32)) as (rows,):
            quantise = Quantiser(device, FORMATS["bf16"], hidden=16, max_tokens=1, elements="fp32")
            (payload,) = quantise(rows)
            quantise.close()
            quantise.close()
            with pytest.raises(ExchangeClosed):
                payload.numpy()


def any_bits(made: PayloadFormat, hidden: int, rows: int = 40) -> Encoded:
    """Arbitrary payloads and scales: decoding must be right for what no quantiser gives, too."""
    rng = np.random.default_rng(hidden)
    sizes = made.payload_bytes(hidden)
    parts = [rng.integers(0, 256, (rows, nbytes), dtype=np.uint8) for nbytes in sizes]
    return Encoded(parts[0], parts[1] if len(parts) > 1 else None)


def same(got: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Raise AssertionError naming the first byte or element that differs."""
    assert got.shape == expected.shape, f"{where}: shape {got.shape}, expected {expected.shape}"
    different = np.argwhere(got != expected)
    if len(different):
        at = tuple(int(i) for i in different[0])
        raise AssertionError(f"{where}: {len(different)} differ, first at {at}: {got[at]!r}, expected {expected[at]!r}")
