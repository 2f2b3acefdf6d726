"""How every transport and protocol must fail: tests of a backend inherit `FailureConformance` and name it."""

from __future__ import annotations

import pytest

from nvep import errors
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.testing.backend import Backend
from nvep.testing.steps import random_step


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
            step = random_step((53,), config, group.size)
            source = step.sources[group.rank]
            late = phase == "dispatch" and group.rank == absent
            try:
                if not late:
                    arrivals = exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                    if group.rank != absent and phase == "combine":
                        self.finish(exchange, arrivals, step)
                    elif group.rank != absent and phase == "release":
                        exchange.release(arrivals)
                    if group.rank != absent or phase == "dispatch":
                        with pytest.raises(errors.PeerTimeout) as caught:
                            exchange.synchronize()
                        assert caught.value.suspect == absent
                        with pytest.raises(errors.PeerTimeout):
                            exchange.dispatch(source.payloads[0], source.expert_ids, source.expert_weights)
                        return f"{caught.value.phase} {caught.value.suspect}"
                return "absent"
            finally:
                group.barrier()
                exchange.note_failure(errors.NvepError("test"))
                exchange.close()

        expected = {"dispatch": "D.recv 1", "combine": "C.recv 1", "release": "release 1"}[phase]
        assert self.run(main, 3) == [expected, "absent", expected]

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
