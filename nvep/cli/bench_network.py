"""``nvep bench --transport``: the send schemes over a network adapter, and peer stores, beside one another."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nvep
from nvep.bench.network import NetworkCase, default_network_cases, full_network_cases, small_network, unique
from nvep.bench.network_account import STAGES
from nvep.bench.network_run import NetworkResult, run_network_cases
from nvep.bench.network_targets import Target, by_transport, crossover_us, hold_ratios, targets
from nvep.cli.launch import open_groups_and_run
from nvep.config import TRANSPORTS, Settings, mpi_launch
from nvep.errors import ArgumentError
from nvep.group import RankGroup
from nvep.nic.base import PLACEMENTS
from nvep.nic.soft.model import LABEL
from nvep.runtime import choose_device_kind

_AXES = {
    "tokens": "tokens",
    "hidden": "hidden",
    "experts": "experts",
    "top_k": "top_k",
    "max_blocks": "blocks",
    "ring_memory": "ring_memory",
    "domain_size": "domain_size",
    "queue_depth": "queue_depth",
}
_FOREIGN = ("dependent", "format", "protocol", "routing", "spans", "profile", "trace", "layer", "flush_l2")
_WIDTH, _PAIR = 40, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep bench`` for this sweep."""
    group = parser.add_argument_group("transports: --transport replaces the sweep by one of send schemes")
    group.add_argument("--transport", nargs="+", choices=(*TRANSPORTS, "all"), help=f"over a {LABEL}")
    group.add_argument("--delay", type=int, nargs="+", metavar="US", help="work between a send and its receive")
    group.add_argument("--ring-memory", nargs="+", choices=PLACEMENTS, help="where rings live")
    group.add_argument("--domain-size", type=int, nargs="+", metavar="N", help="ranks in groups of N use peer stores")
    group.add_argument("--queue-depth", type=int, nargs="+", metavar="N", help="entries of each ring")
    group.add_argument("--account", action="store_true", help="where the time of sends goes, by stamps in kernels")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a step was wrong or a kernel did not compile."""
    emulated = choose_device_kind(Settings.from_environment().device) == "emulated"
    cases = _select(options, emulated=emulated)
    results: list[NetworkResult] = []
    devices: list[str] = []

    def rank(group: RankGroup) -> None:
        chosen = [case for case in cases if case.ranks == group.size]
        if group.rank == 0:
            devices.append(group.device.name)
            print_head(group.device.name, group.size, chosen, emulated=emulated)
        found = run_network_cases(group, chosen, report=print_result)
        if group.rank == 0:
            results.extend(found)

    for ranks in sorted({case.ranks for case in cases}):
        open_groups_and_run(rank, None if mpi_launch() else ranks)
    launched = mpi_launch()
    if launched is None or launched[0] == 0:
        print_summary(results, emulated=emulated)
        if options.json:
            _write(Path(options.json), as_json(results, devices, emulated=emulated))
    return 1 if any(result.failed for result in results) else 0


def _select(options: argparse.Namespace, *, emulated: bool) -> list[NetworkCase]:
    for name in _FOREIGN:
        if getattr(options, name):
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(options, name), "nothing beside --transport")
    if options.json and not Path(options.json).parent.is_dir():  # known now, not after minutes
        raise ArgumentError("--json", options.json, "a file in a folder that exists")
    transports = TRANSPORTS if "all" in options.transport else tuple(dict.fromkeys(options.transport))
    axes = {field: getattr(options, name) for name, field in _AXES.items() if getattr(options, name)}
    if axes or options.delay or options.account:
        base = NetworkCase(ranks=options.ranks or NetworkCase.ranks)
        base = replace(base, delays=tuple(sorted(set(options.delay or (0,)))), accounted=options.account)
        axes = {"transport": list(transports), **axes}
        cases = [replace(base, **dict(zip(axes, values))) for values in itertools.product(*axes.values())]
        cases = [case for case in cases if case.networked or not case.accounted]
    else:
        cases = (full_network_cases if options.full else default_network_cases)(transports)
        cases = [case for case in cases if options.ranks in (None, case.ranks)]
    launched = mpi_launch()
    if launched is not None:
        cases = [replace(case, ranks=launched[1]) for case in cases]
    return sorted(unique(small_network(case) if emulated else case for case in cases), key=lambda case: case.ranks)


def print_head(device: str, ranks: int, cases: Sequence[NetworkCase], *, emulated: bool) -> None:
    """Where, and the columns: dispatch / combine."""
    print(f"\n{ranks} ranks on {device}, {LABEL}: compares schemes, measures no network")
    if emulated:
        print("EMULATED on CPU cores: relations between these figures mean nothing for a GPU")
    print(
        "  us, dispatch / combine, slowest rank; messages, doorbells, senders' waits for room: a step of all ranks;\n"
        "  exposed: send + receive of both, by us of work between them"
    )
    columns = ("hold", "receive", "in flight", "landing")
    line = f"  {'case':<{_WIDTH}}" + "".join(f"{name:>{_PAIR}}" for name in columns)
    print(line + f"{'messages':>10}{'doorbells':>10}{'stall us':>10}  exposed", flush=True)


def print_result(result: NetworkResult) -> None:
    """One line of the table."""
    if result.timing is None:
        print(f"  {result.case.label():<{_WIDTH}} {result.refused or result.failed}", flush=True)
        return
    timing = result.timing
    pairs = (timing.hold_us, timing.receive_us, timing.in_flight_us, timing.landing_us)
    shown = ["" if not pair else f"{pair['dispatch']:.1f} / {pair['combine']:.1f}" for pair in pairs]
    line = f"  {result.case.label():<{_WIDTH}}" + "".join(f"{text:>{_PAIR}}" for text in shown)
    counts = {"messages": 0.0, "doorbells": 0.0, "stalled_us": 0.0, **timing.adapter}
    line += f"{counts['messages']:>10.0f}{counts['doorbells']:>10.0f}{counts['stalled_us']:>10.1f}"
    print(line + "  " + ", ".join(f"{d}: {us:.1f}" for d, us in result.exposed_us.items()), flush=True)


def print_summary(results: Sequence[NetworkResult], *, emulated: bool) -> None:
    """What the sweep says: ratios and targets, delays from which less is exposed, and where hold time goes."""
    lines = [*_ratio_lines(results), *_crossover_lines(results), *_account_lines(results)]
    lines += _target_lines(targets(results), emulated=emulated)
    if lines:
        print(f"\n{LABEL}" + (", EMULATED on CPU cores" if emulated else ""))
        print("\n".join(lines), flush=True)


def _ratio_lines(results: Sequence[NetworkResult]) -> Iterator[str]:
    for transport in by_transport(results):
        ratios = sorted(ratio for _, ratio in hold_ratios(results, transport))
        if ratios and transport != "gdaki":
            below = sum(ratio < 1 for ratio in ratios)
            yield (
                f"  {transport}: hold of D.send over GDAKI's {ratios[0]:.2f} to {ratios[-1]:.2f}, median "
                f"{ratios[len(ratios) // 2]:.2f}; shorter at {below} of {len(ratios)} points"
            )


def _crossover_lines(results: Sequence[NetworkResult]) -> Iterator[str]:
    found = by_transport(results)
    for transport, points in found.items():
        for point, result in points.items():
            base = found.get("gdaki", {}).get(point)
            if transport == "gdaki" or base is None or len(result.exposed_us) < 2:
                continue
            at = crossover_us(base.exposed_us, result.exposed_us)
            delay = result.case.delays[0]
            extra = result.exposed_us[delay] - base.exposed_us[delay]
            said = f"from {at:.0f} us of work on" if at == at else f"not up to {result.case.delays[-1]} us of work"
            yield f"  {result.case.label()}: less exposed than GDAKI {said}; with {delay} us: {extra:+.1f} us"


def _account_lines(results: Sequence[NetworkResult]) -> Iterator[str]:
    accounted = [result for result in results if result.timing is not None and result.timing.account_us]
    if accounted:
        yield "  where a send's block spends its time, us (signals: of the block that posts them)"
    for result in accounted:
        assert result.timing is not None
        for phase, found in result.timing.account_us.items():
            if found:
                shown = ", ".join(f"{name} {found[name]:.2f}" for name in STAGES if found[name] >= 0.005)
                yield f"  {result.case.label()} {phase}: {shown}; hold {result.timing.hold_us[phase]:.2f}"


def _target_lines(found: Sequence[Target], *, emulated: bool) -> Iterator[str]:
    if found:
        yield f"  {'target':<100}{'limit':>8}{'found':>8}{'met':>6}"
    for target in found:
        met = "-" if emulated else "yes" if target.met else "no"
        yield f"  {target.transport + ': ' + target.what:<100}{target.limit:>8.2f}{target.found:>8.2f}{met:>6}"


def as_json(results: Sequence[NetworkResult], devices: Sequence[str], *, emulated: bool) -> dict[str, Any]:
    """Everything measured, in the form that ``nvep plot`` and perf/report.py read."""
    return {
        "version": 1,
        "nvep": nvep.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "emulated": emulated,
        "floors": [],
        "results": [],
        "host_overhead": [],
        "network": {
            "adapter": LABEL,
            "devices": sorted(set(devices)),
            "results": [result.as_json() for result in results],
            "targets": [{**asdict(target), "met": None if emulated else target.met} for target in targets(results)],
        },
    }


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, indent=1))
    except OSError as error:
        raise ArgumentError("--json", str(path), f"a file to write ({error.strerror})") from error
