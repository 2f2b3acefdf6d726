"""A reader accepts, refuses and orders like `as_input`, however often it has seen such an array."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, ShapeError
from nvep.inputs import InputReader, InputSpec, as_input
from nvep.runtime.emulated import EmulatedDevice

_FLOAT, _INT = (np.dtype(np.float32),), (np.dtype(np.int32),)
SPEC = InputSpec("x", _FLOAT, (("tokens", 8), 4), alignment=16)
ROWS = InputSpec.rows("rows", 32, 8)


class Exporter:
    """NumPy's memory through DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _aligned(shape: tuple[int, ...], dtype: Any = np.float32, *, offset: int = 0) -> np.ndarray:
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    array: np.ndarray = raw[begin : begin + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype)
    return array.reshape(shape)


def _own(device: EmulatedDevice, array: np.ndarray, **more: Any) -> DeviceArray:
    return DeviceArray(array.ctypes.data, array.shape, array.dtype, owner=ArrayOwner(device, keepalive=array), **more)


@pytest.mark.parametrize("form", ["numpy", "dlpack", "own", "own of another device"])
@pytest.mark.parametrize(
    ("spec", "array"),
    [
        (SPEC, _aligned((3, 4))),
        (SPEC, _aligned((8, 4))),
        (SPEC, np.zeros((0, 4), np.float32)),
        (ROWS, _aligned((5, 2, 4))),
        (ROWS, _aligned((5, 16), ml_dtypes.bfloat16)),
    ],
)
def test_the_same_view_each_time(form: str, spec: InputSpec, array: np.ndarray) -> None:
    device = EmulatedDevice()
    if form == "dlpack" and array.dtype == ml_dtypes.bfloat16:
        array = array.view(np.uint16)  # NumPy exports no bf16
    owner = EmulatedDevice() if form == "own of another device" else device
    obj: Any = array if form == "numpy" else Exporter(array) if form == "dlpack" else _own(owner, array)
    read = InputReader(spec, device)
    want = as_input(obj, spec, device=device, stream=device.default_stream)._replace(keepalive=None)
    for _ in range(3):
        assert read(obj, device.default_stream)._replace(keepalive=None) == want
    device.close()


def test_what_changed_is_noticed() -> None:
    device = EmulatedDevice()
    read, stream = InputReader(SPEC, device), device.default_stream
    good = _aligned((3, 4))
    for obj in (good, _own(device, good), Exporter(good)):
        for _ in range(2):
            assert read(obj, stream).address == good.ctypes.data
    moved = _aligned((3, 4))
    assert read(_own(device, moved), stream).address == moved.ctypes.data
    wrong: list[tuple[np.ndarray, type[Exception]]] = [
        (_aligned((9, 4)), ShapeError),
        (_aligned((3, 5)), ShapeError),
        (_aligned((3, 4), np.int32), DTypeError),
        (_aligned((3, 4), offset=4), ShapeError),
        (_aligned((3, 8))[:, ::2], ShapeError),
    ]
    for array, error in wrong:
        for obj in (array, _own(device, array, strides=array.strides)):
            for _ in range(2):
                with pytest.raises(error, match="x"):
                    read(obj, stream)
    null = DeviceArray(0, (3, 4), np.float32, owner=ArrayOwner(device))
    with pytest.raises(ArgumentError, match="null pointer"):
        read(null, stream)
    device.close()


def test_an_array_whose_owner_expired() -> None:
    device = EmulatedDevice()
    array = _own(device, _aligned((3, 4)))
    read = InputReader(SPEC, device)
    read(array, device.default_stream)
    array.owner.expire()
    with pytest.raises(ExchangeClosed, match=r"^x: "):
        read(array, device.default_stream)
    device.close()


def test_what_one_reader_accepted_another_checks() -> None:
    device = EmulatedDevice()
    array = _own(device, _aligned((3, 4)))
    read, stream = InputReader(SPEC, device), device.default_stream
    rows, ids = InputReader(InputSpec.rows("rows", 16, 8), device), InputReader(InputSpec("ids", _INT, (3, 4)), device)
    elsewhere = EmulatedDevice()
    there = InputReader(SPEC, elsewhere)
    for _ in range(3):
        assert read(array, stream).dtype == np.float32
        assert rows(array, stream).shape == (3, 16)
        with pytest.raises(DTypeError, match="ids"):
            ids(array, stream)
        assert there(array, elsewhere.default_stream).address == array.address
    elsewhere.close()
    device.close()


def test_an_output_that_became_read_only() -> None:
    device = EmulatedDevice()
    read = InputReader(InputSpec("out", _FLOAT, ("tokens", 4), writable=True), device)
    array = _aligned((3, 4))
    for obj in (array, _own(device, array)):
        read(obj, device.default_stream)
    frozen = array.view()
    frozen.flags.writeable = False
    for obj in (frozen, _own(device, array, readonly=True)):
        with pytest.raises(ArgumentError, match="read-only"):
            read(obj, device.default_stream)
    device.close()


def test_nothing_is_kept_alive() -> None:
    device = EmulatedDevice()
    read = InputReader(SPEC, device)
    array = _aligned((3, 4))
    seen = weakref.ref(array)
    assert read(array, device.default_stream).keepalive is array
    del array
    gc.collect()
    assert seen() is None
    device.close()


def test_later_work_is_ordered_behind_the_producer() -> None:
    device = EmulatedDevice()
    read, stream, producer = InputReader(SPEC, device), device.default_stream, device.create_stream()
    array = _own(device, _aligned((3, 4)))
    read(array, stream)
    array.owner.stream = producer
    order: list[str] = []
    device_work = threading.Event()

    def produce() -> None:
        device_work.wait()
        order.append("producer")

    producer.enqueue(produce)
    read(array, stream)
    stream.enqueue(lambda: order.append("consumer"))
    device_work.set()
    stream.synchronize()
    assert order == ["producer", "consumer"]
    device.close()
