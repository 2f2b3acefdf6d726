"""Kernels and helpers shared by the tests of the CUDA device."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_launch import CudaKernel
from nvep.runtime.cuda_stream import CudaStream
from nvep.runtime.device import LaunchShape
from nvep.runtime.source import KernelSource

KERNELS = Path(__file__).parent / "kernels"
DEADLINE_NS = 20_000_000_000
ARGUMENTS = {
    "fields": [
        Field("small", "u32"),
        Field("negative", "i32"),
        Field("large", "u64"),
        Field("real", "f32"),
        Field("list", "u32", 5),
        Field("out", "unsigned long long*"),
        Field("last", "u32"),
    ],
    "scale_add": [Field("values", "float*"), Field("factor", "f32"), Field("addend", "f32"), Field("count", "u32")],
    "hold": [Field("started", "unsigned int*"), Field("go", "unsigned int*"), Field("deadline_ns", "u64")],
    "append": [Field("value", "unsigned long long*"), Field("tag", "u64")],
    "meet": [Field("come", "unsigned int*"), Field("missed", "unsigned int*"), Field("deadline_ns", "u64")],
    "fault": [Field("target", "int*")],
}
ARGUMENTS["deep_stack"] = ARGUMENTS["scale_add"]
STRUCTS = {"deep_stack": "ScaleAddArguments"}


def kernel_source(name: str, prelude: str = "") -> KernelSource:
    struct = STRUCTS.get(name) or "".join(part.capitalize() for part in name.split("_")) + "Arguments"
    return KernelSource(name, ArgumentStruct(struct, ARGUMENTS[name]), prelude, KERNELS / f"{name}.cu")


def load(device: CudaDevice, name: str) -> CudaKernel:
    return device.load(kernel_source(name))


def launch(device: CudaDevice, kernel: CudaKernel, stream: CudaStream, *, shape: LaunchShape, **values: float) -> None:
    device.launch(kernel, shape, kernel.source.arguments.new(**values), stream)


def read(device: CudaDevice, address: int, dtype: object, count: int, stream: CudaStream) -> np.ndarray:
    array: np.ndarray = np.empty(count, dtype=dtype)  # type: ignore[call-overload]
    device.copy_out(array, address, stream)
    return array


class Gate:
    """A kernel that holds a stream until the host opens it."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._kernel = load(device, "hold")
        self._memory = device.allocate_host(512)
        self._words = self._memory.view(np.uint32, (128,))

    def hold(self, stream: CudaStream) -> None:
        """Hold ``stream`` from now on and wait until the kernel runs."""
        self._words[:] = 0
        started, go = self._memory.address, self._memory.address + 256
        shape = LaunchShape(1, 1)
        launch(self._device, self._kernel, stream, shape=shape, started=started, go=go, deadline_ns=DEADLINE_NS)
        end = time.monotonic() + 10
        while self._words[0] == 0:
            assert time.monotonic() < end, "the holding kernel did not start"

    @property
    def passed(self) -> bool:
        return bool(self._words[0] == 2)

    def open(self) -> None:
        self._words[64] = 1

    def free(self) -> None:
        self._words = np.empty(0, np.uint32)
        self._memory.free()
