"""Which backend computes a layer's experts, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nvep.moe.grouped_gemm.base import GroupedGemm
from nvep.moe.grouped_gemm.cublas import device_sizes, missing
from nvep.moe.grouped_gemm.gather import GatherGroupedGemm
from nvep.moe.grouped_gemm.library import LibraryGroupedGemm, PackedGroupedGemm
from nvep.moe.grouped_gemm.reference import ReferenceGroupedGemm
from nvep.runtime.device import Device

BACKENDS: dict[str, type[GroupedGemm]] = {
    made.name: made for made in (GatherGroupedGemm, LibraryGroupedGemm, PackedGroupedGemm, ReferenceGroupedGemm)
}
AUTO = "auto"


_EMULATED = ("reference", "NumPy is faster than kernels on the emulated device")
_GPU = ("gather", "rows in place, sizes on the device, works under graphs, bf16 and fp8")


class Choice(NamedTuple):
    """A backend's name, and the reason in words."""

    name: str
    reason: str


def choose(name: str, device: Device) -> Choice:
    """The backend that ``name``, a key of ``BACKENDS`` or ``"auto"``, stands for on ``device``."""
    if name != AUTO:
        return Choice(name, "asked for")
    return Choice(*(_EMULATED if device.emulated else _GPU))


def describe(*, emulated: bool) -> Iterator[tuple[str, str]]:
    """Each backend and what it can do here, for people; the first line is what ``"auto"`` stands for."""
    name, reason = _EMULATED if emulated else _GPU
    yield AUTO, f"{name}: {reason}"
    yield "gather", "rows in every payload format; weights bf16 and fp8 (128 x 128 blocks); mma.sync, sm_80 and up"
    why = missing()
    yield "nvmath, packed", "rows and weights bf16" if why is None else f"no ({why})"
    yield "sizes on the device", f"cuBLASLt: {device_sizes()}"
    yield "reference", "every format" if emulated else "no (the device is not emulated)"
