"""What the soft NIC pretends to be, and the trouble it is asked to make."""

from __future__ import annotations

from dataclasses import dataclass

from nvep.errors import ArgumentError
from nvep.nic.base import PLACEMENTS
from nvep.runtime.device import LaunchShape

LABEL = "soft NIC (emulated)"
# Of the engine's kernel, by kind of device, where the model leaves it open.
ENGINE_SHAPES = {"cuda": LaunchShape(16, 512), "emulated": LaunchShape(1, 64)}


@dataclass(frozen=True)
class SoftNicModel:
    """A modelled adapter and its engine; the default is one of 400 Gb/s. Equal on all ranks.

    A message leaves when the line is free and arrives ``latency_ns`` later. Its signal, completion and count become
    visible then at the earliest, or later where moving the bytes took longer; nothing of this is charged to the sender.

    Attributes
    ----------
    latency_ns : int
        From the line to the target.
    gigabits : float
        Bandwidth of the line, Gb/s.
    message_ns, doorbell_ns : int
        What each message costs on the line, and each batch behind a doorbell before it starts.
    placement : str
        Where rings live: ``"default"`` (doorbells, descriptor rings and ready words in host memory, send queues and
        completions in the GPU's), ``"host"`` or ``"device"``.
    blocks, threads : int or None
        Shape of the engine's kernel; default: chosen by device.
    idle_s : float
        The engine leaves the device after this time without work; `Nic.wake` brings it back.
    pending : int
        Events of a ring that may wait for their time, a power of two.
    seed : int
        Of everything drawn by chance below.
    reorder : bool
        Reorder whatever has no promised order.
    busy_odds : int
        Of 1024, that a batch finds no room and is tried again.
    fail : tuple of int or None
        (ring number, entry index) of an entry that fails.
    live : bool
        Answer ``nvep decode-ring --live``.
    """

    latency_ns: int = 2000
    gigabits: float = 400.0
    message_ns: int = 5
    doorbell_ns: int = 300
    placement: str = "default"
    blocks: int | None = None
    threads: int | None = None
    idle_s: float = 2.0
    pending: int = 512
    seed: int = 1
    reorder: bool = False
    busy_odds: int = 0
    fail: tuple[int, int] | None = None
    live: bool = False

    def __post_init__(self) -> None:
        for name in ("latency_ns", "message_ns", "doorbell_ns"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise ArgumentError(name, getattr(self, name), "nanoseconds below 2^31")
        if not 0.01 <= self.gigabits <= 1e6:
            raise ArgumentError("gigabits", self.gigabits, "0.01 to 1e6 Gb/s")
        if self.placement not in PLACEMENTS:
            raise ArgumentError("placement", self.placement, ", ".join(PLACEMENTS))
        if not 0.0 < self.idle_s <= 3600.0:
            raise ArgumentError("idle_s", self.idle_s, "above 0 and at most an hour")
        if self.pending < 128 or self.pending & (self.pending - 1):
            raise ArgumentError("pending", self.pending, "a power of two, at least 128")
        if not 0 <= self.busy_odds < 1024:
            raise ArgumentError("busy_odds", self.busy_odds, "0 to 1023")
        for name, value in (("blocks", self.blocks), ("threads", self.threads)):
            if value is not None and (value < 1 or (name == "threads" and value % 32)):
                raise ArgumentError(name, value, "1 or more; threads: whole warps")

    @property
    def ps_per_byte(self) -> int:
        """Picoseconds a byte takes on the line."""
        return round(8000.0 / self.gigabits)
