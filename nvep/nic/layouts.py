"""Formats of send queues and descriptor rings, and the structs by which kernels and engines find them.

Declared here once; ``ring_prelude`` writes the C++ that ``nvep_kernels/transports`` and ``nvep_kernels/nic`` use.
"""

from __future__ import annotations

from functools import lru_cache

from nvep.nic.words import Bits, Descriptor
from nvep.runtime.arguments import ArgumentStruct, Field


def _big(name: str, byte: int, bits: int, shift: int = 0, container: int = 4) -> Bits:
    return Bits(name, byte, bits, shift, container, big_endian=True)


# Work-queue entries: 64 bytes, segments of 16, big-endian, as mlx5 adapters read them.
WQE_CONTROL = Descriptor(
    "WqeControl",
    16,
    [
        _big("opcode", 0, 8),
        _big("index", 0, 16, 8),
        _big("modifier", 0, 8, 24),
        _big("segments", 4, 6),  # of 16 bytes, this one included
        _big("number", 4, 24, 8),
        Bits("signature", 8, 8, container=1),
        Bits("flags", 11, 8, container=1),
        _big("immediate", 12, 32),
    ],
)
WQE_REMOTE = Descriptor("WqeRemote", 16, [_big("address", 0, 64, container=8), _big("key", 8, 32)])
WQE_DATA = Descriptor("WqeData", 16, [_big("bytes", 0, 31), _big("key", 4, 32), _big("address", 8, 64, container=8)])
# Inline data follow their 4-byte header, up to the end of the entry.
WQE_INLINE = Descriptor("WqeInline", 8, [_big("bytes", 0, 31), _big("is_inline", 0, 1, 31), Bits("first", 4, 32, 0, 4)])
WQE_ATOMIC = Descriptor("WqeAtomic", 16, [_big("operand", 0, 64, container=8), _big("compare", 8, 64, container=8)])
# What a doorbell is told: the producer's index and the queue.
DOORBELL = Descriptor("Doorbell", 8, [_big("index", 0, 16, 8), _big("number", 4, 24, 8)])
CQE = Descriptor(
    "Cqe",
    64,
    [
        _big("bytes", 44, 32),
        _big("timestamp", 48, 64, container=8),
        Bits("vendor_syndrome", 54, 8, container=1),  # in errors, over the timestamp's last bytes
        Bits("syndrome", 55, 8, container=1),
        _big("number", 56, 24),
        _big("wqe_opcode", 56, 8, 24),  # in errors
        _big("index", 60, 16, container=2),
        Bits("signature", 62, 8, container=1),
        Bits("owner", 63, 1, container=1),
        Bits("opcode", 63, 4, 4, container=1),
    ],
)

# GPU-friendly descriptors: bit 0 of every 8-byte segment is the owner bit.
_OWNER = [Bits(f"owner{i}", 8 * i, 1) for i in range(8)]
_HEADER = [Bits("op", 0, 7, 1), Bits("flags", 0, 8, 8), Bits("counter", 0, 16, 16)]
_SIZE = Bits("bytes", 8, 32, 32)
_SOURCE = [Bits("source_handle", 24, 31, 1), Bits("target_handle", 16, 31, 1)]
GFD = Descriptor(
    "Gfd",
    64,
    [
        *_OWNER,
        *_HEADER,
        Bits("signal", 0, 16, 32),
        Bits("peer", 8, 31, 1),
        _SIZE,
        *_SOURCE,
        Bits("value_low", 16, 32, 32),
        Bits("value_high", 24, 32, 32),
        Bits("target_offset", 32, 63, 1),
        Bits("source_offset", 40, 63, 1),
        Bits("inline_low", 48, 32, 32),
        Bits("inline_high", 56, 32, 32),
    ],
)
# Fan-out of one source to many targets: a head, and continuations for the targets that it has no room for.
HEAD_TARGETS, MORE_TARGETS, MAX_TARGETS = 4, 7, 64
FANOUT_HEAD = Descriptor(
    "FanoutHead",
    64,
    [
        *_OWNER,
        *_HEADER,
        Bits("targets", 0, 8, 32),
        _SIZE,
        *_SOURCE,
        Bits("source_offset_low", 16, 32, 32),
        Bits("source_offset_high", 24, 31, 32),
        *(Bits(f"peer{i}", 32 + 8 * i, 15, 1) for i in range(HEAD_TARGETS)),
        *(Bits(f"offset{i}", 32 + 8 * i, 48, 16) for i in range(HEAD_TARGETS)),
    ],
)
FANOUT_MORE = Descriptor(
    "FanoutMore",
    64,
    [
        *_OWNER,
        *_HEADER,
        Bits("targets", 0, 8, 32),
        Bits("position", 0, 8, 40),  # among the continuations of its head
        *(Bits(f"peer{i}", 8 + 8 * i, 15, 1) for i in range(MORE_TARGETS)),
        *(Bits(f"offset{i}", 8 + 8 * i, 48, 16) for i in range(MORE_TARGETS)),
    ],
)
# One target within a fan-out, wherever its segment is.
FANOUT_TARGET = Descriptor("FanoutTarget", 8, [Bits("owner", 0, 1), Bits("peer", 0, 15, 1), Bits("offset", 0, 48, 16)])

DESCRIPTORS = (
    WQE_CONTROL, WQE_REMOTE, WQE_DATA, WQE_INLINE, WQE_ATOMIC, DOORBELL, CQE, GFD, FANOUT_HEAD, FANOUT_MORE,
    FANOUT_TARGET,
)  # fmt: skip

ENTRY_BYTES = 64
# What a fan-out of `MAX_TARGETS` takes; a ring holds four of them.
LARGEST_DESCRIPTOR = 1 + -(-(MAX_TARGETS - HEAD_TARGETS) // MORE_TARGETS)
SMALLEST_RING = 64
LARGEST_QUEUE = 1 << 14  # a completion's 16-bit index must tell this lap from the last one

WQE_OPCODES = {"nop": 0x00, "rdma_write": 0x08, "atomic_fetch_add": 0x12}
CQE_OPCODES = {"requester": 0x0, "requester_error": 0xD, "invalid": 0xF}
SYNDROMES = {"local_length": 0x01, "local_operation": 0x02, "local_protection": 0x04, "flushed": 0x05,
             "remote_access": 0x13}  # fmt: skip
GFD_OPS = {"put": 1, "put_signal": 2, "inline_put": 3, "signal": 4, "flush": 5, "reset": 6, "fanout": 7, "more": 8}
KINDS = {"send_queue": 1, "gfd": 2}

_CONSTANTS = {
    "kEntryBytes": ENTRY_BYTES,
    "kHeadTargets": HEAD_TARGETS,
    "kMoreTargets": MORE_TARGETS,
    "kMaxFanout": MAX_TARGETS,
    "kWqeNop": WQE_OPCODES["nop"],
    "kWqeWrite": WQE_OPCODES["rdma_write"],
    "kWqeAdd": WQE_OPCODES["atomic_fetch_add"],
    "kWqeSignalled": 0x08,  # control segment: asks for a completion
    "kCqeDone": CQE_OPCODES["requester"],
    "kCqeFailed": CQE_OPCODES["requester_error"],
    "kCqeInvalid": CQE_OPCODES["invalid"],
    **{f"kSyndrome{''.join(part.title() for part in name.split('_'))}": code for name, code in SYNDROMES.items()},
    **{f"kOp{''.join(part.title() for part in name.split('_'))}": code for name, code in GFD_OPS.items()},
    "kFlagSet": 1,  # the signal is stored, not added
    "kFlagCounted": 2,  # the counter counts this operation
    "kKindSendQueue": KINDS["send_queue"],
    "kKindGfd": KINDS["gfd"],
    "kLocalKeyTag": 0xFF,  # low byte of a local key; of a remote one, the peer's number modulo 255
}
COUNTER_ERROR = 1 << 63  # of a counter word


def ring_owner(index: int, depth: int) -> int:
    """Owner bit of the descriptor at absolute ``index``: 1 in the first lap, so that zeroed memory holds none."""
    return (index // depth + 1) & 1


# Where a ring is: what producers need to know. Lives in the memory of the device whose kernels post to it.
RING = ArgumentStruct(
    "Ring",
    [
        Field("entries", "u64"),  # depth × 64 bytes
        Field("completions", "u64"),  # send queues: depth × 64 bytes
        Field("consumer", "u64"),  # descriptor rings: word with the index up to which entries and sources are free
        Field("doorbell", "u64"),  # send queues: 8-byte register
        Field("record", "u64"),  # send queues: two 4-byte words, receive and send
        Field("ready", "u64"),  # send queues of Free Flow: depth × 8 bytes
        Field("state", "u64"),  # RingState
        Field("alarm", "u64"),  # word that is not 0 once something of this rank failed
        Field("counters", "u64"),  # descriptor rings: words that count completed operations
        Field("keys", "u64"),  # send queues: u32[handles][1 + ranks], local key first
        Field("depth", "u32"),
        Field("depth_log2", "u32"),
        Field("kind", "u32"),
        Field("number", "u32"),
        Field("rank", "u32"),
        Field("peer", "u32"),  # of a send queue
        Field("ranks", "u32"),
        Field("counter_count", "u32"),
        Field("signal_handle", "u32"),
        Field("sink", "u32"),  # local signal word that takes what an atomic fetched
    ],
)
# Shared by the producers of a ring, in GPU memory.
RING_STATE = ArgumentStruct(
    "RingState",
    [
        Field("reserved", "u64"),  # next index to hand out
        Field("ready", "u64"),  # send queues: entries below are built
        Field("posted", "u64"),  # send queues: the doorbell was rung up to here
        Field("cached", "u64"),  # consumer index as last seen
        Field("stalled_ns", "u64"),  # time that producers waited for room
        Field("stalls", "u64"),
        Field("expired", "u64"),  # waits that were given up
        Field("lock", "u32"),
        Field("unused", "u32"),
    ],
)
# Registered memory of one rank, as the engine of this process maps it.
REGION = ArgumentStruct(
    "Region",
    [
        Field("bases", "u64"),  # u64[ranks]; 0 where only the owner may be reached
        Field("bytes", "u64"),
        Field("ordered", "u32"),  # writes come after all earlier ones of their queue
        Field("key", "u32"),
    ],
)
# What the host thread of Free Flow knows of a send queue.
READY_QUEUE = ArgumentStruct(
    "ReadyQueue",
    [
        Field("ready", "u64"),
        Field("doorbell", "u64"),
        Field("record", "u64"),
        Field("next", "u64"),
        Field("depth", "u32"),
        Field("number", "u32"),
    ],
)
# What exchange kernels find in a lane's private memory.
NETWORK_STATE = ArgumentStruct("NetworkState", [Field("rings", "u64"), Field("alarm", "u64")])
STRUCTS = (RING, RING_STATE, REGION, READY_QUEUE, NETWORK_STATE)


@lru_cache
def ring_prelude() -> str:
    """C++ of everything declared here, for the prelude of a kernel."""
    constants = "\n".join(f"constexpr u32 {name} = {value};" for name, value in _CONSTANTS.items())
    descriptors = "\n".join(d.cpp() for d in DESCRIPTORS)
    structs = "\n".join(s.cpp() for s in STRUCTS)
    return (
        '#include "primitives/types.cuh"\n#include "primitives/bytes.cuh"\n'
        f"namespace nvep {{\nnamespace ring {{\n{constants}\n"
        f"constexpr u64 kCounterError = {COUNTER_ERROR}ull;\n{descriptors}\n}}  // namespace ring\n{structs}\n"
        "}  // namespace nvep\n"
    )
