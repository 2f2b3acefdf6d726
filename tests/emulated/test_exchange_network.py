"""The exchange over every network transport, on the emulated device."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from nvep.config import NETWORK_TRANSPORTS
from nvep.errors import ArgumentError
from nvep.exchange import Exchange
from nvep.group import RankGroup
from nvep.nic.soft import SoftNicModel
from nvep.testing.backend import Backend
from nvep.testing.conformance import ExchangeConformance
from nvep.testing.conformance_failures import FailureConformance
from nvep.testing.mpirun import run_mpi
from nvep.testing.steps import (
    arrivals_of,
    check_arrivals,
    fill_unused,
    output_of,
    poison_receive_buffers,
    random_step,
    same,
)


class TestGdaki(ExchangeConformance, FailureConformance):
    device = "emulated"
    transport = "gdaki"
    protocol = "signal"
    wide_ranks = 16


class TestGpiMc(ExchangeConformance, FailureConformance):
    device = "emulated"
    transport = "gpi-mc"
    protocol = "signal"
    wide_ranks = 16


# The other two differ from these in their posters alone; the tests below compare their results, and tests/gpu runs all.
class TestGpi(FailureConformance):
    device = "emulated"
    transport = "gpi"
    protocol = "signal"


class TestFreeFlow(FailureConformance):
    device = "emulated"
    transport = "free-flow"
    protocol = "signal"


UNFRIENDLY = SoftNicModel(reorder=True, busy_odds=200, seed=3)


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
@pytest.mark.parametrize(("domain", "queues", "lanes"), [(2, 1, 2), (3, 2, 1), (8, 1, 1)])
def test_near_and_far_peers_in_one_step(transport: str, domain: int, queues: int, lanes: int) -> None:
    backend = Backend()
    backend.transport = transport
    config = backend.config(
        num_experts=32, top_k=6, max_tokens=24, domain_size=domain, queues=queues, lanes=lanes, queue_depth=64
    )

    def main(group: RankGroup) -> None:
        with Exchange(group, config, nic=UNFRIENDLY) as exchange:
            for index in range(4):
                poison_receive_buffers(exchange)
                step = random_step((domain, index), config, group.size)
                backend.verified_step(exchange, step, f"rank {group.rank}, step {index}", split=index % 2 == 1)
            if domain >= group.size:
                assert exchange.network is not None
                assert exchange.network.statistics().messages == 0

    backend.run(main, 5)


def test_a_transport_without_an_adapter_takes_no_model() -> None:
    config = Backend().config()

    def main(group: RankGroup) -> None:
        with pytest.raises(ArgumentError, match="None for transport nvlink"):
            Exchange(group, config, nic=UNFRIENDLY)

    Backend().run(main, 2)


@pytest.mark.parametrize("domain", [1, 2])
def test_ranks_that_are_processes(domain: int) -> None:
    program = str(Path(__file__).parent / "network_program.py")
    result = run_mpi(3, [sys.executable, program, str(domain)], timeout=90).require_success()
    assert result.stdout.split() == [word for transport in NETWORK_TRANSPORTS for word in (transport, "True")]


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
def test_a_graph_is_replayed_after_the_engine_left(transport: str) -> None:
    backend = Backend()
    backend.transport = transport
    config = backend.config()

    def main(group: RankGroup) -> None:
        with Exchange(group, config, nic=SoftNicModel(idle_s=0.05)) as exchange:
            steps = [random_step((17, index), config, group.size, counts=[8] * group.size) for index in range(3)]
            source = steps[0].sources[group.rank]
            expected = arrivals_of(steps[0], config, group.rank, protocol=exchange.protocol)
            rows = fill_unused(steps[0], expected, group.rank, protocol=exchange.protocol)
            stream = exchange.device.create_stream()
            with exchange.device.capture(stream) as graph:
                arrivals = exchange.dispatch(
                    tuple(source.payloads), source.expert_ids, source.expert_weights, stream=stream
                )
                output = exchange.combine(rows, arrivals, stream=stream)
            for step in steps:
                await_idle(exchange)
                group.barrier()
                for mine, others in zip(source.payloads, step.sources[group.rank].payloads):
                    mine[:] = others
                source.expert_ids[:] = step.sources[group.rank].expert_ids
                source.expert_weights[:] = step.sources[group.rank].expert_weights
                wanted = arrivals_of(step, config, group.rank, protocol=exchange.protocol)
                rows[:] = fill_unused(step, wanted, group.rank, protocol=exchange.protocol)
                exchange.wake()
                graph.launch(stream)
                exchange.synchronize(stream)
                check_arrivals(arrivals, wanted, "replay")
                same(output.numpy(), output_of(step, config, group.rank), "replay: output")
            graph.close()

    backend.run(main, 3)


def await_idle(exchange: Exchange) -> None:
    """Until the engine has left the device."""
    assert exchange.network is not None
    end = time.monotonic() + 20
    while exchange.network.running:
        assert time.monotonic() < end
        time.sleep(0.01)
