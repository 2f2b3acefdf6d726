"""The simulation's memory model against the published PTX memory model: what must be seen is seen over many seeds, and
what must not be is never seen.

Each test names the axiom of the PTX ISA's memory consistency model (chapter 8) that forbids an outcome. Allowed
outcomes must be observed, or the model would be stronger than a GPU and hide bugs. One allowed behaviour is left out,
and a test says so: load buffering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from nvep.errors import DeviceError
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import LaunchShape
from nvep.runtime.simulated import Chance, SimulatedDevice, SimulatedStream, Simulation, SimulationOptions
from nvep.runtime.simulated_library import SimulatedKernel, SimulatorLibrary
from nvep.runtime.source import KernelSource

KERNELS = Path(__file__).parent / "kernels" / "litmus"
ARGUMENTS = ArgumentStruct(
    "LitmusArguments",
    [
        *(Field(name, "unsigned long long*") for name in ("x", "y", "z", "seen")),
        *(Field(name, "u32") for name in ("role", "writer", "reader", "device", "how")),
    ],
)
RELAXED, STRONG, FENCE, DEVICE_FENCE = range(4)  # Writer and Reader of litmus.cuh
SEEDS = 400
BULK = 5
Outcome = tuple[int, ...]


ONE_THREAD = LaunchShape(1, 1)


@dataclass(frozen=True)
class Part:
    """One grid: ``role`` of a kernel on ``stream`` of ``rank``."""

    role: int
    rank: int
    stream: int = 0
    shape: LaunchShape = ONE_THREAD


@dataclass(frozen=True)
class Litmus:
    """A test: its grids in order of launch, how they write and read, and which words make the outcome.

    ``watched``: indices of what was seen; ``"x"`` and ``"y"`` stand for the final values.
    """

    kernel: str
    parts: tuple[Part, ...]
    watched: tuple[int | str, ...]
    writer: int = RELAXED
    reader: int = RELAXED
    device: bool = False
    how: int = 0
    axiom: bool = True
    x: int = 0

    def with_orders(self, writer: int, reader: int) -> Litmus:
        return replace(self, writer=writer, reader=reader)


@cache
def kernels() -> dict[str, SimulatedKernel]:
    prelude = (KERNELS / "litmus.cuh").read_text()
    sources = [KernelSource(p.stem, ARGUMENTS, prelude, p) for p in sorted(KERNELS.glob("*.cu"))]
    return {kernel.source.name: kernel for kernel in library().load(sources)}


@cache
def library() -> SimulatorLibrary:
    return SimulatorLibrary()


def run(test: Litmus, seed: int) -> Outcome:
    """One run of a litmus test."""
    memory = np.zeros(1024 + 64, dtype=np.uint8)
    words = memory[-memory.ctypes.data % 64 :][:1024].view(np.uint64)
    words[0] = test.x
    words[48:50] = BULK  # where bulk copies come from
    base = words.ctypes.data
    options = SimulationOptions(streams=8, blocks=2, axiom=test.axiom, chance=Chance(preempt=384), budget=1_000_000)
    simulation = Simulation(library(), seed, options)
    try:
        devices = [SimulatedDevice(simulation, rank) for rank in range(1 + max(p.rank for p in test.parts))]
        simulation.axiom_records(base + 256, 8)
        simulation.start()
        streams: dict[tuple[int, int], SimulatedStream] = {}
        for part in test.parts:
            device = devices[part.rank]
            key = (part.rank, part.stream)
            if key not in streams:
                streams[key] = device.create_stream() if part.stream else device.default_stream
            arguments = ARGUMENTS.new(
                x=base, y=base + 256, z=base + 320, seen=base + 512, role=part.role, writer=test.writer,
                reader=test.reader, device=int(test.device), how=test.how,
            )  # fmt: skip
            device.launch(kernels()[test.kernel], part.shape, arguments, streams[key])
        simulation.run()
    finally:
        simulation.close()
    final = {"x": int(words[0]), "y": int(words[32])}
    return tuple(final[w] if isinstance(w, str) else int(words[64 + w]) for w in test.watched)


def outcomes(test: Litmus, seeds: int = SEEDS) -> set[Outcome]:
    return {run(test, seed) for seed in range(seeds)}


def failures(test: Litmus, seeds: int = 60) -> Iterator[str]:
    """What the simulation objects to, by seed; empty for none."""
    for seed in range(seeds):
        try:
            run(test, seed)
            yield ""
        except DeviceError as error:
            yield str(error)


def apart(kernel: str, roles: Sequence[int], watched: Sequence[int | str], *, same_rank: bool = False) -> Litmus:
    """Each role on a rank of its own, or on a stream of its own of one rank."""
    parts = tuple(Part(role, 0 if same_rank else i, i if same_rank else 0) for i, role in enumerate(roles))
    return Litmus(kernel, parts, tuple(watched), device=same_rank)


MP = apart("message_passing", (0, 1), (0, 1))
ISA2 = apart("message_passing", (2, 3, 4), (0, 1, 2))
WRC = apart("message_passing", (5, 6, 7), (0, 1, 2))
STRONG_PAIRS = [(STRONG, STRONG), (FENCE, FENCE), (STRONG, FENCE), (FENCE, STRONG)]
WEAK_PAIRS = [(RELAXED, RELAXED), (STRONG, RELAXED), (RELAXED, STRONG), (FENCE, RELAXED), (RELAXED, FENCE)]


@pytest.mark.parametrize(("test", "stale"), [(MP, (1, 0)), (ISA2, (1, 1, 0)), (WRC, (1, 1, 0))])
@pytest.mark.parametrize("orders", STRONG_PAIRS)
def test_a_release_seen_by_an_acquire_publishes_everything(
    test: Litmus, stale: Outcome, orders: tuple[int, int]
) -> None:
    """Causality: what precedes a release pattern precedes what follows the acquire pattern that observes it; in ISA2
    over a third thread (base causality is transitive), in WRC also what the releasing thread had only observed."""
    seen = outcomes(test.with_orders(*orders))
    assert stale not in seen
    assert tuple([1] * len(stale)) in seen


@pytest.mark.parametrize(("test", "stale"), [(MP, (1, 0)), (ISA2, (1, 1, 0)), (WRC, (1, 1, 0))])
@pytest.mark.parametrize("orders", WEAK_PAIRS)
def test_half_a_synchronisation_is_none(test: Litmus, stale: Outcome, orders: tuple[int, int]) -> None:
    assert stale in outcomes(test.with_orders(*orders), 1500)


@pytest.mark.parametrize("orders", [(STRONG, STRONG), (DEVICE_FENCE, DEVICE_FENCE)])
def test_device_scope_is_enough_within_a_device(orders: tuple[int, int]) -> None:
    test = apart("message_passing", (0, 1), (0, 1), same_rank=True).with_orders(*orders)
    seen = outcomes(test)
    assert (1, 0) not in seen
    assert (1, 1) in seen


@pytest.mark.parametrize("orders", [(DEVICE_FENCE, FENCE), (FENCE, DEVICE_FENCE), (DEVICE_FENCE, STRONG)])
def test_a_fence_of_device_scope_does_nothing_between_devices(orders: tuple[int, int]) -> None:
    """Patterns synchronise only if they are morally strong: each scope includes the other's thread."""
    assert (1, 0) in outcomes(MP.with_orders(*orders), 1500)


def test_accesses_whose_scopes_do_not_meet_are_a_race() -> None:
    found = list(failures(replace(MP, device=True)))
    assert any("scopes do not meet" in text for text in found)


def test_a_chain_of_updates_carries_a_release() -> None:
    """Observation order passes through read-modify-writes."""
    test = replace(apart("message_passing", (8, 9, 10), (0, 1, 2), same_rank=True), writer=STRONG, reader=STRONG)
    seen = outcomes(test, 1000)
    assert (1, 2, 1) in seen
    assert (1, 2, 0) not in seen
    assert (1, 2, 0) in outcomes(replace(test, writer=RELAXED), 2000)


@pytest.mark.parametrize("orders", [(RELAXED, RELAXED), (STRONG, STRONG), (FENCE, FENCE)])
def test_store_buffering_is_always_allowed(orders: tuple[int, int]) -> None:
    """Only fence.sc forbids it, and nvep uses none."""
    seen = outcomes(apart("ordering", (0, 1), (0, 1)).with_orders(*orders))
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("orders", [(RELAXED, RELAXED), (STRONG, STRONG), (FENCE, FENCE)])
def test_observers_may_disagree_on_the_order_of_two_writes(orders: tuple[int, int]) -> None:
    """IRIW: again only fence.sc forbids it."""
    assert (1, 0, 1, 0) in outcomes(apart("ordering", (2, 3, 4, 5), (0, 1, 2, 3)).with_orders(*orders), 1500)


@pytest.mark.parametrize("writer", [RELAXED, STRONG, FENCE])
def test_two_plus_two_writes_have_no_common_order(writer: int) -> None:
    """Coherence is an order per location; without a read nothing synchronises, so both first writes may be last."""
    assert (1, 1) in outcomes(apart("ordering", (6, 7), ("x", "y")).with_orders(writer, RELAXED), 1500)


def test_load_buffering_is_not_modelled() -> None:
    """PTX allows both to see the other's later write; here loads run in program order. A limit, not a rule."""
    assert (1, 1) not in outcomes(apart("ordering", (8, 9), (0, 1)))


COHERENCE: list[tuple[Sequence[int], Sequence[int | str], Callable[[Outcome], bool]]] = [
    ((0, 1), (0, 1), lambda o: o == (1, 0)),  # CoRR
    ((2, 3), (0, 1), lambda o: o[1] < o[0]),  # CoWW: 2 follows 1 for everybody
    ((4, 5), (0, "x"), lambda o: o == (1, 1)),  # CoRW: what was read comes before what is written next
    ((6, 7), (0, "x"), lambda o: o[0] == 0 or o == (2, 1)),  # CoWR: never older than one's own write
]


@pytest.mark.parametrize("same_rank", [False, True])
@pytest.mark.parametrize(("roles", "watched", "wrong"), COHERENCE)
def test_one_location_is_coherent(
    roles: Sequence[int], watched: Sequence[int | str], wrong: Callable[[Outcome], bool], same_rank: bool
) -> None:
    """SC-per-location, at both scopes."""
    seen = outcomes(apart("coherence", roles, watched, same_rank=same_rank))
    assert not any(wrong(outcome) for outcome in seen), seen
    assert len(seen) > 1


def test_what_was_read_counts_as_known() -> None:
    """CoRR over a synchronisation: the second thread may not read what is older than the first one's read, and may read
    what is older than the first one's later read."""
    test = replace(apart("coherence", (9, 10, 11), (0, 1, 2, 3)), writer=STRONG, reader=STRONG)
    seen = outcomes(test, 3000)
    assert not any(flag == 1 and later < first for first, flag, later, _ in seen), seen
    assert any(flag == 1 and later < last for _, flag, later, last in seen), seen


def test_updates_are_atomic() -> None:
    test = Litmus("coherence", (Part(8, 0, shape=LaunchShape(2, 1)),), (0, 1, "x"), device=True)
    assert outcomes(test) == {(0, 1, 2), (1, 0, 2)}


def block_test(how: int, threads: int, writer: int = STRONG, reader: int = STRONG) -> Litmus:
    shape = LaunchShape(1, threads)
    parts = (Part(0, 0, shape=shape), Part(1, 1, shape=shape))
    return Litmus("blocks", parts, tuple(range(threads)), writer, reader, how=how)


@pytest.mark.parametrize(("how", "threads"), [(1, 64), (1, 32), (2, 32)])
@pytest.mark.parametrize("orders", [(STRONG, STRONG), (FENCE, FENCE)])
def test_barriers_extend_a_synchronisation_to_their_threads(how: int, threads: int, orders: tuple[int, int]) -> None:
    """bar.sync and bar.warp.sync are morally strong synchronisations of their threads; releases are cumulative."""
    assert outcomes(block_test(how, threads, *orders), 60) == {tuple([1] * threads)}


@pytest.mark.parametrize(
    "test",
    [
        block_test(0, 32),  # nothing joins the threads
        block_test(3, 32),  # a shuffle moves registers and orders no memory
        block_test(2, 64),  # a warp's barrier says nothing to the other warp
        block_test(1, 64, RELAXED, STRONG),
        block_test(1, 64, STRONG, RELAXED),
        block_test(1, 64, DEVICE_FENCE, FENCE),
    ],
)
def test_ordinary_accesses_without_causality_are_a_race(test: Litmus) -> None:
    """Conflicting weak accesses that causality order does not relate are a data race: an error here, not a value."""
    found = list(failures(test))
    assert all("data race" in text and "blocks.cu" in text for text in found), found


def test_vector_accesses_tear_at_eight_bytes() -> None:
    assert outcomes(apart("widths", (0, 1), (0, 1))) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("roles", [(2, 3), (4, 5)])
def test_mixed_sizes_and_mixed_kinds_are_errors(roles: Sequence[int]) -> None:
    found = list(failures(apart("widths", roles, (0,))))
    assert all("data race" in text for text in found), found


@pytest.mark.parametrize("orders", [(STRONG, STRONG), (FENCE, FENCE)])
def test_a_kernel_boundary_orders_grids_of_a_stream(orders: tuple[int, int]) -> None:
    test = Litmus("grids", (Part(0, 0), Part(1, 0), Part(8, 1)), (1,)).with_orders(*orders)
    assert outcomes(test, 60) == {(7,)}


def test_a_dependent_launch_is_ordered_at_its_wait_only() -> None:
    late = Part(3, 0, shape=LaunchShape(1, 1, dependent=True))
    test = Litmus("grids", (Part(2, 0), late, Part(8, 1)), (1,), STRONG, STRONG, how=1)
    assert outcomes(test, 100) == {(7,)}
    found = list(failures(replace(test, how=0), 100))
    assert any("data race" in text for text in found)


@pytest.mark.parametrize("axiom", [True, False])
def test_the_axiom_of_completed_grids(axiom: bool) -> None:
    """Beyond PTX: a peer's store in a grid after one that saw a record comes after the grids before that record."""
    parts = (Part(4, 0), Part(5, 0), Part(6, 1), Part(7, 1))
    seen = outcomes(Litmus("grids", parts, (0, "x"), axiom=axiom), 1500)
    assert ((1, 1) in seen) is not axiom  # the record was seen, and yet the re-arm came last
    assert (1, 2) in seen
    assert (0, 1) in seen


def test_a_seed_replays_exactly() -> None:
    test = apart("ordering", (2, 3, 4, 5), (0, 1, 2, 3))
    assert [run(test, seed) for seed in range(40)] == [run(test, seed) for seed in range(40)]


def bulk_test(*roles: int, how: int, watched: tuple[int | str, ...] = (0,), orders: int = STRONG) -> Litmus:
    shape = LaunchShape(1, 1, shared_bytes=64)
    parts = tuple(Part(role, rank, shape=shape) for rank, role in enumerate(roles))
    return Litmus("bulk", parts, watched, orders, orders, how=how)


@pytest.mark.parametrize("orders", [STRONG, FENCE])
def test_a_bulk_store_is_there_once_it_was_waited_for(orders: int) -> None:
    """Writes of a bulk copy are made visible to the thread that waits for its group; without `.read`."""
    assert outcomes(bulk_test(0, 1, how=1, orders=orders), 60) == {(BULK,)}
    for too_early in (0, 2):
        found = list(failures(bulk_test(0, 1, how=too_early, orders=orders)))
        assert all("data race" in text and "meets rank 0 block 0 a bulk copy" in text for text in found), found


@pytest.mark.parametrize("roles", [(2, 3), (4,)])
def test_a_bulk_load_needs_a_proxy_fence(roles: tuple[int, ...]) -> None:
    """Neither an acquire nor program order brings ordinary accesses to the async proxy."""
    assert outcomes(bulk_test(*roles, how=1), 60) == {(7,)}
    found = list(failures(bulk_test(*roles, how=0)))
    assert all("data race" in text and "bulk.cu" in text for text in found), found


def test_a_bulk_load_has_come_once_its_barrier_says_so() -> None:
    assert outcomes(bulk_test(5, how=1), 60) == {(BULK,)}
    assert outcomes(bulk_test(5, how=0), 60) == {(BULK,), (0xCDCDCDCDCDCDCDCD,)}


def test_a_stage_is_free_once_its_store_has_read_it() -> None:
    assert outcomes(bulk_test(6, how=1, watched=("x",)), 60) == {(BULK,)}
    assert outcomes(bulk_test(6, how=0, watched=("x",)), 60) == {(BULK,), (0,)}


def test_a_kernel_boundary_orders_bulk_copies() -> None:
    """A later grid finds what a bulk copy stored, by ordinary loads and by bulk copies, without a fence."""
    shape = LaunchShape(1, 1, shared_bytes=64)
    test = Litmus("bulk", (Part(7, 0, shape=shape), Part(9, 0, shape=shape)), (0, 1))
    assert outcomes(test, 60) == {(BULK, BULK)}


def test_bulk_copies_move_whole_units() -> None:
    for text in failures(bulk_test(8, how=0), 3):
        assert "a bulk copy is not of whole 16-byte units at litmus/bulk.cu" in text
