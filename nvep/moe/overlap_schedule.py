"""Schedules of micro-batches as data: which phase is enqueued when, and on which stream. See docs/overlap.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError, StepOrderError

COMPUTE = "compute"
"""Name of the stream that the caller gives; every other stream forks from it and joins it."""
EXCHANGE_PHASES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
SENDS = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
"""What each receive waits for, on every rank."""
STEP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": (),
        "dispatch_send": ("attention",),
        "dispatch_recv": ("dispatch_send",),
        "experts": ("dispatch_recv",),
        "combine_send": ("experts",),
        "combine_recv": ("combine_send",),
    }
)
"""Phases of a micro-batch in one layer, and what each needs. All but those of the exchange compute."""


@dataclass(frozen=True)
class Phase:
    """One entry of a schedule.

    Attributes
    ----------
    micro_batch : int
        Which micro-batch, from 0; it uses the exchange's lane of the same number.
    name : str
        A phase of the exchange, or the name of a callable that computes.
    stream : str
        Where it runs, in the order of the schedule. ``"compute"`` is the caller's stream.
    layer : int
        Which layer of the step, from 0.
    """

    micro_batch: int
    name: str
    stream: str
    layer: int = 0

    def __str__(self) -> str:
        return f"{self.layer}.{self.micro_batch} {self.name} {self.stream}"


@dataclass(frozen=True)
class Schedule:
    """An order in which one rank enqueues the phases of a step; equal on all ranks.

    No order that passes the checks can make ranks wait for one another for ever: every phase waits only for phases that
    all ranks enqueue earlier.

    Parameters
    ----------
    phases : sequence of Phase
        Every phase of every micro-batch in every layer, once.
    needs : mapping
        Names of the phases of a micro-batch in a layer, each with those it needs; a name needs only names before it.
        Default: `STEP`. The first phases of a layer need the last ones of the layer before.

    Raises
    ------
    ArgumentError
        A phase is unknown, missing or there twice.
    StepOrderError
        A phase stands before one that it needs.
    """

    phases: tuple[Phase, ...]
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: STEP)

    def __post_init__(self) -> None:
        _check_needs(self.needs)
        if not isinstance(self.phases, (tuple, list)) or not self.phases:
            raise ArgumentError("phases", self.phases, "a sequence of at least one Phase")
        object.__setattr__(self, "phases", tuple(self.phases))
        object.__setattr__(self, "needs", MappingProxyType({name: tuple(n) for name, n in self.needs.items()}))
        for phase in self.phases:
            _check_phase(phase, self.needs)
        self._check_complete()
        self._check_order()

    # --- what it holds ----------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return 1 + max(phase.micro_batch for phase in self.phases)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(phase.layer for phase in self.phases)

    @property
    def computations(self) -> tuple[str, ...]:
        """Names of the phases that callables run."""
        return tuple(name for name in self.needs if name not in EXCHANGE_PHASES)

    @cached_property
    def _last(self) -> tuple[str, ...]:
        """Names that no other name of the same layer needs."""
        needed = {n for names in self.needs.values() for n in names}
        return tuple(name for name in self.needs if name not in needed)

    def predecessors(self, phase: Phase) -> list[tuple[int, int, str]]:
        """(layer, micro-batch, name) of each phase that must have run before ``phase`` starts."""
        names = self.needs[phase.name]
        if names:
            return [(phase.layer, phase.micro_batch, name) for name in names]
        return [(phase.layer - 1, phase.micro_batch, name) for name in self._last] if phase.layer else []

    def first(self, micro_batches: int) -> Schedule:
        """The same order without the micro-batches from ``micro_batches`` on, for a step that has fewer."""
        if not 1 <= micro_batches <= self.micro_batches:
            raise ArgumentError("micro_batches", micro_batches, f"1 to {self.micro_batches}")
        return Schedule(tuple(p for p in self.phases if p.micro_batch < micro_batches), self.needs)

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def __len__(self) -> int:
        return len(self.phases)

    # --- text ---------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line a phase, as `parse` reads it."""
        return "\n".join(map(str, self.phases))

    @staticmethod
    def parse(text: str, needs: Mapping[str, tuple[str, ...]] = STEP) -> Schedule:
        """Read lines of ``layer.micro_batch phase stream``; ``#`` starts a comment.

        Raises
        ------
        ArgumentError, StepOrderError
            As for a Schedule; or a line has another form.
        """
        phases = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            layer, dot, batch = words[0].partition(".")
            if len(words) != 3 or not (dot and layer.isdecimal() and batch.isdecimal()):
                raise ArgumentError(f"line {number} of the schedule", line, "layer.micro_batch phase stream")
            phases.append(Phase(int(batch), words[1], words[2], int(layer)))
        return Schedule(tuple(phases), needs)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_complete(self) -> None:
        seen: set[tuple[int, int, str]] = set()
        for phase in self.phases:
            key = (phase.layer, phase.micro_batch, phase.name)
            if key in seen:
                raise ArgumentError("phases", f"{_of(*key)} twice", "every phase once")
            seen.add(key)
        for layer in range(self.layers):
            for batch in range(self.micro_batches):
                missing = [name for name in self.needs if (layer, batch, name) not in seen]
                if missing:
                    raise ArgumentError("phases", f"no {_of(layer, batch, missing[0])}", "every phase once")

    def _check_order(self) -> None:
        done: set[tuple[int, int, str]] = set()
        for phase in self.phases:
            for needed in self.predecessors(phase):
                if needed not in done:
                    raise StepOrderError(_refusal(phase, needed))
            done.add((phase.layer, phase.micro_batch, phase.name))


def _of(layer: int, micro_batch: int, name: str) -> str:
    return f"{name} of micro-batch {micro_batch} in layer {layer}"


def _refusal(phase: Phase, needed: tuple[int, int, str]) -> str:
    text = f"{_of(phase.layer, phase.micro_batch, phase.name)} stands before {_of(*needed)}, which it needs"
    if SENDS.get(phase.name) == needed[2]:
        text += f": it would hold up {phase.stream!r} on every rank until a send that no rank has enqueued"
    return text


def _check_phase(phase: object, needs: Mapping[str, tuple[str, ...]]) -> None:
    if not isinstance(phase, Phase):
        raise ArgumentError("phases", phase, "Phase objects")
    for name in ("micro_batch", "layer"):
        value = getattr(phase, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
            raise ArgumentError(name, value, "a number from 0 to 65535")
    if phase.name not in needs:
        raise ArgumentError("name", phase.name, ", ".join(needs))
    if not isinstance(phase.stream, str) or len(phase.stream.split()) != 1 or "#" in phase.stream:
        raise ArgumentError("stream", phase.stream, "a name without spaces and #")


def _check_needs(needs: Mapping[str, tuple[str, ...]]) -> None:
    """The exchange's phases are there, each behind the one before; names need only names before them."""
    behind: dict[str, set[str]] = {}
    for name, needed in needs.items():
        unknown = [n for n in needed if n not in behind]
        if unknown:
            raise ArgumentError("needs", f"{name} needs {unknown[0]}", "names that stand before it")
        behind[name] = set(needed).union(*(behind[n] for n in needed))
    for before, name in zip(("", *EXCHANGE_PHASES), EXCHANGE_PHASES):
        if name not in behind:
            raise ArgumentError("needs", tuple(needs), f"a step with {', '.join(EXCHANGE_PHASES)}")
        if before and before not in behind[name]:
            raise ArgumentError("needs", f"{name} without {before}", "each phase of the exchange behind the one before")


# --- the usual ones ---------------------------------------------------------------------------------------------------


def default_schedule(
    config: ExchangeConfig, *, layers: int = 1, micro_batches: int | None = None, receive_on: str | None = None
) -> Schedule:
    """Sends run beside the computation of another micro-batch: dispatch-send of 1 beside attention of 0, and so on.

    Parameters
    ----------
    config : ExchangeConfig
        Of the exchange.
    layers : int
        Layers of the step.
    micro_batches : int, optional
        Default: ``config.lanes``. The last goes first.
    receive_on : str, optional
        ``"communication"``: receives follow their sends on the micro-batch's own stream, also beside computation.
        ``"compute"``: they stand between computations, so that nothing waits on a multiprocessor while messages are
        under way. Default: the latter for transports over a network adapter.
    """
    count = config.lanes if micro_batches is None else micro_batches
    _check_counts(config, count, layers)
    if receive_on not in (None, "communication", COMPUTE):
        raise ArgumentError("receive_on", receive_on, f"communication or {COMPUTE}")
    on_compute = receive_on == COMPUTE or (receive_on is None and config.networked)
    order = range(count - 1, -1, -1)

    def phases(layer: int, batch: int, names: Iterable[str]) -> Iterator[Phase]:
        for name in names:
            apart = name in EXCHANGE_PHASES and not (on_compute and name in SENDS)
            yield Phase(batch, name, f"communication:{batch}" if apart else COMPUTE, layer)

    found: list[Phase] = []
    for layer in range(layers):
        for batch in order:
            if layer:
                found += phases(layer - 1, batch, ("combine_recv",))
            found += phases(layer, batch, ("attention", "dispatch_send"))
        for batch in order:
            found += phases(layer, batch, ("dispatch_recv", "experts", "combine_send"))
    for batch in order:
        found += phases(layers - 1, batch, ("combine_recv",))
    return Schedule(tuple(found))


def serial_schedule(config: ExchangeConfig, *, layers: int = 1, micro_batches: int | None = None) -> Schedule:
    """Everything on the caller's stream, one micro-batch after the other: overlap off."""
    count = config.lanes if micro_batches is None else micro_batches
    _check_counts(config, count, layers)
    return Schedule(
        tuple(
            Phase(batch, name, COMPUTE, layer)
            for layer in range(layers)
            for batch in range(count - 1, -1, -1)
            for name in STEP
        )
    )


def _check_counts(config: ExchangeConfig, micro_batches: int, layers: int) -> None:
    if not 1 <= micro_batches <= config.lanes:
        raise ArgumentError("micro_batches", micro_batches, f"1 to {config.lanes}, the lanes of the exchange")
    if layers < 1:
        raise ArgumentError("layers", layers, "1 or more")
