"""The network adapter of an exchange: its registered memory, its rings, and where kernels find them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nvep.errors import ArgumentError
from nvep.exchange.memory import ExchangeMemory
from nvep.exchange.plan import Plan
from nvep.group import RankGroup
from nvep.nic import Nic
from nvep.nic.layouts import NETWORK_STATE
from nvep.nic.soft import SoftNic, SoftNicModel
from nvep.nic.soft.model import ENGINE_SHAPES
from nvep.symmetric.layout import Layout
from nvep.transports import TRANSPORTS
from nvep.transports.network import NetworkTransport

NicChoice = SoftNicModel | Callable[[RankGroup], SoftNic]
"""A model for the emulated adapter, or what makes an adapter of the group (collectively)."""


def open_network(group: RankGroup, plan: Plan, memory: ExchangeMemory, nic: NicChoice | None) -> SoftNic | None:
    """Create the adapter that ``plan``'s transport posts to (collective); None where it needs none.

    Registers the symmetric heap, this rank's private memory and the signal words, in the order that
    ``nvep_kernels/transports/network_parts.cuh`` names.

    Raises
    ------
    ArgumentError
        A model for a transport without an adapter, or more signal words than descriptors can name.
    """
    transport = TRANSPORTS[plan.config.transport]
    if not isinstance(transport, NetworkTransport):
        if nic is not None:
            raise ArgumentError("nic", nic, f"None for transport {transport.name}")
        return None
    adapter = nic(group) if callable(nic) else SoftNic(group, nic)
    try:
        group.together(lambda: _require_room(adapter, group))
        _register(adapter, group, plan, memory)
        words = plan.heap.region("Signals").nbytes // 8
        if words > 1 << 16:
            raise ArgumentError("queues", plan.config.queues, f"at most 65536 signal words, not {words}")
        rings = adapter.create_rings(transport.rings(plan.config, group.size), signals=2, sink=words - 1)
        group.together(lambda: _tell_lanes(plan, memory, rings, adapter.alarm_address))
    except BaseException:
        adapter.close()
        raise
    return adapter


def _require_room(nic: SoftNic, group: RankGroup) -> None:
    """Exchange kernels leave room for the engine's usual shape."""
    most = ENGINE_SHAPES[group.device.kind].blocks
    if not group.device.emulated and nic.engine.shape.blocks > most:
        raise ArgumentError("blocks", nic.engine.shape.blocks, f"at most {most} for the adapter of an exchange")


def _register(nic: Nic, group: RankGroup, plan: Plan, memory: ExchangeMemory) -> None:
    heap: Layout = plan.heap
    nic.register(memory.heap.peer_bases, heap.nbytes)
    own = [memory.local.address if rank == group.rank else 0 for rank in range(group.size)]
    nic.register(own, plan.local.nbytes)
    signals = [base + heap.offset("Signals") for base in memory.heap.peer_bases]
    nic.register(signals, heap.region("Signals").nbytes, ordered=True)


def _tell_lanes(plan: Plan, memory: ExchangeMemory, rings: int, alarm: int) -> None:
    state = np.frombuffer(bytes(NETWORK_STATE.new(rings=rings, alarm=alarm)), dtype=np.uint8)
    stream = memory.device.default_stream
    for lane in range(plan.config.lanes):
        memory.device.copy_in(memory.lane_local(lane) + plan.local.offset("Network"), state, stream)
    stream.synchronize()
