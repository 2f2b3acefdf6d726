"""The small kernels of the suite: floors, marks in time, and a delay."""

from __future__ import annotations

import numpy as np

from nvep.errors import ArgumentError
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape, Memory, Stream
from nvep.runtime.source import KERNEL_ROOT, KernelSource

NAMES = ("floor_copy", "floor_flag", "floor_empty", "floor_stamp", "floor_delay")
ARGUMENTS = ArgumentStruct(
    "FloorArguments",
    [
        Field("source", "u64"),
        Field("target", "u64"),
        Field("result", "u64"),
        Field("count", "u64"),
        Field("base", "u64"),
        Field("nanoseconds", "u64"),
        Field("first", "u32"),
        Field("ordered", "u32"),
    ],
)
_ONE_THREAD = LaunchShape(1, 1)


def floor_kernels() -> dict[str, KernelSource]:
    """Sources by name."""
    folder = KERNEL_ROOT / "testing"
    return {name: KernelSource(name, ARGUMENTS, file=folder / f"{name}.cu") for name in NAMES}


class FloorKernels:
    """They, loaded on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels = device.load_all(floor_kernels())

    def launch(self, name: str, stream: Stream, *, shape: LaunchShape = _ONE_THREAD, **fields: int) -> None:
        """Enqueue ``floor_<name>``."""
        self._device.launch(self._kernels[f"floor_{name}"], shape, ARGUMENTS.new(**fields), stream)


class Stamps:
    """Marks in time between the kernels of a captured graph, ``each`` to a step; every replay overwrites them.

    A mark is a kernel of one thread that stores the GPU's nanosecond clock. The first two marks of a step have nothing
    between them: their distance is what marks themselves cost, and is taken off every span.
    """

    def __init__(self, device: Device, kernels: FloorKernels, *, steps: int, each: int) -> None:
        self._device = device
        self._kernels = kernels
        self._shape = (steps, each)
        self._next = 0
        self._memory: Memory = device.allocate(8 * steps * each)

    def mark(self, stream: Stream) -> None:
        """Enqueue the next mark."""
        if self._next >= self._shape[0] * self._shape[1]:
            raise ArgumentError("mark", self._next, f"{self._shape[0] * self._shape[1]} marks")
        self._kernels.launch("stamp", stream, result=self._memory.address + 8 * self._next)
        self._next += 1

    def spans_us(self, stream: Stream) -> np.ndarray:
        """Microseconds between the marks of the last replay, after waiting for it: float64 ``[steps, each - 2]``."""
        times = np.zeros(self._shape, dtype=np.uint64)
        self._device.copy_out(times, self._memory.address, stream)
        gaps = np.diff(times.astype(np.int64), axis=1) / 1e3
        return np.asarray(gaps[:, 1:] - gaps[:, :1].mean())

    def close(self) -> None:
        self._memory.free()
