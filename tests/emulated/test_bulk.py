"""Bulk copies on the emulated device, and exchanges of devices that have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvep.errors import ArgumentError, DeviceError
from nvep.runtime.device import LaunchShape
from nvep.runtime.emulated import EmulatedDevice
from nvep.testing.backend import Backend
from nvep.testing.bulk_checks import ARGUMENTS, SOURCE, check_without_bulk_copies, copy_pieces


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 20), (5, 4)])
def test_pieces_come_through_a_ring(device: EmulatedDevice, shape: tuple[int, int]) -> None:
    copy_pieces(device, shape, 48)


def test_a_copy_of_a_part_of_a_unit_is_an_error(device: EmulatedDevice) -> None:
    with pytest.raises(
        DeviceError, match=r"thread 0: a bulk copy is not of whole 16-byte units at .*bulk_copies.cu:\d+"
    ):
        copy_pieces(device, (1, 2), 48, odd_bytes=8)


def test_shared_memory_has_a_limit(device: EmulatedDevice) -> None:
    shape = LaunchShape(1, 32, shared_bytes=1 << 20)
    with pytest.raises(ArgumentError, match=r"shape\.shared_bytes: got 1048576; allowed: 0 to"):
        device.launch(device.load(SOURCE), shape, ARGUMENTS.new(), device.default_stream)


@pytest.mark.parametrize("row_bytes", [16, 1040])
@pytest.mark.parametrize("partial_format", ["bf16", "fp32"])
def test_exchanges_without_bulk_copies(row_bytes: int, partial_format: str) -> None:
    check_without_bulk_copies(Backend(), row_bytes, partial_format)
