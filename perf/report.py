"""Tables in Markdown from what ``nvep bench --json`` wrote: ``python perf/report.py FILE... >perf/results/NAME.md``.

Targets beside what was reached, speed by number of blocks, and every case; by hand then come the commands and why what
falls short does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
COLUMNS: dict[str, Callable[[Result], Any]] = {
    "case": lambda r: r["label"],
    "protocol": lambda r: r["protocol"],
    "median us": lambda r: r["median_us"],
    "p99": lambda r: r["p99_us"],
    "dispatch": lambda r: _phases(r, "dispatch"),
    "combine": lambda r: _phases(r, "combine"),
    "floor": lambda r: r["floor_us"],
    "ratio": lambda r: r["ratio"],
    "GB/s": lambda r: r["gbs"],
}


def _phases(result: Result, name: str) -> float:
    return sum(float(us) for phase, us in result["timing"]["spans_us"].items() if phase.startswith(name))


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Markdown; numbers with two decimals."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns)]
    lines += [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(data: Mapping[str, Any]) -> str:
    """One file's section."""
    parts = [f"## {data['date']}, nvep {data['nvep']}"]
    if data["emulated"]:
        parts.append("**EMULATED on CPU cores: says nothing about a GPU.**")
    for floors in data["floors"]:
        shown = "; ".join(f"{name} {value:.3g}" for name, value in floors.items() if isinstance(value, float))
        parts.append(f"{len(floors['gpus'])} ranks on {floors['device']}: {shown}.")
    timed = [r for r in data["results"] if "median_us" in r]
    aimed = [r for r in timed if r["target_us"] is not None]
    if aimed:
        rows = [
            [
                r["label"],
                r["target_us"],
                r["median_us"],
                r["floor_us"],
                "yes" if r["median_us"] <= r["target_us"] else "no",
            ]
            for r in aimed
        ]
        parts.append("### Targets\n\n" + table(("case", "target us", "reached", "floor", "met"), rows))
    blocks = [r for r in timed if r["case"]["max_blocks"]]
    if blocks:
        head = ("case", "blocks", "median us", "GB/s both ways")
        rows = [[r["label"], r["case"]["max_blocks"], r["median_us"], r["gbs"]] for r in blocks]
        parts.append("### By blocks\n\n" + table(head, rows))
    if timed:
        parts.append("### All cases\n\n" + table(COLUMNS, [[value(r) for value in COLUMNS.values()] for r in timed]))
    without = [[r["label"], r["refused"] or r["failed"]] for r in data["results"] if "median_us" not in r]
    if without:
        parts.append("### Without a figure\n\n" + table(("case", "why"), without))
    if data["host_overhead"]:
        names = ("cpu_us", "dispatch_us", "combine_us")
        rows = [[o["case"]["tokens"], o["protocol"], *(o[name] for name in names)] for o in data["host_overhead"]]
        parts.append("### Host overhead\n\n" + table(("tokens", "protocol", *names), rows))
    return "\n\n".join([*parts, *network(data.get("network"))])


def network(found: Mapping[str, Any] | None) -> list[str]:
    """Sections of a sweep of send schemes; none without one."""
    if not found:
        return []
    timed = [r for r in found["results"] if r["timing"] is not None]
    parts = [f"### Send schemes over a {found['adapter']}, {', '.join(found['devices'])}"]
    parts[0] += "\n\nMicroseconds on the slowest rank. It compares schemes; it measures no network."
    if found["targets"]:
        met = {None: "-", True: "yes", False: "no"}
        rows = [[t["transport"], t["what"], t["limit"], t["found"], met[t["met"]]] for t in found["targets"]]
        parts.append("#### Targets\n\n" + table(("transport", "target", "limit", "found", "met"), rows))
    parts.append("#### Phases, dispatch / combine\n\n" + _phases_table(timed))
    exposed = [r for r in timed if len(r["case"]["delays"]) > 1]
    if exposed:
        delays = sorted({delay for r in exposed for delay in r["case"]["delays"]})
        rows = [[r["name"], *(_exposed(r, delay) for delay in delays)] for r in exposed]
        head = ("case", *(f"{delay} us" for delay in delays))
        parts.append("#### Exposed (send + receive of both) by work between send and receive\n\n" + table(head, rows))
    accounted = [(r, p, us) for r in timed for p, us in r["timing"]["account_us"].items() if us]
    if accounted:
        names = list(accounted[0][2])
        rows = [[f"{r['name']} {p}", *us.values(), r["timing"]["hold_us"][p]] for r, p, us in accounted]
        parts.append("#### Where a send's block spends its time\n\n" + table(("case", *names, "hold"), rows))
    without = [[r["name"], r["refused"] or r["failed"]] for r in found["results"] if r["timing"] is None]
    return parts + (["#### Without a figure\n\n" + table(("case", "why"), without)] if without else [])


def _phases_table(timed: Iterable[Result]) -> str:
    names, counts = ("hold_us", "receive_us", "in_flight_us", "landing_us"), ("messages", "doorbells", "stalled_us")
    rows = []
    for result in timed:
        timing = result["timing"]
        pairs = [timing[name] and f"{timing[name]['dispatch']:.2f} / {timing[name]['combine']:.2f}" for name in names]
        rows.append([result["name"], *(pair or "" for pair in pairs), *(timing["adapter"].get(n, "") for n in counts)])
    head = ("hold", "receive", "in flight", "landing", "messages a step", "doorbells", "stalled us")
    return table(("case", *head), rows)


def _exposed(result: Result, delay: int) -> float | str:
    found = result["timing"]["exposed_us"]
    return "" if delay not in result["case"]["delays"] else sum(float(found[p][str(delay)]) for p in found)


if __name__ == "__main__":
    print("\n\n".join(report(json.loads(Path(path).read_text())) for path in sys.argv[1:]))
