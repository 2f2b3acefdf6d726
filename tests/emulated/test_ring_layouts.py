"""Entries and descriptors as kernels write them are those of the declarations, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from nvep.group import RankGroup, run_local
from nvep.nic import RingSpec, layouts
from nvep.nic.soft import SoftNic
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.symmetric import Layout, Region, SymmetricHeap
from nvep.testing.nic_streams import open_rings

DEPTH = 64
OPS = layouts.GFD_OPS
LAYOUT = Layout([Region("Data", 4096), Region("Staging", 4096), Region("Signals", 256)])
_LAYOUT_ARGUMENTS = ArgumentStruct("RingLayoutArguments", [Field(n, "u64") for n in ("ring", "values", "first")])


def written(spec: RingSpec, values: np.ndarray, first: int) -> tuple[RankGroup, np.ndarray, np.ndarray, int]:
    found: list[tuple[RankGroup, np.ndarray, np.ndarray, int]] = []

    def run(group: RankGroup) -> None:
        with SymmetricHeap(group, LAYOUT) as heap, SoftNic(group) as nic:
            ring = open_rings(group, heap, nic, [spec])
            prelude = layouts.ring_prelude() + '#include "transports/fanout.cuh"\n'
            file = KERNEL_ROOT / "testing" / "ring_layouts.cu"
            kernel = group.device.load(KernelSource("ring_layouts", _LAYOUT_ARGUMENTS, prelude, file))
            arguments = _LAYOUT_ARGUMENTS.new(ring=ring, values=values.ctypes.data, first=first)
            group.device.launch(kernel, LaunchShape(1, 1), arguments, group.device.default_stream)
            group.device.default_stream.synchronize()
            parts = nic.rings.parts[0]
            bells = [nic.rings.read(part) for part in (parts.doorbell, parts.record, parts.ready)]
            entries = nic.rings.read(parts.entries).reshape(-1, 8)
            if group.rank == 0:
                found.append((group, entries, np.concatenate(bells), nic.rings.number(0)))

    run_local(run, 2, device="emulated")
    return found[0]


@pytest.mark.parametrize("first", [0, 7, DEPTH - 5, 65536 - 2])
def test_work_queue_entries_are_those_of_the_declarations(first: int) -> None:
    values = np.random.default_rng(first).integers(0, 1 << 63, 16, dtype=np.uint64)
    values[0] = values[0] % np.uint64(1 << 31)
    _, entries, bells, number = written(RingSpec("send_queue", DEPTH, peer=1, ready=True), values, first)
    low = [int(v) & 0xFFFFFFFF for v in values]

    def control(i: int, opcode: int, segments: int) -> np.ndarray:
        index = first + i & 0xFFFF
        return layouts.WQE_CONTROL.encode(opcode=opcode, index=index, segments=segments, number=number, flags=8)

    signal = layouts.WQE_REMOTE.encode(key=0x201, address=8 * (low[3] & 0xFFFF))
    to = layouts.WQE_REMOTE.encode(key=0x101, address=values[1])
    inline = np.concatenate([[int(layouts.WQE_INLINE.encode(bytes=28, is_inline=1)[0]) & 0xFFFFFFFF], low[5:12]])
    words = (inline[1::2].astype(np.uint64) << np.uint64(32)) | inline[::2].astype(np.uint64)
    stored = layouts.WQE_INLINE.encode(bytes=8, is_inline=1, first=low[4])[0], values[4] >> np.uint64(32)
    expected = [
        [*control(0, 8, 3), *to, *layouts.WQE_DATA.encode(bytes=low[0], key=0x2FF, address=values[2])],
        [*control(1, 8, 4), *to, *words],
        [*control(2, 8, 3), *signal, *stored],
        [*control(3, 0x12, 4), *signal, *layouts.WQE_ATOMIC.encode(operand=values[4]),
         *layouts.WQE_DATA.encode(bytes=8, key=0x2FF, address=8 * 31)],
    ]  # fmt: skip
    for i, entry in enumerate(expected):
        assert entries[(first + i) % DEPTH][: len(entry)].tolist() == [int(w) for w in entry], i
    end = first + 4
    assert bells[0] == layouts.DOORBELL.encode(index=end & 0xFFFF, number=number)[0]
    assert int(bells[1] >> np.uint64(32)) == int.from_bytes((end & 0xFFFF).to_bytes(4, "big"), "little")
    assert bells[2 + (first + 3) % DEPTH] == first + 4


@pytest.mark.parametrize("first", [0, DEPTH - 4, 5 * DEPTH - 8, (1 << 33) + DEPTH - 3])
def test_descriptors_are_those_of_the_declarations(first: int) -> None:
    values = np.random.default_rng(first % 997).integers(0, 1 << 62, 16, dtype=np.uint64)
    _, entries, _, _ = written(RingSpec("gfd", DEPTH), values, first)
    v = [int(x) for x in values]
    low = [x & 0xFFFFFFFF for x in v]
    counted = {"flags": 2, "counter": low[15] & 0xFFFF}
    handles = {"target_handle": low[13] & 0x7FFF, "source_handle": low[14] & 0x7FFF}
    put = {"peer": low[12] & 0x7FFFFFFF, "bytes": low[0], "target_offset": v[1], "source_offset": v[2]} | handles
    signal = {"signal": low[3] & 0xFFFF, "value_low": low[4], "value_high": v[4] >> 32}
    source = {"source_offset_low": low[2], "source_offset_high": v[2] >> 32, "bytes": low[0]} | handles
    peers = [x & 0x7FFF for x in v]
    offsets = [x & (1 << 48) - 1 for x in v]

    def targets(begin: int, count: int) -> dict[str, int]:
        some = {f"peer{i}": peers[begin + i] for i in range(count)}
        return some | {f"offset{i}": offsets[begin + i] for i in range(count)}

    inline = {k: put[k] for k in ("peer", "target_handle", "target_offset")} | {"bytes": 8}
    inline |= {"inline_low": low[4], "inline_high": v[4] >> 32}
    flagged = {"flags": 3, "counter": counted["counter"]}
    expected = [
        layouts.GFD.encode(op=OPS["put"], **put, **counted),
        layouts.GFD.encode(op=OPS["put_signal"], **put, **signal),
        layouts.GFD.encode(op=OPS["signal"], peer=put["peer"], **signal, **flagged),
        layouts.GFD.encode(op=OPS["inline_put"], **inline),
        layouts.GFD.encode(op=OPS["flush"], **counted),
        layouts.GFD.encode(op=OPS["reset"], **counted),
        layouts.FANOUT_HEAD.encode(op=OPS["fanout"], targets=13, **source, **counted, **targets(0, 4)),
        layouts.FANOUT_MORE.encode(op=OPS["more"], targets=13, position=0, **targets(4, 7)),
        layouts.FANOUT_MORE.encode(op=OPS["more"], targets=13, position=1, **targets(11, 2)),
    ]
    for i, words in enumerate(expected):
        owner = np.uint64(layouts.ring_owner(first + i, DEPTH))
        assert entries[(first + i) % DEPTH].tolist() == (words | owner).tolist(), i
