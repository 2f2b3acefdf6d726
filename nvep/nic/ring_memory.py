"""Memory of one rank's rings: which part is the GPU's and which the host's, and the structs that say where it is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nvep.nic.base import RingSpec
from nvep.nic.dump import RingDump
from nvep.nic.layouts import CQE, ENTRY_BYTES, KINDS, RING, RING_STATE
from nvep.runtime.device import Device, HostMemory, Memory

_ALIGNMENT = 256
_WORDS = ENTRY_BYTES // 8
_STATE_BYTES = ctypes.sizeof(RING_STATE.ctype)
_STATE_STRIDE = 128  # a cache line each


@dataclass(frozen=True)
class RingPart:
    """A piece of one of the two allocations."""

    on_host: bool
    offset: int
    nbytes: int


class _Plan:
    def __init__(self) -> None:
        self.sizes = {True: 0, False: 0}

    def place(self, nbytes: int, *, on_host: bool) -> RingPart:
        part = RingPart(on_host, self.sizes[on_host], nbytes)
        self.sizes[on_host] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part


@dataclass(frozen=True)
class RingParts:
    """Where the pieces of one ring are; None for what its kind has not."""

    entries: RingPart
    state: RingPart
    completions: RingPart | None = None
    consumer: RingPart | None = None
    doorbell: RingPart | None = None
    record: RingPart | None = None
    ready: RingPart | None = None
    counters: RingPart | None = None


def _plan_ring(plan: _Plan, spec: RingSpec, placement: str, state: RingPart) -> RingParts:
    """Default: what the GPU rings or posts to is the host's; what it builds at leisure, or polls, is its own.

    What Free Flow's host thread touches is the host's in every placement.
    """
    all_host, all_device = placement == "host", placement == "device"
    entries = spec.depth * ENTRY_BYTES
    if spec.kind == "send_queue":
        bells = not all_device or spec.ready
        return RingParts(
            entries=plan.place(entries, on_host=all_host),
            state=state,
            completions=plan.place(entries, on_host=all_host),
            doorbell=plan.place(8, on_host=bells),
            record=plan.place(8, on_host=bells),
            ready=plan.place(8 * spec.depth, on_host=True) if spec.ready else None,
        )
    return RingParts(
        entries=plan.place(entries, on_host=not all_device),
        state=state,
        consumer=plan.place(8, on_host=all_host),
        counters=plan.place(max(8, 8 * spec.counters), on_host=all_host),
    )


class RingMemory:
    """One rank's rings.

    Parameters
    ----------
    device : Device
        Whose kernels post.
    specs : sequence of RingSpec
    placement : str
        ``"default"``, ``"host"`` or ``"device"``.
    rank : int
        Owner; ring numbers derive from it.
    """

    def __init__(self, device: Device, specs: Sequence[RingSpec], *, placement: str, rank: int) -> None:
        self.specs = tuple(specs)
        self.rank = rank
        self._device = device
        plan = _Plan()
        self._states = plan.place(len(specs) * _STATE_STRIDE, on_host=False)  # together: read in one copy
        states = [RingPart(False, self._states.offset + i * _STATE_STRIDE, _STATE_BYTES) for i in range(len(specs))]
        self.parts = [_plan_ring(plan, spec, placement, state) for spec, state in zip(specs, states)]
        self._alarm = plan.place(8, on_host=True)
        self._table = plan.place(len(specs) * ctypes.sizeof(RING.ctype), on_host=False)
        self._host: HostMemory = device.allocate_host(plan.sizes[True])
        self._local: Memory = device.allocate(plan.sizes[False])
        self._bytes = self._host.view(np.uint8, (plan.sizes[True],))
        self._reader = device.create_stream()  # others may stand behind a kernel that waits

    def number(self, index: int) -> int:
        """Number of ring ``index``, unique among all ranks."""
        return self.rank << 12 | index

    def address(self, part: RingPart | None) -> int:
        """For kernels; 0 for None."""
        if part is None:
            return 0
        return (self._host if part.on_host else self._local).address + part.offset

    def host_address(self, part: RingPart | None) -> int:
        """For host threads, of a part that is the host's."""
        assert part is not None
        assert part.on_host
        return int(self._bytes.ctypes.data) + part.offset

    @property
    def table(self) -> int:
        """Device address of the array of ``Ring``."""
        return self.address(self._table)

    def ring_address(self, index: int) -> int:
        """Device address of one ``Ring``."""
        return self.table + index * ctypes.sizeof(RING.ctype)

    @property
    def alarm_address(self) -> int:
        return self.address(self._alarm)

    @property
    def alarm(self) -> int:
        """Syndrome, ring number and index of the first failure; 0 without one."""
        return int(self._words(self._alarm)[0])

    def write(self, *, keys: int, ranks: int, signals: int, sink: int) -> None:
        """Write the table and the initial completions; waits for it."""
        stream = self._device.default_stream
        table = bytearray()
        for index, (spec, parts) in enumerate(zip(self.specs, self.parts)):
            table += bytes(
                RING.new(
                    **{name: self.address(getattr(parts, name)) for name in parts.__dataclass_fields__},
                    alarm=self.alarm_address,
                    keys=keys,
                    depth=spec.depth,
                    depth_log2=spec.depth.bit_length() - 1,
                    kind=KINDS[spec.kind],
                    number=self.number(index),
                    rank=self.rank,
                    peer=spec.peer or 0,
                    ranks=ranks,
                    counter_count=spec.counters,
                    signal_handle=signals,
                    sink=sink,
                )
            )
            if parts.completions is not None:
                self.store(parts.completions, CQE.encode(opcode=np.full(spec.depth, 0xF)))
        self._device.copy_in(self.table, np.frombuffer(bytes(table), dtype=np.uint8), stream)
        stream.synchronize()

    def store(self, part: RingPart | None, words: np.ndarray, offset: int = 0) -> None:
        """Write words from byte ``offset`` of a part on, and wait for it."""
        assert part is not None
        flat = np.ascontiguousarray(words, dtype=np.uint64).reshape(-1)
        if part.on_host:
            self._words(part)[offset // 8 : offset // 8 + flat.size] = flat
        else:
            self._device.copy_in(self.address(part) + offset, flat, self._reader)
            self._reader.synchronize()

    def _words(self, part: RingPart) -> np.ndarray:
        return self._bytes[part.offset : part.offset + part.nbytes].view(np.uint64)

    def read(self, part: RingPart | None) -> np.ndarray:
        """Words of a part, copied; none for None. Waits for nothing but the copy."""
        if part is None:
            return np.empty(0, np.uint64)
        if part.on_host:
            return self._words(part).copy()
        words = np.empty(part.nbytes // 8, np.uint64)
        self._device.copy_out(words, self.address(part), self._reader)
        return words

    def states(self) -> list[ctypes.Structure]:
        """``RingState`` of every ring."""
        raw = self.read(self._states).tobytes()
        return [RING_STATE.ctype.from_buffer_copy(raw, i * _STATE_STRIDE) for i in range(len(self.specs))]

    def dump(self, engine: str) -> list[RingDump]:
        """Every ring, as it is now."""
        return [self._dump(index, engine) for index in range(len(self.specs))]

    def _dump(self, index: int, engine: str) -> RingDump:
        spec, parts = self.specs[index], self.parts[index]
        raw = RING_STATE.ctype.from_buffer_copy(self.read(parts.state).tobytes())
        state = {"reserved": int(raw.reserved)}
        if spec.kind == "send_queue":
            doorbell = self.read(parts.doorbell)
            state |= {"ready": int(raw.ready), "posted": int(raw.posted), "doorbell": int(doorbell[0])}
        else:
            state["consumer"] = int(self.read(parts.consumer)[0])
        return RingDump(
            kind=spec.kind,
            engine=engine,
            rank=self.rank,
            number=self.number(index),
            depth=spec.depth,
            peer=spec.peer,
            state=state,
            entries=self.read(parts.entries).reshape(-1, _WORDS),
            completions=self.read(parts.completions).reshape(-1, _WORDS),
            ready_words=self.read(parts.ready),
        )

    def free(self) -> None:
        """Idempotent."""
        self._bytes = np.empty(0, np.uint8)
        self._host.free()
        self._local.free()
