"""A thousand steps in one process: what it holds does not grow, and the last steps are as right as the first."""

from __future__ import annotations

from nvep.arrays import DeviceArray
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup, run_local
from nvep.moe.synthetic import ScaleExperts
from nvep.reference import RankTokens, combine_at, dispatch_to, scale_experts
from nvep.runtime.device import Stream
from nvep.testing.moe_checks import MoECase, poison
from nvep.testing.resources import Resources
from nvep.testing.steps import check_arrivals, same

STEPS, WARM_UP, CHECKED = 1000, 100, 50
MIB = 1 << 20
CASE = MoECase(ranks=4, experts=10, top_k=3, hidden=24, intermediate=8)  # its tokens; the experts need no weights


class Endurance:
    """Joined and split steps in turn, on two streams, with counts that change from step to step."""

    def __init__(self) -> None:
        self.readings: dict[int, Resources] = {}

    def main(self, group: RankGroup) -> int:
        with Exchange(group, CASE.config) as exchange:
            experts = ScaleExperts(exchange)
            streams = [exchange.device.create_stream() for _ in range(2)]
            checked = 0
            for index in range(STEPS):
                sources = CASE.step(index)
                checking = index % CHECKED == CHECKED - 1
                if checking:
                    exchange.drain()  # so that what finished steps kept alive is let go of by the next one
                    poison(exchange)
                arrivals, output = self._step(
                    experts, sources[group.rank], (exchange, streams[index % 2]), split=index % 3 == 1
                )
                if checking:
                    self._check(exchange, arrivals, output, (sources, index))
                    checked += 1
                    self._read(group, index)
            return checked

    @staticmethod
    def _step(
        experts: ScaleExperts, tokens: RankTokens, where: tuple[Exchange, Stream], *, split: bool
    ) -> tuple[Arrivals, DeviceArray]:
        exchange, stream = where
        inputs = (tokens.payloads[0], tokens.expert_ids, tokens.expert_weights)
        if not split:
            arrivals = exchange.dispatch(*inputs, stream=stream)
            return arrivals, exchange.combine(experts(arrivals, stream=stream), arrivals, stream=stream)
        exchange.dispatch_send(*inputs, stream=stream)
        arrivals = exchange.dispatch_recv(stream=stream)
        exchange.combine_send(experts(arrivals, stream=stream), arrivals, stream=stream)
        return arrivals, exchange.combine_recv(arrivals, stream=stream)

    @staticmethod
    def _check(exchange: Exchange, arrivals: Arrivals, output: DeviceArray, what: tuple[list[RankTokens], int]) -> None:
        """Bit for bit; the receive buffers still hold the step, since no rank starts the next before all are here."""
        (sources, index), rank, config = what, exchange.group.rank, exchange.config
        exchange.drain()
        exchange.check()
        every = [dispatch_to(r, sources, config=config) for r in range(CASE.ranks)]
        check_arrivals(arrivals, every[rank], f"rank {rank}, step {index}")
        partial = [scale_experts(a, rank=r, config=config, num_ranks=CASE.ranks) for r, a in enumerate(every)]
        want = combine_at(rank, partial, expert_ids=sources[rank].expert_ids, config=config)
        same(output.numpy(), want, f"rank {rank}, step {index}: output")

    def _read(self, group: RankGroup, index: int) -> None:
        group.barrier()
        if group.rank == 0:
            self.readings[index] = Resources.now()
        group.barrier()


def test_a_thousand_steps() -> None:
    endurance = Endurance()
    assert run_local(endurance.main, CASE.ranks, device="emulated") == [STEPS // CHECKED] * CASE.ranks
    steady = [reading for index, reading in sorted(endurance.readings.items()) if index >= WARM_UP - 1]
    first, rest = steady[0], steady[1:]
    assert len(rest) == (STEPS - WARM_UP) // CHECKED
    for reading in rest:
        assert reading.descriptors == first.descriptors, (first, reading)
        assert reading.threads == first.threads, (first, reading)
        # An arena that Python's allocator took or gave back joins, splits or adds a mapping; nothing else may be new.
        arenas = reading.python_arenas - first.python_arenas
        assert arenas <= 1, (first, reading)
        assert reading.mappings <= first.mappings + abs(arenas), (first, reading)
        grown = reading.python_blocks - first.python_blocks
        assert grown < STEPS - WARM_UP, (first, reading)  # one a step, of all ranks together, would be a leak
        assert reading.resident_bytes <= first.resident_bytes + 8 * MIB, (first, reading)
