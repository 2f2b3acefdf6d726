"""Steps of several micro-batches whose every bit is known, and random schedules that keep the rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.bench.kernels import FloorKernels
from nvep.config import ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local
from nvep.moe import MoELayer, MoEWeights
from nvep.moe.overlap import STEP, MicroBatch, OverlapRunner, Phase, Schedule, default_schedule, split_tokens
from nvep.moe.overlap_plan import plan_events
from nvep.moe.synthetic import ScaleExperts
from nvep.reference import RankTokens, combine, dispatch
from nvep.reference.experts import scale_experts
from nvep.runtime.device import Device, Stream
from nvep.testing import moe_checks

STREAMS = ("compute", "communication", "a", "b")
POISON, DELAY_NS = 0xA5, 100_000
CONFIG = ExchangeConfig(num_experts=6, top_k=3, max_tokens=12, row_bytes=256, lanes=2, deadline=20.0)


def random_schedule(
    rng: random.Random,
    *,
    micro_batches: int | None = None,
    layers: int | None = None,
    needs: Mapping[str, tuple[str, ...]] = STEP,
) -> Schedule:
    """Phases in an order in which each stands behind those that it needs, on streams at random."""
    batches = micro_batches or rng.randint(1, 3)
    depth = layers or rng.randint(1, 2)
    streams = STREAMS[: rng.randint(1, len(STREAMS))]
    waiting = {
        batch: [(layer, name) for layer in range(depth) for name in needs]  # a mapping lists names behind their needs
        for batch in range(batches)
    }
    phases = []
    while waiting:
        batch = rng.choice(list(waiting))
        layer, name = waiting[batch].pop(0)
        phases.append(Phase(batch, name, rng.choice(streams), layer))
        if not waiting[batch]:
            del waiting[batch]
    return Schedule(tuple(phases), needs)


@dataclass(frozen=True)
class Scenario:
    """A step: tokens of each rank, through ``layers`` layers of synthetic experts."""

    counts: tuple[int, ...] = (11, 4, 0)
    config: ExchangeConfig = CONFIG
    layers: int = 1
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def tokens(self) -> list[RankTokens]:
        """What each rank brings, by rank: bf16 numbers of ordinary size."""
        config, found = self.config, []
        for rank, count in enumerate(self.counts):
            rng = np.random.default_rng([self.seed, rank])
            bits = rng.integers(0, 1 << 16, (count, config.row_bytes // 2), dtype=np.uint16)
            rows = (bits & 0x83FF | 0x3C00).view(np.uint8)
            ids = np.argsort(rng.random((count, config.num_experts)), axis=1)[:, : config.top_k].astype(np.int32)
            found.append(RankTokens([rows], ids, rng.random((count, config.top_k), dtype=np.float32)))
        return found

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """By rank: uint8 ``[tokens, bytes]`` after the last layer. Rows do not depend on how tokens are split."""
        sources, config = self.tokens, self.config
        for _ in range(self.layers):
            arrivals = dispatch(sources, config)
            partial = [scale_experts(a, rank=r, config=config, num_ranks=self.ranks) for r, a in enumerate(arrivals)]
            outputs = combine(partial, [s.expert_ids for s in sources], config=config)
            rows = [np.ascontiguousarray(output).view(np.uint8) for output in outputs]
            sources = [replace(s, payloads=[r]) for s, r in zip(sources, rows)]
        return [source.payloads[0] for source in sources]


def put(device: Device, array: np.ndarray, resources: ExitStack) -> DeviceArray:
    """A copy of ``array`` on the device."""
    memory = device.allocate(max(array.nbytes, 16))
    resources.callback(memory.free)
    if array.nbytes:
        device.copy_in(memory.address, np.ascontiguousarray(array), device.default_stream)
        device.default_stream.synchronize()
    return DeviceArray(memory.address, array.shape, array.dtype, owner=ArrayOwner(device))


class Steps:
    """One rank's steps of a scenario."""

    def __init__(self, group: RankGroup, scenario: Scenario, exchange: Exchange, resources: ExitStack) -> None:
        self.exchange, self.scenario = exchange, scenario
        self._device, self._resources = exchange.device, resources
        mine = scenario.tokens[group.rank]
        self._source, self._ids, self._weights = (
            self._put(array) for array in (mine.payloads[0], mine.expert_ids, mine.expert_weights)
        )
        self._sent = self._put(np.zeros_like(mine.payloads[0]))
        self._experts = group.together(lambda: ScaleExperts(exchange))
        self._kernels = group.together(lambda: FloorKernels(exchange.device))
        self.computations: dict[str, Callable[[MicroBatch], object]] = {
            "attention": self._attend,
            "experts": self._compute,
        }

    def _put(self, array: np.ndarray) -> DeviceArray:
        return put(self._device, array, self._resources)

    def _attend(self, batch: MicroBatch) -> None:
        """Move rows to where dispatch reads them: what is sent too early is poison, or the layer before."""
        source = batch.data if batch.layer == 0 else batch.output
        assert source is not None
        self._kernels.launch("delay", batch.stream, nanoseconds=DELAY_NS)
        self._device.copy(batch.tokens.address, source.address, batch.tokens.nbytes, batch.stream)

    def _compute(self, batch: MicroBatch) -> None:
        """What is given back too early is poison."""
        assert batch.arrivals is not None
        rows = batch.arrivals.partial_rows
        self._device.fill(rows.address, POISON, rows.nbytes, batch.stream)
        self._kernels.launch("delay", batch.stream, nanoseconds=DELAY_NS)
        self._experts(batch.arrivals, stream=batch.stream)

    def batches(self, *, most: int | None = None, smallest: int = 1) -> list[MicroBatch]:
        """This rank's tokens, split."""
        counts, config = self.scenario.counts, self.exchange.config
        tokens = counts[self.exchange.group.rank]
        split = split_tokens(tokens, most=max(counts) if most is None else most, config=config, smallest=smallest)
        return [
            MicroBatch(self._sent[part], self._ids[part], self._weights[part], data=self._source[part])
            for part in split.slices
        ]

    def poison(self, stream: Any = None) -> None:
        """Enqueue overwriting what attention is to write."""
        if self._sent.nbytes:
            self._device.fill(self._sent.address, POISON, self._sent.nbytes, self._device.as_stream(stream))

    def check(self, outputs: Sequence[DeviceArray], where: str) -> None:
        """Outputs of all micro-batches are, together, what the reference says."""
        self.exchange.synchronize()
        rows = [np.ascontiguousarray(output.numpy()).view(np.uint8) for output in outputs]
        expected = self.scenario.expected[self.exchange.group.rank]
        np.testing.assert_array_equal(np.concatenate(rows), expected, err_msg=where)


@contextmanager
def steps_of(group: RankGroup, scenario: Scenario) -> Iterator[Steps]:
    """An exchange, and a rank's steps over it. Collective."""
    with Exchange(group, scenario.config) as exchange, ExitStack() as resources:
        resources.callback(exchange.drain)
        steps = Steps(group, scenario, exchange, resources)
        resources.callback(exchange.drain)
        yield steps


def on_ranks(scenario: Scenario, device: str, body: Callable[[Steps], Any]) -> list[Any]:
    """Run ``body`` on every rank."""
    scenario.expected  # noqa: B018 (once, before the ranks start)

    def main(group: RankGroup) -> Any:
        with steps_of(group, scenario) as steps:
            return body(steps)

    return run_local(main, scenario.ranks, device=device, timeout=90)


def runner_of(steps: Steps, schedule: Schedule, pool: dict[str, Stream]) -> OverlapRunner:
    """A runner whose streams are those of ``pool``, which is added to."""
    counts = range(1, schedule.micro_batches + 1)
    names = {queue for count in counts for queue in plan_events(schedule.first(count)).queues} - {"compute"}
    for name in names - pool.keys():
        pool[name] = steps.exchange.device.create_stream()
    streams = {name: pool[name] for name in names}
    return OverlapRunner(steps.exchange, steps.computations, schedule=schedule, streams=streams)


def check_schedules(scenario: Scenario, device: str, schedules: Sequence[Schedule], *, graph: bool = False) -> None:
    """Every schedule gives the reference's bits: eagerly, or as a graph replayed three times."""

    def body(steps: Steps) -> None:
        pool: dict[str, Stream] = {}  # one for all runners: a GPU that ranks share has queues for few streams
        for number, schedule in enumerate(schedules):
            runner = runner_of(steps, schedule, pool)
            stream, where = steps.exchange.device.default_stream, f"schedule {number}:\n{schedule}"
            if not graph:
                for _ in range(2):
                    steps.poison()
                    steps.check(runner.run(steps.batches()), where)
                continue
            captured = runner.capture(steps.batches())
            for _ in range(3):
                steps.poison()
                captured.launch(stream)
                steps.check(captured.outputs, where)
            steps.exchange.group.barrier()
            captured.close()

    on_ranks(scenario, device, body)


def check_default(scenario: Scenario, device: str, *, graph: bool) -> None:
    """The usual schedules: receives on either kind of stream, and the serial one."""
    from nvep.moe.overlap import serial_schedule

    config, layers = scenario.config, scenario.layers
    schedules = [default_schedule(config, layers=layers, receive_on=on) for on in ("communication", "compute")]
    check_schedules(scenario, device, [*schedules, serial_schedule(config, layers=layers)], graph=graph)


def check_layers(device: str, *, graph: bool) -> None:
    """Two micro-batches through a MoELayer, overlapped, give the bits of the same micro-batches one after the other."""
    case = moe_checks.MoECase(2, 6, 3, hidden=256, intermediate=128)

    def body(layer: MoELayer, weights: MoEWeights) -> None:
        exchange, rank = layer.exchange, layer.group.rank
        runner = OverlapRunner(layer, {"attention": lambda batch: None})
        with ExitStack() as resources:
            resources.callback(layer.group.barrier)  # nobody frees while a peer's kernel waits
            for index in range(2):
                steps = [case.step(2 * index + half)[rank] for half in range(2)]
                arrays = [(moe_checks.rows_of(t), t.expert_ids, t.expert_weights) for t in steps]
                inputs = [tuple(put(exchange.device, a, resources) for a in three) for three in arrays]
                layer.group.barrier()  # nor allocates
                expected = [_by_hand(layer, *three) for three in inputs]
                batches = [MicroBatch(*three) for three in inputs]
                if graph:
                    captured = runner.capture(batches)
                    resources.callback(captured.close)
                    captured.launch(exchange.device.default_stream)
                    outputs = captured.outputs
                else:
                    outputs = runner.run(batches)
                exchange.synchronize()
                for half, output in enumerate(outputs):
                    where = f"rank {rank}, step {index}, micro-batch {half}"
                    assert output.numpy().tobytes() == expected[half].tobytes(), where
                    moe_checks.check_output(output.numpy(), steps[half], case, weights, where)
                layer.group.barrier()

    moe_checks.run(case, device, body, lanes=2)


def _by_hand(layer: MoELayer, *arrays: Any) -> np.ndarray:
    layer.dispatch_send(*arrays)
    arrivals = layer.dispatch_recv()
    layer.experts(arrivals)
    layer.combine_send(arrivals)
    output = layer.combine_recv(arrivals)
    layer.exchange.synchronize()
    return output.numpy().copy()
