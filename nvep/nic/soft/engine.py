"""The kernel that plays the adapters of all local ranks of one device: tables, launches, and when it leaves."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from nvep.errors import ArgumentError
from nvep.nic.dump import RingDump
from nvep.nic.live import LiveRings
from nvep.nic.soft.layouts import (
    CONTROL,
    ENGINE_RING,
    ENGINE_STATE,
    PENDING,
    SOFT_NIC_ARGUMENTS,
    STATE_LEAVING,
    STOP_NOW,
    engine_prelude,
)
from nvep.nic.soft.model import ENGINE_SHAPES, SoftNicModel
from nvep.nic.soft.ready_thread import ReadyQueue, ReadyThread
from nvep.runtime.device import Device, Event, LaunchShape, Memory, Stream
from nvep.runtime.source import KernelSource

MAX_RINGS = 4096
_WATCH_PERIOD_S = 0.05
_RING_BYTES = ctypes.sizeof(ENGINE_RING.ctype)
_EVENT_BYTES = ctypes.sizeof(PENDING.ctype)


def soft_nic_source() -> KernelSource:
    """The engine's kernel."""
    return KernelSource("soft_nic", SOFT_NIC_ARGUMENTS, engine_prelude())


class RingOwner(Protocol):
    """What an engine asks of a rank whose rings it executes."""

    def dump(self) -> list[RingDump]:
        """The rings' memory."""

    def behind(self) -> bool:
        """Is something posted that was not executed?"""


class SoftEngine:
    """One per device and process; ranks attach their rings to it.

    Tables change only while the kernel is away: it keeps everything in memory, so it can leave between any two batches.

    Parameters
    ----------
    device : Device
        Opened for the engine, which closes it: it outlives any rank's own.
    model : SoftNicModel
    """

    def __init__(self, device: Device, model: SoftNicModel) -> None:
        self.model = model
        self._lock = threading.RLock()
        self._holders = 0
        self._device = device
        self._stream, self._close_stream = _urgent_stream(self._device)
        self._reader = self._device.create_stream()
        self._kernel = self._device.load(soft_nic_source())
        default = ENGINE_SHAPES[device.kind]
        self.shape = LaunchShape(model.blocks or default.blocks, model.threads or default.threads)
        resident = self._device.resident_blocks(self._kernel, self.shape.threads)
        if self.shape.blocks > resident:
            raise ArgumentError("blocks", self.shape.blocks, f"at most {resident}, what is resident at once")
        self._control_memory = self._device.allocate_host(ctypes.sizeof(CONTROL.ctype))
        self._control = self._control_memory.view(np.uint64, (ctypes.sizeof(CONTROL.ctype) // 8,))
        self._state = self._device.allocate(ctypes.sizeof(ENGINE_STATE.ctype))
        self._table = self._device.allocate(MAX_RINGS * _RING_BYTES)
        self._events: dict[int, Memory] = {}
        self._count = 0
        self._launch = 0
        self._ended: Event | None = None
        self._owners: dict[int, RingOwner] = {}
        self._closing = threading.Event()
        self._watchdog: threading.Thread | None = None
        self._live = LiveRings(self._all_dumps) if model.live else None
        self._ready_thread: ReadyThread | None = None

    # Ranks

    def retain(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Close the engine with its last holder."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._close()

    def attach(self, rings: Sequence[int], port: int, owner: RingOwner) -> list[int]:
        """Execute rings from the next wake on.

        Parameters
        ----------
        rings : sequence of int
            Device addresses of ``Ring``.
        port : int
            Device address of their rank's ``Port``.
        owner : RingOwner
            Who knows what is in them.

        Returns
        -------
        list of int
            Positions in the engine's table, for `detach`.
        """
        with self._away():
            free = [i for i in range(MAX_RINGS) if i not in self._events][: len(rings)]
            if len(free) < len(rings):
                raise ArgumentError("specs", len(rings), f"{len(free)} rings: an engine has {MAX_RINGS}")
            for position, ring in zip(free, rings):
                events = self._events[position] = self._device.allocate(self.model.pending * _EVENT_BYTES)
                self._write(position, ENGINE_RING.new(ring=ring, port=port, pending=events.address))
                self._owners[position] = owner
            self._count = max(self._count, *(position + 1 for position in free), 0)
            return free

    def detach(self, positions: Sequence[int]) -> None:
        """Forget rings; when this returns, the kernel touches them no more."""
        with self._away():
            for position in positions:
                self._write(position, ENGINE_RING.new())
                self._events.pop(position).free()
                self._owners.pop(position)

    @contextmanager
    def _away(self) -> Iterator[None]:
        """The kernel is not there; afterwards it is again if it was: other ranks may be waiting for it."""
        with self._lock:
            running = self.running
            self.pause()
            try:
                yield
            finally:
                if running:
                    self._start()

    def _write(self, position: int, ring: ctypes.Structure) -> None:
        stream = self._device.default_stream
        self._device.copy_in(self._table.address + position * _RING_BYTES, np.frombuffer(bytes(ring), np.uint8), stream)
        stream.synchronize()

    def counts(self, positions: Sequence[int]) -> list[ctypes.Structure]:
        """``EngineRing`` of rings, as they are now."""
        raw = np.empty(max(1, self._count) * _RING_BYTES, np.uint8)
        self._device.copy_out(raw, self._table.address, self._reader)
        table = (ENGINE_RING.ctype * max(1, self._count)).from_buffer_copy(raw.tobytes())
        return [table[position] for position in positions]

    def _all_dumps(self) -> list[RingDump]:
        with self._lock:  # a rank detaches before it frees what is read here
            dumps = [dump for owner in dict.fromkeys(self._owners.values()) for dump in owner.dump()]
        return sorted(dumps, key=lambda dump: dump.number)

    # Free Flow

    def add_ready_queues(self, queues: list[ReadyQueue]) -> None:
        """Have the host thread ring for send queues; it is compiled for the first."""
        with self._lock:
            if self._ready_thread is None:
                self._ready_thread = ReadyThread()
        self._ready_thread.add(queues)

    def remove_ready_queues(self, numbers: list[int]) -> None:
        """Returns once the host thread does not touch them any more."""
        if self._ready_thread is not None:
            self._ready_thread.remove(numbers)

    @property
    def heartbeat(self) -> int:
        """Scans of the host thread so far; 0 without one."""
        return 0 if self._ready_thread is None else self._ready_thread.heartbeat

    # The kernel

    @property
    def running(self) -> bool:
        """Is a launch on its way or on the device?"""
        return self._ended is not None and not self._ended.done

    def wake(self) -> None:
        """Launch the kernel unless it is there and stays. Never waits for it."""
        with self._lock:
            self._control[CONTROL.ctype.wake.offset // 8] += 1
            self._watch()
        with self._lock:  # a full barrier between that store and the load below; see nic/engine.cuh
            state = int(self._control[CONTROL.ctype.state.offset // 8])
            if not self.running or state == (self._launch << 2 | STATE_LEAVING):
                self._start()

    def _watch(self) -> None:
        """Start what brings the kernel back if something is posted after it left: a phase that its stream held up."""
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._bring_back, name="nvep-soft-nic", daemon=True)
            self._watchdog.start()

    def _bring_back(self) -> None:
        while not self._closing.wait(_WATCH_PERIOD_S):
            if self.running:
                continue
            with self._lock:  # a rank detaches before it frees what is read here
                if not self._closing.is_set() and any(o.behind() for o in dict.fromkeys(self._owners.values())):
                    self.wake()

    def _start(self) -> None:
        model = self.model
        self._launch += 1
        number, index = (0, -1) if model.fail is None else model.fail
        arguments = SOFT_NIC_ARGUMENTS.new(
            rings=self._table.address,
            control=self._control_memory.address,
            state=self._state.address,
            idle_ns=round(model.idle_s * 1e9),
            seed=model.seed,
            fail_number=number,
            fail_index=index + 1,
            ring_count=self._count,
            launch=self._launch,
            capacity=model.pending,
            latency_ns=model.latency_ns,
            ps_per_byte=model.ps_per_byte,
            message_ns=model.message_ns,
            doorbell_ns=model.doorbell_ns,
            busy_odds=model.busy_odds,
            reorder=int(model.reorder),
        )
        self._device.launch(self._kernel, self.shape, arguments, self._stream)
        self._ended = self._stream.record()

    def pause(self) -> None:
        """Make the kernel leave and wait until it has. It comes back with `wake`, or for what is in the rings."""
        with self._lock:
            stop = CONTROL.ctype.stop.offset // 8
            self._control[stop] = STOP_NOW
            self._stream.synchronize()
            self._control[stop] = 0

    def _close(self) -> None:
        self._closing.set()
        if self._watchdog is not None:
            self._watchdog.join()
        if self._live is not None:
            self._live.close()
        if self._ready_thread is not None:
            self._ready_thread.close()
        self.pause()
        for memory in (*self._events.values(), self._table, self._state, self._control_memory):
            memory.free()
        self._close_stream()
        self._device.close()


def _urgent_stream(device: Device) -> tuple[Stream, Callable[[], Any]]:
    """A stream whose kernels go first where there is a choice, and what closes it."""
    if device.emulated:
        return device.create_stream(), lambda: None  # closed with the device
    import cuda.core
    from cuda.bindings import driver

    from nvep.runtime.cuda_calls import check, core_call

    core = cuda.core.Device(device.ordinal)
    core_call("cuCtxSetCurrent", core.set_current)
    _, most = check("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange())
    options = cuda.core.StreamOptions(nonblocking=True, priority=int(most))
    owner = core_call("cuStreamCreateWithPriority", core.create_stream, options=options)
    return device.as_stream(owner), owner.close
