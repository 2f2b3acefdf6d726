"""Structs of the soft NIC's kernel: the engine's own state, which no producer sees."""

from __future__ import annotations

from functools import lru_cache

from nvep.nic.layouts import ring_prelude
from nvep.runtime.arguments import ArgumentStruct, Field

# One rank's adapter.
PORT = ArgumentStruct(
    "Port",
    [
        Field("regions", "u64"),  # Region[region_count]
        Field("alarm", "u64"),
        Field("line", "u64"),  # word: when the modelled line is free again
        Field("region_count", "u32"),
        Field("rank", "u32"),
        Field("ranks", "u32"),
        Field("signal_handle", "u32"),
    ],
)
# One ring, as the block that serves it keeps it between batches and between launches.
ENGINE_RING = ArgumentStruct(
    "EngineRing",
    [
        Field("ring", "u64"),
        Field("port", "u64"),
        Field("pending", "u64"),  # Pending[capacity]
        Field("next", "u64"),  # descriptor to take next
        Field("available", "u64"),  # send queues: the doorbell said so
        Field("head", "u64"),  # oldest pending event
        Field("tail", "u64"),
        Field("descriptors", "u64"),
        Field("messages", "u64"),
        Field("bytes", "u64"),
        Field("batches", "u64"),
        Field("doorbells", "u64"),
        Field("retries", "u64"),  # batches put off because something had no room
        Field("attempts", "u64"),
        Field("errors", "u64"),
        Field("failed", "u32"),  # once set, nothing more is executed
        Field("unused", "u32"),
    ],
)
# What becomes visible later than its bytes: signals, completions, counts.
PENDING = ArgumentStruct(
    "Pending",
    [
        Field("due", "u64"),
        Field("address", "u64"),
        Field("value", "u64"),
        Field("kind", "u32"),
        Field("peer", "u32"),
        Field("bytes", "u32"),
        Field("syndrome", "u32"),  # 0: it went well
    ],
)
# In memory that the host reads and writes.
CONTROL = ArgumentStruct(
    "Control",
    [
        Field("wake", "u64"),
        Field("stop", "u64"),
        Field("state", "u64"),
        Field("unused", "u64"),
    ],
)
STOP_NOW, STOP_WHEN_IDLE = 1, 2  # Control.stop
STATE_RUNNING, STATE_LEAVING = 1, 2  # low bits of Control.state, below the number of the launch
# Shared by the blocks of the engine.
ENGINE_STATE = ArgumentStruct("EngineState", [Field("activity", "u64"), Field("ended", "u64")])
SOFT_NIC_ARGUMENTS = ArgumentStruct(
    "SoftNicArguments",
    [
        Field("rings", "u64"),  # EngineRing[ring_count]
        Field("control", "u64"),
        Field("state", "u64"),
        Field("idle_ns", "u64"),
        Field("seed", "u64"),  # of injected trouble and of the order of what has none
        Field("fail_index", "u64"),  # descriptor that fails, of ring number `fail_number`; counted from 1, 0: none
        Field("fail_number", "u32"),
        Field("ring_count", "u32"),
        Field("launch", "u32"),
        Field("capacity", "u32"),  # pending events of a ring, a power of two
        Field("latency_ns", "u32"),
        Field("ps_per_byte", "u32"),
        Field("message_ns", "u32"),
        Field("doorbell_ns", "u32"),
        Field("busy_odds", "u32"),  # of 1024, that a batch is put off
        Field("reorder", "u32"),
    ],
)
_CONSTANTS = {
    "kStopNow": STOP_NOW,
    "kStopWhenIdle": STOP_WHEN_IDLE,
    "kStateRunning": STATE_RUNNING,
    "kStateLeaving": STATE_LEAVING,
}


@lru_cache
def engine_prelude() -> str:
    """C++ of the rings and of the engine's own structs."""
    constants = "\n".join(f"constexpr u64 {name} = {value};" for name, value in _CONSTANTS.items())
    structs = "\n".join(s.cpp() for s in (PORT, ENGINE_RING, PENDING, CONTROL, ENGINE_STATE))
    return f"{ring_prelude()}namespace nvep {{\n{constants}\n{structs}\n}}  // namespace nvep\n"
