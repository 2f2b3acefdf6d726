"""A failing schedule written by hand for every mutation: who stays back where, and what is stale or early.

Nothing is left to chance but the order of threads that no rule holds, which the scenario's seed fixes. Under each of
these schedules the true protocol holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvep.errors import ArgumentError
from nvep.runtime.simulated import ORDERLY, Rule
from nvep.runtime.source import KERNEL_ROOT
from nvep.testing.simulation.mutations import MUTATIONS
from nvep.testing.simulation.scenario import Operation, Scenario, ScenarioKind

_JOINED = ("dispatch", "combine")


@dataclass(frozen=True)
class Line:
    """The one line of a kernel file that holds ``text``, and who stays back (or what happens) there."""

    directive: str
    file: str
    text: str
    rank: int | None = None
    block: int | None = None
    thread: int | None = None
    kernel: str = ""

    def rule(self) -> Rule:
        """The rule for the file as it is now."""
        lines = (KERNEL_ROOT / self.file).read_text().splitlines()
        found = [number for number, line in enumerate(lines, 1) if self.text in line]
        if len(found) != 1:
            raise ArgumentError("text", self.text, f"one line of {self.file}, not {len(found)}")
        return Rule(self.directive, self.file, found[0], self.rank, self.block, self.thread, self.kernel)


@dataclass(frozen=True)
class Written:
    """A schedule: lines where something happens, tokens of ``seed``, and phases of each step."""

    seed: int = 0
    lines: tuple[Line, ...] = ()
    slow_rank: int | None = None
    phases: tuple[str, ...] = _JOINED
    steps: int = 3
    ranks: int = 2
    program: tuple[Operation, ...] = ()
    lanes: tuple[int, ...] = ()
    masked: int | None = None
    protocols: tuple[str, ...] = ()
    dependent: bool = False


def _phases(*steps: tuple[str, int]) -> tuple[Operation, ...]:
    return tuple(Operation(name, step) for name, step in steps)


_TWO_IN_FLIGHT = _phases(
    ("dispatch_send", 0), ("dispatch_send", 1), ("dispatch_recv", 0), ("dispatch_recv", 1), ("combine", 0),
    ("combine", 1),
)  # fmt: skip
_MASK_IN_FLIGHT = _phases(
    ("dispatch", 0), ("combine", 0), ("dispatch_send", 1), ("mask", 2), ("dispatch_recv", 1), ("combine", 1),
    ("dispatch", 2), ("combine", 2),
)  # fmt: skip
_LEAVES = _phases(
    ("dispatch", 0), ("combine", 0), ("leave", 1), ("dispatch", 1), ("combine", 1), ("recover", 2), ("dispatch", 2),
    ("combine", 2),
)  # fmt: skip
_PUSH, _PUSHES = "transports/fence_ring.cuh", "bulk_store(reinterpret_cast<void*>(to)"
_PULL, _PULLS = "transports/fence_pull.cuh", "bulk_load(to, reinterpret_cast<const void*>"
_SENTINEL, _LANE = "protocols/sentinel.cuh", "protocols/lane.cuh"

_SENDS = (
    Line("late", _SENTINEL, "if (lane == 0) store_relaxed_system(key_word, key);", rank=0),
    Line("late", _SENTINEL, "store_relaxed_system(body + lane + 32 * i, u64x2{data", rank=0),
)

SCHEDULES: dict[str, Written] = {
    # Block 0 increments first, so that the last block must pass its stores on.
    "increment-release-only": Written(lines=(Line("late", _PUSH, _PUSHES, block=1),)),
    "release-last-block-only": Written(lines=(Line("late", _PUSH, _PUSHES, block=1),)),
    "drop-acquire": Written(),
    "relaxed-flag": Written(),
    # Block 1 is still storing when block 0 posts the record.
    "flag-before-blocks": Written(lines=(Line("late", _PUSH, _PUSHES, block=1),)),
    "no-barrier-before-increment": Written(lines=(Line("late", _PUSH, _PUSHES),)),
    "combine-record-only-with-rows": Written(seed=3),
    # Rank 1 is still pulling when rank 0 sends the next step.
    "moving-combine-offset": Written(lines=(Line("late", _PULL, _PULLS, rank=1),)),
    "shared-epoch": Written(lanes=(0, 1), program=_TWO_IN_FLIGHT, steps=2),
    # Rank 2 sent a step that the others receive after they masked it for the next one.
    "mask-resnapshot": Written(
        ranks=3,
        lanes=(0, 1, 0),
        program=_MASK_IN_FLIGHT,
        masked=2,
        lines=(Line("late", _PUSH, _PUSHES, kernel="dispatch_send"),),
    ),
    # The key comes, the units stay out: what lies there is two steps old.
    "no-bulk-wait": Written(),
    "bulk-wait-read-only": Written(),
    # A store that reads its stage as late as it may finds what was loaded there since.
    "no-stage-wait": Written(),
    "no-entry-wait": Written(),
    "no-proxy-fence": Written(),
    "skip-rearm": Written(seed=1, lines=(_SENDS[1],)),
    # Rank 1 erases the next generation after rank 0 wrote there.
    "early-rearm": Written(
        lines=(Line("late", _SENTINEL, "store_relaxed_system(key_word, kEmpty);", rank=1),),
        phases=("dispatch", "release"),
    ),
    # Rank 1 has not read its wire when rank 0 writes the next step there.
    "one-generation-fewer": Written(
        seed=8, lines=(Line("late", _SENTINEL, "chunk.key = load_relaxed_system(key_word);", rank=1),)
    ),
    "single-record-word": Written(
        seed=2, lines=(Line("late", _SENTINEL, "word[i] = load_relaxed_system(where(r));", rank=1),)
    ),
    "skip-step-record": Written(),
    "no-escape": Written(seed=1),
    "unrouted-first-chunk-only": Written(),
    # Rank 1 comes late and finds everything there, but its second lane still sees its unit as it was.
    "unpolled-word": Written(
        lines=(
            Line(
                "stale", _SENTINEL, "chunk.data.unit[i] = load_relaxed_system(body + lane + 32 * i);", rank=1, thread=1
            ),
        ),
        slow_rank=1,
    ),
    # Rank 2 leaves before step 1, which the others send in vain. In step 2 rank 0 has announced its tokens and not sent
    # them yet: others find those of step 1.
    "recover-without-refill": Written(seed=2, ranks=3, program=_LEAVES, masked=2, lines=_SENDS),
    "shared-landing": Written(seed=2, slow_rank=1, protocols=("sentinel", "fence", "sentinel")),
    # D.recv opens its step when D.send, which is slow, has not said which one.
    "pdl-no-wait": Written(
        phases=("dispatch_send", "dispatch_recv", "release"),
        dependent=True,
        lines=(
            Line("late", _LANE, "u64 dead = load_relaxed_device(&counters->dead);", kernel="dispatch_recv"),
            Line("late", _PUSH, _PUSHES),
        ),
    ),
}


def written_scenario(name: str, seed: int | None = None) -> Scenario:
    """The schedule written for a mutation.

    Raises
    ------
    ArgumentError
        A line of the kernels that it names has changed.
    """
    written, mutation = SCHEDULES[name], MUTATIONS[name]
    rules = [line.rule() for line in written.lines]
    if written.slow_rank is not None:
        rules.append(Rule("late", rank=written.slow_rank))
    steps = len(written.lanes) or written.steps
    plain = tuple(Operation(phase, step) for step in range(steps) for phase in written.phases)
    default = "fence" if mutation.protocol == "mixed" else mutation.protocol
    return Scenario(
        kind=ScenarioKind(ranks=written.ranks, steps=steps, protocol=mutation.protocol),
        seed=written.seed if seed is None else seed,
        first_epoch=1,
        lanes=written.lanes or (0,) * steps,
        protocols=written.protocols or (default,) * steps,
        program=written.program or plain,
        one_stream=not written.lanes,
        masked=written.masked,
        blocks=2,
        threads=32,
        chance=ORDERLY,
        rules=tuple(rules),
        dependent=written.dependent,
    )


def axiom_scenario(*, axiom: bool, strict_ptx: bool = False, seed: int = 0) -> Scenario:
    """Sentinel where every send goes as early in coherence order as it may: before a re-arm, if nothing forbids it."""
    base = written_scenario("skip-rearm", seed)
    kind = replace(base.kind, axiom=axiom, strict_ptx=strict_ptx)
    return replace(base, kind=kind, rules=(Rule("early"),))
