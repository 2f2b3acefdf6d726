"""A rank's soft NIC: registered memory, rings, and the part of the engine that is its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from nvep.errors import ArgumentError, ExchangeClosed, NicError, NicTimeout
from nvep.group import RankGroup
from nvep.group.placement import physical_device
from nvep.nic.base import Nic, NicStatistics, RingSpec
from nvep.nic.decode import syndrome_text
from nvep.nic.dump import RingDump
from nvep.nic.layouts import REGION
from nvep.nic.ring_memory import RingMemory
from nvep.nic.soft.engine import SoftEngine
from nvep.nic.soft.layouts import PORT
from nvep.nic.soft.model import LABEL, SoftNicModel
from nvep.nic.soft.ready_thread import ReadyQueue
from nvep.runtime import open_device
from nvep.runtime.device import Memory

LOCAL_KEY_TAG = 0xFF
_DRAIN_PERIOD_S = 0.0005


class SoftNic(Nic):
    """Executes rings between ranks of one host by moving bytes itself: emulated, never a measurement of a network.

    Construction is collective. Ranks of one process that share a device share one engine.

    Parameters
    ----------
    group : RankGroup
        Ranks that map one another's memory.
    model : SoftNicModel, optional
        What it pretends to be; equal on all ranks.
    engine : SoftEngine, optional
        Whatever executes this rank's rings; default: one for all ranks of this process on the device.

    Raises
    ------
    ConfigMismatch
        Ranks ask for different models.
    """

    label = LABEL

    def __init__(
        self, group: RankGroup, model: SoftNicModel | None = None, *, engine: SoftEngine | None = None
    ) -> None:
        self.group = group
        self.model = model or SoftNicModel()
        self._regions: list[tuple[tuple[int, ...], int, bool]] = []
        self._resources = ExitStack()
        self._attachments = ExitStack()
        self._memory: RingMemory | None = None
        self._positions: list[int] = []
        self._closed = False
        group.agree("the model of the soft NIC", self.model)
        self._engine = engine or self._find_engine()
        self._engine.retain()
        self._resources.callback(self._engine.release)

    def _find_engine(self) -> SoftEngine:
        group, device = self.group, self.group.device

        def create() -> SoftEngine:
            return SoftEngine(open_device(device.kind, device.ordinal), self.model)

        if not group.in_process:
            return group.together(create)
        places = group.allgather(physical_device(device))
        leader = places.index(places[group.rank])
        made = group.together(lambda: create() if leader == group.rank else None)
        engines: list[SoftEngine | None] = group.allgather(made)
        engine = engines[leader]
        assert engine is not None
        return engine

    def register(self, bases: Sequence[int], nbytes: int, *, ordered: bool = False) -> int:
        if self._memory is not None:
            raise ArgumentError("bases", list(bases), "memory that is registered before rings are created")
        if len(bases) != self.group.size or bases[self.group.rank] == 0:
            raise ArgumentError("bases", list(bases), f"{self.group.size} addresses, that of this rank not 0")
        if nbytes <= 0 or nbytes % 4 or any(base % 8 for base in bases):
            raise ArgumentError("nbytes", nbytes, "a positive multiple of 4, at addresses that are multiples of 8")
        self._regions.append((tuple(bases), nbytes, ordered))
        return len(self._regions) - 1

    def create_rings(self, specs: Sequence[RingSpec], *, signals: int, sink: int = 0) -> int:
        if self._memory is not None or self._closed:
            raise ArgumentError("specs", len(specs), "one call per adapter, before it is closed")
        for spec in specs:
            if spec.peer is not None and not 0 <= spec.peer < self.group.size:
                raise ArgumentError("peer", spec.peer, f"0 to {self.group.size - 1}")
        shared = [(nbytes, ordered) for _, nbytes, ordered in self._regions]
        self.group.agree("registered memory", (shared, signals))
        if not (0 <= signals < len(shared) and shared[signals][1] and 0 <= 8 * sink < shared[signals][0]):
            raise ArgumentError("signals", signals, "the handle of ordered memory with room for the sink")
        return self.group.together(lambda: self._create(specs, signals, sink))

    def _create(self, specs: Sequence[RingSpec], signals: int, sink: int) -> int:
        device, rank, ranks = self.group.device, self.group.rank, self.group.size
        memory = RingMemory(device, specs, placement=self.model.placement, rank=rank)
        self._resources.callback(memory.free)
        keys = self._upload(soft_keys(len(self._regions), ranks))
        memory.write(keys=keys.address, ranks=ranks, signals=signals, sink=sink)
        port = self._upload(self._port(memory, signals))
        rings = [memory.ring_address(i) for i in range(len(specs))]
        self._memory = memory
        self._positions = self._engine.attach(rings, port.address, self)
        self._attachments.callback(self._engine.detach, self._positions)
        self._watch_ready_words(memory)
        return memory.table

    def _watch_ready_words(self, memory: RingMemory) -> None:
        queues = []
        for index, (spec, parts) in enumerate(zip(memory.specs, memory.parts)):
            if spec.ready:
                ready, doorbell, record = map(memory.host_address, (parts.ready, parts.doorbell, parts.record))
                queues.append(ReadyQueue(ready, doorbell, record, depth=spec.depth, number=memory.number(index)))
        if queues:
            self._engine.add_ready_queues(queues)
            self._attachments.callback(self._engine.remove_ready_queues, [queue.number for queue in queues])

    def _port(self, memory: RingMemory, signals: int) -> np.ndarray:
        regions = bytearray()
        for handle, (bases, nbytes, ordered) in enumerate(self._regions):
            table = self._upload(np.array(bases, dtype=np.uint64))
            regions += bytes(REGION.new(bases=table.address, bytes=nbytes, ordered=int(ordered), key=handle << 8))
        line = self._upload(np.zeros(1, np.uint64))
        port = PORT.new(
            regions=self._upload(np.frombuffer(bytes(regions), np.uint8)).address,
            alarm=memory.alarm_address,
            line=line.address,
            region_count=len(self._regions),
            rank=self.group.rank,
            ranks=self.group.size,
            signal_handle=signals,
        )
        return np.frombuffer(bytes(port), np.uint8)

    def _upload(self, array: np.ndarray) -> Memory:
        device = self.group.device
        memory = device.allocate(array.nbytes)
        self._resources.callback(memory.free)
        device.copy_in(memory.address, array, device.default_stream)
        device.default_stream.synchronize()
        return memory

    @property
    def alarm_address(self) -> int:
        """Word, in memory the host reads, that is not 0 once an entry of this rank failed."""
        return self._open_memory().alarm_address

    @property
    def engine(self) -> SoftEngine:
        """Who executes the rings."""
        return self._engine

    @property
    def rings(self) -> RingMemory:
        """Memory of this rank's rings."""
        return self._open_memory()

    def _open_memory(self) -> RingMemory:
        if self._memory is None or self._closed:
            raise ExchangeClosed("the adapter has no rings: none were created, or it is closed")
        return self._memory

    def wake(self) -> None:
        if self._closed:
            raise ExchangeClosed("the adapter is closed")
        self._engine.wake()

    def behind(self) -> bool:
        """Is something posted that the engine has not taken yet?"""
        counts, states = self._engine.counts(self._positions), self._open_memory().states()
        return any(int(count.next) < int(state.reserved) for count, state in zip(counts, states))

    def drain(self, seconds: float) -> bool:
        memory, end = self._open_memory(), time.monotonic() + seconds
        posted = [int(state.reserved) for state in memory.states()]
        while True:
            counts = self._engine.counts(self._positions)
            if all(int(c.next) >= p and c.head == c.tail for c, p in zip(counts, posted)):
                return True
            if time.monotonic() > end:
                return False
            self.wake()
            time.sleep(_DRAIN_PERIOD_S)

    @property
    def running(self) -> bool:
        """Is the engine on the device, or on its way?"""
        return self._engine.running

    @property
    def heartbeat(self) -> int:
        """Scans of Free Flow's host thread so far; 0 without one."""
        return self._engine.heartbeat

    def pause(self) -> None:
        """Take the engine, of all ranks that share it, off the device: until `wake`, or until it is needed."""
        self._engine.pause()

    def error(self) -> NicError | None:
        alarm = self._open_memory().alarm
        if not alarm:
            return None
        number, index = alarm >> 32 & 0xFFFFFF, alarm & 0xFFFFFFFF
        return NicError(self.group.rank, number, index, syndrome_text(alarm >> 56))

    def check(self) -> None:
        memory, failed = self._open_memory(), self.error()
        if failed is not None:
            raise failed
        for ring, state in enumerate(memory.states()):
            if state.expired:
                raise NicTimeout(self.group.rank, memory.number(ring), int(state.expired))

    def statistics(self) -> NicStatistics:
        memory = self._open_memory()
        counts, states = self._engine.counts(self._positions), memory.states()
        fields = ("descriptors", "messages", "bytes", "batches", "doorbells", "retries", "errors")
        return NicStatistics(
            **{name: sum(int(getattr(c, name)) for c in counts) for name in fields},
            stalls=sum(int(s.stalls) for s in states),
            stalled_ns=sum(int(s.stalled_ns) for s in states),
        )

    def dump(self) -> list[RingDump]:
        return self._open_memory().dump(self.label)

    def detach(self) -> None:
        self._attachments.close()

    def close(self) -> None:
        if not self._closed:
            self._attachments.close()
            self._resources.close()
            self._closed = True


def soft_keys(handles: int, ranks: int) -> np.ndarray:
    """Keys of registered memory: the handle, then a tag that says whose memory the key opens.

    Returns
    -------
    numpy.ndarray
        uint32, shape ``[handles, 1 + ranks]``: the local key, then the one for each rank's memory.
    """
    tags = np.concatenate([[LOCAL_KEY_TAG], np.arange(ranks) % LOCAL_KEY_TAG]).astype(np.uint32)
    keys: np.ndarray = np.arange(handles, dtype=np.uint32)[:, None] << np.uint32(8) | tags
    return keys
