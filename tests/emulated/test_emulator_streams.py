"""Streams, events, graphs, memory and errors of the emulated device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from nvep.errors import ArgumentError, DeviceError, ShapeError
from nvep.runtime.device import LaunchShape, Stream
from nvep.runtime.emulated import EmulatedDevice
from nvep.runtime.emulated_stream import EmulatedStream
from tests.emulated.emulator_kit import enqueue, source


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


class Log:
    """Values appended by launches, in the order in which they ran."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.log, self.length, self.input = np.zeros(64, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)

    def append(self, value: int, stream: Stream) -> None:
        enqueue(self.device, "append", (2, 32), stream, log=self.log, length=self.length, input=self.input, value=value)

    @property
    def values(self) -> list[int]:
        return [int(v) for v in self.log[: self.length[0]]]


def _words(device: EmulatedDevice, kernel: str, stream: Stream, **values: object) -> None:
    enqueue(device, kernel, (1, 64), stream, **{"value": 1, "deadline_ns": 20 * 10**9, **values})


def test_a_kernel_waits_for_a_word_that_another_stream_stores(device: EmulatedDevice) -> None:
    first, second = device.create_stream(), device.create_stream()
    data = np.arange(10_000, dtype=np.uint32)
    box, out, flag = np.zeros_like(data), np.zeros_like(data), np.zeros(1, np.uint64)
    _words(device, "wait_word", first, flag=flag, to=out, words=len(data), **{"from": box})
    time.sleep(0.05)  # the waiter spins and naps meanwhile
    assert not out.any()
    _words(device, "post_word", second, flag=flag, to=box, words=len(data), **{"from": data})
    first.synchronize()
    np.testing.assert_array_equal(out, data)


def test_round_trips_between_spinning_streams_are_quick(device: EmulatedDevice) -> None:
    """40 hand-overs between two kernels that wait for each other's words, on any number of cores."""
    streams = [device.create_stream(), device.create_stream()]
    flags, data = np.zeros((2, 1), np.uint64), np.arange(8, dtype=np.uint32)
    scratch = np.zeros((4, 8), np.uint32)
    start = time.monotonic()
    for i in range(20):
        for me in (0, 1):
            _words(
                device, "post_word", streams[me], flag=flags[me], to=scratch[me], words=8, value=i + 1, **{"from": data}
            )
            to, box = scratch[2 + me], scratch[1 - me]
            _words(device, "wait_word", streams[me], flag=flags[1 - me], to=to, words=8, value=i + 1, **{"from": box})
    for stream in streams:
        stream.synchronize()
    assert time.monotonic() - start < 5
    np.testing.assert_array_equal(scratch, np.stack([data] * 4))


def test_work_of_a_stream_keeps_its_order(device: EmulatedDevice) -> None:
    log, stream = Log(device), device.default_stream
    for i in range(20):
        log.append(i, stream)
    device.copy_in(log.input.ctypes.data, np.array([100], np.uint32), stream)
    log.append(20, stream)
    device.fill(log.input.ctypes.data, 0, 4, stream)
    log.append(21, stream)
    stream.synchronize()
    assert log.values == [*range(20), 120, 21]


def test_events_order_streams_and_measure(device: EmulatedDevice) -> None:
    log, flag = Log(device), np.zeros(1, np.uint64)
    slow, fast = device.create_stream(), device.create_stream()
    nothing = np.zeros(1, np.uint32)
    before = slow.record()
    _words(device, "wait_word", slow, flag=flag, to=nothing, words=0, **{"from": nothing})
    log.append(1, slow)
    event = slow.record()
    fast.wait(event)
    log.append(2, fast)
    time.sleep(0.05)
    assert log.values == []
    flag[0] = 1
    fast.synchronize()
    assert log.values == [1, 2]
    event.synchronize()
    assert 50 <= event.elapsed_ms(before) < 5000
    assert before.elapsed_ms(event) == -event.elapsed_ms(before)


def test_host_arrays_are_copied_when_the_call_returns(device: EmulatedDevice) -> None:
    flag, nothing, memory = np.zeros(1, np.uint64), np.zeros(1, np.uint32), device.allocate(4000)
    stream = device.create_stream()
    _words(device, "wait_word", stream, flag=flag, to=nothing, words=0, **{"from": nothing})
    array = np.arange(1000, dtype=np.uint32)
    device.copy_in(memory.address, array, stream)
    array[:] = 0
    flag[0] = 1
    out = np.zeros(1000, np.uint32)
    device.copy_out(out, memory.address, stream)
    np.testing.assert_array_equal(out, np.arange(1000))
    memory.free()


def test_graphs_replay_with_the_inputs_of_the_moment(device: EmulatedDevice) -> None:
    log, stream, other = Log(device), device.create_stream(), device.create_stream()
    with device.capture(stream) as graph:
        assert device.is_capturing(stream)
        log.append(1, stream)
        fork = stream.record()
        other.wait(fork)
        assert device.is_capturing(other)
        log.append(2, other)
        stream.wait(other.record())
        log.append(3, stream)
        with pytest.raises(DeviceError, match="while it is captured"):
            stream.synchronize()
        with pytest.raises(DeviceError, match="still being captured"):
            graph.launch(device.default_stream)
    assert not device.is_capturing(stream)
    assert not device.is_capturing(other)
    device.default_stream.synchronize()
    assert log.values == []  # capturing ran nothing
    for base in (10, 20):
        device.copy_in(log.input.ctypes.data, np.array([base], np.uint32), stream)
        graph.launch(stream)
    stream.synchronize()
    assert log.values == [11, 12, 13, 21, 22, 23]
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.launch(stream)


def test_what_a_capture_forbids(device: EmulatedDevice) -> None:
    stream, other = device.create_stream(), device.create_stream()
    outside = other.record()
    array = np.zeros(4, np.uint8)
    with device.capture(stream) as graph:
        with pytest.raises(DeviceError, match="outside the capture"):
            stream.wait(outside)
        with pytest.raises(DeviceError, match="cannot be captured"):
            device.copy_out(array, array.ctypes.data, stream)
        with pytest.raises(DeviceError, match="already"), device.capture(stream):
            pass
        inside = stream.record()
        with pytest.raises(DeviceError, match="recorded during a capture"):
            inside.synchronize()
    with pytest.raises(DeviceError, match="finished capture"):
        other.wait(inside)
    graph.close()
    with pytest.raises(RuntimeError, match="on purpose"), device.capture(stream) as failed:
        raise RuntimeError("on purpose")
    assert not device.is_capturing(stream)
    with pytest.raises(DeviceError, match="closed"):
        failed.launch(stream)


def test_an_error_is_raised_once_and_the_rest_is_dropped(device: EmulatedDevice) -> None:
    log, stream, out = Log(device), device.create_stream(), np.zeros(64, np.uint32)
    log.append(1, stream)
    enqueue(device, "faults", (1, 64), stream, out=out, mode=1)
    log.append(2, stream)
    stream.record().synchronize()  # reached all the same
    with pytest.raises(DeviceError, match="kernel faults"):
        stream.synchronize()
    log.append(3, stream)
    stream.synchronize()
    assert log.values == [1, 3]


def test_streams_are_accepted_as_handles_and_by_protocol(device: EmulatedDevice) -> None:
    stream = device.create_stream()

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, stream.handle)

    assert device.as_stream(None) is device.default_stream
    assert device.as_stream(stream) is stream
    assert device.as_stream(stream.handle) is stream
    assert device.as_stream(Foreign()) is stream
    assert device.as_stream(0) is device.default_stream
    for wrong in (12345, True, "stream", 1.5):
        with pytest.raises(ArgumentError, match="stream"):
            device.as_stream(wrong)


def test_order_makes_a_known_stream_wait_and_else_the_host(device: EmulatedDevice) -> None:
    log, producer, consumer = Log(device), device.create_stream(), device.create_stream()
    for i in range(5):
        log.append(i, producer)
    device.order(consumer.handle, producer)
    log.append(9, consumer)
    consumer.synchronize()
    assert log.values == [0, 1, 2, 3, 4, 9]
    log.append(10, producer)
    device.order(77, producer)
    assert log.values[-1] == 10


def test_memory_is_zeroed_aligned_and_checked(device: EmulatedDevice) -> None:
    memory = device.allocate_host(1000)
    assert memory.address % 256 == 0
    view = memory.view(np.int32, (2, 125))
    assert view.shape == (2, 125)
    assert not view.any()
    view[1, 124] = 5
    out = np.zeros(1, np.int32)
    device.copy_out(out, memory.address + 996, device.default_stream)
    assert out[0] == 5
    device.copy(memory.address, memory.address + 996, 4, device.default_stream)
    device.default_stream.synchronize()
    assert view[0, 0] == 5
    with pytest.raises(ShapeError, match="at most 1000 bytes"):
        memory.view(np.int32, (251,))
    with pytest.raises(ShapeError, match="C-contiguous"):
        device.copy_in(memory.address, np.zeros((4, 4))[:, 1], device.default_stream)
    memory.free()
    memory.free()
    assert view[1, 124] == 5  # a view keeps its pages
    with pytest.raises(DeviceError, match="freed"):
        memory.view(np.int32, (1,))
    assert device.allocate(0).address


def test_launches_are_checked(device: EmulatedDevice) -> None:
    kernel = device.load(source("append"))
    good = kernel.source.arguments.new()
    for shape, name in (
        (LaunchShape(1, 1025), "threads"),
        (LaunchShape(1, 0), "threads"),
        (LaunchShape(0, 32), "blocks"),
    ):
        with pytest.raises(ArgumentError, match=name):
            device.launch(kernel, shape, good, device.default_stream)
    with pytest.raises(ArgumentError, match="AppendArguments"):
        device.launch(kernel, LaunchShape(1, 32), source("faults").arguments.new(), device.default_stream)


def test_closing_leaves_no_thread_and_dropping_a_stream_ends_its_worker() -> None:
    before = set(threading.enumerate())
    device = EmulatedDevice()
    log = Log(device)
    streams = [device.create_stream() for _ in range(3)]
    for i, stream in enumerate(streams):
        log.append(i, stream)
    dropped = weakref.ref(streams[0])
    streams[0].synchronize()
    del streams[0], stream
    gc.collect()
    assert dropped() is None
    deadline = time.monotonic() + 5
    while len(set(threading.enumerate()) - before) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(threading.enumerate()) - before) == 2
    device.close()
    device.close()
    assert set(threading.enumerate()) == before
    assert sorted(log.values) == [0, 1, 2]
    with pytest.raises(DeviceError, match="closed"):
        log.append(3, streams[0])
    with pytest.raises(DeviceError, match="closed"):
        device.create_stream()


def test_an_idle_stream_has_no_thread() -> None:
    before = threading.active_count()
    stream = EmulatedStream()
    stream.synchronize()
    assert threading.active_count() == before
    stream.close()
