"""Rings as text: what each entry asks for, whether it is complete, and how far its producers and consumer are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nvep.nic import layouts
from nvep.nic.dump import RingDump
from nvep.nic.words import Descriptor

_OPS = {code: name for name, code in layouts.GFD_OPS.items()}
_OPCODES = {code: name for name, code in layouts.WQE_OPCODES.items()}
_CQE_OPCODES = {code: name for name, code in layouts.CQE_OPCODES.items()}
_SYNDROMES = {code: name.replace("_", " ") for name, code in layouts.SYNDROMES.items()}


def syndrome_text(code: int) -> str:
    """What a completion's syndrome says."""
    return _SYNDROMES.get(code, f"syndrome {code:#x}")


def _one(descriptor: Descriptor, words: np.ndarray) -> dict[str, int]:
    return {name: int(value) for name, value in descriptor.decode(words).items()}


def describe(dump: RingDump) -> Iterator[str]:
    """Lines of text: one about the ring, then one per entry that was ever written, oldest index first."""
    kind = {"send_queue": "send queue", "gfd": "descriptor ring"}[dump.kind]
    to = "" if dump.peer is None else f" to rank {dump.peer}"
    state = ", ".join(f"{name} {value}" for name, value in dump.state.items())
    yield f"{kind} {dump.number} of rank {dump.rank}{to}: {dump.depth} entries, {state}; {dump.engine}"
    reserved = dump.state["reserved"]
    for index in range(max(0, reserved - dump.depth), reserved):
        slot = index % dump.depth
        text = _queue_entry(dump, index) if dump.kind == "send_queue" else _gfd_entry(dump.entries[slot], index, dump)
        yield f"  [{index}] {text}"


def _queue_entry(dump: RingDump, index: int) -> str:
    slot = index % dump.depth
    words = dump.entries[slot]
    control = _one(layouts.WQE_CONTROL, words[:2])
    remote = _one(layouts.WQE_REMOTE, words[2:4])
    if control["index"] != index & 0xFFFF or control["number"] != dump.number:
        return f"not written: holds entry {control['index']} of queue {control['number']}"
    name = _OPCODES.get(control["opcode"], f"opcode {control['opcode']:#x}")
    parts = [name, f"to key {remote['key']:#x} at {remote['address']:#x}", *_queue_operand(name, words)]
    if len(dump.ready_words):
        parts.append("ready" if dump.ready_words[slot] == index + 1 else "not ready")
    parts.append(_completion(dump.completions[slot], index))
    return ", ".join(parts)


def _queue_operand(name: str, words: np.ndarray) -> Iterator[str]:
    if name == "atomic_fetch_add":
        yield f"adds {_one(layouts.WQE_ATOMIC, words[4:6])['operand']:#x}"
    if name != "rdma_write":
        return
    inline = _one(layouts.WQE_INLINE, words[4:5])
    if inline["is_inline"]:
        data = words[4:8].tobytes()[4 : 4 + min(inline["bytes"], 28)]
        yield f"{inline['bytes']} B inline {data.hex(' ', 4)}"
    else:
        data_segment = _one(layouts.WQE_DATA, words[4:6])
        yield f"{data_segment['bytes']} B from key {data_segment['key']:#x} at {data_segment['address']:#x}"


def _completion(words: np.ndarray, index: int) -> str:
    cqe = _one(layouts.CQE, words)
    opcode = _CQE_OPCODES.get(cqe["opcode"], f"opcode {cqe['opcode']:#x}")
    if opcode == "invalid" or cqe["index"] != index & 0xFFFF:
        return "no completion"
    if opcode == "requester_error":
        return f"failed: {syndrome_text(cqe['syndrome'])}"
    return f"completed at {cqe['timestamp']} ns"


def _gfd_entry(words: np.ndarray, index: int, dump: RingDump) -> str:
    owners = words & np.uint64(1)
    right = int((owners == np.uint64(layouts.ring_owner(index, dump.depth))).sum())
    if right < len(words):
        return f"claimed, {right} of {len(words)} segments written"
    gfd = _one(layouts.GFD, words)
    op = _OPS.get(gfd["op"], f"op {gfd['op']}")
    parts = [op, *_gfd_operands(op, words)]
    if gfd["flags"] & 2:
        parts.append(f"counted by counter {gfd['counter']}")
    parts.append("consumed" if index < dump.state["consumer"] else "waiting")
    return ", ".join(parts)


def _gfd_operands(op: str, words: np.ndarray) -> Iterator[str]:
    gfd = _one(layouts.GFD, words)
    if op in ("put", "put_signal"):
        yield (
            f"{gfd['bytes']} B to rank {gfd['peer']}, handle {gfd['target_handle']} at {gfd['target_offset']:#x}, "
            f"from handle {gfd['source_handle']} at {gfd['source_offset']:#x}"
        )
    if op in ("signal", "put_signal"):
        value = gfd["value_high"] << 32 | gfd["value_low"]
        verb = "set to" if gfd["flags"] & 1 else "add"
        yield f"signal {gfd['signal']} of rank {gfd['peer']}: {verb} {value:#x}"
    if op == "inline_put":
        value = gfd["inline_high"] << 32 | gfd["inline_low"]
        yield (
            f"{gfd['bytes']} B inline {value:#x} to rank {gfd['peer']}, handle {gfd['target_handle']} at "
            f"{gfd['target_offset']:#x}"
        )
    if op == "fanout":
        head = _one(layouts.FANOUT_HEAD, words)
        source = head["source_offset_high"] << 32 | head["source_offset_low"]
        targets = _targets(words[4:], min(head["targets"], layouts.HEAD_TARGETS))
        yield (
            f"{head['bytes']} B from handle {head['source_handle']} at {source:#x} to {head['targets']} targets of "
            f"handle {head['target_handle']}: {targets}"
        )
    if op == "more":
        more = _one(layouts.FANOUT_MORE, words)
        before = layouts.HEAD_TARGETS + more["position"] * layouts.MORE_TARGETS
        yield _targets(words[1:], max(0, min(more["targets"] - before, layouts.MORE_TARGETS)))


def _targets(segments: np.ndarray, count: int) -> str:
    targets = [_one(layouts.FANOUT_TARGET, segments[i : i + 1]) for i in range(count)]
    return " ".join(f"rank {t['peer']} at {t['offset']:#x}" for t in targets)
