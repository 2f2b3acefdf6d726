"""What happens in a simulation: steps, phases and their order, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nvep.config import NETWORK_TRANSPORTS, PROTOCOLS, ExchangeConfig
from nvep.runtime.simulated import Chance, Rule
from nvep.testing.steps import Step, random_step

_WORD = 1 << 32
_LOOKS_EMPTY = 0x80  # rows of this byte look like Sentinel's empty wire


@dataclass(frozen=True)
class ScenarioKind:
    """What seeds of a search have in common.

    Attributes
    ----------
    ranks, steps : int
        Ranks, and steps of each scenario.
    protocol : str
        ``"fence"``, ``"sentinel"``, or ``"mixed"`` for both in turn.
    strict_ptx : bool
        Sentinel by release and acquire of records.
    axiom : bool
        The axiom of completed grids holds.
    transport : str
        How bytes move. Over a network adapter ranks 0 and 1 reach one another directly, and the protocol is
        ``"signal"``.
    """

    ranks: int = 4
    steps: int = 6
    protocol: str = "fence"
    strict_ptx: bool = False
    axiom: bool = True
    transport: str = "nvlink"

    @property
    def networked(self) -> bool:
        """Does it need a network adapter?"""
        return self.transport in NETWORK_TRANSPORTS

    def config(self, first_epoch: int = 1) -> ExchangeConfig:
        """Small enough to be fast, large enough to have two chunks a slot and slots that stay empty."""
        return ExchangeConfig(
            num_experts=2 * self.ranks,
            top_k=2,
            max_tokens=8,
            row_bytes=64,
            lanes=2,
            protocol="auto" if self.protocol == "mixed" else self.protocol,
            transport=self.transport,
            domain_size=2 if self.networked else 1,
            queues=2 if self.networked else 1,
            queue_depth=64,
            chunk_bytes=32,
            strict_ptx=self.strict_ptx,
            deadline=1.0,
            first_epoch=first_epoch,
        )


@dataclass(frozen=True)
class Operation:
    """One thing that every rank enqueues.

    Attributes
    ----------
    name : str
        A phase, as the methods of ``Exchange`` are called; ``mask``; ``leave``, from where on a rank enqueues nothing;
        or ``recover``, before which the others wait for everything, and after which they go on without it.
    step : int
        Of a phase; else the first step that it may concern.
    """

    name: str
    step: int


@dataclass(frozen=True)
class Scenario:
    """A simulation, complete but for the true or mutated kernels that it runs.

    Attributes
    ----------
    kind : ScenarioKind
        What it was drawn from.
    seed : int
        Of steps and schedule.
    first_epoch : int
        Counter of the first step.
    lanes, protocols : tuple
        By step.
    program : tuple of Operation
        In the order in which each rank enqueues it.
    one_stream : bool
        Lanes share a stream.
    masked : int or None
        Rank that ``mask`` or ``leave`` is about, and that takes no part from then on.
    blocks, threads : int
        Launch shape.
    chance, rules :
        How the schedule is drawn, or written.
    dependent : bool
        A kernel directly behind another one on its stream is launched as its dependent.
    """

    kind: ScenarioKind
    seed: int
    first_epoch: int
    lanes: tuple[int, ...]
    protocols: tuple[str, ...]
    program: tuple[Operation, ...]
    one_stream: bool
    masked: int | None
    blocks: int
    threads: int
    chance: Chance
    rules: tuple[Rule, ...] = ()
    dependent: bool = False

    @property
    def steps(self) -> int:
        return len(self.lanes)

    def masked_in(self, step: int) -> tuple[int, ...]:
        """Ranks left out of ``step``."""
        if self.masked is None:
            return ()
        for operation in self.program:
            if operation.name in ("mask", "recover"):
                return (self.masked,)
            if operation.step == step and operation.name.startswith("dispatch"):
                return ()
        return ()

    @property
    def recovered(self) -> int | None:
        """First step behind a recovery."""
        return next((operation.step for operation in self.program if operation.name == "recover"), None)

    def tokens(self, step: int) -> Step:
        """What every rank brings to ``step``: the same for every scenario of this seed."""
        return _tokens(self.kind, self.seed, step)

    def first_steps(self, steps: int) -> Scenario:
        """The same without the later steps."""
        program = tuple(operation for operation in self.program if operation.step < steps)
        has_mask = any(operation.name in ("mask", "recover") for operation in program)
        if not has_mask:
            program = tuple(operation for operation in program if operation.name != "leave")
        return replace(
            self,
            lanes=self.lanes[:steps],
            protocols=self.protocols[:steps],
            program=program,
            masked=self.masked if has_mask else None,
        )


@lru_cache(maxsize=16)
def _tokens(kind: ScenarioKind, seed: int, step: int) -> Step:
    config = kind.config()
    drawn = random_step((seed, step), config, kind.ranks)
    rng = np.random.default_rng((seed, step, 1))
    for source in drawn.sources:
        for rows in source.payloads:
            rows[rng.random(len(rows)) < 0.15] = _LOOKS_EMPTY
    for partial in drawn.partial_rows:
        flat = partial.view(np.uint8)
        flat[rng.random(flat.shape[:2]) < 0.1] = _LOOKS_EMPTY
    return drawn


def random_scenario(kind: ScenarioKind, seed: int) -> Scenario:
    """Draw a scenario; the same seed gives the same one."""
    rng = np.random.default_rng(seed)
    two_lanes = rng.random() < 0.5
    lanes = tuple(step % 2 if two_lanes else 0 for step in range(kind.steps))
    masked = int(rng.integers(kind.ranks)) if kind.ranks > 2 and rng.random() < 0.25 else None
    program = tuple(_program(rng, lanes, masked is not None))
    start = [1, 0, _WORD - 1, _WORD - 2, int(rng.integers(_WORD))][int(rng.integers(5))]
    drawn = Scenario(
        kind=kind,
        seed=seed,
        first_epoch=start,
        lanes=lanes,
        protocols=tuple(_protocols(rng, kind)),
        program=program,
        one_stream=not two_lanes or (masked is None and rng.random() < 0.2),
        masked=masked,
        blocks=int(rng.integers(1, 4)),
        threads=int(rng.choice([32, 64])),
        chance=_chance(rng),
        dependent=bool(rng.random() < 0.5),
    )
    return _with_recovery(rng, drawn) if masked is None and kind.ranks > 2 and rng.random() < 0.2 else drawn


def _with_recovery(rng: np.random.Generator, scenario: Scenario) -> Scenario:
    """A rank leaves somewhere in the steps up to one; the others recover, and run the steps after it without it."""
    if scenario.steps < 2:
        return scenario
    first = int(rng.integers(1, scenario.steps))
    before = [operation for operation in scenario.program if operation.step < first]
    before.insert(int(rng.integers(len(before))), Operation("leave", first - 1))
    after = [operation for operation in scenario.program if operation.step >= first]
    program = (*before, Operation("recover", first), *after)
    return replace(scenario, program=program, masked=int(rng.integers(scenario.kind.ranks)))


def _protocols(rng: np.random.Generator, kind: ScenarioKind) -> Iterator[str]:
    for _ in range(kind.steps):
        yield "signal" if kind.networked else kind.protocol if kind.protocol != "mixed" else str(rng.choice(PROTOCOLS))


def _chance(rng: np.random.Generator) -> Chance:
    def one_of(*odds: int) -> int:
        return int(rng.choice(odds))

    return Chance(
        stale=one_of(0, 128, 512, 900),
        early=one_of(0, 128, 512, 900),
        preempt=one_of(0, 8, 64, 256),
        hold=one_of(0, 64, 512),
        pause=one_of(0, 64, 512, 1000),
    )


def _phases(rng: np.random.Generator) -> list[str]:
    first = ["dispatch"] if rng.random() < 0.5 else ["dispatch_send", "dispatch_recv"]
    last = (
        ["release"] if rng.random() < 0.1 else ["combine"] if rng.random() < 0.5 else ["combine_send", "combine_recv"]
    )
    return first + last


def _program(rng: np.random.Generator, lanes: tuple[int, ...], mask: bool) -> Iterator[Operation]:
    """Phases in lane order, lanes interleaved; a mask changes before the first phase of some step."""
    waiting: dict[int, list[Operation]] = {}
    for step, lane in enumerate(lanes):
        phases = [Operation(name, step) for name in _phases(rng)]
        waiting.setdefault(lane, []).extend(phases)
    mask_before = int(rng.integers(1, len(lanes))) if mask and len(lanes) > 1 else None
    while any(waiting.values()):
        lane = int(rng.choice([lane for lane, phases in waiting.items() if phases]))
        operation = waiting[lane].pop(0)
        if operation.step == mask_before and operation.name.startswith("dispatch"):
            yield Operation("mask", operation.step)
            mask_before = None
        yield operation
