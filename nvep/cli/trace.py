"""``nvep trace``: when every phase of a step ran on every rank, as a Chrome or Perfetto trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import nvep
from nvep.bench.cases import PROFILES, Case, profile, small
from nvep.bench.timeline import MODES, Timeline, TimelineCase, run_timelines, waited_for
from nvep.bench.trace_events import Arrow, Span, trace_document, trace_text
from nvep.cli.launch import open_groups_and_run
from nvep.cli.traces import RoutingTrace, read_trace
from nvep.config import PROTOCOLS, TRANSPORTS, Settings, mpi_launch
from nvep.errors import ArgumentError
from nvep.group import RankGroup
from nvep.moe.overlap import Schedule
from nvep.runtime import choose_device_kind

_EMULATED_US = 1000.0  # of a computation on CPU cores, where exchange kernels take about as long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep trace``."""
    parser.add_argument("--out", metavar="FILE", default="nvep-trace.json", help="trace to write (%(default)s)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of a local group, without mpirun (default 2)")
    parser.add_argument(
        "--overlap", choices=MODES, nargs="+", default=["on", "off"],
        help="on: micro-batches overlap; off: one after the other on one stream; single: one batch of all tokens",
    )  # fmt: skip
    parser.add_argument("--micro-batches", type=int, default=2, metavar="N", help="of a step (default 2)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of a step (default 2)")
    parser.add_argument("--schedule", metavar="FILE", help="schedule of 'on': lines of layer.micro_batch phase stream")
    parser.add_argument("--print-schedule", action="store_true", help="print the schedule of 'on' and do nothing else")
    sizes = parser.add_argument_group("what is exchanged (on an emulated device, sizes are cut)")
    sizes.add_argument("--tokens", type=int, default=128, metavar="N", help="of a rank in a step (default 128)")
    sizes.add_argument("--profile", choices=tuple(PROFILES), help="hidden, experts and top_k of a model")
    for name, text in (("hidden", "bf16 elements of a row"), ("experts", "in all"), ("top-k", "experts of a token")):
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=text)
    sizes.add_argument("--trace", metavar="LOG", help="router log to route by; gives top_k and experts")
    sizes.add_argument("--layer", help="layer of the log, where it holds several")
    how = parser.add_argument_group("how")
    how.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0])
    how.add_argument("--protocol", choices=(*PROTOCOLS, "auto"), default="auto")
    how.add_argument("--blocks", type=int, metavar="N", help="blocks of an exchange kernel; computation gets the rest")
    how.add_argument("--attention-us", type=float, metavar="US", help="computation before dispatch (default 20)")
    how.add_argument("--experts-us", type=float, metavar="US", help="computation before combine (default 20)")
    how.add_argument("--eager", action="store_true", help="the host enqueues every step (always so when emulated)")
    how.add_argument("--replays", type=int, metavar="N", help="of a step; the median is shown (default 20, emulated 3)")


def run(options: argparse.Namespace) -> int:
    """Record, write and print; 1 if modes gave different bits."""
    emulated = choose_device_kind(Settings.from_environment().device) == "emulated"
    launched = mpi_launch()
    log = read_trace(options.trace, layer=options.layer) if options.trace else None
    case = make_case(options, log, ranks=launched[1] if launched else options.ranks or 2, emulated=emulated)
    modes, replays = list(dict.fromkeys(options.overlap)), options.replays or (3 if emulated else 20)
    if options.print_schedule:
        print(case.schedule_of("on"))
        return 0
    if not Path(options.out).absolute().parent.is_dir():
        raise ArgumentError("--out", options.out, "a file in a folder that exists")
    recorded = None if log is None else np.asarray(log.ids)

    def on_rank(group: RankGroup) -> bool:
        found = run_timelines(group, case, modes, recorded=recorded, replays=replays)
        document = make_document(found, case, device=group.device.name, emulated=group.device.emulated)
        group.together(lambda: _write(options.out, document) if group.rank == 0 else None)
        if group.rank == 0:
            show(found, document, options.out)
        return len({timeline.digests for timeline in found}) == 1

    return 0 if all(open_groups_and_run(on_rank, None if launched else case.case.ranks)) else 1


def make_case(options: argparse.Namespace, log: RoutingTrace | None, *, ranks: int, emulated: bool) -> TimelineCase:
    """The options as a case.

    Raises
    ------
    ArgumentError
        An option is out of range.
    """
    for name in ("ranks", "micro_batches", "layers", "replays"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", value, "1 or more")
    case = Case(ranks=ranks, tokens=options.tokens, protocol=options.protocol, max_blocks=options.blocks)
    if options.profile:
        case = replace(case, **profile(options.profile))
    sizes = {name: getattr(options, name) for name in ("hidden", "experts", "top_k")}
    case = replace(case, **{name: value for name, value in sizes.items() if value is not None})
    if log is not None:
        case = replace(case, routing="recorded", top_k=log.ids.shape[1], experts=log.num_experts)
    default_us = _EMULATED_US if emulated else 20.0
    times = {name: getattr(options, name) for name in ("attention_us", "experts_us")}
    for name, value in times.items():
        if value is not None and not 0 <= value <= 1e5:
            raise ArgumentError(f"--{name.replace('_', '-')}", value, "0 to 100,000 microseconds")
    return TimelineCase(
        replace(small(case), ranks=ranks) if emulated else case,
        options.transport,
        micro_batches=options.micro_batches,
        layers=options.layers,
        schedule=_read_schedule(options.schedule) if options.schedule else None,
        graph=not (options.eager or emulated),
        **{name: default_us if value is None else value for name, value in times.items()},
    )


def _read_schedule(path: str) -> Schedule:
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ArgumentError("--schedule", path, f"a text file ({error})") from error
    return Schedule.parse(text)


# --- what is written --------------------------------------------------------------------------------------------------


def make_document(timelines: Sequence[Timeline], case: TimelineCase, *, device: str, emulated: bool) -> dict[str, Any]:
    """The trace as plain values."""
    spans: list[Span] = []
    arrows: list[Arrow] = []
    for timeline in timelines:
        first = len(spans)
        spans += [_span(timeline, s, emulated=emulated) for s in timeline.spans]
        arrows += [Arrow(first + source, first + target, why) for source, target, why in waited_for(timeline)]
    about = {
        "nvep": nvep.__version__,
        "device": device,
        "emulated": emulated,
        "note": "EMULATED on CPU cores: nothing here is a time of a GPU" if emulated else "",
        "network": "emulated adapter" if case.config().networked else "none",
        "case": {**asdict(case.case), **_other_fields(case)},
        "equal_bits": len({timeline.digests for timeline in timelines}) == 1,
        "modes": {timeline.mode: _figures(timeline, case.case.ranks) for timeline in timelines},
    }
    return trace_document(spans, arrows, about)


def _other_fields(case: TimelineCase) -> dict[str, Any]:
    names = ("transport", "micro_batches", "layers", "attention_us", "experts_us", "graph")
    return {name: getattr(case, name) for name in names}


def _span(timeline: Timeline, span: Any, *, emulated: bool) -> Span:
    phase = span.phase
    process = f"overlap {timeline.mode}, rank {span.rank}" + (" (EMULATED)" if emulated else "")
    kind = "computation" if phase.name in ("attention", "experts") else "communication"
    details = {"micro_batch": phase.micro_batch, "layer": phase.layer, "rank": span.rank}
    name = f"{phase.name} {phase.layer}.{phase.micro_batch}"
    return Span(process, phase.stream, name, kind, span.start_us, span.end_us, details)


def _figures(timeline: Timeline, ranks: int) -> dict[str, Any]:
    return {
        "step_us": {"median": timeline.median_us, "p99": float(np.percentile(timeline.step_us, 99))},
        "traced_step_us": timeline.marked_us,
        "mark_us": timeline.mark_us,
        "clock_error_us": timeline.clock_error_us,
        "ranks": [timeline.summary(rank) for rank in range(ranks)],
    }


def _write(path: str, document: dict[str, Any]) -> None:
    try:
        Path(path).write_text(trace_text(document))
    except OSError as error:
        raise ArgumentError("--out", path, f"a file that can be written ({error.strerror})") from error


def show(timelines: Sequence[Timeline], document: dict[str, Any], path: str) -> None:
    """Print a line for each mode."""
    about = document["otherData"]
    if about["emulated"]:
        print("EMULATED on CPU cores: relations between these figures mean little, and nothing for a GPU")
    print(f"{about['device']}, {about['case']['transport']}, network: {about['network']}")
    names = ("step", "computation", "communication", "hidden", "exposed")
    print(f"  {'overlap':<9}{'step us':>10}{'p99':>10}   with marks:" + "".join(f"{name:>15}" for name in names))
    for timeline in timelines:
        figures = about["modes"][timeline.mode]
        slowest = max(figures["ranks"], key=lambda rank: rank["step"])
        step = figures["step_us"]
        line = f"  {timeline.mode:<9}{step['median']:>10.1f}{step['p99']:>10.1f}   {'':11}"
        print(line + "".join(f"{slowest[name]:>15.1f}" for name in names))
    worst = max(timeline.clock_error_us for timeline in timelines)
    clock = f"clocks within {worst:.1f} us" if worst else "one clock"
    equal = "equal bits in every mode" if about["equal_bits"] else "DIFFERENT bits"
    print(f"{len(document['traceEvents'])} events, {clock}, {equal}: {path}", flush=True)
