"""``nvep bench``: times the exchange and measures the floors of the machine beside it."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import nvep
from nvep.bench import Case, CaseResult, Floors, default_cases, full_cases, measure_floors, run_cases, small
from nvep.bench.cases import FORMATS, PROFILES, ROUTINGS, SPANS, profile
from nvep.bench.kernels import FloorKernels
from nvep.bench.overhead import HostOverhead, host_overhead
from nvep.cli import bench_network
from nvep.cli.launch import open_groups_and_run
from nvep.cli.traces import read_trace
from nvep.config import PROTOCOLS, Settings, mpi_launch
from nvep.errors import ArgumentError
from nvep.group import RankGroup
from nvep.runtime import choose_device_kind

JSON_VERSION = 1
_AXES = ("tokens", "hidden", "experts", "top_k", "format", "protocol", "max_blocks", "dependent", "routing", "spans")
_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep bench``."""
    parser.add_argument("--ranks", type=int, help="ranks of a local group, without mpirun (default 2)")
    parser.add_argument("--full", action="store_true", help="every combination worth a figure, not one axis at a time")
    parser.add_argument("--flush-l2", action="store_true", help="empty the second-level cache before every timed step")
    axes = parser.add_argument_group("axes: with any of these, all combinations of them replace the sweep")
    for name in ("tokens", "hidden", "experts", "top-k"):
        axes.add_argument(f"--{name}", type=int, nargs="+", metavar="N")
    axes.add_argument("--blocks", type=int, nargs="+", metavar="N", dest="max_blocks", help="blocks of a kernel")
    axes.add_argument(
        "--dependent", type=int, choices=(0, 1), nargs="+", help="launch each phase as a dependent of the one before"
    )
    axes.add_argument("--format", nargs="+", choices=FORMATS, help="of dispatched rows")
    axes.add_argument("--protocol", nargs="+", choices=(*PROTOCOLS, "auto"))
    axes.add_argument("--routing", nargs="+", choices=ROUTINGS, help="recorded needs --trace")
    axes.add_argument("--spans", nargs="+", choices=SPANS, help="which kernels are told apart")
    axes.add_argument("--profile", nargs="+", choices=tuple(PROFILES), help="hidden, experts and top_k of a model")
    parser.add_argument("--trace", metavar="FILE", help="router log for --routing recorded; gives top_k and experts")
    parser.add_argument("--layer", help="layer of the log, where it holds several")
    parser.add_argument("--host-overhead", action="store_true", help="CPU time of eager steps, instead of the cases")
    parser.add_argument("--json", metavar="OUT", help="write everything measured to a file")
    bench_network.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a step was wrong or a kernel did not compile."""
    if options.transport:
        return bench_network.run(options)
    for name in ("delay", "ring_memory", "domain_size", "queue_depth", "account"):
        if getattr(options, name):
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(options, name), "nothing without --transport")
    bench = _Bench(options)
    for ranks in sorted({case.ranks for case in bench.cases}):
        open_groups_and_run(lambda group: bench.run_rank(group), None if mpi_launch() else ranks)
    bench.write()
    return 1 if any(result.failed for result in bench.results) else 0


class _Bench:
    """The command in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.json and not Path(options.json).parent.is_dir():  # known now, not after minutes
            raise ArgumentError("--json", options.json, "a file in a folder that exists")
        self._options = options
        self.results: list[CaseResult] = []
        self._floors: list[Floors] = []
        self._overhead: list[HostOverhead] = []
        self._emulated = choose_device_kind(Settings.from_environment().device) == "emulated"
        self._trace = read_trace(options.trace, layer=options.layer) if options.trace else None
        launched = mpi_launch()
        ranks = launched[1] if launched else options.ranks or (1 if options.host_overhead else 2)
        cases = self._select(ranks, other_ranks=() if launched else (4,) if self._emulated else (4, 8))
        self.cases = list(dict.fromkeys(small(case) for case in cases)) if self._emulated else cases

    def _select(self, ranks: int, *, other_ranks: tuple[int, ...]) -> list[Case]:
        options = self._options
        if options.dependent:
            options.dependent = [bool(value) for value in options.dependent]
        if self._trace is not None and options.routing is None:
            options.routing = ["recorded"]
        axes = {name: getattr(options, name) for name in _AXES if getattr(options, name)}
        base = Case(ranks=ranks, flush_l2=options.flush_l2)
        if self._trace is not None:
            base = replace(base, top_k=self._trace.ids.shape[1], experts=self._trace.num_experts)
        if not (axes or options.profile or options.host_overhead):
            cases = (full_cases if options.full else default_cases)(ranks, other_ranks=other_ranks)
            return list(dict.fromkeys(replace(case, flush_l2=options.flush_l2 or case.flush_l2) for case in cases))
        bases = [replace(base, **profile(name)) for name in options.profile or ()] or [base]
        if options.host_overhead:
            axes = {"tokens": [8], "protocol": list(PROTOCOLS), **axes}
        return [
            replace(chosen, **dict(zip(axes, values)))
            for chosen in bases
            for values in itertools.product(*axes.values())
        ]

    def run_rank(self, group: RankGroup) -> None:
        """One rank's part. Collective."""
        cases = [case for case in self.cases if case.ranks == group.size]
        if self._options.host_overhead:
            for case in cases:
                self._report_overhead(group, host_overhead(group, case))
            return
        kernels = group.together(lambda: FloorKernels(group.device))
        floors = measure_floors(group, kernels)
        if group.rank == 0:
            self._floors.append(floors)
            print_floors(floors, emulated=group.device.emulated)
        recorded = None if self._trace is None else np.asarray(self._trace.ids)
        found = run_cases(group, cases, floors=floors, kernels=kernels, recorded=recorded, report=print_result)
        if group.rank == 0:
            self.results += found

    def _report_overhead(self, group: RankGroup, found: HostOverhead) -> None:
        if group.rank == 0:
            self._overhead.append(found)
            print(
                f"{found.case.label()}: {found.cpu_us:.1f} us of CPU time for dispatch + combine; one call takes "
                f"{found.dispatch_us:.1f} us and {found.combine_us:.1f} us ({group.device.name})",
                flush=True,
            )

    def write(self) -> None:
        """The JSON file, on the process of rank 0."""
        launched = mpi_launch()
        if not self._options.json or (launched and launched[0] != 0):
            return
        found: dict[str, Any] = {
            "version": JSON_VERSION,
            "nvep": nvep.__version__,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "emulated": self._emulated,
            "floors": [asdict(floors) for floors in self._floors],
            "results": [result.as_json() for result in self.results],
            "host_overhead": [overhead.as_json() for overhead in self._overhead],
        }
        try:
            with open(self._options.json, "w") as file:
                json.dump(found, file, indent=1)
        except OSError as error:
            raise ArgumentError("--json", self._options.json, f"a file to write ({error.strerror})") from error


def print_floors(floors: Floors, *, emulated: bool) -> None:
    """What the machine allows, and the head of the table."""
    apart = floors.peer_push_gbs
    print(f"\n{len(floors.gpus)} ranks on {floors.device}")
    if emulated:
        print("EMULATED on CPU cores: relations between these figures mean little, and nothing for a GPU")
    print(
        f"  copy kernel {floors.local_copy_gbs:,.0f} GB/s read + written ({floors.cached_copy_gbs:,.0f} in the cache), "
        + (f"push to a peer {apart:,.0f} GB/s" if apart else "all ranks share it: no links")
    )
    if floors.flag_us is not None and floors.flag_ordered_us is not None:
        print(f"  flag one way {floors.flag_us:.2f} us relaxed, {floors.flag_ordered_us:.2f} us release/acquire")
    print(f"  empty kernel in a graph {floors.launch_us:.2f} us, dependent launch {floors.dependent_launch_us:.2f} us")
    columns = ("pair us", "p99", "dispatch", "combine", "floor", "ratio", "GB/s", "target", "met")
    print(f"  {'case':<{_WIDTH}}" + "".join(f"{name:>9}" for name in columns), flush=True)


def print_result(result: CaseResult) -> None:
    """One line of the table."""
    chosen = f" ({result.protocol})" if result.protocol not in ("", result.case.protocol) else ""
    label = result.case.label() + chosen
    if result.timing is None or result.floor is None:
        print(f"  {label:<{_WIDTH}} {result.refused or result.failed}", flush=True)
        return
    spans, split = result.timing.spans_us, result.case.spans == "split"
    shown = [result.median_us, result.p99_us]
    shown += [sum(v for name, v in spans.items() if name.startswith(p)) for p in ("dispatch", "combine")]
    shown += [result.floor.pair_us, result.ratio, result.gbs]
    line = f"  {label:<{_WIDTH}}" + "".join(f"{value:>9.2f}" for value in shown)
    if result.target_us is not None:
        line += f"{result.target_us:>9.1f}{'yes' if result.median_us <= result.target_us else 'no':>9}"
    if split:
        line += "  " + ", ".join(f"{name} {value:.2f}" for name, value in spans.items())
    if result.timing.late:
        line += f"  ({result.timing.late} replays dropped: the host was late)"
    print(line, flush=True)
