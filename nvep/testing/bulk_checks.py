"""Bulk copies of a device, and exchanges that do without: what tests of every device run."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape
from nvep.runtime.source import KERNEL_ROOT, KernelSource
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
SOURCE = KernelSource("bulk_copies", ARGUMENTS, file=KERNEL_ROOT / "testing" / "bulk_copies.cu")


def copy_pieces(device: Device, shape: tuple[int, int], piece_bytes: int, *, odd_bytes: int = 0) -> None:
    """Copy through rings of two stages in shared memory and compare; ``shape`` is (blocks, pieces).

    Raises
    ------
    AssertionError
        Bytes differ.
    DeviceError
        ``odd_bytes``, a further copy of so many bytes, is not of whole units.
    """
    blocks, pieces = shape
    stream = device.default_stream
    given = np.random.default_rng(pieces).integers(0, 256, pieces * piece_bytes, dtype=np.uint8)
    source, target = device.allocate(given.nbytes), device.allocate(given.nbytes)
    try:
        device.copy_in(source.address, given, stream)
        addresses: dict[str, Any] = {"from": source.address, "to": target.address}
        arguments = ARGUMENTS.new(**addresses, pieces=pieces, piece_bytes=piece_bytes, odd_bytes=odd_bytes)
        launch = LaunchShape(blocks, 32, shared_bytes=2 * piece_bytes)
        device.launch(device.load(SOURCE), launch, arguments, stream)
        got = np.empty_like(given)
        device.copy_out(got, target.address, stream)
        np.testing.assert_array_equal(got, given)
    finally:
        source.free()
        target.free()


def check_without_bulk_copies(backend: Backend, row_bytes: int, partial_format: str) -> None:
    """An exchange by ordinary loads and stores gives the reference's bits, as one with bulk copies does."""
    config = backend.config(
        num_experts=12, top_k=5, max_tokens=40, row_bytes=row_bytes, extra_payload_bytes=(32,),
        partial_format=partial_format, partial_elements=1304,
    )  # fmt: skip

    def main(group: RankGroup) -> None:
        had, group.device.bulk = group.device.bulk, None
        try:
            with Exchange(group, config) as exchange:
                for index in range(3):
                    poison_receive_buffers(exchange)
                    backend.verified_step(exchange, random_step((83, index), config, group.size), f"step {index}")
        finally:
            group.device.bulk = had

    backend.run(main, 4)
