"""Fixtures of the GPU tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvep.runtime.cuda import CudaDevice
from nvep.runtime.cuda_memory import CudaMemory
from tests.gpu.cuda_kit import Gate

MEBI = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice(0)
    yield opened
    opened.close()


@pytest.fixture
def gate(device: CudaDevice) -> Iterator[Gate]:
    made = Gate(device)
    yield made
    made.open()
    device.default_stream.synchronize()
    made.free()


@pytest.fixture
def block(device: CudaDevice) -> Iterator[CudaMemory]:
    memory = device.allocate(64 * MEBI)
    yield memory
    device.default_stream.synchronize()
    memory.free()
