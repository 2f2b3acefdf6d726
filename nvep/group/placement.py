"""Which device each rank opens, which ranks share one, and how long ranks wait for one another."""

from __future__ import annotations

from nvep.config import Settings
from nvep.runtime.device import Device

SHORTEST_COLLECTIVE_TIMEOUT = 30.0


def device_kind(device: str | None) -> str:
    """``"cuda"`` or ``"emulated"`` for a caller's ``device`` argument (``None``: ``NVEP_DEVICE``).

    Raises
    ------
    ArgumentError
        It is none of ``"auto"``, ``"cuda"``, ``"emulated"``.
    DeviceError
        ``"cuda"`` was asked for and there is no usable GPU.
    """
    from nvep.runtime import choose_device_kind

    return choose_device_kind(Settings.from_environment().device if device is None else device)


def visible_gpus() -> int:
    """GPUs that the driver shows to this process."""
    from nvep.runtime.cuda_calls import count_devices

    return count_devices()[0]


def spread(ranks: int, gpus: int) -> list[int]:
    """GPU of each rank: contiguous blocks of ranks, as equal as possible; with more GPUs than ranks one each."""
    return [rank * gpus // max(ranks, gpus) for rank in range(ranks)]


def physical_device(device: Device) -> str:
    """Equal for two devices of one host exactly if they are the same hardware, whatever their ordinals."""
    if device.emulated:
        return device.kind
    from cuda.core import Device as CoreDevice

    return str(CoreDevice(device.ordinal).uuid)


def collective_timeout() -> float:
    """Seconds that a collective waits for other ranks: ten deadlines, since a peer may be compiling kernels."""
    return max(SHORTEST_COLLECTIVE_TIMEOUT, 10.0 * Settings.from_environment().deadline)


def name_ranks(ranks: set[int]) -> str:
    """``rank 3``, ``ranks 1, 2``: for messages."""
    shown = ", ".join(str(r) for r in sorted(ranks)[:8])
    more = "" if len(ranks) <= 8 else f" and {len(ranks) - 8} more"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
