"""Ranks that die, stop, fall silent or fail: the others learn it in time, by name, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep import errors
from nvep.config import ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local
from nvep.moe import MoELayer, MoEWeights
from nvep.testing import fault_checks
from nvep.testing.backend import Backend
from nvep.testing.fault_checks import FaultCase
from nvep.testing.moe_checks import ODD
from nvep.testing.resources import Resources, require_nothing_left
from nvep.testing.steps import random_step

DEVICE = "emulated"
MIB = 1 << 20

# --- ranks as processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["between", "sent"])
def test_killed_rank_ends_the_job(place: str, tmp_path: Path) -> None:
    fault_checks.check_job_ends(FaultCase("kill", place, deadline=30.0), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        FaultCase("kill", "between"),
        FaultCase("stop", "sent"),
        FaultCase("stop", "between", deadline=2.0, victim=0),
        FaultCase("kill", "arrived", deadline=2.0, ranks=3),
        FaultCase("kill", "returned", deadline=2.0, ranks=2, victim=1),
        FaultCase("kill", "anywhere", deadline=2.0, victim=3, delay=0.0013),
    ],
    ids=lambda case: f"{case.signal}-{case.place}",
)
def test_survivors_name_the_lost_rank(case: FaultCase, tmp_path: Path) -> None:
    fault_checks.check_survivors(case, tmp_path)


# --- ranks as threads -------------------------------------------------------------------------------------------------


class Silence(Backend):
    """A group in which rank 2 falls silent, and comes back when all others have given it up."""

    device = DEVICE
    deadline = 1.0
    silent = 2

    def __init__(self, place: str, lanes: int) -> None:
        self._place = place
        self._config = self.config(deadline=self.deadline, lanes=lanes)
        self._lanes = lanes
        self._given_up = threading.Semaphore(0)

    def main(self, group: RankGroup) -> tuple[errors.PeerTimeout, float]:
        exchange = Exchange(group, self._config)
        self.verified_step(exchange, random_step((1,), self._config, group.size), "before")
        start = time.monotonic()
        with pytest.raises(errors.PeerTimeout) as caught:
            self._steps(exchange)
        waited = time.monotonic() - start
        with pytest.raises(errors.PeerTimeout):  # and so does every later call
            self._dispatch(exchange, 0)
        exchange.close()
        if group.rank != self.silent:
            self._given_up.release()
        with Exchange(group, self._config) as another:
            for index in range(3):
                self.verified_step(another, random_step((2, index), self._config, group.size), "after")
        return caught.value, waited

    def _steps(self, exchange: Exchange) -> None:
        """A step on every lane, all in flight at once."""
        silent = exchange.group.rank == self.silent
        if silent and self._place == "before dispatch":
            self._wait_for_others(exchange)
        lanes = range(self._lanes)
        streams = [exchange.device.create_stream() for _ in lanes]
        arrivals = [self._dispatch(exchange, lane, stream=streams[lane]) for lane in lanes]
        if silent and self._place == "before combine":
            self._wait_for_others(exchange)
        for lane in lanes:
            exchange.combine(arrivals[lane].partial_rows, arrivals[lane], stream=streams[lane])
        for stream in streams:
            exchange.synchronize(stream)

    def _dispatch(self, exchange: Exchange, lane: int, *, stream: Any = None) -> Any:
        source = random_step((3, lane), self._config, exchange.group.size).sources[exchange.group.rank]
        inputs = (source.payloads[0], source.expert_ids, source.expert_weights)
        return exchange.dispatch(*inputs, lane=lane, stream=stream)

    def _wait_for_others(self, exchange: Exchange) -> None:
        for _ in range(exchange.group.size - 1):
            assert self._given_up.acquire(timeout=30.0)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("place", ["before dispatch", "before combine"])
def test_silent_rank_is_named_and_learns_it_too(place: str, lanes: int) -> None:
    silence = Silence(place, lanes)
    results = silence.run(silence.main, 4)
    for rank, (error, waited) in enumerate(results):
        assert error.suspect == silence.silent
        assert error.reporter != silence.silent
        assert error.phase == ("D.recv" if place == "before dispatch" else "C.recv")
        if rank != silence.silent:
            own_work = 0.3  # threads of one process take turns until all that do not wait have sent
            assert 0.9 * silence.deadline <= waited <= 1.1 * silence.deadline + own_work, f"{waited:.3f} s"


def test_process_stays_usable_after_a_lost_rank() -> None:
    def lost(group: RankGroup) -> None:
        config = ExchangeConfig(num_experts=4, top_k=1, max_tokens=4, row_bytes=16, deadline=0.2)
        with Exchange(group, config) as exchange:
            if group.rank == 1:
                return  # as if all were well: close() waits for the others
            ids, weights = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
            exchange.dispatch(np.zeros((1, 16), np.uint8), ids, weights)
            exchange.synchronize()

    with pytest.raises(errors.PeerTimeout, match="rank 1 did not answer"):
        run_local(lost, 3, device=DEVICE)

    def fine(group: RankGroup) -> None:
        with Exchange(group, Backend().config()) as exchange:
            Backend().verified_step(exchange, random_step((5,), exchange.config, group.size), "another group")

    run_local(fine, 3, device=DEVICE)


# --- exceptions -------------------------------------------------------------------------------------------------------


class Mishap(Exception):
    """Raised by one rank on purpose."""


def _large_config() -> ExchangeConfig:
    """128 MiB of rows a source and rank, never touched but by a few tokens: a slice left mapped cannot be missed."""
    return ExchangeConfig(num_experts=8, top_k=2, max_tokens=1 << 13, row_bytes=1 << 14, deadline=1000.0)


@pytest.mark.parametrize("place", ["construction", "before dispatch", "between", "sent", "after combine"])
def test_exception_on_one_rank(place: str) -> None:
    """The others end without waiting for a deadline, the cause surfaces, and nothing stays."""
    config = _large_config()

    def mishap(group: RankGroup, here: str) -> None:
        if here == place and group.rank == 1:
            raise Mishap(here)

    def main(group: RankGroup) -> None:
        rows = np.zeros((3, config.row_bytes), np.uint8)
        ids, weights = np.tile(np.array([0, 5], np.int32), (3, 1)), np.ones((3, 2), np.float32)
        mishap(group, "construction")
        with Exchange(group, config) as exchange:
            mishap(group, "before dispatch")
            exchange.dispatch_send(rows, ids, weights)
            mishap(group, "sent")
            arrivals = exchange.dispatch_recv()
            mishap(group, "between")
            exchange.combine(arrivals.partial_rows, arrivals)
            mishap(group, "after combine")
            exchange.synchronize()

    def attempt() -> None:
        with pytest.raises(Mishap, match=place):
            run_local(main, 3, device=DEVICE, timeout=30.0)

    attempt()  # loads libraries and starts what the process keeps
    before = Resources.now()
    attempt()
    require_nothing_left(before, writable=64 * MIB)


def test_exception_inside_a_layer() -> None:
    weights = ODD.weights()

    def main(group: RankGroup) -> None:
        with MoELayer(group, weights, top_k=ODD.top_k, max_tokens=ODD.max_tokens, deadline=1000.0) as layer:
            for index in range(3):
                tokens = ODD.step(index)[group.rank]
                rows = tokens.payloads[0].view(weights.gate.dtype)
                if index == 2 and group.rank == 0:
                    raise Mishap("in step 2")
                layer(rows, tokens.expert_ids, tokens.expert_weights)
            layer.exchange.synchronize()

    def attempt() -> None:
        with pytest.raises(Mishap, match="in step 2"):
            run_local(main, 3, device=DEVICE, timeout=30.0)

    attempt()
    before = Resources.now()
    for _ in range(3):
        attempt()
    require_nothing_left(before, writable=64 * MIB)


def test_construction_that_fails_leaves_nothing() -> None:
    """A heap beyond the host's memory, and weights that one rank alone got wrong."""
    config = _large_config()
    wrong = MoEWeights(*(np.zeros(1, np.float32) for _ in range(3)))

    def main(group: RankGroup) -> None:
        large = ExchangeConfig(num_experts=8, top_k=2, max_tokens=1 << 20, row_bytes=1 << 20)
        with pytest.raises(errors.HeapTooLarge):
            Exchange(group, large)
        with pytest.raises(errors.DTypeError):
            MoELayer(group, wrong if group.rank == 2 else ODD.weights(), top_k=2, max_tokens=4)
        with Exchange(group, config):
            pass

    run_local(main, 3, device=DEVICE)
    before = Resources.now()
    run_local(main, 3, device=DEVICE)
    require_nothing_left(before, writable=64 * MIB)
