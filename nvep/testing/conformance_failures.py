"""How every transport and protocol must fail: tests of a backend inherit `FailureConformance` and name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvep import errors
from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup
from nvep.testing.backend import Backend
from nvep.testing.steps import (
    Step,
    Turnstile,
    arrivals_of,
    check_arrivals,
    fill_unused,
    output_of,
    poison_receive_buffers,
    random_step,
    same,
)


class FailureConformance(Backend):
    """Wrong order, absent peers, failing peers: inherit this and set the backend."""

    def test_phases_out_of_order(self) -> None:
        config = self.config()

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                step = random_step((47,), config, group.size)
                source = step.sources[group.rank]
                inputs = (source.payloads[0], source.expert_ids, source.expert_weights)
                with pytest.raises(errors.StepOrderError, match="dispatch_recv"):
                    exchange.dispatch_recv()
                old = exchange.dispatch(*inputs)
                with pytest.raises(errors.StepOrderError, match="dispatch"):
                    exchange.dispatch(*inputs)
                with pytest.raises(errors.StepOrderError, match="combine_recv"):
                    exchange.combine_recv(old)
                exchange.release(old)
                new = exchange.dispatch(*inputs)
                with pytest.raises(errors.StepOrderError, match="step 1"):
                    exchange.release(old)
                exchange.release(new)
                exchange.synchronize()

        self.run(main, 2)

    @pytest.mark.parametrize("phase", ["dispatch", "combine", "release"])
    def test_missing_rank_is_named(self, phase: str) -> None:
        config = self.config(deadline=0.5)
        absent = 1

        def main(group: RankGroup) -> str:
            exchange = Exchange(group, config)
            step = random_step((53,), config, group.size, counts=[config.max_tokens] * group.size)
            for source in step.sources:
                source.expert_ids[0] = (0, config.num_experts // 2)  # everybody needs the absent rank's experts
            try:
                if group.rank != absent:
                    return self._wait_in(phase, exchange, step)
                if phase != "dispatch":
                    source = step.sources[absent]
                    exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                return "absent"
            finally:
                group.barrier()
                exchange.note_failure(errors.NvepError("test"))
                exchange.close()

        found = {"dispatch": "D.recv", "combine": "C.recv", "release": "release"}[phase]
        if self.protocol == "sentinel" and phase == "release":
            found = "D.recv"  # a release sends nothing: the next step's records are missed
        assert self.run(main, 3) == [f"{found} 1", "absent", f"{found} 1"]

    def _wait_in(self, phase: str, exchange: Exchange, step: Step) -> str:
        """Run as far as ``phase`` while the absent rank stays in the phase before; say what the timeout names."""
        source = step.sources[exchange.group.rank]
        inputs = (source.payloads[0], source.expert_ids, source.expert_weights)
        arrivals = exchange.dispatch(*inputs)
        if phase == "combine":
            self.finish(exchange, arrivals, step)
        elif phase == "release":
            exchange.release(arrivals)
            if self.protocol == "sentinel":
                exchange.dispatch(*inputs)
        with pytest.raises(errors.PeerTimeout) as caught:
            exchange.synchronize()
        with pytest.raises(errors.PeerTimeout):
            exchange.check()
        return f"{caught.value.phase} {caught.value.suspect}"

    def test_leaving_tells_of_a_failure_that_nobody_saw(self) -> None:
        config = self.config(deadline=0.3)

        def main(group: RankGroup) -> None:
            if group.rank == 1:
                exchange = Exchange(group, config)
                group.barrier()
                exchange.close()
                return
            with pytest.raises(errors.PeerTimeout, match="rank 1 did not answer"):
                self._dispatch_and_leave(group, config)

        self.run(main, 2)

    @staticmethod
    def _dispatch_and_leave(group: RankGroup, config: ExchangeConfig) -> None:
        with Exchange(group, config) as exchange:
            source = random_step((107,), config, group.size).sources[group.rank]
            exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
            group.barrier()

    def test_closed_exchange(self) -> None:
        config = self.config()

        def main(group: RankGroup) -> None:
            exchange = Exchange(group, config)
            step = random_step((59,), config, group.size)
            source = step.sources[group.rank]
            arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
            exchange.release(arrivals)
            exchange.close()
            exchange.close()
            with pytest.raises(errors.ExchangeClosed):
                exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
            with pytest.raises(errors.ExchangeClosed):
                arrivals.rows.numpy()

        self.run(main, 2)

    def test_rank_that_fails_ends_the_waits_of_its_peers(self) -> None:
        config = self.config(deadline=1000.0)  # far beyond this test's own limit

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                step = random_step((61,), config, group.size)
                source = step.sources[group.rank]
                arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                if group.rank == 1:
                    raise ValueError("an expert of rank 1 failed")
                self.finish(exchange, arrivals, step)
                with pytest.raises(errors.PeerLeft, match="rank 1 left"):
                    exchange.synchronize()

        with pytest.raises(ValueError, match="expert of rank 1"):
            self.run(main, 3)

    def test_count_on_the_device_beyond_the_rows(self) -> None:
        config = self.config(deadline=1000.0)

        def main(group: RankGroup) -> list[int]:
            with Exchange(group, config) as exchange:
                step = random_step((67,), config, group.size, counts=[5] * group.size)
                source = step.sources[group.rank]
                memory = exchange.device.allocate(4)
                stream = exchange.device.default_stream
                exchange.device.copy_in(memory.address, np.array([9 if group.rank == 1 else 4], np.uint32), stream)
                count = DeviceArray(memory.address, (1,), np.uint32, owner=ArrayOwner(exchange.device))
                inputs = (source.payloads[0], source.expert_ids, source.expert_weights)
                arrivals = exchange.dispatch(*inputs, num_tokens=count)
                taken: list[int] = arrivals.counts.numpy().tolist()
                if group.rank == 1:
                    with pytest.raises(errors.ArgumentError, match="num_tokens: got 9; allowed: at most the rows"):
                        exchange.synchronize()
                else:
                    with pytest.raises(errors.PeerLeft, match="rank 1 left"):
                        self._go_on(exchange, arrivals, inputs)
            memory.free()
            return taken

        rows = self.run(main, 3)
        if self.protocol == "sentinel":  # the counts of Fence depend on the routing
            assert rows == [[4, 5, 4]] * 3

    @staticmethod
    def _go_on(exchange: Exchange, arrivals: Arrivals, inputs: tuple[Any, ...]) -> None:
        """End the step and run another."""
        exchange.release(arrivals)
        exchange.synchronize()
        exchange.dispatch(*inputs)
        exchange.synchronize()

    @pytest.mark.parametrize("first_epoch", [1, (1 << 32) - 3])
    def test_survivors_recover(self, first_epoch: int) -> None:
        """A rank leaves in the middle of a step, its rows half way; the others go on without it, in both lanes."""
        config = self.config(num_experts=16, top_k=4, lanes=2, deadline=20.0, first_epoch=first_epoch)
        lost = 2

        def main(group: RankGroup) -> int:
            with Exchange(group, config) as exchange:
                for index in range(3):
                    self.verified_step(exchange, random_step((83, index), config, group.size), "before")
                group.barrier()  # a rank that leaves early would stop the others in the steps before
                step = random_step((83, 99), config, group.size, counts=[config.max_tokens] * group.size)
                source = step.sources[group.rank]
                exchange.dispatch_send(source.payloads[0], source.expert_ids, source.expert_weights, lane=1)
                if group.rank == lost:
                    exchange.note_failure(errors.NvepError("gone"))
                    return 0
                with pytest.raises(errors.PeerLeft, match=f"rank {lost} left"):
                    self._step_until_it_fails(exchange, step)
                exchange.recover([lost])
                for index in range(4):
                    poison_receive_buffers(exchange)
                    self._masked_step(exchange, random_step((89, index), config, group.size), (lost,), lane=index % 2)
                return exchange.statistics().dropped_tokens

        dropped = self.run(main, 4)
        assert all(n > 0 for rank, n in enumerate(dropped) if rank != lost)

    def _step_until_it_fails(self, exchange: Exchange, step: Step) -> None:
        """Steps of both lanes, until one of them fails."""
        exchange.dispatch_recv(lane=1)
        self._release_until_it_fails(exchange, step)

    @staticmethod
    def _release_until_it_fails(exchange: Exchange, step: Step) -> None:
        source = step.sources[exchange.group.rank]
        while True:
            arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
            exchange.release(arrivals)
            exchange.synchronize()

    def test_recovery_keeps_earlier_masks(self) -> None:
        config = self.config(num_experts=16, top_k=4, deadline=5.0)
        masked, lost = 3, 2
        turnstile = Turnstile()

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                self.verified_step(exchange, random_step((109, 0), config, group.size), "before")
                if group.rank == masked:
                    group.barrier()
                    exchange.note_failure(errors.NvepError("masked"))
                    return
                exchange.set_mask([r == masked for r in range(group.size)])
                exchange.synchronize()
                group.barrier()
                self._masked_step(exchange, random_step((109, 1), config, group.size), (masked,))
                turnstile.open(f"rank {group.rank} did the masked step")
                if group.rank == lost:
                    for rank in (0, 1):  # else this rank's leaving would stop them in it
                        turnstile.wait(f"rank {rank} did the masked step")
                    exchange.note_failure(errors.NvepError("gone"))
                    return
                with pytest.raises(errors.PeerLeft, match=f"rank {lost} left"):
                    self._release_until_it_fails(exchange, random_step((109, 2), config, group.size))
                exchange.recover([lost])
                for index in range(3, 6):
                    self._masked_step(exchange, random_step((109, index), config, group.size), (lost, masked))

        self.run(main, 4)

    def test_a_masked_rank_stops_nobody(self) -> None:
        """A rank that was left out runs on, misses its peers and says so: they no longer listen.

        What it sent meanwhile stays where it is, and must not be taken for another rank's.
        """
        config = self.config(num_experts=16, top_k=4, deadline=0.5)
        masked, ranks = 1, 4
        full = [config.max_tokens] * ranks

        def main(group: RankGroup) -> None:
            with Exchange(group, config) as exchange:
                self.verified_step(exchange, random_step((101, 0), config, group.size), "before")
                if group.rank == masked:
                    step = random_step((101, 1), config, group.size, counts=full)
                    source = step.sources[masked]
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    exchange.release(arrivals)
                    exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    with pytest.raises(errors.PeerTimeout):
                        exchange.synchronize()
                    group.barrier()
                    return
                exchange.set_mask([r == masked for r in range(group.size)])
                group.barrier()  # by now the masked rank has poisoned everybody
                for index in range(1, 4):
                    self._masked_step(exchange, random_step((103, index), config, group.size, counts=full), (masked,))

        self.run(main, ranks)

    def _masked_step(self, exchange: Exchange, step: Step, masked: tuple[int, ...], *, lane: int = 0) -> None:
        rank, config = exchange.group.rank, exchange.config
        source = step.sources[rank]
        arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights, lane=lane)
        expected = arrivals_of(step, config, rank, masked=masked, protocol=exchange.protocol)
        check_arrivals(arrivals, expected, "with masked ranks")
        output = exchange.combine(fill_unused(step, expected, rank, protocol=exchange.protocol), arrivals)
        exchange.synchronize()
        same(output.numpy(), output_of(step, config, rank, masked=masked), "with masked ranks")

    def test_a_rank_that_may_still_write_is_not_recovered_from(self) -> None:
        config = self.config(deadline=0.5)

        def main(group: RankGroup) -> str:
            exchange = Exchange(group, config)
            step = random_step((97,), config, group.size)
            source = step.sources[group.rank]
            try:
                if group.rank == 1:
                    return ""
                exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                with pytest.raises(errors.PeerTimeout, match="rank 1 did not answer"):
                    exchange.synchronize()
                with pytest.raises(errors.PeerTimeout, match="waited in recover") as caught:
                    exchange.recover([1])
                assert caught.value.suspect == 1
                with pytest.raises(errors.ArgumentError, match="lost"):
                    exchange.recover([group.rank])
                return "refused"
            finally:
                if group.rank == 1:
                    turnstile.wait("others are done")
                else:
                    done.append(group.rank)
                    if len(done) == 2:
                        turnstile.open("others are done")
                exchange.note_failure(errors.NvepError("test"))
                exchange.close()

        turnstile, done = Turnstile(), []  # type: tuple[Turnstile, list[int]]
        assert self.run(main, 3) == ["refused", "", "refused"]
