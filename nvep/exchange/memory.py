"""Everything an exchange owns on its device, freed together."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np

from nvep.exchange.arguments import COUNTERS, PHASE_LEFT, poison_word
from nvep.exchange.failures import StatusBoard
from nvep.exchange.plan import Plan
from nvep.group import RankGroup
from nvep.runtime.device import Device, Memory
from nvep.symmetric import SymmetricHeap

_WORD = 1 << 32


class ExchangeMemory:
    """Symmetric heap, private lane state, mask, placement, default outputs and status records.

    Construction is collective. ``close()`` frees everything, also after a construction that failed half way.
    """

    def __init__(self, group: RankGroup, plan: Plan) -> None:
        self._resources = ExitStack()
        self._group = group
        self.rank = group.rank
        self.plan = plan
        self.device: Device = group.device
        try:
            # First the heap, far the largest: it checks what it needs before anything is allocated.
            self.heap = SymmetricHeap(group, plan.heap, initialise=self._initialise)
            self._resources.callback(self.heap.close)
            group.together(self._allocate)
        except BaseException:
            self.close()
            raise

    def _own(self, memory: Memory) -> Memory:
        self._resources.callback(memory.free)
        return memory

    def _allocate(self) -> None:
        config, ranks = self.plan.config, self._group.size
        device = self.device
        self.status = StatusBoard(device, config.lanes)
        self._resources.callback(self.status.free)
        self.local = self._own(device.allocate(self.plan.local.nbytes))
        self.mask = self._own(device.allocate(ranks * 4))
        self.expert_ranks = self._own(device.allocate(config.num_experts * 4))
        self.output_lane_bytes = config.max_tokens * config.partial_row_bytes
        self.outputs = self._own(device.allocate(config.lanes * self.output_lane_bytes))
        stream = device.default_stream
        device.copy_in(self.expert_ranks.address, config.expert_ranks(ranks), stream)
        self._write_counters((config.first_epoch - 1) % _WORD)
        stream.synchronize()

    def _write_counters(self, completed: int) -> None:
        counters = COUNTERS.new(completed=completed, dispatched=completed)
        for lane in range(self.plan.config.lanes):
            address = self.local.address + self.plan.local.offset("Counters", lane)
            self.device.copy_in(address, np.frombuffer(bytes(counters), dtype=np.uint8), self.device.default_stream)

    def _initialise(self, heap: SymmetricHeap) -> None:
        self._write_heap(heap, self.plan.config.first_epoch)

    def _write_heap(self, heap: SymmetricHeap, first_epoch: int) -> None:
        stream = self.device.default_stream
        for lane in range(self.plan.config.lanes):
            for region, values in self.plan.initial_words(first_epoch).items():
                self.device.copy_in(heap.address(region, lane=lane), values, stream)
            for region, byte in self.plan.filled_regions().items():
                self.device.fill(heap.address(region, lane=lane), byte, heap.layout.region(region).nbytes, stream)
        stream.synchronize()

    def restart(self, completed: int, masked: np.ndarray) -> None:
        """As before a first step, with the epoch ``completed`` behind and ranks masked. No kernel of any rank runs."""
        stream = self.device.default_stream
        self._write_counters(completed)
        self._write_heap(self.heap, (completed + 1) % _WORD)
        self.device.fill(self.heap.address("Poison"), 0, 8 * self._group.size, stream)
        self.device.copy_in(self.mask.address, masked.astype(np.uint32), stream)
        stream.synchronize()
        self.status.clear()

    def progress(self) -> list[int]:
        """Epoch that each lane's last D.send wrote, read from the device."""
        words = []
        for lane in range(self.plan.config.lanes):
            raw = np.zeros(ctypes.sizeof(COUNTERS.ctype), dtype=np.uint8)
            self.device.copy_out(
                raw, self.lane_local(lane) + self.plan.local.offset("Counters"), self.device.default_stream
            )
            words.append(int(COUNTERS.ctype.from_buffer_copy(raw.tobytes()).dispatched))
        return words

    def acknowledge(self) -> None:
        """Tell every peer that no kernel of this rank writes to it any more."""
        self._tell_peers("Left", 1)

    def has_left(self, rank: int) -> bool:
        """Has ``rank`` acknowledged?"""
        word = np.zeros(1, dtype=np.uint64)
        self.device.copy_out(word, self.heap.address("Left") + 8 * rank, self.device.default_stream)
        return bool(word[0])

    def lane_local(self, lane: int) -> int:
        """Device address of a lane's private state."""
        return self.local.address + lane * self.plan.local.lane_bytes

    def output(self, lane: int) -> int:
        """Device address of a lane's default combine output."""
        return self.outputs.address + lane * self.output_lane_bytes

    def poison_peers(self) -> None:
        """End every wait on this rank: it leaves. Not collective."""
        self._tell_peers("Poison", poison_word(self._group.rank, PHASE_LEFT))

    def _tell_peers(self, region: str, word: int) -> None:
        """Store ``word`` in this rank's place of every peer's ``region``."""
        stream = self.device.control_stream  # the others may stand behind a kernel that waits
        value = np.array([word], dtype=np.uint64)
        for peer in range(self._group.size):
            self.device.copy_in(self.heap.address(region, rank=peer) + 8 * self.rank, value, stream)
        stream.synchronize()

    def close(self) -> None:
        """Free everything, last allocated first. Idempotent."""
        self._resources.close()
