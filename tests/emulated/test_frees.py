"""Devices whose frees wait for kernels: ranks of one process free together, and none waits for another to do so."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError, DeviceError, NvepError
from nvep.exchange import Exchange
from nvep.exchange.inputs import InputChecker
from nvep.group import RankGroup, run_local
from nvep.runtime.device import Memory
from nvep.runtime.emulated import EmulatedDevice, EmulatedMemory
from nvep.testing.resources import Resources, require_nothing_left
from nvep.testing.steps import Turnstile

RANKS = 3
CONFIG = ExchangeConfig(num_experts=6, top_k=2, max_tokens=4, row_bytes=64, deadline=20.0)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def frees_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "frees_wait_for_kernels", True)


def _is_free(memory: Memory) -> bool:
    assert isinstance(memory, EmulatedMemory)
    try:
        memory.view(np.uint8, (1,))
    except DeviceError:
        return True
    return False


def _step(exchange: Exchange) -> None:
    ids = np.array([[0, 2], [1, 5]], np.int32)
    arrivals = exchange.dispatch(np.ones((2, 64), np.uint8), ids, np.ones((2, 2), np.float32))
    exchange.release(arrivals)
    exchange.synchronize()


@pytest.mark.parametrize("failed", [False, True])
def test_the_last_to_close_frees_for_all(failed: bool) -> None:
    turnstile, exchanges = Turnstile(), {}  # type: tuple[Turnstile, dict[int, Exchange]]

    def main(group: RankGroup) -> list[bool]:
        exchange = exchanges[group.rank] = Exchange(group, CONFIG)
        _step(exchange)
        group.barrier()
        if group.rank:  # rank 0 has the exchange open while the others close
            if failed:
                exchange.note_failure(NvepError("gone"))
            exchange.close()
            turnstile.open(f"rank {group.rank} closed")
            return []
        for rank in range(1, RANKS):
            turnstile.wait(f"rank {rank} closed")
        before = [_is_free(exchanges[rank].memory.local) for rank in range(RANKS)]
        exchange.close()
        return before + [_is_free(exchanges[rank].memory.local) for rank in range(RANKS)]

    assert run_local(main, RANKS, device="emulated", timeout=60)[0] == [False] * RANKS + [True] * RANKS


def test_another_open_exchange_of_the_group_puts_off_frees_until_the_next_is_made() -> None:
    def main(group: RankGroup) -> list[bool]:
        with Exchange(group, CONFIG) as kept:
            first = Exchange(group, CONFIG)
            first.close()
            group.barrier()
            states = [_is_free(first.memory.local)]
            _step(kept)
            group.barrier()
            with Exchange(group, CONFIG) as second:
                states.append(_is_free(first.memory.local))
            group.barrier()
            states.append(_is_free(second.memory.local))
        group.barrier()
        return [*states, _is_free(second.memory.local)]

    assert run_local(main, RANKS, device="emulated", timeout=60) == [[False, True, False, True]] * RANKS


@pytest.mark.parametrize(("owner", "name"), [(InputChecker, "__init__"), (Exchange, "_prepare_lanes")])
def test_a_failed_construction_leaves_nothing(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails half way, in an early or in a late part of it; the next exchange frees as usual."""
    true = getattr(owner, name)
    thread = [""]

    def fail_once(self: object, *arguments: object) -> None:
        if threading.current_thread().name == thread[0]:
            thread[0] = ""
            raise ArgumentError("test", 1, "nothing")
        true(self, *arguments)

    def main(group: RankGroup) -> None:
        if group.rank == 1:
            thread[0] = threading.current_thread().name
        with pytest.raises(ArgumentError, match="test"):
            Exchange(group, big)
        with Exchange(group, CONFIG) as exchange:
            _step(exchange)
        group.barrier()
        assert _is_free(exchange.memory.local)

    monkeypatch.setattr(owner, name, fail_once)
    big = ExchangeConfig(num_experts=6, top_k=2, max_tokens=4096, row_bytes=4096, deadline=20.0)
    run_local(_run_a_step, RANKS, device="emulated", timeout=60)
    before = Resources.now()
    run_local(main, RANKS, device="emulated", timeout=60)
    require_nothing_left(before, writable=8 * MIB)


def _run_a_step(group: RankGroup) -> None:
    with Exchange(group, CONFIG) as exchange:
        _step(exchange)
