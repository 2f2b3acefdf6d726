"""Streams and events of the CUDA device on a real GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nvep.errors import ArgumentError
from nvep.runtime import open_device
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_memory import CudaMemory
from nvep.runtime.device import LaunchShape
from tests.gpu.cuda_kit import Gate, launch, load, read

REPOSITORY = Path(__file__).resolve().parents[2]
MEBI = 1 << 20


# Streams and events


def test_a_stream_waits_for_an_event_of_another(device: CudaDevice, block: CudaMemory, gate: Gate) -> None:
    kernel, other = load(device, "scale_add"), device.create_stream()
    device.copy_in(block.address, np.ones(8, np.float32), device.default_stream)
    device.default_stream.synchronize()
    gate.hold(device.default_stream)
    shape = LaunchShape(1, 32)
    launch(device, kernel, device.default_stream, shape=shape, values=block.address, factor=1, addend=4, count=8)
    other.wait(device.default_stream.record())
    launch(device, kernel, other, shape=shape, values=block.address, factor=10, addend=0, count=8)
    threading.Timer(0.2, gate.open).start()
    assert (read(device, block.address, np.float32, 8, other) == 50).all()


def test_streams_do_not_wait_for_each_other_or_for_the_default_one(device: CudaDevice, gate: Gate) -> None:
    gate.hold(device.default_stream)
    other = device.create_stream()
    memory = device.allocate(1024)
    device.fill(memory.address, 9, 1024, other)
    other.synchronize()
    assert not gate.passed
    memory.free()


def test_order_makes_another_librarys_stream_wait(device: CudaDevice, block: CudaMemory, gate: Gate) -> None:
    consumer = device.create_stream()
    gate.hold(device.default_stream)
    device.fill(block.address, 7, 64, device.default_stream)
    device.order(consumer.handle, device.default_stream)
    threading.Timer(0.2, gate.open).start()
    assert (read(device, block.address, np.uint8, 64, consumer) == 7).all()


def test_events_measure_time(device: CudaDevice, gate: Gate) -> None:
    stream = device.create_stream()
    before = stream.record()
    gate.hold(stream)
    after = stream.record()
    time.sleep(0.1)
    gate.open()
    after.synchronize()
    assert 90 < after.elapsed_ms(before) < 10_000


class Foreign:
    """A stream of a library that nvep does not know."""

    def __init__(self, pair: object) -> None:
        self._pair = pair

    def __cuda_stream__(self) -> object:
        return self._pair


def test_every_kind_of_stream_is_accepted(device: CudaDevice, block: CudaMemory) -> None:
    own = device.create_stream()
    assert device.as_stream(None) is device.default_stream
    assert device.as_stream(own) is own
    for accepted in (own.handle, own.owner, Foreign((0, own.handle))):
        assert device.as_stream(accepted).handle == own.handle
    for value, handle in enumerate((own.handle, 0, 1, 2), start=1):
        stream = device.as_stream(handle)
        device.fill(block.address, value, 16, stream)
        stream.record().synchronize()
        assert (read(device, block.address, np.uint8, 16, stream) == value).all()


@pytest.mark.parametrize("stream", ["s", 1.5, True, -1, object(), Foreign((1, 5)), Foreign(5), Foreign((0,))])
def test_what_is_no_stream_is_refused(device: CudaDevice, stream: object) -> None:
    with pytest.raises(ArgumentError, match="stream"):
        device.as_stream(stream)


def test_streams_of_the_emulated_device_are_refused(device: CudaDevice) -> None:
    emulated = open_device("emulated")
    with pytest.raises(ArgumentError, match="not of another kind of device"):
        device.as_stream(emulated.create_stream())
    emulated.close()


def test_torch_streams_are_accepted(device: CudaDevice, block: CudaMemory) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    assert device.as_stream(stream).handle == stream.cuda_stream
    device.fill(block.address, 3, 16, device.as_stream(stream))
    stream.synchronize()
    assert (read(device, block.address, np.uint8, 16, device.default_stream) == 3).all()
