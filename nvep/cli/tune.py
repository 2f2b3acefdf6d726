"""``nvep tune``: measures on this machine which protocol and how many blocks are fastest, by size."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, replace
from typing import Any

from nvep.bench import Case
from nvep.bench.inputs import Inputs
from nvep.bench.kernels import FloorKernels
from nvep.bench.timing import time_exchange
from nvep.cli.launch import open_groups_and_run
from nvep.config import PROTOCOLS, Settings, mpi_launch
from nvep.errors import ArgumentError, HeapTooLarge
from nvep.exchange import Exchange
from nvep.exchange.tuning import Tuning, device_key, largest_step, save_tuning
from nvep.group import RankGroup

_SIZES = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)
_BLOCKS = (4, 8, 16, 32, 64, 132)
_EMULATED_SIZES, _EMULATED_BLOCKS = (1, 4, 16), (2, 4)
_CLOSE = 1.03  # of the best time: fewer blocks, which leave room for others, count as good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep tune``."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a local group, without mpirun (default 2)")
    parser.add_argument("--hidden", type=int, default=7168, help="bf16 elements of a row (default 7168)")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens a rank to measure at")
    parser.add_argument("--blocks", type=int, nargs="+", help="numbers of blocks to try")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but do not keep the result")
    parser.add_argument("--json", metavar="OUT", help="write the measurements to a file")


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep."""
    results = open_groups_and_run(lambda group: _measure(group, options), None if mpi_launch() else options.ranks)
    if results[0]["rank"] == 0:
        _report(results[0], options)
    return 0


def _measure(group: RankGroup, options: argparse.Namespace) -> dict[str, Any]:
    emulated = group.device.emulated
    kernels = group.together(lambda: FloorKernels(group.device))
    blocks = options.blocks or (_EMULATED_BLOCKS if emulated else _BLOCKS)
    rows: list[dict[str, Any]] = []
    for tokens in sorted(set(options.tokens or (_EMULATED_SIZES if emulated else _SIZES))):
        case = Case(group.size, tokens, options.hidden, spans="none", replays=4 if emulated else 12)
        case = replace(case, unrolled=2 if emulated else case.unrolled)
        inputs = group.together(lambda c=case: Inputs(group, c))  # type: ignore[misc]
        times = {}
        for protocol in PROTOCOLS:
            cases = [replace(case, protocol=protocol, max_blocks=count) for count in blocks]
            found = [_median_us(group, c, inputs=inputs, kernels=kernels) for c in cases]
            times[protocol] = {count: us for count, us in zip(blocks, found) if us is not None}
        inputs.close()
        rows.append({"tokens": tokens, "bytes": largest_step(case.config()), "times": times})
    device = {"device": device_key(group.device.name), "emulated": emulated, "ranks": group.size, "rank": group.rank}
    return {**device, "row_bytes": 2 * options.hidden, "rows": rows}


def _median_us(group: RankGroup, case: Case, *, inputs: Inputs, kernels: FloorKernels) -> float | None:
    """Of dispatch + combine; None where the machine cannot run so many blocks at once."""
    try:
        with Exchange(group, case.config()) as exchange:
            return statistics.median(time_exchange(exchange, case, inputs=inputs, kernels=kernels).pair_us)
    except (ArgumentError, HeapTooLarge):
        return None


def tuning_from(rows: list[dict[str, Any]]) -> Tuning:
    """What rows of ``{"bytes": n, "times": {protocol: {blocks: us}}}``, ascending in bytes, say.

    Sentinel counts as faster up to the last size before it first loses. Of numbers of blocks within 3 % of the best the
    smallest is taken; neighbouring sizes with the same number make one class.
    """
    crossover = 0
    for row in rows:
        best = {protocol: min(times.values(), default=math.inf) for protocol, times in row["times"].items()}
        if best["sentinel"] > best["fence"]:
            break
        crossover = row["bytes"]
    blocks: dict[str, tuple[tuple[int, int], ...]] = {}
    for protocol in PROTOCOLS:
        classes: dict[int, int] = {}  # by size
        for row in rows:
            times = row["times"][protocol]
            if times:
                good = min(count for count, us in times.items() if us <= _CLOSE * min(times.values()))
                classes = {size: count for size, count in classes.items() if size != max(classes) or count != good}
                classes[row["bytes"]] = good
        blocks[protocol] = tuple(classes.items())
    return Tuning(crossover, blocks)


def _report(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"dispatch + combine, us, {found['ranks']} ranks, {found['row_bytes']:,} B rows, {found['device']}")
    if found["emulated"]:
        print("EMULATED device (CPU): these times say nothing about a GPU")
    for row in found["rows"]:
        for protocol, times in row["times"].items():
            shown = "".join(f"{f'{count} blocks':>14} {us:9.1f}" for count, us in times.items())
            print(f"{row['tokens']:>6,} tokens {protocol:<9}{shown or '  refused'}")
    tuning = tuning_from(found["rows"])
    print(f"sentinel up to {tuning.sentinel_bytes:,} B a rank and step")
    for protocol, classes in tuning.blocks.items():
        print(f"{protocol}: " + ", ".join(f"{count} blocks up to {size:,} B" for size, count in classes))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**found, "tuning": asdict(tuning)}, file, indent=1)
    if not options.dry_run:
        print(f"kept in {save_tuning(found['device'], tuning, Settings.from_environment().cache_dir)}")
