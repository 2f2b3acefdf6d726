"""Which backend computes a layer's experts, and why."""

from __future__ import annotations

from typing import NamedTuple

from nvep.moe.grouped_gemm.base import GroupedGemm
from nvep.moe.grouped_gemm.gather import GatherGroupedGemm
from nvep.moe.grouped_gemm.library import LibraryGroupedGemm, PackedGroupedGemm
from nvep.moe.grouped_gemm.reference import ReferenceGroupedGemm
from nvep.runtime.device import Device

BACKENDS: dict[str, type[GroupedGemm]] = {
    made.name: made for made in (GatherGroupedGemm, LibraryGroupedGemm, PackedGroupedGemm, ReferenceGroupedGemm)
}
AUTO = "auto"


class Choice(NamedTuple):
    """A backend's name, and the reason in words."""

    name: str
    reason: str


def choose(name: str, device: Device) -> Choice:
    """The backend that ``name``, a key of ``BACKENDS`` or ``"auto"``, stands for on ``device``."""
    if name != AUTO:
        return Choice(name, "asked for")
    if device.emulated:
        return Choice(ReferenceGroupedGemm.name, "NumPy is faster than kernels on the emulated device")
    return Choice(GatherGroupedGemm.name, "rows in place, sizes on the device, works under graphs")
