"""The CUDA device on a real GPU: memory, copies, order, launches, errors."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver

from nvep.errors import ArgumentError, DeviceError, ShapeError
from nvep.runtime import open_device
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_calls import check
from nvep.runtime.cuda_memory import CudaMemory
from nvep.runtime.device import LaunchShape
from tests.gpu.cuda_kit import DEADLINE_NS, Gate, kernel_source, launch, load, read

REPOSITORY = Path(__file__).resolve().parents[2]
MEBI = 1 << 20


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


# What it is


def test_it_describes_itself(device: CudaDevice) -> None:
    assert (device.kind, device.emulated, device.ordinal) == ("cuda", False, 0)
    assert device.arch.startswith("sm_")
    assert device.arch in device.name
    assert device.default_threads == 512
    assert 1 <= device.default_blocks <= device.multiprocessors


def test_the_factory_opens_it() -> None:
    opened = open_device("cuda", 0)
    assert isinstance(opened, CudaDevice)
    opened.close()
    opened.close()


def test_a_gpu_that_does_not_exist_is_named() -> None:
    with pytest.raises(ArgumentError, match="ordinal: got 4096; allowed: one of the"):
        CudaDevice(4096)


def test_two_devices_on_one_gpu_are_independent(device: CudaDevice) -> None:
    other = CudaDevice(0)
    memory = other.allocate(1024)
    mine = device.allocate(1024)
    other.fill(memory.address, 5, 1024, other.default_stream)
    assert (read(device, memory.address, np.uint8, 1024, other.default_stream) == 5).all()
    memory.free()
    other.close()
    device.fill(mine.address, 6, 1024, device.default_stream)
    assert (read(device, mine.address, np.uint8, 1024, device.default_stream) == 6).all()
    mine.free()


# Memory and copies


@pytest.mark.parametrize("nbytes", [0, 1, 255, 4096, 3 * MEBI + 1])
def test_memory_is_zero_and_aligned(device: CudaDevice, nbytes: int) -> None:
    dirty = device.allocate(max(nbytes, 1))
    device.fill(dirty.address, 0xFF, max(nbytes, 1), device.default_stream)
    device.default_stream.synchronize()
    dirty.free()
    memory = device.allocate(nbytes)
    assert memory.address != 0
    assert memory.address % 256 == 0
    assert memory.nbytes == nbytes
    assert not read(device, memory.address, np.uint8, nbytes, device.default_stream).any()
    memory.free()
    memory.free()


def test_freed_memory_goes_back(device: CudaDevice) -> None:
    def free_bytes() -> int:
        device.default_stream.synchronize()
        return int(check("cuMemGetInfo", driver.cuMemGetInfo())[0])

    device.allocate(256 * MEBI).free()
    before = free_bytes()
    for _ in range(50):
        device.allocate(256 * MEBI).free()
    assert free_bytes() > before - 512 * MEBI


def test_too_much_memory_is_a_typed_error_and_not_the_end(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match=r"of 1099511627776 bytes failed: .*CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1 << 40)
    device.allocate(1024).free()


# 16 MiB is the staging ring: arrays below, at, and far above it.
@pytest.mark.parametrize("nbytes", [1, 3, 4095, MEBI, 16 * MEBI, 16 * MEBI + 5, 50 * MEBI + 3])
def test_arrays_survive_the_round_trip(device: CudaDevice, block: CudaMemory, nbytes: int) -> None:
    sent = random_bytes(nbytes)
    device.copy_in(block.address, sent, device.default_stream)
    assert np.array_equal(read(device, block.address, np.uint8, nbytes, device.default_stream), sent)


def test_many_small_copies_wrap_around_the_ring(device: CudaDevice, block: CudaMemory) -> None:
    sent = random_bytes(48 * MEBI)
    step = 700_001
    for begin in range(0, sent.nbytes, step):
        device.copy_in(block.address + begin, sent[begin : begin + step], device.default_stream)
    assert np.array_equal(read(device, block.address, np.uint8, sent.nbytes, device.default_stream), sent)


def test_shaped_arrays_of_other_types_are_copied(device: CudaDevice, block: CudaMemory) -> None:
    sent = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    device.copy_in(block.address, sent, device.default_stream)
    back = np.empty_like(sent)
    device.copy_out(back, block.address, device.default_stream)
    assert np.array_equal(back, sent)


def test_strided_arrays_are_refused(device: CudaDevice, block: CudaMemory) -> None:
    with pytest.raises(ShapeError, match="C-contiguous"):
        device.copy_in(block.address, np.zeros((4, 4))[:, :2], device.default_stream)
    with pytest.raises(ShapeError, match="C-contiguous"):
        device.copy_out(np.zeros((4, 4)).T[1:], block.address, device.default_stream)


def test_an_array_may_change_while_its_copy_still_waits(device: CudaDevice, block: CudaMemory, gate: Gate) -> None:
    sent = random_bytes(8 * MEBI)
    expected = sent.copy()
    gate.hold(device.default_stream)
    start = time.monotonic()
    device.copy_in(block.address, sent, device.default_stream)
    assert time.monotonic() - start < 5
    assert not gate.passed
    sent[:] = 0
    gate.open()
    assert np.array_equal(read(device, block.address, np.uint8, sent.nbytes, device.default_stream), expected)


def test_allocation_does_not_wait_for_a_running_kernel(device: CudaDevice, gate: Gate) -> None:
    gate.hold(device.default_stream)
    start = time.monotonic()
    memory = device.allocate(8 * MEBI)
    memory.free()
    device.allocate(8 * MEBI).free()
    assert time.monotonic() - start < 5
    assert not gate.passed


def test_copies_and_fills_stay_inside_their_range(device: CudaDevice, block: CudaMemory) -> None:
    stream = device.default_stream
    device.fill(block.address, 1, 1024, stream)
    device.fill(block.address + 100, 2, 50, stream)
    device.fill(block.address, 3, 0, stream)
    device.copy(block.address + 301, block.address + 99, 52, stream)
    device.copy(block.address, block.address + 100, 0, stream)
    expected = np.ones(1024, np.uint8)
    expected[100:150] = 2
    expected[301:353] = expected[99:151]
    assert np.array_equal(read(device, block.address, np.uint8, 1024, stream), expected)


def test_host_memory_is_one_memory_for_both_sides(device: CudaDevice) -> None:
    kernel, stream = load(device, "scale_add"), device.create_stream()
    memory = device.allocate_host(4096)
    view = memory.view(np.float32, (32, 32))
    assert not view.any()
    view[:] = np.arange(1024).reshape(32, 32)
    shape = LaunchShape(4, 256)
    launch(device, kernel, stream, shape=shape, values=memory.address, factor=2, addend=1, count=1024)
    stream.synchronize()
    assert np.array_equal(view.ravel(), np.arange(1024, dtype=np.float32) * 2 + 1)
    with pytest.raises(ArgumentError, match="at most 4096 bytes"):
        memory.view(np.float64, (513,))
    memory.free()
    memory.free()
    with pytest.raises(DeviceError, match="freed"):
        memory.view(np.uint8, (1,))


# Kernels


def test_a_struct_arrives_by_value(device: CudaDevice, block: CudaMemory, gate: Gate) -> None:
    kernel, stream = load(device, "fields"), device.default_stream
    arguments = kernel.source.arguments.new(
        small=0xFFFFFFFF, negative=-7, large=(1 << 63) + 5, real=1.5, out=block.address, last=77
    )
    arguments.list[:] = [10, 20, 30, 40, 50]
    gate.hold(stream)
    device.launch(kernel, LaunchShape(2, 32), arguments, stream)
    for name in ("small", "negative", "large", "last", "out"):
        setattr(arguments, name, 0)  # the launch has its own copy although it has not started
    gate.open()
    seen = read(device, block.address, np.uint64, 10, stream).tolist()
    assert seen == [0xFFFFFFFF, (1 << 64) - 7, (1 << 63) + 5, 0x3FC00000, 10, 20, 30, 40, 50, 77]


def test_another_struct_is_refused(device: CudaDevice) -> None:
    other = ArgumentStruct("OtherArguments", [Field("x", "u32")]).new()
    with pytest.raises(ArgumentError, match="FieldsArguments"):
        device.launch(load(device, "fields"), LaunchShape(1, 1), other, device.default_stream)


def test_products_and_sums_are_not_fused(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream = load(device, "scale_add"), device.default_stream
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    factor, addend = np.float32(1.1), np.float32(0.7)
    device.copy_in(block.address, values, stream)
    shape = LaunchShape(16, 256)
    launch(device, kernel, stream, shape=shape, values=block.address, factor=factor, addend=addend, count=4096)
    seen = read(device, block.address, np.float32, 4096, stream)
    fused = (values.astype(np.float64) * float(factor) + float(addend)).astype(np.float32)
    assert np.array_equal(seen, values * factor + addend)
    assert not np.array_equal(seen, fused)


def test_kernels_are_loaded_before_their_first_launch(device: CudaDevice) -> None:
    kernel = device.load(kernel_source("append", prelude="// not loaded by any other test"))
    state = check("cuFuncIsLoaded", driver.cuFuncIsLoaded(kernel.function))
    assert state == driver.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED


def test_a_kernel_is_loaded_once(device: CudaDevice) -> None:
    sources = {name: kernel_source(name) for name in ("fields", "meet", "append")}
    loaded = device.load_all(sources)
    assert list(loaded) == list(sources)
    assert all(device.load(source) is loaded[name] for name, source in sources.items())
    assert {kernel.source.name for kernel in loaded.values()} == set(sources)


def test_deep_stacks_are_set_aside_when_loading(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream = load(device, "deep_stack"), device.default_stream
    limit = check("cuCtxGetLimit", driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE))
    assert limit >= 2048 * 4
    device.copy_in(block.address, np.arange(100, dtype=np.float32), stream)
    shape = LaunchShape(1, 1)
    launch(device, kernel, stream, shape=shape, values=block.address, factor=2, addend=0, count=100)
    assert np.array_equal(read(device, block.address, np.float32, 100, stream), np.arange(99, -1, -1) * 2)


@pytest.mark.parametrize("threads", [32, 512, 1024])
def test_resident_blocks_do_run_at_once(device: CudaDevice, block: CudaMemory, threads: int) -> None:
    kernel, stream = load(device, "meet"), device.default_stream
    blocks = device.resident_blocks(kernel, threads)
    assert blocks % device.multiprocessors == 0
    assert device.multiprocessors <= blocks <= device.multiprocessors * 32
    device.fill(block.address, 0, 512, stream)
    shape = LaunchShape(blocks, threads)
    launch(device, kernel, stream, shape=shape, come=block.address, missed=block.address + 256, deadline_ns=DEADLINE_NS)
    words = read(device, block.address, np.uint32, 128, stream)
    assert words[0] == blocks
    assert words[64] == 0


def recurrence(tags: list[int]) -> int:
    value = 0
    for tag in tags:
        value = (value * 31 + tag) % (1 << 64)
    return value


def test_dependent_launches_keep_their_order(device: CudaDevice, block: CudaMemory) -> None:
    kernel, stream = load(device, "append"), device.create_stream()
    device.fill(block.address, 0, 8, stream)
    tags = list(range(1, 301))
    for tag in tags:
        shape = LaunchShape(3, 64, dependent=tag > 1)  # the first follows a memset, which announces nothing
        launch(device, kernel, stream, shape=shape, value=block.address, tag=tag)
    assert read(device, block.address, np.uint64, 1, stream)[0] == recurrence(tags)


def test_threads_share_the_device(device: CudaDevice) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            kernel, stream = device.load(kernel_source("append")), device.create_stream()
            memory = device.allocate(256)
            for tag in range(50):
                launch(device, kernel, stream, shape=LaunchShape(1, 32), value=memory.address, tag=tag * number)
            assert read(device, memory.address, np.uint64, 1, stream)[0] == recurrence([t * number for t in range(50)])
            memory.free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Errors


def test_a_launch_that_the_driver_refuses_is_described(device: CudaDevice) -> None:
    kernel = load(device, "fields")
    with pytest.raises(DeviceError, match=r"cuLaunchKernelEx of fields, 3 blocks of 2048 threads failed: CUDA_ERROR_"):
        device.launch(kernel, LaunchShape(3, 2048), kernel.source.arguments.new(), device.default_stream)


FAULT = """
from nvep.errors import DeviceError
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.device import LaunchShape
from tests.gpu.cuda_kit import launch, load
device = CudaDevice(0)
launch(device, load(device, "fault"), device.default_stream, shape=LaunchShape(1, 1), target=64)
try:
    device.default_stream.synchronize()
except DeviceError as error:
    print("synchronize:", error)
try:
    device.close()
except DeviceError as error:
    print("close:", error)
device.close()
print("end")
"""


def test_a_fault_in_a_kernel_is_named_where_it_is_noticed() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FAULT], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert answer.returncode == 0, answer.stderr
    noticed, closing, end = answer.stdout.splitlines()
    assert noticed.startswith("synchronize: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): ")
    assert closing.startswith("close: closing ")
    assert end == "end"
