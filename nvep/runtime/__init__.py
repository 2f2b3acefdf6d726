"""Devices that kernels run on, and the compilers that make kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvep.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    from nvep.runtime.device import Device

__all__ = ["choose_device_kind", "open_device"]


def choose_device_kind(setting: str) -> str:
    """Turn ``auto``, ``cuda`` or ``emulated`` (``NVEP_DEVICE``) into ``"cuda"`` or ``"emulated"``.

    ``auto`` is ``cuda`` where a driver answers with at least one GPU.

    Raises
    ------
    ArgumentError
        ``setting`` is none of the three.
    DeviceError
        ``cuda`` was asked for and there is none.
    """
    if setting not in ("auto", "cuda", "emulated"):
        raise ArgumentError("device", setting, "auto, cuda or emulated")
    if setting == "emulated":
        return setting
    from nvep.runtime.cuda_calls import count_devices

    try:
        count, why = count_devices()
    except DeviceError as error:
        if setting == "cuda":
            raise
        logging.getLogger("nvep").warning("the CUDA driver does not work, so the device is emulated: %s", error)
        return "emulated"
    if count == 0 and setting == "cuda":
        raise DeviceError(f"no CUDA device: {why}")
    return "cuda" if count else "emulated"


def open_device(kind: str, ordinal: int = 0) -> Device:
    """Open GPU ``ordinal`` (``kind`` is ``"cuda"``) or an emulated device (``"emulated"``, any ordinal).

    Raises
    ------
    ArgumentError
        ``kind`` or ``ordinal`` is not one of those.
    DeviceError
        There is no such GPU, or the driver refused.
    """
    if kind == "cuda":
        from nvep.runtime.cuda import CudaDevice

        return CudaDevice(ordinal)
    if kind == "emulated":
        from nvep.runtime.emulated import EmulatedDevice

        return EmulatedDevice()
    raise ArgumentError("kind", kind, "cuda or emulated")
