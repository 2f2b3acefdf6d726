"""Ranks as threads: collectives, agreement, and what happens to the others when one fails."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

import pytest

from nvep.errors import ArgumentError, ConfigMismatch, DeviceError, GroupError
from nvep.group import RankGroup, local_groups, run_local
from nvep.group.placement import name_ranks, spread


def run(function: Callable[[RankGroup], object], ranks: int, *, timeout: float | None = 60.0) -> list[object]:
    return run_local(function, ranks, device="emulated", timeout=timeout)


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_allgather_returns_values_by_rank(ranks: int) -> None:
    def gather(group: RankGroup) -> list[int]:
        group.barrier()
        return group.allgather(group.rank * 10)

    assert run(gather, ranks) == [[r * 10 for r in range(ranks)]] * ranks


def test_values_are_shared_by_reference() -> None:
    gathered = run(lambda group: group.allgather(object()), 3)
    assert gathered[0] == gathered[1] == gathered[2]


def test_consecutive_collectives_do_not_mix() -> None:
    def gather(group: RankGroup) -> bool:
        return all(group.allgather((group.rank, i)) == [(r, i) for r in range(group.size)] for i in range(300))

    assert all(run(gather, 4))


def test_a_rank_knows_its_place() -> None:
    def place(group: RankGroup) -> tuple[object, ...]:
        assert group.in_process
        assert group.device.kind == "emulated"
        return group.rank, group.size, group.local_rank, group.local_size, threading.current_thread().name

    assert run(place, 3) == [(r, 3, r, 3, f"nvep-rank-{r}") for r in range(3)]
    assert len({id(device) for device in run(lambda group: group.device, 3)}) == 3


def test_agree_raises_the_same_text_on_every_rank() -> None:
    def disagree(group: RankGroup) -> str:
        group.agree("top_k", 8)
        with pytest.raises(ConfigMismatch) as caught:
            group.agree("top_k", 8 if group.rank != 2 else 4)
        return str(caught.value)

    texts = run(disagree, 4)
    assert set(texts) == {"top_k must be equal on all ranks; rank 0: 8, rank 1: 8, rank 2: 4, rank 3: 8"}


def test_raise_together_raises_the_lowest_ranks_error_everywhere() -> None:
    def fail(group: RankGroup) -> Exception:
        mine = ArgumentError("x", group.rank, "none") if group.rank in (1, 3) else None
        with pytest.raises(ArgumentError, match=r"^x: got 1; allowed: none$") as caught:
            group.raise_together(mine)
        assert (caught.value is mine) == (group.rank == 1)
        group.raise_together(None)
        return caught.value

    errors = run(fail, 4)
    assert len({id(error) for error in errors}) == 4  # each with a traceback of its own


def test_an_error_that_cannot_be_copied_is_raised_as_it_is() -> None:
    class Stubborn(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("stubborn")

    def fail(group: RankGroup) -> None:
        with pytest.raises(Stubborn, match="stubborn"):
            group.raise_together(Stubborn(1, 2))

    run(fail, 2)


def test_together_runs_a_step_and_returns_its_result() -> None:
    def step(group: RankGroup) -> int:
        def fail_on_one() -> int:
            if group.rank == 1:
                raise DeviceError("no memory")
            return 7

        with pytest.raises(DeviceError, match="no memory"):
            group.together(fail_on_one)
        return group.together(lambda: group.rank)

    assert run(step, 3) == [0, 1, 2]


def test_a_timeout_names_the_missing_ranks_and_ends_the_group() -> None:
    groups = local_groups(4, device="emulated")
    try:
        groups[0].timeout = 0.1  # type: ignore[attr-defined]
        expected = r"^ranks 1, 2, 3 did not reach a collective: rank 0 waited 0\.1 s$"
        with pytest.raises(GroupError, match=expected):
            groups[0].barrier()
        with pytest.raises(GroupError, match=expected):
            groups[2].barrier()
    finally:
        for group in groups:
            group.close()


def test_abort_wakes_waiting_ranks_with_the_reason() -> None:
    def wait(group: RankGroup) -> str:
        if group.rank == 1:
            time.sleep(0.1)
            group.abort("out of paper")
        with pytest.raises(GroupError) as caught:
            group.barrier()
        return str(caught.value)

    start = time.monotonic()
    assert set(run(wait, 3)) == {"rank 1 stopped the group: out of paper"}
    assert time.monotonic() - start < 10.0


def test_a_rank_that_returned_is_not_waited_for() -> None:
    def wait(group: RankGroup) -> None:
        if group.rank != 2:
            group.barrier()

    with pytest.raises(GroupError, match=r"rank 2 left the group while rank [01] waited"):
        run(wait, 3)


def test_a_rank_that_returns_after_a_collective_spoils_nothing() -> None:
    def last_one_is_slow(group: RankGroup) -> list[int]:
        gathered = group.allgather(group.rank)
        time.sleep(0.02 * group.rank)
        return gathered

    assert run(last_one_is_slow, 3) == [[0, 1, 2]] * 3


def test_one_rank_used_by_two_threads_is_an_error() -> None:
    groups = local_groups(2, device="emulated")
    try:
        thread = threading.Thread(target=groups[0].barrier)
        thread.start()
        while not groups[0]._rendezvous._arrived:  # type: ignore[attr-defined]
            time.sleep(0.001)
        with pytest.raises(GroupError, match="rank 0 entered a collective from two threads"):
            groups[0].barrier()
        groups[1].barrier()
        thread.join()
    finally:
        for group in groups:
            group.close()


def test_close_is_idempotent_and_final() -> None:
    with local_groups(1, device="emulated")[0] as group:
        assert group.allgather(5) == [5]
    group.close()
    with pytest.raises(GroupError, match=r"rank 0 used its group after close\(\)"):
        group.barrier()
    with pytest.raises(DeviceError):
        group.device.create_stream()


def test_run_local_raises_the_cause_with_its_traceback() -> None:
    def fail_in_a_named_function(group: RankGroup) -> None:
        if group.rank == 2:
            raise KeyError("the cause")
        group.barrier()

    with pytest.raises(KeyError, match="the cause") as caught:
        run(fail_in_a_named_function, 4)
    assert "fail_in_a_named_function" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_run_local_raises_the_lowest_ranks_cause() -> None:
    def fail(group: RankGroup) -> None:
        group.barrier()
        if group.rank == 0:
            time.sleep(0.1)
            group.barrier()  # stopped by the others: not a cause
        raise ValueError(f"rank {group.rank}")

    with pytest.raises(ValueError, match="rank 1"):
        run(fail, 4)


def test_run_local_raises_an_abort_that_has_no_other_cause() -> None:
    def stop(group: RankGroup) -> None:
        if group.rank == 0:
            group.abort("enough")
        else:
            group.barrier()

    with pytest.raises(GroupError, match="rank 0 stopped the group: enough"):
        run(stop, 2)


def test_system_exit_of_a_rank_reaches_the_caller() -> None:
    def leave(group: RankGroup) -> None:
        if group.rank == 1:
            raise SystemExit(3)
        group.barrier()

    with pytest.raises(SystemExit) as caught:
        run(leave, 2)
    assert caught.value.code == 3


def test_run_local_closes_every_device() -> None:
    devices = run(lambda group: group.device, 3)
    for device in devices:
        with pytest.raises(DeviceError):
            device.create_stream()  # type: ignore[attr-defined]


def test_an_error_at_close_is_not_lost() -> None:
    def break_close(group: RankGroup) -> None:
        def close() -> None:
            raise DeviceError("close failed")

        group.device.close = close  # type: ignore[method-assign]

    with pytest.raises(DeviceError, match="close failed"):
        run(break_close, 2)


def test_run_local_gives_up_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvep.group.local._LAST_WORDS", 0.1)
    release = threading.Event()

    def hang(group: RankGroup) -> None:
        if group.rank == 1:
            release.wait(30)

    with pytest.raises(GroupError, match=r"rank 1 did not finish within 0\.2 s"):
        run(hang, 2, timeout=0.2)
    release.set()


@pytest.mark.parametrize("n", [0, -1, 1025, True, 2.0, "2"])
def test_bad_number_of_ranks(n: object) -> None:
    with pytest.raises(ArgumentError, match=r"^n: got .*; allowed: an integer from 1 to 1024"):
        local_groups(n, device="emulated")  # type: ignore[arg-type]


@pytest.mark.parametrize("ordinals", [[0], [0, 1], [0, -1], [0, 0, 0]])
def test_bad_ordinals(ordinals: list[int]) -> None:
    with pytest.raises(ArgumentError, match=r"^ordinals: got .*; allowed: 2 device numbers below 1"):
        local_groups(2, device="emulated", ordinals=ordinals)


def test_bad_device() -> None:
    with pytest.raises(ArgumentError, match="tpu"):
        local_groups(2, device="tpu")


def test_devices_opened_before_a_failure_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import nvep.runtime

    opened = []
    real = nvep.runtime.open_device

    def open_two(kind: str, ordinal: int) -> object:
        if len(opened) == 2:
            raise DeviceError("no third device")
        opened.append(real(kind, ordinal))
        return opened[-1]

    monkeypatch.setattr(nvep.runtime, "open_device", open_two)
    with pytest.raises(DeviceError, match="no third device"):
        local_groups(3, device="emulated")
    for device in opened:
        with pytest.raises(DeviceError):
            device.create_stream()


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (4, 1, [0, 0, 0, 0]),
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (2, 8, [0, 1]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_ranks_spread_over_gpus_in_blocks(ranks: int, gpus: int, expected: list[int]) -> None:
    assert spread(ranks, gpus) == expected


def test_names_of_ranks() -> None:
    assert name_ranks({3}) == "rank 3"
    assert name_ranks({2, 1}) == "ranks 1, 2"
    assert name_ranks(set(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
