"""``nvep compile``: every kernel of the catalogue to cubins, with no driver."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvep.config import Settings
from nvep.errors import ArgumentError, CompilationError
from nvep.runtime.jit import Cubin, check_architecture, compile_kernel, nvrtc_version
from nvep.runtime.source import KernelSource

DEFAULT_ARCHITECTURES = "sm_90a,sm_100a,sm_103a,sm_120"
FAILURE_STATUS = 1
PIPE_WIDTH = 200  # a file has no width; rich would take 80 columns and cut numbers
Catalog = Sequence[tuple[str, KernelSource]]


@dataclass(frozen=True)
class Outcome:
    """One kernel for one architecture: a cubin, or the compiler's complaint."""

    label: str
    arch: str
    cubin: Cubin | None = None
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        default=DEFAULT_ARCHITECTURES,
        metavar="SM,...",
        help="architectures, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compilations at a time (default: one per core)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results to this file")


def run(namespace: argparse.Namespace) -> int:
    """Compile, print a table, and return 0 only if everything compiled."""
    from nvep.cli.catalog import kernel_catalog

    names = list(dict.fromkeys(part.strip() for part in namespace.arch.split(",") if part.strip()))
    architectures = [check_architecture("--arch", name) for name in names]
    if not architectures:
        raise ArgumentError("--arch", namespace.arch, "at least one architecture")
    jobs = len(os.sched_getaffinity(0)) if namespace.jobs is None else namespace.jobs
    if jobs < 1:
        raise ArgumentError("--jobs", jobs, "1 or more")
    catalog = kernel_catalog()
    start = time.perf_counter()
    outcomes = _compile_with_progress(catalog, architectures, jobs, Settings.from_environment().cache_dir)
    seconds = time.perf_counter() - start
    _print_table(outcomes)
    if namespace.json is not None:
        namespace.json.write_text(json.dumps(report(outcomes), indent=1) + "\n")
    return _print_end(outcomes, seconds)


def compile_catalog(
    catalog: Catalog, architectures: Sequence[str], *, jobs: int, cache_dir: Path, done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Compile every kernel for every architecture, ``jobs`` at a time, in the order of the catalogue.

    Parameters
    ----------
    catalog : sequence of (label, KernelSource)
    architectures : sequence of str
    jobs : int
        Threads; NVRTC runs in parallel in one process.
    cache_dir : Path
    done : callable
        Told each outcome as it comes, from the thread that made it.
    """

    def one(job: tuple[str, KernelSource, str]) -> Outcome:
        label, source, arch = job
        try:
            outcome = Outcome(label, arch, compile_kernel(source, arch, cache_dir))
        except CompilationError as error:
            outcome = Outcome(label, arch, error=str(error))
        done(outcome)
        return outcome

    work = [(label, source, arch) for label, source in catalog for arch in architectures]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, work))


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What ``--json`` writes: NVRTC's version and one record per kernel and architecture."""
    return {"nvrtc": nvrtc_version(), "kernels": [_record(outcome) for outcome in outcomes]}


def _record(outcome: Outcome) -> dict[str, Any]:
    record: dict[str, Any] = {"kernel": outcome.label, "arch": outcome.arch, "ok": outcome.cubin is not None}
    if outcome.cubin is None:
        return record | {"error": outcome.error}
    cubin, used = outcome.cubin, outcome.cubin.resources
    return record | {
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "stack_bytes": used.stack_bytes,
        "shared_bytes": used.shared_bytes,
        "cubin_bytes": len(cubin.code),
        "seconds": round(cubin.seconds, 3),
        "cached": cubin.cached,
        "warnings": cubin.warnings,
    }


def _compile_with_progress(catalog: Catalog, architectures: list[str], jobs: int, cache_dir: Path) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("compiling", total=len(catalog) * len(architectures))

        def done(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=f"{outcome.label} {outcome.arch}")

        return compile_catalog(catalog, architectures, jobs=jobs, cache_dir=cache_dir, done=done)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kernel", overflow="fold")
    table.add_column("arch", no_wrap=True)
    for name in ("registers", "spill B", "stack B", "shared B", "cubin B", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    above = ""
    for outcome in outcomes:
        table.add_row("" if outcome.label == above else outcome.label, outcome.arch, *_cells(outcome))
        above = outcome.label
    console.print(table)


def _cells(outcome: Outcome) -> list[str]:
    if outcome.cubin is None:
        return ["[red]failed[/red]"]
    used = outcome.cubin.resources
    sizes = (used.registers, used.spill_bytes, used.stack_bytes, used.shared_bytes)
    numbers = ["?" if size is None else f"{size:,}" for size in sizes]
    if used.spill_bytes:
        numbers[1] = f"[yellow]{numbers[1]}[/yellow]"
    when = "cached" if outcome.cubin.cached else f"{outcome.cubin.seconds:.2f} s"
    return [*numbers, f"{len(outcome.cubin.code):,}", when]


def _print_end(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print warnings and errors, each once, and the totals; return the exit status."""
    for text in dict.fromkeys(o.cubin.warnings for o in outcomes if o.cubin is not None and o.cubin.warnings):
        print(text, file=sys.stderr)
    failed = [outcome for outcome in outcomes if outcome.cubin is None]
    for outcome in failed:
        print(f"\n{outcome.label}: {outcome.error}", file=sys.stderr)
    cached = sum(1 for outcome in outcomes if outcome.cubin is not None and outcome.cubin.cached)
    built = len(outcomes) - cached - len(failed)
    spilling = sum(1 for outcome in outcomes if outcome.cubin is not None and outcome.cubin.resources.spill_bytes)
    print(
        f"{len(outcomes)} kernels with NVRTC {nvrtc_version()}: {built} compiled, {cached} cached, "
        f"{len(failed)} failed, {spilling} with spills, {seconds:.1f} s"
    )
    return FAILURE_STATUS if failed else 0
