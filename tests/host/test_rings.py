"""Layouts of send queues and descriptor rings: golden bytes of mlx5's formats, fields, dumps and what is printed."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvep.cli.main import main
from nvep.errors import ArgumentError, NicError, NicTimeout
from nvep.nic import RingSpec, layouts
from nvep.nic.decode import describe
from nvep.nic.dump import RingDump, read_dumps
from nvep.nic.live import LiveRings, ask, processes
from nvep.nic.soft import SoftNicModel
from nvep.nic.soft.nic import soft_keys
from nvep.nic.words import Bits, Descriptor


def raw(words: np.ndarray) -> str:
    return words.astype("<u8").tobytes().hex(" ", 4)


# Written out by hand from the adapter's format: what an RDMA write, an inline write and a fetch-and-add look like.
def test_golden_control_segment_of_a_write() -> None:
    words = layouts.WQE_CONTROL.encode(opcode=0x08, index=0x1234, segments=3, number=0xABCDEF, flags=0x08)
    assert raw(words) == "00123408 abcdef03 00000008 00000000"


def test_golden_remote_data_inline_and_atomic_segments() -> None:
    assert raw(layouts.WQE_REMOTE.encode(address=0x0102030405060708, key=0xA1B2C3D4)) == (
        "01020304 05060708 a1b2c3d4 00000000"
    )
    assert raw(layouts.WQE_DATA.encode(bytes=0x3800, key=0x11223344, address=0x7F00)) == (
        "00003800 11223344 00000000 00007f00"
    )
    assert raw(layouts.WQE_INLINE.encode(bytes=8, is_inline=1, first=0xDDCCBBAA)) == "80000008 aabbccdd"
    assert raw(layouts.WQE_ATOMIC.encode(operand=1, compare=0)) == "00000000 00000001 00000000 00000000"


def test_golden_doorbell_and_completion() -> None:
    assert raw(layouts.DOORBELL.encode(index=0x0105, number=0x42)) == "00010500 00004200"
    done = layouts.CQE.encode(bytes=64, timestamp=0x1122334455667788, number=7, index=0x0A0B, owner=1, opcode=0)
    assert raw(done[5:]) == "00000000 00000040 11223344 55667788 00000007 0a0b0001"
    failed = layouts.CQE.encode(syndrome=0x13, vendor_syndrome=0x81, wqe_opcode=8, number=7, index=1, opcode=0xD)
    assert raw(failed[6:]) == "00000000 00008113 08000007 000100d0"


@pytest.mark.parametrize("descriptor", layouts.DESCRIPTORS, ids=lambda d: d.name)
def test_fields_come_back_as_they_were_put(descriptor: Descriptor) -> None:
    rng = np.random.default_rng(0)
    for name, field in descriptor.fields.items():
        values = rng.integers(0, field.mask, 20, dtype=np.uint64, endpoint=True)
        words = descriptor.encode(**{name: values})
        assert words.shape == (20, descriptor.words)
        assert np.array_equal(descriptor.decode(words)[name], values)
        full = descriptor.encode(**{name: field.mask})
        assert sum(int(w).bit_count() for w in full) == field.bits  # nothing else of it


@given(st.integers(0, 1 << 40), st.sampled_from([64, 128, 1024]))
def test_owner_bits_flip_every_lap_and_zeroed_memory_has_none(index: int, depth: int) -> None:
    assert layouts.ring_owner(index, depth) != layouts.ring_owner(index + depth, depth)
    assert layouts.ring_owner(index % depth, depth) == 1


def test_fields_of_descriptors_do_not_overlap() -> None:
    for descriptor in (layouts.GFD, layouts.FANOUT_HEAD, layouts.FANOUT_MORE, layouts.WQE_CONTROL, layouts.DOORBELL):
        ones = [descriptor.encode(**{name: field.mask}) for name, field in descriptor.fields.items()]
        assert np.array_equal(np.bitwise_or.reduce(ones), np.sum(ones, axis=0, dtype=np.uint64))


def test_a_ring_holds_four_of_the_largest_descriptor() -> None:
    assert layouts.LARGEST_DESCRIPTOR == 10
    assert RingSpec("gfd", 64).depth >= 4 * layouts.LARGEST_DESCRIPTOR


def test_bad_declarations_and_values_are_refused() -> None:
    with pytest.raises(ArgumentError, match="containers"):
        Descriptor("Bad", 8, [Bits("x", 2, 4, container=4)])
    with pytest.raises(ArgumentError, match="at most 0xff"):
        layouts.WQE_CONTROL.encode(opcode=256)
    with pytest.raises(ArgumentError, match="one of opcode"):
        layouts.WQE_CONTROL.encode(opcod=1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kind": "fifo"}, "kind"),
        ({"kind": "gfd", "depth": 96}, "depth"),
        ({"kind": "gfd", "depth": 32}, "depth"),
        ({"kind": "gfd", "depth": 1 << 15}, "depth"),
        ({"kind": "gfd", "peer": 1}, "peer"),
        ({"kind": "send_queue"}, "peer"),
        ({"kind": "gfd", "ready": True}, "ready"),
        ({"kind": "send_queue", "peer": 0, "counters": 1}, "counters"),
    ],
)
def test_ring_specs_say_what_is_wrong(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        RingSpec(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument == name


@pytest.mark.parametrize(
    "arguments",
    [
        {"latency_ns": -1},
        {"gigabits": 0.0},
        {"placement": "nic"},
        {"idle_s": 0.0},
        {"pending": 100},
        {"busy_odds": 1024},
        {"threads": 48},
        {"blocks": 0},
    ],
)
def test_models_say_what_is_wrong(arguments: dict[str, object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        SoftNicModel(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument in arguments


def test_the_default_model_is_a_400_gigabit_adapter() -> None:
    assert SoftNicModel().ps_per_byte == 20


def test_keys_tell_handles_and_owners_apart() -> None:
    keys = soft_keys(3, 300)
    assert keys.shape == (3, 301)
    assert len(np.unique(keys[:, :256])) == 3 * 256
    assert np.array_equal(keys >> 8, np.arange(3)[:, None] * np.ones(301, dtype=int))


def test_errors_survive_pickling_and_name_the_ring() -> None:
    import pickle

    for error in (NicError(2, 0x2001, 5, "remote access"), NicTimeout(1, 0x1000, 3)):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert str(error.ring) in str(error)


# Dumps


def gfd_dump(depth: int = 64) -> RingDump:
    """Lap 1 has begun: entries 62 to 66, of which 65 is half written and 66 only claimed."""
    entries = np.ones((depth, 8), np.uint64)  # whatever lap 0 left

    def put(index: int, words: np.ndarray, segments: int = 8) -> None:
        owner = np.uint64(layouts.ring_owner(index, depth))
        entries[index % depth, :segments] = words[:segments] | owner

    ops = layouts.GFD_OPS
    put(62, layouts.GFD.encode(op=ops["put"], peer=3, bytes=4096, target_offset=0x80, source_offset=0x40, flags=2))
    put(63, layouts.FANOUT_HEAD.encode(op=ops["fanout"], targets=5, bytes=64, peer0=1, offset0=0x100, peer3=2))
    put(64, layouts.FANOUT_MORE.encode(op=ops["more"], targets=5, position=0, peer0=7, offset0=0x200))
    put(65, layouts.GFD.encode(op=ops["signal"], peer=1, signal=9, value_low=5, flags=1), segments=5)
    none = np.zeros((0, 8), np.uint64)
    state = {"reserved": 67, "consumer": 63}
    return RingDump("gfd", "soft NIC (emulated)", 2, 0x2000, depth, None, state, entries, none, none[:, 0])


def queue_dump(depth: int = 64) -> RingDump:
    entries, completions = np.zeros((2, depth, 8), np.uint64)
    completions[:] = layouts.CQE.encode(opcode=0xF)
    control = {"segments": 3, "number": 5, "flags": 8}
    remote = layouts.WQE_REMOTE.encode(key=0x100, address=64)
    entries[0, :2] = layouts.WQE_CONTROL.encode(opcode=8, index=0, **control)
    entries[0, 2:4] = remote
    entries[0, 4:6] = layouts.WQE_DATA.encode(bytes=256, key=0x2FF, address=32)
    entries[1, :2] = layouts.WQE_CONTROL.encode(opcode=8, index=1, **control)
    entries[1, 2:4] = remote
    entries[1, 4] = layouts.WQE_INLINE.encode(bytes=4, is_inline=1, first=0x04030201)[0]
    entries[2, :2] = layouts.WQE_CONTROL.encode(opcode=0x12, index=2, **control)
    entries[2, 4:6] = layouts.WQE_ATOMIC.encode(operand=17)
    completions[0] = layouts.CQE.encode(index=0, timestamp=1000)
    completions[1] = layouts.CQE.encode(index=1, opcode=0xD, syndrome=0x13)
    ready = np.zeros(depth, np.uint64)
    ready[:2] = 1, 2
    state = {"reserved": 4, "ready": 3, "posted": 2, "doorbell": 0}
    return RingDump("send_queue", "soft NIC (emulated)", 0, 5, depth, 1, state, entries, completions, ready)


def test_descriptor_rings_are_printed_entry_by_entry() -> None:
    lines = list(describe(gfd_dump()))
    assert lines[0] == ("descriptor ring 8192 of rank 2: 64 entries, reserved 67, consumer 63; soft NIC (emulated)")
    shown = "\n".join(lines)
    assert (
        "[62] put, 4096 B to rank 3, handle 0 at 0x80, from handle 0 at 0x40, counted by counter 0, consumed" in shown
    )
    assert "[63] fanout, 64 B from handle 0 at 0x0 to 5 targets of handle 0: rank 1 at 0x100 rank 0 at 0x0" in shown
    assert "[64] more, rank 7 at 0x200, waiting" in shown
    assert "[65] claimed, 5 of 8 segments written" in shown
    assert "[66] claimed, 0 of 8 segments written" in shown


def test_send_queues_are_printed_entry_by_entry() -> None:
    shown = "\n".join(describe(queue_dump()))
    assert "send queue 5 of rank 0 to rank 1" in shown
    assert "[0] rdma_write, to key 0x100 at 0x40, 256 B from key 0x2ff at 0x20, ready, completed at 1000 ns" in shown
    assert "[1] rdma_write, to key 0x100 at 0x40, 4 B inline 01020304, ready, failed: remote access" in shown
    assert "[2] atomic_fetch_add, to key 0x0 at 0x0, adds 0x11, not ready, no completion" in shown
    assert "[3] not written" in shown


def test_a_dump_comes_back_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rings"
    with path.open("wb") as file:
        for dump in (gfd_dump(), queue_dump()):
            dump.write(file)
    with path.open("rb") as file:
        again = list(read_dumps(file))
    assert [list(describe(d)) for d in again] == [list(describe(d)) for d in (gfd_dump(), queue_dump())]
    assert main(["decode-ring", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line for dump in again for line in describe(dump)]


@pytest.mark.parametrize("spoil", [lambda b: b[:-8], lambda b: b"{}\n", lambda b: b"\x00" + b, lambda b: b"[1]\n" + b])
def test_another_file_is_refused(spoil: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    gfd_dump().write(file)
    path = tmp_path / "rings"
    path.write_bytes(spoil(file.getvalue()))  # type: ignore[operator]
    assert main(["decode-ring", str(path)]) == 2
    assert "rings written as" in capsys.readouterr().err


def test_a_running_process_answers_with_its_rings(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveRings(lambda: [gfd_dump(), queue_dump()])
    try:
        assert os.getpid() in processes()
        assert [d.kind for d in ask(os.getpid())] == ["gfd", "send_queue"]
        assert main(["decode-ring", "--live", str(os.getpid())]) == 0
        assert "descriptor ring 8192 of rank 2" in capsys.readouterr().out
    finally:
        live.close()
        live.close()
    with pytest.raises(ArgumentError, match="a process that answers"):
        ask(os.getpid())


def test_nothing_to_print_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert main(["decode-ring", str(tmp_path / "empty")]) == 1
    assert main(["decode-ring"]) == 2
    assert main(["decode-ring", str(tmp_path / "absent")]) == 2
    assert "a readable file" in capsys.readouterr().err
