"""Graphs of the CUDA device on a real GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nvep.errors import DeviceError
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_memory import CudaMemory
from nvep.runtime.device import LaunchShape
from tests.gpu.cuda_kit import launch, load, read

SHAPE = LaunchShape(1, 32)


def test_replays_read_what_the_arrays_hold_then(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream = load(device, "scale_add"), device.create_stream()
    copied = block.address + 4096
    assert not device.is_capturing(stream)
    with device.capture(stream) as graph:
        assert device.is_capturing(stream)
        launch(device, kernel, stream, shape=SHAPE, values=block.address, factor=3, addend=1, count=8)
        device.copy(copied, block.address, 32, stream)
        device.fill(block.address, 0, 32, stream)
    assert not device.is_capturing(stream)
    assert not read(device, copied, np.float32, 8, stream).any()  # recorded, not run
    for turn in range(1, 4):
        device.copy_in(block.address, np.full(8, turn, np.float32), stream)
        graph.launch(stream)
        assert (read(device, copied, np.float32, 8, stream) == 3 * turn + 1).all()
        assert not read(device, block.address, np.float32, 8, stream).any()
    graph.close()
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.launch(stream)


def test_a_graph_runs_on_another_stream(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream, other = load(device, "append"), device.create_stream(), device.create_stream()
    with device.capture(stream) as graph:
        for tag in (1, 2):
            launch(device, kernel, stream, shape=SHAPE, value=block.address, tag=tag)
    device.fill(block.address, 0, 8, other)
    graph.launch(other)
    graph.launch(other)
    assert read(device, block.address, np.uint64, 1, other)[0] == ((1 * 31 + 2) * 31 + 1) * 31 + 2
    graph.close()


def test_other_streams_join_a_capture_through_events(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream, other = load(device, "append"), device.create_stream(), device.create_stream()
    with device.capture(stream) as graph:
        launch(device, kernel, stream, shape=SHAPE, value=block.address, tag=1)
        other.wait(stream.record())
        assert device.is_capturing(other)
        launch(device, kernel, other, shape=SHAPE, value=block.address, tag=2)
        stream.wait(other.record())
        launch(device, kernel, stream, shape=SHAPE, value=block.address, tag=3)
    device.fill(block.address, 0, 8, stream)
    graph.launch(stream)
    assert read(device, block.address, np.uint64, 1, stream)[0] == (1 * 31 + 2) * 31 + 3
    graph.close()


def test_dependent_launches_are_captured(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream = load(device, "append"), device.create_stream()
    with device.capture(stream) as graph:
        for tag in range(1, 5):
            shape = LaunchShape(1, 32, dependent=tag > 1)
            launch(device, kernel, stream, shape=shape, value=block.address, tag=tag)
    device.fill(block.address, 0, 8, stream)
    graph.launch(stream)
    assert read(device, block.address, np.uint64, 1, stream)[0] == ((1 * 31 + 2) * 31 + 3) * 31 + 4
    graph.close()


def test_an_error_inside_leaves_the_stream_usable(device: CudaDevice, block: CudaMemory) -> None:
    stream, graphs = device.create_stream(), []

    def fail_inside() -> None:
        with device.capture(stream) as graph:
            graphs.append(graph)
            device.fill(block.address, 1, 8, stream)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail_inside()
    assert not device.is_capturing(stream)
    with pytest.raises(DeviceError, match="abandoned"):
        graphs[0].launch(stream)
    device.fill(block.address, 2, 8, stream)
    assert (read(device, block.address, np.uint8, 8, stream) == 2).all()


def test_host_copies_are_refused_and_the_capture_goes_on(device: CudaDevice, block: CudaMemory) -> None:
    stream, array = device.create_stream(), np.ones(8, np.uint8)
    with device.capture(stream) as graph:
        with pytest.raises(DeviceError, match="copy_in: a copy between host and device cannot be captured"):
            device.copy_in(block.address, array, stream)
        with pytest.raises(DeviceError, match="copy_out: a copy between host and device cannot be captured"):
            device.copy_out(array, block.address, stream)
        with pytest.raises(DeviceError, match="still being captured"):
            graph.launch(stream)
        device.fill(block.address, 5, 8, stream)
    graph.launch(stream)
    assert (read(device, block.address, np.uint8, 8, stream) == 5).all()
    graph.close()


def test_other_threads_go_on_while_one_captures(device: CudaDevice, block: CudaMemory) -> None:
    stream, sent, seen = device.create_stream(), np.arange(100, dtype=np.float32), []

    def work() -> None:
        own, memory = device.create_stream(), device.allocate(4096)
        device.copy_in(memory.address, sent, own)
        seen.append(read(device, memory.address, np.float32, 100, own))
        memory.free()

    thread = threading.Thread(target=work)
    with device.capture(stream) as graph:
        device.fill(block.address, 4, 8, stream)
        thread.start()
        thread.join()
        device.fill(block.address + 8, 5, 8, stream)
    assert np.array_equal(seen[0], sent)
    graph.launch(stream)
    assert read(device, block.address, np.uint8, 16, stream).tolist() == [4] * 8 + [5] * 8
    graph.close()


def test_a_stream_is_captured_once_at_a_time(device: CudaDevice) -> None:
    stream = device.create_stream()
    with (
        pytest.raises(DeviceError, match="cuStreamBeginCapture failed"),
        device.capture(stream),
        device.capture(stream),
    ):
        pass
    assert not device.is_capturing(stream)


def test_work_is_captured_by_torch(device: CudaDevice, block: CudaMemory) -> None:
    torch = pytest.importorskip("torch")
    kernel = load(device, "scale_add")
    values = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = device.as_stream(torch.cuda.current_stream())
        assert device.is_capturing(stream)
        launch(device, kernel, stream, shape=SHAPE, values=values.data_ptr(), factor=2, addend=1, count=8)
        device.copy(block.address, values.data_ptr(), 32, stream)
    for expected in (3, 7, 15):
        graph.replay()
        torch.cuda.synchronize()
        assert (read(device, block.address, np.float32, 8, device.default_stream) == expected).all()
