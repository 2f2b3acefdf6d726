"""Seeds tried one after the other: the true protocols, which must hold, and mutations, which must be caught."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nvep.config import Settings
from nvep.testing.simulation.mutations import Mutation
from nvep.testing.simulation.runner import Failure, Simulator, run_scenario
from nvep.testing.simulation.scenario import ScenarioKind, random_scenario


@dataclass
class Search:
    """What a search found.

    Attributes
    ----------
    steps : int
        Steps that ran, each a dispatch and a combine of all ranks.
    seconds : float
        Of simulation.
    seeds : int
        Seeds tried.
    failures : list of Failure
        In order of seed.
    """

    steps: int = 0
    seconds: float = 0.0
    seeds: int = 0
    failures: list[Failure] = field(default_factory=list)


def search(kind: ScenarioKind, seeds: Iterable[int], *, simulator: Simulator, most: int = 1) -> Search:
    """Run the scenarios of ``seeds`` until ``most`` have failed."""
    found = Search()
    for seed in seeds:
        run = run_scenario(simulator, random_scenario(kind, seed))
        found.seeds += 1
        found.steps += run.steps
        found.seconds += run.seconds
        if run.failure is not None:
            found.failures.append(run.failure)
            if len(found.failures) == most:
                break
    return found


def hunt(mutation: Mutation, kind: ScenarioKind, seeds: Iterable[int], *, settings: Settings | None = None) -> Search:
    """Look for a seed that a mutation fails with; ``kind.protocol`` gives way to the mutation's."""
    simulator = Simulator(settings, overlay=mutation.overlay())
    with mutation.planted():
        return search(replace(kind, protocol=mutation.protocol), seeds, simulator=simulator)


def prove_replay(failure: Failure, *, simulator: Simulator) -> bool:
    """Does the same scenario fail in the same way again?"""
    again = run_scenario(simulator, failure.scenario).failure
    return again is not None and (again.symptom, again.trace) == (failure.symptom, failure.trace)
