"""Arrays of a GPU in and out of torch, CuPy, JAX and numba, where installed: same bits and memory, in stream order."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed
from nvep.inputs import InputSpec, as_input
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_stream import CudaStream
from tests.gpu.cuda_kit import Gate
from tests.host.array_support import EXTENSION, NATIVE, FakeDevice, values

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory

DTYPES = {d.name: d for d in NATIVE + EXTENSION}
BF16 = DTYPES["bfloat16"]
FLOAT32 = DTYPES["float32"]
COMMON = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "uint8"]
PLAIN = ["float16", "float32", "int32", "int64", "uint8"]
ROWS = InputSpec.rows("tokens", 64, 16)


class Placed:
    """Puts host arrays on the GPU and frees them together."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._memories: list[Any] = []

    def __call__(self, host: np.ndarray, stream: CudaStream | None = None) -> DeviceArray:
        memory = self.device.allocate(max(host.nbytes, 16))
        self._memories.append(memory)
        filler = self.device.default_stream
        self.device.copy_in(memory.address, host, filler)
        filler.synchronize()
        owner = ArrayOwner(self.device, stream=stream or filler)
        return DeviceArray(memory.address, host.shape, host.dtype, owner=owner)

    def free(self) -> None:
        gc.collect()
        for memory in self._memories:
            memory.free()


@pytest.fixture
def place(device: CudaDevice) -> Iterator[Placed]:
    device.make_current()
    placed = Placed(device)
    yield placed
    placed.free()


def torch_bits(torch: Any, tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMON)
def test_host_copies(place: Placed, name: str) -> None:
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    assert array.numpy().tobytes() == host.tobytes()
    assert array[1:4, ::2].numpy().tobytes() == host[1:4, ::2].tobytes()
    assert array[:0].numpy().shape == (0, 6)
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.asarray(array)


@pytest.mark.parametrize("name", COMMON)
def test_torch_reads_in_place(place: Placed, name: str) -> None:
    torch = pytest.importorskip("torch")
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    tensor = torch.from_dlpack(array[1:])
    assert tensor.is_cuda
    assert tensor.dtype == getattr(torch, name)
    assert tensor.data_ptr() == array[1:].address
    assert torch_bits(torch, tensor) == host[1:].tobytes()
    assert torch_bits(torch, torch.from_dlpack(array[:, 1:3])) == host[:, 1:3].tobytes()


@pytest.mark.parametrize("name", [n for n in COMMON if DTYPES[n].itemsize < 8])  # JAX narrows 64 bits by default
def test_jax_reads_in_place(place: Placed, name: str) -> None:
    jax = pytest.importorskip("jax")
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    seen = jax.dlpack.from_dlpack(array)
    assert seen.dtype == host.dtype
    assert seen.unsafe_buffer_pointer() == array.address
    assert np.asarray(seen).tobytes() == host.tobytes()


@pytest.mark.parametrize("name", PLAIN)
def test_cupy_reads_in_place(place: Placed, name: str) -> None:
    cupy = pytest.importorskip("cupy")
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    for seen in (cupy.from_dlpack(array), cupy.asarray(array)):
        assert seen.dtype == host.dtype
        assert seen.data.ptr == array.address
        assert cupy.asnumpy(seen).tobytes() == host.tobytes()
    assert cupy.asnumpy(cupy.asarray(array[:, 1:3])).tobytes() == host[:, 1:3].tobytes()


@pytest.mark.parametrize("name", PLAIN)
def test_cuda_array_interface_consumers(place: Placed, name: str) -> None:
    torch = pytest.importorskip("torch")
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    tensor = torch.as_tensor(array, device="cuda:0")
    assert tensor.data_ptr() == array.address
    assert torch_bits(torch, tensor) == host.tobytes()


@pytest.mark.parametrize("name", PLAIN)
def test_numba_reads_in_place(place: Placed, name: str) -> None:
    numba = pytest.importorskip("numba.cuda")
    host = values(DTYPES[name], (5, 6))
    array = place(host)
    assert numba.as_cuda_array(array).copy_to_host().tobytes() == host.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_extension_types_are_not_misread(place: Placed, library: str, name: str) -> None:
    """Through the CUDA array interface these have no name: a consumer refuses them or keeps them as raw bytes."""
    module = pytest.importorskip(library)
    array = place(values(DTYPES[name], (5, 6)))
    convert: Callable[[Any], Any] = module.as_tensor if library == "torch" else module.asarray
    options = {"device": "cuda:0"} if library == "torch" else {}
    try:
        seen = convert(array, **options)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return
    assert str(seen.dtype).removeprefix("torch.") in (name, "|V1", "|V2", "void8", "void16")


def test_host_copy_through_dlpack(place: Placed) -> None:
    host = values(FLOAT32, (5, 6))
    copied = np.from_dlpack(place(host), device="cpu")
    assert copied.tobytes() == host.tobytes()


def test_expired_arrays_are_refused(place: Placed) -> None:
    torch = pytest.importorskip("torch")
    array = place(values(FLOAT32, (5, 6)))
    array.owner.expire("the exchange is closed")
    for use in (torch.from_dlpack, lambda a: a.__cuda_array_interface__, lambda a: a.numpy()):
        with pytest.raises(ExchangeClosed, match="the exchange is closed"):
            use(array)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_consumers_wait_for_the_producer(device: CudaDevice, place: Placed, gate: Gate, library: str) -> None:
    module = pytest.importorskip(library)
    producer = device.create_stream()
    array = place(np.zeros((64,), np.uint8), producer)
    consumer = module.cuda.Stream() if library == "torch" else module.cuda.Stream(non_blocking=True)
    read = module.from_dlpack  # CuPy's asarray would wait on the host for the stream that the array names
    with module.cuda.stream(consumer) if library == "torch" else consumer:
        assert set((read(array) + 0).tolist()) == {0}  # loads what a held GPU could not load
        gate.hold(producer)
        device.fill(array.address, 7, 64, producer)
        copy = read(array) + 0
        done = consumer.query() if library == "torch" else consumer.done
        assert not done
        gate.open()
        consumer.synchronize()
    assert set(copy.tolist()) == {7}


# --- in ---------------------------------------------------------------------------------------------------------------


def sources(library: str, host: np.ndarray) -> tuple[Any, int]:
    """An array of ``library`` on GPU 0 with the bits of ``host``, and its address."""
    module = pytest.importorskip(library)
    if library == "torch":
        tensor = module.from_numpy(host.view(np.uint8)).cuda().view(getattr(module, host.dtype.name))
        return tensor, tensor.data_ptr()
    if library == "cupy":
        array = module.asarray(host)
        return array, array.data.ptr
    if library == "jax":
        array = module.device_put(host, module.devices("gpu")[0])
        return array, array.unsafe_buffer_pointer()
    array = module.to_device(host)
    return array, array.__cuda_array_interface__["data"][0]


IN = [
    *[("torch", name) for name in COMMON],
    *[("jax", name) for name in COMMON if name != "int64"],
    *[(library, name) for library in ("cupy", "numba.cuda") for name in PLAIN],
]


@pytest.mark.parametrize(("library", "name"), IN)
def test_arrays_come_in(device: CudaDevice, library: str, name: str) -> None:
    host = values(DTYPES[name], (4, 6))
    array, address = sources(library, host)
    stream = device.create_stream()
    view = as_input(array, InputSpec("x", (host.dtype,), ("n", 6)), device=device, stream=stream)
    assert (view.address, view.shape, view.dtype) == (address, (4, 6), host.dtype)
    assert (view.host, view.settled) == (False, False)
    got = np.empty_like(host)
    device.copy_out(got, view.address, stream)
    assert got.tobytes() == host.tobytes()


def test_cupy_extension_types_come_in_as_rows(device: CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros((4, 16), cupy.float32)
    assert as_input(array, ROWS, device=device).shape == (4, 64)


def test_host_tensors_are_marked_for_copying(device: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(4, 16).pin_memory()):
        view = as_input(tensor, ROWS, device=device, stream=device.default_stream)
        assert (view.host, view.settled) == (True, True)
        assert view.to_numpy().shape == (4, 64)


def test_refusals(device: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, device="cuda:0")
    spec = InputSpec("x", (BF16,), ("n", 6))
    with pytest.raises(DTypeError, match="x: got 'float32'; allowed: bfloat16"):
        as_input(tensor, spec, device=device)
    with pytest.raises(ArgumentError, match=r"x: .*detach"):
        as_input(tensor.requires_grad_(), spec, device=device)
    with pytest.raises(ArgumentError, match=r"x: got 'an array on cuda:0'; allowed: cuda:1, this rank's device"):
        as_input(tensor.detach(), spec, device=FakeDevice("cuda", 1))
    with pytest.raises(ArgumentError, match=r"x: got 'an array on cuda:0'; allowed: host memory"):
        as_input(tensor.detach(), spec, device=FakeDevice())


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_kernels_wait_for_the_library(device: CudaDevice, gate: Gate, library: str) -> None:
    module = pytest.importorskip(library)
    producer, consumer = device.create_stream(), device.create_stream()
    array = module.zeros(64, dtype=module.uint8, **({"device": "cuda:0"} if library == "torch" else {}))
    fill = array.fill_ if library == "torch" else array.fill
    foreign = module.cuda.ExternalStream(producer.handle)
    with module.cuda.stream(foreign) if library == "torch" else foreign:
        fill(1)
        module.cuda.synchronize() if library == "torch" else module.cuda.Device().synchronize()
        gate.hold(producer)
        fill(7)
        view = as_input(array, InputSpec("x", (), (64,)), device=device, stream=consumer)
    marker = consumer.record()
    assert not marker.done
    gate.open()
    got = np.empty(64, np.uint8)
    device.copy_out(got, view.address, consumer)
    assert set(got.tolist()) == {7}


def test_nvep_arrays_wait_across_streams(device: CudaDevice, place: Placed, gate: Gate) -> None:
    producer, consumer = device.create_stream(), device.create_stream()
    array = place(np.zeros(64, np.uint8), producer)
    gate.hold(producer)
    device.fill(array.address, 7, 64, producer)
    view = as_input(array, InputSpec("x", (), (64,)), device=device, stream=consumer)
    assert not consumer.record().done
    gate.open()
    got = np.empty(64, np.uint8)
    device.copy_out(got, view.address, consumer)
    assert set(got.tolist()) == {7}
