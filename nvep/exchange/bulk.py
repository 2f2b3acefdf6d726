"""How exchange kernels cut rows and share out shared memory for bulk copies."""

from __future__ import annotations

from dataclasses import dataclass

from nvep.config import ExchangeConfig
from nvep.runtime.device import BulkCopies

_WARPS = 16  # most of a block
_SEND_RINGS = 4  # a thread that moves rows spends some 700 cycles on a piece, more than a fast block has for one
_MOST_STAGES = 16
_MOST_PULLED = 128  # pieces of a block on their way
_BARRIER_BYTES = 8
_ALIGNMENT = 128
_SENDING = ("dispatch", "dispatch_send")
_PULLING = ("combine", "combine_recv")


@dataclass(frozen=True)
class BulkPlan:
    """Sizes of the rings in shared memory.

    Parameters
    ----------
    config : ExchangeConfig
    bulk : BulkCopies or None
        What the device offers; None: kernels load and store instead, in pieces of the same size.
    """

    config: ExchangeConfig
    bulk: BulkCopies | None

    @property
    def _limits(self) -> BulkCopies:
        return self.bulk or BulkCopies()

    @property
    def send_bytes(self) -> int:
        """Bytes of a stage: a token's payloads, cut into equal portions."""
        return _equal_pieces(sum(self.config.payload_bytes), self._limits.send_bytes)

    @property
    def send_stages(self) -> int:
        """Stages of a ring."""
        fit = self._limits.send_ring_bytes // (_SEND_RINGS * self.send_bytes)
        return max(1, min(fit, _MOST_STAGES))

    @property
    def pull_bytes(self) -> int:
        """Bytes of a ring's entry: a partial row, cut into equal pieces."""
        return _equal_pieces(self.config.partial_row_bytes, self._limits.pull_bytes)

    @property
    def pull_entries(self) -> int:
        """Entries of a block's rings, of which each warp has one."""
        return max(_WARPS, min(self._limits.pull_ring_bytes // self.pull_bytes, _MOST_PULLED))

    def constants(self) -> list[tuple[str, str, object]]:
        """Type, name and value of what the kernels know of this."""
        return [
            ("bool", "kBulk", str(self.bulk is not None).lower()),
            ("u32", "kBulkBarrierBytes", self._barrier_bytes),
            ("u32", "kSendBytes", self.send_bytes),
            ("u32", "kSendRings", _SEND_RINGS),
            ("u32", "kSendStages", self.send_stages),
            ("u32", "kPullBytes", self.pull_bytes),
            ("u32", "kPullEntries", self.pull_entries),
        ]

    def shared_bytes(self, protocol: str, kernel: str) -> int:
        """Dynamic shared memory of a block of an exchange kernel."""
        if self.bulk is None or protocol != "fence":
            return 0
        if kernel in _SENDING:
            return self._barrier_bytes + _SEND_RINGS * self.send_stages * self.send_bytes
        return self._barrier_bytes + self.pull_entries * self.pull_bytes if kernel in _PULLING else 0

    @property
    def _barrier_bytes(self) -> int:
        barriers = max(_SEND_RINGS * self.send_stages, self.pull_entries)
        return -(-barriers * _BARRIER_BYTES // _ALIGNMENT) * _ALIGNMENT


def _equal_pieces(nbytes: int, most: int) -> int:
    """Bytes of the pieces that ``nbytes`` are cut into, the last of which may be shorter."""
    pieces = -(-nbytes // most)
    return -(-nbytes // pieces // 16) * 16 if pieces > 1 else nbytes
