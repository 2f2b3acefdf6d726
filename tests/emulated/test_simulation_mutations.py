"""Every planted bug is noticed: under a schedule written by hand, under which the true protocol holds, and by random
seeds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from nvep.errors import ArgumentError
from nvep.testing.simulation.mutations import MUTATIONS, Mutation, Patch
from nvep.testing.simulation.runner import Simulator, run_scenario
from nvep.testing.simulation.scenario import ScenarioKind
from nvep.testing.simulation.schedules import SCHEDULES, written_scenario
from nvep.testing.simulation.search import hunt

MOST_SEEDS = 2000
ROOT = Path(__file__).resolve().parents[2]


@cache
def mutated(name: str) -> Simulator:
    return Simulator(overlay=MUTATIONS[name].overlay())


@cache
def true() -> Simulator:
    return Simulator()


def test_every_mutation_has_a_schedule() -> None:
    assert set(SCHEDULES) == set(MUTATIONS)


@pytest.mark.parametrize("document", ["README.md", "docs/design/simulation.md"])
def test_documents_say_what_every_mutation_breaks(document: str) -> None:
    text = (ROOT / document).read_text()
    assert [name for name, m in MUTATIONS.items() if f"| `{name}` | {m.broken} |" not in text] == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_written_schedule_shows_the_bug(name: str) -> None:
    scenario = written_scenario(name)
    with MUTATIONS[name].planted():
        assert run_scenario(mutated(name), scenario).failure is not None, f"nobody noticed {name}"
    held = run_scenario(true(), scenario).failure
    assert held is None, f"the schedule of {name} also breaks the true protocol: {held}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_random_seeds_show_the_bug(name: str) -> None:
    found = hunt(MUTATIONS[name], ScenarioKind(), range(MOST_SEEDS))
    assert found.failures, f"{name} survived {found.seeds} seeds"
    assert found.failures[0].trace


def test_a_patch_that_no_longer_fits_is_refused() -> None:
    lost = Mutation("lost", "nothing", "fence", (Patch("protocols/fence.cuh", "text that is not there", ""),))
    with pytest.raises(ArgumentError, match="exactly once, not 0 times"):
        lost.overlay()
