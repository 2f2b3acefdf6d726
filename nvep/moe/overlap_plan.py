"""From a schedule to queues and events: arithmetic, nothing touches a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvep.moe.overlap_schedule import COMPUTE, EXCHANGE_PHASES, Phase, Schedule

START = -1
"""Number, among tasks, of the point of the caller's stream where the step starts."""


@dataclass(frozen=True)
class Task:
    """A phase with its place on the device.

    Attributes
    ----------
    phase : Phase
        What runs.
    queue : str
        Stream that it is enqueued on: ``phase.stream``, or ``"lane:N"`` where the exchange phases of a micro-batch are
        spread over several. That stream holds them alone; the order of the schedule's streams is kept by events.
    waits : tuple of int
        Tasks (`START` or positions) of other queues whose event it waits for.
    marked : bool
        Some other queue waits for it: an event is recorded behind it.
    """

    phase: Phase
    queue: str
    waits: tuple[int, ...]
    marked: bool


@dataclass(frozen=True)
class EventPlan:
    """Tasks of a schedule, and the events between queues: one for each edge that nothing else implies.

    Attributes
    ----------
    tasks : tuple of Task
        In the order of the schedule.
    joins : tuple of int
        Tasks that the caller's stream waits for at the end.
    """

    tasks: tuple[Task, ...]
    joins: tuple[int, ...]

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of all queues, the caller's stream first."""
        return tuple(dict.fromkeys([COMPUTE, *(task.queue for task in self.tasks)]))

    @property
    def start_marked(self) -> bool:
        """Another queue waits for the start."""
        return any(START in task.waits for task in self.tasks)


def plan_events(schedule: Schedule) -> EventPlan:
    """Place phases on queues and find the events they need."""
    queues = _queues(schedule)
    position = {(p.layer, p.micro_batch, p.name): i for i, p in enumerate(schedule.phases)}
    known: dict[str, dict[str, int]] = {COMPUTE: {COMPUTE: START}}  # by queue: latest task of each that it is behind
    at: dict[int, dict[str, int]] = {START: {COMPUTE: START}}  # the same, at each task
    last: dict[str, int] = {}  # by stream of the schedule
    waits: list[tuple[int, ...]] = []
    for index, (phase, queue) in enumerate(zip(schedule.phases, queues)):
        before = {position[key] for key in schedule.predecessors(phase)}
        before.add(last.get(phase.stream, START))
        seen = known.setdefault(queue, {})
        waits.append(_wait_for(before, seen, [*queues, COMPUTE], at))  # START is -1: the last entry
        last[phase.stream] = index
        seen[queue] = index
        at[index] = dict(seen)
    ends = {queue: index for index, queue in enumerate(queues)}
    joins = _wait_for(set(ends.values()), known[COMPUTE], [*queues, COMPUTE], at)
    marked = {index for waited in (*waits, joins) for index in waited}
    tasks = tuple(Task(p, q, w, i in marked) for i, (p, q, w) in enumerate(zip(schedule.phases, queues, waits)))
    return EventPlan(tasks, joins)


def _wait_for(
    before: set[int], seen: dict[str, int], queues: Sequence[str], at: dict[int, dict[str, int]]
) -> tuple[int, ...]:
    """Which of ``before`` must be waited for by a queue that is behind ``seen``, which is brought up to date."""
    found = []
    for index in sorted(before, reverse=True):  # a later task brings more with it
        if seen.get(queues[index], START - 1) < index:
            found.append(index)
            for queue, position in at[index].items():
                seen[queue] = max(seen.get(queue, START - 1), position)
    return tuple(found)


def _queues(schedule: Schedule) -> list[str]:
    """Queue of each phase. The exchange orders the phases of a lane itself; one queue leaves it nothing to add."""
    streams: dict[int, set[str]] = {}
    for phase in schedule.phases:
        if phase.name in EXCHANGE_PHASES:
            streams.setdefault(phase.micro_batch, set()).add(phase.stream)
    apart = {batch for batch, used in streams.items() if len(used) > 1}
    return [
        f"lane:{p.micro_batch}" if p.name in EXCHANGE_PHASES and p.micro_batch in apart else p.stream
        for p in schedule.phases
    ]
