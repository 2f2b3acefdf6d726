"""What keeps steps cheap for the host and never waits for a kernel: events, streams, captures, frees."""

from __future__ import annotations

import time

import numpy as np
import pytest

from nvep.errors import DeviceError
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.frees import Frees
from tests.gpu.cuda_kit import Gate


def test_a_mark_tells_when_and_becomes_another(device: CudaDevice, gate: Gate) -> None:
    stream = device.create_stream()
    first = stream.mark()
    first.synchronize()
    assert first.done
    gate.hold(stream)
    second = stream.mark(first)
    assert second is first
    assert not second.done
    gate.open()
    second.synchronize()
    assert second.done
    with pytest.raises(DeviceError, match="cuEventElapsedTime"):
        second.elapsed_ms(stream.mark())


def test_a_wait_is_for_what_was_marked_then(device: CudaDevice, gate: Gate) -> None:
    held, free = device.create_stream(), device.create_stream()
    gate.hold(held)
    event = free.mark()
    third = device.create_stream()
    third.wait(event)
    held.mark(event)  # the same event, of a stream that is held
    third.synchronize()
    assert not gate.passed


def test_streams_that_nobody_uses_are_given_back(device: CudaDevice, gate: Gate) -> None:
    before = len(device._streams)
    busy = device.create_stream()
    gate.hold(busy)
    del busy  # what it was given to do is done all the same
    for _ in range(20):
        device.create_stream()
    assert len(device._streams) <= before + 2
    assert not gate.passed
    gate.open()
    device.synchronize()
    device.create_stream()
    assert len(device._streams) <= before + 1


def test_every_capture_has_a_number_of_its_own(device: CudaDevice) -> None:
    stream, fork = device.create_stream(), device.create_stream()
    numbers = set()
    for _ in range(3):
        with device.capture(stream) as graph:
            number = device.capture_of(stream)
            assert device.graph_of(number) is graph
            fork.wait(stream.mark())
            assert device.capture_of(fork) == number
            stream.wait(fork.mark())
            numbers.add(number)
        assert device.capture_of(stream) == 0
        assert device.graph_of(number) is None
        graph.close()
    assert len(numbers) == 3
    assert 0 not in numbers


def test_frees_wait_for_exchanges_and_not_for_kernels(gate: Gate) -> None:
    """A rank that leaves while a peer's kernel waits is not held up, nor is its device when it closes."""
    device = CudaDevice(0)
    device.frees = Frees()
    device.frees.enter()
    held = gate._device.create_stream()
    gate.hold(held)
    words = device.allocate_host(4096)
    words.view(np.uint8, (1,))[:] = 1
    start = time.monotonic()
    words.free()
    device.close()
    assert time.monotonic() - start < 1.0
    assert not gate.passed
    gate.open()
    held.synchronize()
    device.frees.leave()
