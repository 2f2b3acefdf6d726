"""What keeps steps cheap for the host and never waits for a kernel: events, streams, captures, frees."""

from __future__ import annotations

import time

import numpy as np
import pytest

from nvep.errors import ArgumentError, DeviceError
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_memory import CudaMemory
from nvep.runtime.device import LaunchShape
from nvep.runtime.emulated_stream import EmulatedStream
from nvep.runtime.frees import Frees
from tests.gpu.cuda_kit import Gate, load, read


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


def test_a_prepared_launch_takes_what_its_arguments_hold_then(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream, other = load(device, "append"), device.create_stream(), device.create_stream()
    arguments = kernel.source.arguments.new(value=block.address)
    launches = [device.prepare(kernel, LaunchShape(1, 32, dependent=dep), arguments) for dep in (False, True)]
    expected = 0
    for tag in range(1, 9):
        arguments.tag = tag
        queue = stream if tag % 4 else other
        other.wait(stream.mark())
        launches[tag % 2](queue)
        stream.wait(other.mark())
        expected = expected * 31 + tag
    assert read(device, block.address, np.uint64, 1, stream)[0] == expected
    with device.capture(stream) as graph:
        launches[0](stream)
    device.fill(block.address, 0, 8, stream)
    graph.launch(stream)
    assert read(device, block.address, np.uint64, 1, stream)[0] == 8
    graph.close()


def test_a_prepared_launch_is_refused_like_any_other(device: CudaDevice) -> None:
    kernel = load(device, "append")
    with pytest.raises(ArgumentError, match="a AppendArguments"):
        device.prepare(kernel, LaunchShape(1, 32), ArgumentStruct("OtherArguments", [Field("x", "u32")]).new())
    launch = device.prepare(kernel, LaunchShape(3, 2048), kernel.source.arguments.new())
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"cuLaunchKernelEx of append, 3 blocks of 2048 threads failed: CUDA_ERR"):
            launch(device.default_stream)
    with pytest.raises(ArgumentError, match="stream"):
        launch(EmulatedStream())


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
