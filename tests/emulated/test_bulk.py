"""Bulk copies on the emulated device, and exchanges of devices that have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.errors import ArgumentError, DeviceError
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.emulated import EmulatedDevice
from nvep.runtime.source import KernelSource
from nvep.testing.backend import Backend
from nvep.testing.steps import poison_receive_buffers, random_step

ARGUMENTS = ArgumentStruct(
    "BulkArguments",
    [
        Field("from", "const char*"),
        Field("to", "char*"),
        *(Field(name, "u32") for name in ("pieces", "piece_bytes", "odd_bytes")),
    ],
)
SOURCE = KernelSource("bulk_copies", ARGUMENTS, file=Path(__file__).parent / "kernels" / "bulk_copies.cu")
PIECE_BYTES = 48


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


def copy(device: EmulatedDevice, blocks: int, pieces: int, *, odd_bytes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    given = np.random.default_rng(pieces).integers(0, 256, pieces * PIECE_BYTES, dtype=np.uint8)
    source, target = device.allocate(given.nbytes), device.allocate(given.nbytes)
    source.view(np.uint8, given.shape)[...] = given
    values: dict[str, Any] = {"from": source.address, "to": target.address}
    arguments = ARGUMENTS.new(**values, pieces=pieces, piece_bytes=PIECE_BYTES, odd_bytes=odd_bytes)
    shape = LaunchShape(blocks, 32, shared_bytes=2 * PIECE_BYTES)
    device.launch(device.load(SOURCE), shape, arguments, device.default_stream)
    device.default_stream.synchronize()
    return given, target.view(np.uint8, given.shape)


@pytest.mark.parametrize(("blocks", "pieces"), [(1, 1), (1, 7), (3, 20), (5, 4)])
def test_pieces_come_through_a_ring(device: EmulatedDevice, blocks: int, pieces: int) -> None:
    given, got = copy(device, blocks, pieces)
    np.testing.assert_array_equal(got, given)


def test_a_copy_of_a_part_of_a_unit_is_an_error(device: EmulatedDevice) -> None:
    with pytest.raises(DeviceError, match=r"thread 0: a bulk copy is not of whole 16-byte units at bulk_copies.cu:\d+"):
        copy(device, 1, 2, odd_bytes=8)


def test_shared_memory_has_a_limit(device: EmulatedDevice) -> None:
    shape = LaunchShape(1, 32, shared_bytes=1 << 20)
    with pytest.raises(ArgumentError, match=r"shape\.shared_bytes: got 1048576; allowed: 0 to"):
        device.launch(device.load(SOURCE), shape, ARGUMENTS.new(), device.default_stream)


class TestWithoutBulkCopies(Backend):
    """The same bits by ordinary loads and stores."""

    @pytest.mark.parametrize("row_bytes", [16, 1040])
    @pytest.mark.parametrize("partial_format", ["bf16", "fp32"])
    def test_matches_reference(self, row_bytes: int, partial_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EmulatedDevice, "bulk", None)
        config = self.config(
            num_experts=12, top_k=5, max_tokens=40, row_bytes=row_bytes, extra_payload_bytes=(32,),
            partial_format=partial_format, partial_elements=1304,
        )  # fmt: skip

        def main(group: RankGroup) -> None:
            assert group.device.bulk is None
            with Exchange(group, config) as exchange:
                for index in range(3):
                    poison_receive_buffers(exchange)
                    self.verified_step(exchange, random_step((83, index), config, group.size), f"step {index}")

        self.run(main, 4)
