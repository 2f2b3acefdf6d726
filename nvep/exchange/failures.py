"""From what kernels reported to typed errors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from nvep.errors import ArgumentError, NvepError, PeerLeft, PeerTimeout, ProtocolMismatch
from nvep.exchange.arguments import PHASE_LEFT, PHASES, STATUS, STATUS_PROTOCOL
from nvep.runtime.device import Device, HostMemory

STATUS_BYTES = ctypes.sizeof(STATUS.ctype)
_FIELDS = [name for name, _ in STATUS.ctype._fields_]  # type: ignore[misc]


@dataclass(frozen=True)
class Statistics:
    """Tokens and ids that were not exchanged as given, since construction.

    Attributes
    ----------
    invalid_ids : int
        Expert ids in device arrays that were out of range or repeated within a token; treated as -1.
    dropped_tokens : int
        Tokens of which a masked rank would have received a row.
    """

    invalid_ids: int
    dropped_tokens: int


class StatusBoard:
    """One status record per lane, written by kernels, read by the host without waiting for anything."""

    def __init__(self, device: Device, lanes: int) -> None:
        self._memory: HostMemory = device.allocate_host(lanes * STATUS_BYTES)
        self._words = self._memory.view(np.uint32, (lanes, STATUS_BYTES // 4))
        self._flat = self._words.reshape(-1).data  # ten times faster to look at than the array
        per_lane = STATUS_BYTES // 4
        failing = (_FIELDS.index("code"), _FIELDS.index("excess_tokens"))
        self._watched = [lane * per_lane + field for lane in range(lanes) for field in failing]

    def address(self, lane: int) -> int:
        """Device address of a lane's record."""
        return self._memory.address + lane * STATUS_BYTES

    def _field(self, lane: int, name: str) -> int:
        return int(self._words[lane, _FIELDS.index(name)])

    def error(self) -> NvepError | None:
        """First reported failure, or None."""
        flat = self._flat
        for at in self._watched:
            if flat[at]:
                return self._found()
        return None

    def _found(self) -> NvepError | None:
        for lane in range(self._words.shape[0]):
            excess = self._field(lane, "excess_tokens")
            if excess:
                return ArgumentError("num_tokens", excess, "at most the rows of tokens")
            code = self._field(lane, "code")
            if code == 0:
                continue
            suspect, reporter = self._field(lane, "suspect"), self._field(lane, "reporter")
            if self._field(lane, "phase") == PHASE_LEFT:
                return PeerLeft(suspect)
            phase, epoch = PHASES[self._field(lane, "phase")], self._field(lane, "epoch")
            if code == STATUS_PROTOCOL:
                return ProtocolMismatch(
                    f"rank {suspect} ran step {epoch} with another protocol than rank {reporter} ({phase})"
                )
            return PeerTimeout(suspect, phase, epoch, reporter)
        return None

    def statistics(self) -> Statistics:
        lanes = range(self._words.shape[0])
        return Statistics(
            invalid_ids=sum(self._field(lane, "invalid_ids") for lane in lanes),
            dropped_tokens=sum(self._field(lane, "dropped_tokens") for lane in lanes),
        )

    def clear(self) -> None:
        """Forget failures; counts stay."""
        kept = [_FIELDS.index("invalid_ids"), _FIELDS.index("dropped_tokens")]
        counts = self._words[:, kept].copy()
        self._words[...] = 0
        self._words[:, kept] = counts

    def free(self) -> None:
        del self._words, self._flat
        self._memory.free()
