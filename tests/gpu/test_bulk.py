"""Bulk copies on a GPU that has them, and exchanges that do without."""

from __future__ import annotations

import pytest

from nvep.runtime.cuda import CudaDevice
from nvep.testing.backend import Backend
from nvep.testing.bulk_checks import check_without_bulk_copies, copy_pieces


class CudaBackend(Backend):
    device = "cuda"


@pytest.mark.parametrize("piece_bytes", [16, 7168, 49152])
def test_pieces_come_through_a_ring(device: CudaDevice, piece_bytes: int) -> None:
    if device.bulk is None:
        pytest.skip(f"{device.name} has no bulk copies")
    copy_pieces(device, (5, 64), piece_bytes)


@pytest.mark.parametrize("row_bytes", [16, 1040])
def test_exchanges_without_bulk_copies(row_bytes: int) -> None:
    check_without_bulk_copies(CudaBackend(), row_bytes, "bf16")
