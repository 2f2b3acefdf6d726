"""``nvep simulate``: exchanges under a weak memory model, from seeds, with or without planted bugs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvep.config import TRANSPORTS
from nvep.errors import ArgumentError
from nvep.testing.simulation.mutations import MUTATIONS
from nvep.testing.simulation.nic_mutations import NIC_MUTATIONS, find
from nvep.testing.simulation.render import short_paths
from nvep.testing.simulation.runner import Failure, Simulator, shrink
from nvep.testing.simulation.scenario import ScenarioKind
from nvep.testing.simulation.search import hunt, prove_replay, search

SHOWN_FAILURES = 3
_ALL = {name: m.broken for name, m in MUTATIONS.items()} | {name: m.broken for name, m in NIC_MUTATIONS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep simulate``."""
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="simulated ranks, 2 or more (default: 4)")
    parser.add_argument("--steps", type=int, default=6, metavar="K", help="steps of each seed's scenario (default: 6)")
    parser.add_argument(
        "--protocol", choices=("fence", "sentinel", "mixed"), default="mixed", help="what the true kernels run"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="nvlink", help="what the true kernels run (default: nvlink)"
    )
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="seeds A to B - 1 (default: 0:100)")
    parser.add_argument(
        "--mutate",
        metavar="NAME",
        help="plant a bug and look for a seed that shows it; 'all' for every one, 'list' to list",
    )
    parser.add_argument(
        "--strict-ptx", action="store_true", help="Sentinel ordered by release and acquire of its records"
    )
    parser.add_argument("--no-axiom", action="store_true", help="without the axiom on completed grids")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that look for mutations (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 for a clean search, or for mutations that were all caught; 1 otherwise."""
    if options.mutate == "list":
        print("\n".join(_ALL))
        return 0
    _check(options)
    kind = ScenarioKind(
        ranks=options.ranks,
        steps=options.steps,
        protocol=options.protocol,
        strict_ptx=options.strict_ptx,
        axiom=not options.no_axiom,
        transport=options.transport,
    )
    seeds = _seeds(options.seeds)
    started = time.perf_counter()
    report: dict[str, Any]
    report = _mutations(options, kind, seeds) if options.mutate else _true_protocols(kind, seeds)
    wall = time.perf_counter() - started
    report["steps_per_s"] = round(report["steps"] / wall, 1) if wall else 0.0
    print(f"{report['steps']} steps in {wall:.1f} s, {report['steps_per_s']:.0f} steps/s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    caught = all(entry["caught"] for entry in report["mutations"].values())
    return 0 if caught and not report["failures"] else 1


def _check(options: argparse.Namespace) -> None:
    if not 2 <= options.ranks <= 16:
        raise ArgumentError("--ranks", options.ranks, "2 to 16")
    if options.steps < 1:
        raise ArgumentError("--steps", options.steps, "1 or more")
    if options.jobs < 1:
        raise ArgumentError("--jobs", options.jobs, "1 or more")
    if options.mutate and options.mutate != "all" and options.mutate not in _ALL:
        raise ArgumentError("--mutate", options.mutate, f"all, list, {', '.join(_ALL)}")


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()) or int(first) >= int(end):
        raise ArgumentError("--seeds", text, "A:B with 0 <= A < B")
    return range(int(first), int(end))


def _true_protocols(kind: ScenarioKind, seeds: Iterable[int]) -> dict[str, Any]:
    simulator = Simulator()
    found = search(kind, seeds, simulator=simulator, most=SHOWN_FAILURES)
    for failure in found.failures:
        _show(shrink(simulator, failure), simulator)
    print(f"{kind.transport if kind.networked else kind.protocol}: {found.seeds} seeds, {len(found.failures)} failures")
    return {"steps": found.steps, "failures": [_entry(f) for f in found.failures], "mutations": {}}


def _show(failure: Failure, simulator: Simulator) -> None:
    scenario = failure.scenario
    print(f"seed {scenario.seed}, {scenario.steps} steps: {failure.symptom}")
    print(failure.trace)
    again = "replays exactly" if prove_replay(failure, simulator=simulator) else "DID NOT REPLAY"
    print(f"seed {scenario.seed}: {again}\n")


def _entry(failure: Failure) -> dict[str, Any]:
    return {"seed": failure.scenario.seed, "symptom": failure.symptom}


@dataclass(frozen=True)
class _Hunt:
    """How the search for a planted bug went."""

    name: str
    seeds: int
    steps: int
    seconds: float
    seed: int | None = None
    symptom: str = ""
    trace: str = ""


def _mutations(options: argparse.Namespace, kind: ScenarioKind, seeds: range) -> dict[str, Any]:
    names = list(_ALL) if options.mutate == "all" else [options.mutate]
    entries: dict[str, Any] = {}
    steps = 0
    width = 2 + max(len(_ALL[name]) for name in names)
    print(f"{'mutation':<31}{'what is broken':<{width}}{'caught at seed':>14}{'s':>6}  symptom")
    for found in _hunts(names, kind, seeds, options.jobs):
        steps += found.steps
        caught = found.seed is not None
        entries[found.name] = {
            "caught": caught, "seed": found.seed, "seeds_tried": found.seeds, "symptom": found.symptom
        }  # fmt: skip
        shown = found.seed if caught else f"NO, {found.seeds} tried"
        row = f"{found.name:<31}{_ALL[found.name]:<{width}}{shown:>14}{found.seconds:>6.1f}  {found.symptom[:60]}"
        print(row, flush=True)
        if caught and len(names) == 1:
            print(found.trace)
    return {"steps": steps, "failures": [], "mutations": entries}


def _hunts(names: list[str], kind: ScenarioKind, seeds: range, jobs: int) -> Iterator[_Hunt]:
    tasks = [(name, kind, seeds) for name in names]
    if jobs == 1:
        yield from map(_hunt, tasks)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(_hunt, tasks)


def _hunt(task: tuple[str, ScenarioKind, range]) -> _Hunt:
    name, kind, seeds = task
    started = time.perf_counter()
    if name in NIC_MUTATIONS:
        caught = find(NIC_MUTATIONS[name], seeds)
        tried = len(seeds) if caught is None else seeds.index(caught[0]) + 1
        found = _Hunt(name, tried, 0, time.perf_counter() - started)
        return found if caught is None else replace(found, seed=caught[0], symptom=short_paths(caught[1]))
    search_ = hunt(MUTATIONS[name], kind, seeds)
    found = _Hunt(name, search_.seeds, search_.steps, time.perf_counter() - started)
    if not search_.failures:
        return found
    failure = search_.failures[0]
    return replace(found, seed=failure.scenario.seed, symptom=failure.symptom, trace=failure.trace)
