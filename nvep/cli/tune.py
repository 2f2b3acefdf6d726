"""``nvep tune``: measures on this machine up to which size Sentinel is the faster protocol."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from nvep.cli.launch import open_groups_and_run
from nvep.config import PROTOCOLS, Settings, mpi_launch
from nvep.exchange.timing import PairCase, time_group
from nvep.exchange.tuning import device_key, save_crossover
from nvep.group import RankGroup

_SIZES = (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
_EMULATED_SIZES = (1, 4, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep tune``."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a local group, without mpirun (default 2)")
    parser.add_argument("--hidden", type=int, default=7168, help="bf16 elements of a row (default 7168)")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens a rank to measure at")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but do not keep the result")
    parser.add_argument("--json", metavar="OUT", help="write the measurements to a file")


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep."""
    results: list[dict[str, Any]] = open_groups_and_run(
        lambda group: _measure(group, options), None if mpi_launch() else options.ranks
    )
    found = results[0]
    if found["rank"] == 0:
        _report(found, options)
    return 0


def _measure(group: RankGroup, options: argparse.Namespace) -> dict[str, Any]:
    emulated = group.device.emulated
    sizes = sorted(set(options.tokens or (_EMULATED_SIZES if emulated else _SIZES)))
    rows = []
    for tokens in sizes:
        case = PairCase(group.size, tokens, hidden=options.hidden)
        if emulated:
            case = dataclasses.replace(case, unrolled=2, replays=4)
        times = {p: time_group(group, dataclasses.replace(case, protocol=p)).median_us for p in PROTOCOLS}
        rows.append({"tokens": tokens, **times})
    return {
        "rank": group.rank,
        "device": device_key(group.device.name),
        "emulated": emulated,
        "ranks": group.size,
        "row_bytes": 2 * options.hidden,
        "rows": rows,
        "crossover_bytes": crossover_bytes(rows, 2 * options.hidden),
    }


def crossover_bytes(rows: list[dict[str, Any]], row_bytes: int) -> int:
    """Bytes of the largest measured step up to which Sentinel never lost; 0 if it lost at once."""
    best = 0
    for row in rows:
        if row["sentinel"] > row["fence"]:
            break
        best = row["tokens"] * row_bytes
    return best


def _report(found: dict[str, Any], options: argparse.Namespace) -> None:
    table = Table(
        title=f"dispatch + combine, us, {found['ranks']} ranks, {found['row_bytes']:,} B rows, {found['device']}"
    )
    for column in ("tokens a rank", *PROTOCOLS):
        table.add_column(column, justify="right")
    for row in found["rows"]:
        table.add_row(f"{row['tokens']:,}", *(f"{row[p]:.1f}" for p in PROTOCOLS))
    console = Console()
    console.print(table)
    if found["emulated"]:
        console.print("emulated device (CPU): these times say nothing about a GPU")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    if not options.dry_run:
        path = save_crossover(found["device"], found["crossover_bytes"], Settings.from_environment().cache_dir)
        console.print(f"sentinel up to {found['crossover_bytes']:,} B a rank and step; kept in {path}")
