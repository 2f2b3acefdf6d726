"""``nvep replay``: a recorded router log through dispatch, experts and combine, every row checked."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nvep.cli.launch import open_groups_and_run
from nvep.cli.traces import RoutingTrace, read_trace
from nvep.config import PROTOCOLS, TRANSPORTS, ExchangeConfig
from nvep.errors import ArgumentError
from nvep.group import RankGroup

HEADER_ENTRY_BYTES = 8  # expert id and weight
BF16_BYTES = 2
DEFINITIONS = {
    "rows_sent": "rows read from the receive buffers of all ranks, those that a rank sent to itself included",
    "rows_local": "rows of rows_sent that a rank sent to itself",
    "bytes_sent": "row and header bytes of rows_sent",
    "rows_saved_by_dedup": "(token, expert) pairs of the log minus rows_sent",
    "load_by_rank": "(token, expert) pairs that the rank's experts worked on, by the headers it received",
    "step_ms": "dispatch, experts and combine on the slowest rank's stream, ranks aligned by an empty step before; the "
    "copy taken for checking is not counted; p99 is the nearest-rank percentile over steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``nvep replay``."""
    parser.add_argument("trace", metavar="TRACE", help="router log: JSONL (token log or Megatron trace), .npy or .npz")
    parser.add_argument("--layer", help="layer to replay, where the log holds several")
    parser.add_argument("--experts", type=int, help="number of experts (default: by the log, or its largest id + 1)")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="replay only the first TOKENS tokens")
    parser.add_argument("--hidden", type=int, default=2048, help="bf16 elements of a row (default 2048)")
    parser.add_argument("--tokens-per-step", type=int, default=128, metavar="N", help="most tokens of a rank in a step")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0])
    parser.add_argument("--protocol", choices=(*PROTOCOLS, "auto"), default=PROTOCOLS[0])
    parser.add_argument(
        "--placement", default="contiguous", metavar="contiguous|round-robin|FILE",
        help="which rank owns which expert; FILE holds a rank for each expert, as JSON list or separated by spaces",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks in this process, without mpirun (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows (default 0)")
    parser.add_argument("--json", metavar="OUT", help="write the report to this file")


def run(options: argparse.Namespace) -> int:
    """Run ``nvep replay``; return the exit status: 0 verified, 1 different."""
    reports = open_groups_and_run(lambda group: replay_on_rank(group, options), options.ranks)
    return 0 if reports[0]["verified"] else 1


def replay_on_rank(group: RankGroup, options: argparse.Namespace) -> dict[str, Any]:
    """One rank's whole command: read, replay, report (rank 0). Collective; returns the report on every rank."""
    trace = _read_once(group, options)
    config = group.together(lambda: make_config(options, trace, group.size))
    from nvep.cli.replay_steps import RankReplay

    replay = RankReplay(group, trace, config=config, seed=options.seed)
    with _progress(group, replay.steps) as advance:
        mine = replay.run(advance)
    results = group.allgather(mine)
    report = make_report(group, trace, config=config, results=results)
    if group.rank == 0:
        show(report)
    if options.json is not None:
        group.together(lambda: _write(options.json, report) if group.rank == 0 else None)
    return report


def _read_once(group: RankGroup, options: argparse.Namespace) -> RoutingTrace:
    """Rank 0 checks the options that need no ranks and reads; every rank gets its trace or raises its error."""

    def read() -> RoutingTrace | None:
        if group.rank != 0:
            return None
        check_options(options)
        trace = read_trace(options.trace, layer=options.layer, num_experts=options.experts)
        return trace if options.limit is None else trace.first(options.limit)

    trace = group.allgather(group.together(read))[0]
    assert isinstance(trace, RoutingTrace)
    return trace


def check_options(options: argparse.Namespace) -> None:
    """Raise ArgumentError for what can be refused before the log is read."""
    for name, low in (("limit", 1), ("experts", 1), ("hidden", 8), ("tokens_per_step", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise ArgumentError(f"--{name.replace('_', '-')}", value, f"{low} or more")
    if options.hidden % 8:
        raise ArgumentError("--hidden", options.hidden, "a multiple of 8: rows are multiples of 16 bytes")
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise ArgumentError("--json", options.json, "a file in an existing directory")


def make_config(options: argparse.Namespace, trace: RoutingTrace, num_ranks: int) -> ExchangeConfig:
    """Configuration of the exchange that carries ``trace``."""
    return ExchangeConfig(
        num_experts=trace.num_experts,
        top_k=trace.ids.shape[1],
        max_tokens=options.tokens_per_step,
        row_bytes=options.hidden * BF16_BYTES,
        placement=read_placement(options.placement, trace.num_experts, num_ranks),
        protocol=options.protocol,
        transport=options.transport,
    )


def read_placement(choice: str, num_experts: int, num_ranks: int) -> tuple[int, ...] | None:
    """Rank of each expert: None for contiguous blocks, ``e % ranks`` for round-robin, or the integers in a file."""
    if choice == "contiguous":
        return None
    if choice == "round-robin":
        return tuple(expert % num_ranks for expert in range(num_experts))
    try:
        text = Path(choice).read_text()
        ranks = tuple(int(word) for word in text.translate(str.maketrans("[],", "   ")).split())
    except (OSError, ValueError) as error:
        raise ArgumentError("--placement", choice, f"contiguous, round-robin or a file of ranks ({error})") from error
    if len(ranks) != num_experts:
        raise ArgumentError("--placement", choice, f"a rank for each of {num_experts} experts, not {len(ranks)} ranks")
    if not all(0 <= rank < num_ranks for rank in ranks):
        raise ArgumentError("--placement", choice, f"ranks from 0 to {num_ranks - 1}")
    return ranks


# --- report -----------------------------------------------------------------------------------------------------------


def make_report(
    group: RankGroup, trace: RoutingTrace, *, config: ExchangeConfig, results: Sequence[Any]
) -> dict[str, Any]:
    """What ``--json`` writes; equal on all ranks."""
    step_ms = np.max([result.step_ms for result in results], axis=0)
    rows_sent = sum(result.rows_received for result in results)
    differences = [str(result.difference) for result in results if result.difference is not None]
    return {
        "verified": not differences,
        "differences": differences,
        "trace": trace.source,
        "layer": trace.layer,
        "ranks": group.size,
        "group": "local" if group.in_process else "mpi",
        "device": group.device.name,
        "emulated": group.device.emulated,
        "transport": config.transport,
        "protocol": config.protocol,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "row_bytes": config.row_bytes,
        "tokens_per_step": config.max_tokens,
        "tokens": len(trace.ids),
        "steps": len(step_ms),
        "rows_sent": rows_sent,
        "rows_local": sum(result.rows_local for result in results),
        "bytes_sent": rows_sent * (config.row_bytes + config.top_k * HEADER_ENTRY_BYTES),
        "rows_saved_by_dedup": trace.ids.size - rows_sent,
        "load_by_rank": [result.pairs for result in results],
        "step_ms": {"median": float(np.median(step_ms)), "p99": _percentile(step_ms.tolist(), 0.99)},
        "definitions": DEFINITIONS,
    }


def _percentile(values: list[float], fraction: float) -> float:
    """Nearest-rank percentile: the smallest value that at least ``fraction`` of all do not exceed."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1]


def _write(path: str, report: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ArgumentError("--json", path, f"a file that can be written ({error.strerror})") from error


def show(report: dict[str, Any]) -> None:
    """Print the report for people; the last line says whether all was equal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None)
    layer = "" if report["layer"] is None else f", layer {report['layer']}"
    total = sum(report["load_by_rank"])
    local = report["rows_local"] / max(1, report["rows_sent"])
    busiest = max(report["load_by_rank"]) * report["ranks"] / max(1, total)
    lines = {
        "log": f"{report['trace']}{layer}: {report['num_experts']} experts, top-{report['top_k']}",
        "device": f"{report['device']}, {report['transport']}, {report['protocol']}",
        "steps": f"{report['steps']} of up to {report['tokens_per_step']} tokens a rank",
        "rows sent": f"{report['rows_sent']:,} of {report['row_bytes']:,} bytes, {local:.0%} local",
        "bytes sent": f"{report['bytes_sent']:,} with headers",
        "rows saved": f"{report['rows_saved_by_dedup']:,} of {total:,} by sending once per target",
        "load by rank": f"{', '.join(f'{n:,}' for n in report['load_by_rank'])} (busiest {busiest:.2f} x the mean)",
        "step": f"median {report['step_ms']['median']:.3f} ms, p99 {report['step_ms']['p99']:.3f} ms",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table)
    for difference in report["differences"]:
        print(f"DIFFERENT at {difference}")
    verdict = "verified" if report["verified"] else "DIFFERENT"
    print(f"replay: {report['ranks']} ranks, {report['tokens']} tokens, {verdict}", flush=True)


@contextmanager
def _progress(group: RankGroup, steps: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0, on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if group.rank != 0 or not console.is_terminal:
        yield lambda step: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replay", total=steps)
        yield lambda step: progress.update(task, completed=step)
