"""Blocks and warps of the emulated device, against NumPy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import pytest

from nvep.errors import DeviceError
from nvep.runtime.emulated import EmulatedDevice
from tests.emulated.emulator_kit import enqueue, run

UNDEFINED = 0xBAD0BAD0BAD0BAD0


@pytest.fixture(params=[0, 7], ids=["ascending", "permuted"])
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(seed=request.param)
    yield opened
    opened.close()


def _shuffled(group: list[int], source: int, values: list[int]) -> int:
    return values[source] if source in group else UNDEFINED


def _expected_lane(lane: int, group: list[int], values: list[int], width: int, delta: int, anchor: int) -> list[int]:
    """Results of `collect` in warp_collectives.cu for one lane of a warp, written from CUDA's description."""
    first = lane - lane % width
    up = lane - delta if lane - delta >= first else lane
    down = lane + delta if lane + delta < first + width else lane
    xor = lane ^ delta if (lane ^ delta) < first + width else lane
    wide = [(v << 32) | (~v & 0xFFFFFFFF) for v in values]
    floats = [int(np.float32(v).view(np.uint32)) for v in values]
    return [
        _shuffled(group, first + values[lane] % 32 % width, values) & 0xFFFFFFFF,
        _sign_extended(_shuffled(group, up, values) & 0xFFFFFFFF),
        _shuffled(group, down, wide),
        _shuffled(group, xor, floats) & 0xFFFFFFFF,
        sum(1 << x for x in group if values[x] & 1),
        int(any(values[x] == anchor for x in group)),
        int(all(values[x] < 900 for x in group)),
        sum(1 << x for x in group if values[x] % 5 == values[lane] % 5),
        sum(1 << x for x in group if values[x] == values[lane]),
        1,
    ]


def _sign_extended(value: int) -> int:
    return value if value < 1 << 31 else value + (0xFFFFFFFF << 32)


@pytest.mark.parametrize(
    ("threads", "active", "split", "width", "delta"),
    [
        (64, 64, 0, 32, 3),
        (96, 96, 0, 16, 5),
        (48, 48, 0, 8, 1),
        (64, 64, 0, 8, 12),
        (40, 37, 0, 32, 9),
        (64, 64, 1, 32, 4),
        (64, 60, 1, 16, 2),
    ],
)
def test_warp_collectives(
    device: EmulatedDevice, threads: int, active: int, split: int, width: int, delta: int
) -> None:
    values = np.random.default_rng(threads + delta).integers(0, 1000, threads, dtype=np.uint32)
    results = np.zeros((threads, 12), np.uint64)
    run(
        device,
        "warp_collectives",
        (1, threads),
        values=values,
        results=results,
        active=active,
        split=split,
        width=width,
        delta=delta,
    )
    for thread in range(active):
        warp, lane = divmod(thread, 32)
        lanes = [x for x in range(32) if warp * 32 + x < active and (not split or x // 16 == lane // 16)]
        own = [int(values[warp * 32 + x]) if warp * 32 + x < threads else 0 for x in range(32)]
        expected = _expected_lane(lane, lanes, own, width, delta, int(values[0]))
        assert [int(v) for v in results[thread, :10]] == expected, f"thread {thread}"
        if len(lanes) == (16 if split else 32):
            assert int(results[thread, 10]) == sum(own[x] for x in lanes)
    assert not results[active:].any()


def test_shuffle_from_a_lane_outside_the_mask_gives_garbage(device: EmulatedDevice) -> None:
    values = np.full(64, 5, np.uint32)
    results = np.zeros((64, 12), np.uint64)
    run(device, "warp_collectives", (1, 64), values=values, results=results, active=64, split=1, width=32, delta=1)
    assert set(results[:16, 11]) == {6}
    assert set(results[16:32, 11]) == {(UNDEFINED & 0xFFFFFFFF) + 1}


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 128), (7, 1024)])
def test_barriers_and_shared_memory(device: EmulatedDevice, blocks: int, threads: int) -> None:
    rows, columns = 11, threads - 5
    values = np.random.default_rng(threads).integers(-50, 1000, (rows, columns), dtype=np.int32)
    values[3, 0], values[4, 1] = 7, -1000
    results = np.zeros((rows, 6), np.int32)
    run(device, "block_reduce", (blocks, threads), values=values, results=results, rows=rows, columns=columns)
    padded = np.zeros((rows, threads), np.int32)
    padded[:, :columns] = values
    seen = np.bitwise_or.reduce(1 << (padded.astype(np.int64) & 31), axis=1).astype(np.uint32).view(np.int32)
    expected = [values.sum(1), values.max(1), seen, (values < 0).sum(1), (values == 7).any(1), (values > -1000).all(1)]
    np.testing.assert_array_equal(results, np.stack(expected, axis=1))


@pytest.mark.parametrize("from_the_end", [False, True])
def test_returned_threads_count_as_arrived(device: EmulatedDevice, from_the_end: bool) -> None:
    threads = 70
    counts, ballots = np.zeros(threads, np.int32), np.zeros(threads, np.uint32)
    run(device, "early_return", (1, threads), counts=counts, ballots=ballots, reversed=from_the_end)
    if from_the_end:  # the first warp reports; thread t is gone after threads - 1 - t rounds
        np.testing.assert_array_equal(counts[:-1], threads - 1 - np.arange(threads - 1))
        expected = [(1 << min(32, threads - 1 - i)) - 1 for i in range(threads)]
    else:
        np.testing.assert_array_equal(counts, threads - np.arange(threads))
        expected = [0x3F & ~((1 << max(0, i - 64)) - 1) for i in range(threads)]
    np.testing.assert_array_equal(ballots, np.array(expected, np.uint32))


class Totals(ctypes.Structure):
    _fields_ = [
        ("signed_sum", ctypes.c_int32),
        ("unsigned_sum", ctypes.c_uint32),
        ("float_sum", ctypes.c_float),
        ("bits", ctypes.c_uint32),
        ("highest", ctypes.c_int32),
        ("relaxed", ctypes.c_uint32),
        ("ordered", ctypes.c_uint32),
        ("last", ctypes.c_uint32),
        ("swapped", ctypes.c_uint64),
        ("handed_out", ctypes.c_uint64),
    ]


def test_atomics_from_several_streams_lose_nothing(device: EmulatedDevice) -> None:
    streams, repeats, blocks, threads = [device.create_stream() for _ in range(4)], 200, 3, 64
    totals = Totals()
    for stream in streams:
        enqueue(device, "atomics", (blocks, threads), stream, totals=ctypes.addressof(totals), repeats=repeats)
    for stream in streams:
        stream.synchronize()
    each = blocks * threads * len(streams)
    n = each * repeats
    assert (totals.signed_sum, totals.unsigned_sum, totals.float_sum) == (-n, 3 * n, n / 2)
    assert (totals.bits, totals.highest) == (0xFFFFFFFF, blocks * threads - 1)
    assert (totals.relaxed, totals.ordered, totals.swapped) == (n, 2 * n, 5 * n)
    all_values = sum(range(repeats, (blocks * threads + 1) * repeats)) * len(streams)
    assert totals.handed_out == all_values - totals.last


@pytest.mark.parametrize("threads", [1024, 640])
def test_window_holds_exactly_the_resident_blocks(device: EmulatedDevice, threads: int) -> None:
    from tests.emulated.emulator_kit import source

    window = device.resident_blocks(device.load(source("grid_barrier")), threads)
    for blocks, deadline in ((window, 20e9), (window + 1, 0.15e9)):
        arrived, most, seen = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(blocks, np.uint32)
        start = time.monotonic()
        run(
            device,
            "grid_barrier",
            (blocks, threads),
            arrived=arrived,
            most=most,
            seen=seen,
            deadline_ns=int(deadline),
            expected=blocks,
        )
        if blocks == window:
            assert (seen == blocks).all()
            assert time.monotonic() - start < 15
        else:  # the last block finds no room until another gave up
            assert sorted(seen)[0] == window


FAULTS = [
    (0, r"thread \d+ is in __syncthreads at faults.cu:\d+ while thread \d+ waits in __syncthreads at faults.cu:\d+"),
    (1, r"a block barrier must be reached by all threads"),
    (2, r"__syncwarp\(mask 0x0000000[37]\) at faults.cu:\d+ while thread [01] waits for it in __syncwarp"),
    (3, r"thread [1-9]\d* is not in the mask 0x00000001 of its own __ballot_sync at faults.cu:\d+"),
    (4, r"deadlock.*thread\(s\) 0-2,4-31 in __shfl_sync at faults.cu:\d+"),
    (5, r"shared memory: 600\d\d bytes in 2 objects, allowed are 49152 bytes"),
]


@pytest.mark.parametrize(("mode", "message"), FAULTS)
def test_broken_rules_are_errors_not_hangs(device: EmulatedDevice, mode: int, message: str) -> None:
    out = np.zeros(1024, np.uint32)
    start = time.monotonic()
    enqueue(device, "faults", (2, 64), None, out=out, mode=mode)
    with pytest.raises(DeviceError, match=rf"kernel faults, block \d+: .*{message}"):
        device.default_stream.synchronize()
    assert time.monotonic() - start < 5
    run(device, "faults", (2, 64), out=out, mode=99)  # the stream is usable again
    np.testing.assert_array_equal(out[:64], np.arange(64))


def test_polling_through_barriers_starves_no_other_block(device: EmulatedDevice) -> None:
    out = np.zeros(64, np.uint32)
    run(device, "faults", (2, 64), out=out, mode=7)
    assert out[0] == 1


def test_stacks_can_be_used_up_to_their_guard(device: EmulatedDevice) -> None:
    out = np.zeros(64, np.uint32)
    run(device, "deep_stack", (1, 64), out=out, spare=16384 + 8192)  # a guard page, and room for the last call
    assert out.min() * 4096 > 64 * 1024


def test_deadlock_names_every_group_of_threads(device: EmulatedDevice) -> None:
    """Found although a thread of another block spins for ever."""
    out = np.zeros(1, np.uint32)
    enqueue(device, "faults", (2, 40), None, out=out, mode=6)
    with pytest.raises(DeviceError) as raised:
        device.default_stream.synchronize()
    text = str(raised.value)
    assert text.startswith("kernel faults, block 1: deadlock, all 32 live threads of 40 wait for one another:"), text
    assert "thread(s) 0 in __syncthreads at faults.cu:" in text
    assert "thread(s) 1-31 in __syncwarp at faults.cu:" in text
