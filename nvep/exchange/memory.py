"""Everything an exchange owns on its device, freed together."""

from __future__ import annotations

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
        completed = (config.first_epoch - 1) % _WORD
        counters = COUNTERS.new(completed=completed, dispatched=completed)
        for lane in range(config.lanes):
            address = self.local.address + self.plan.local.offset("Counters", lane)
            device.copy_in(address, np.frombuffer(bytes(counters), dtype=np.uint8), stream)
        stream.synchronize()

    def _initialise(self, heap: SymmetricHeap) -> None:
        stream = self.device.default_stream
        for lane in range(self.plan.config.lanes):
            for region, values in self.plan.initial_words().items():
                self.device.copy_in(heap.address(region, lane=lane), values, stream)
            for region, byte in self.plan.filled_regions().items():
                self.device.fill(heap.address(region, lane=lane), byte, heap.layout.region(region).nbytes, stream)
        stream.synchronize()

    def lane_local(self, lane: int) -> int:
        """Device address of a lane's private state."""
        return self.local.address + lane * self.plan.local.lane_bytes

    def output(self, lane: int) -> int:
        """Device address of a lane's default combine output."""
        return self.outputs.address + lane * self.output_lane_bytes

    def poison_peers(self) -> None:
        """End every wait on this rank: it leaves. Not collective."""
        rank, stream = self._group.rank, self.device.create_stream()
        word = np.array([poison_word(rank, PHASE_LEFT)], dtype=np.uint64)
        for peer in range(self._group.size):
            self.device.copy_in(self.heap.address("Poison", rank=peer), word, stream)
        stream.synchronize()

    def close(self) -> None:
        """Free everything, last allocated first. Idempotent."""
        self._resources.close()
