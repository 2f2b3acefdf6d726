"""Timelines as Chrome trace events, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """Something that lasted.

    Attributes
    ----------
    process, thread : str
        Rows that it is shown in; processes are groups of rows.
    name, category : str
        What it is, and a word to filter by.
    start_us, end_us : float
        Microseconds on a clock that all spans share.
    details : dict
        Shown when it is selected.
    """

    process: str
    thread: str
    name: str
    category: str
    start_us: float
    end_us: float
    details: dict[str, Any]


@dataclass(frozen=True)
class Arrow:
    """From the end of one span to the start of another that waited for it; both by their number."""

    source: int
    target: int
    name: str


def trace_document(spans: Sequence[Span], arrows: Iterable[Arrow], about: dict[str, Any]) -> dict[str, Any]:
    """The whole file as plain values.

    Parameters
    ----------
    spans : sequence of Span
        In the order in which their processes and threads are to be shown.
    arrows : iterable of Arrow
        Between them.
    about : dict
        Kept beside the events, under ``otherData``.
    """
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        if span.process not in processes:
            processes[span.process] = len(processes)
            events += _names("process", processes[span.process], 0, span.process)
        key = span.process, span.thread
        if key not in threads:
            threads[key] = sum(process == span.process for process, _ in threads)
            events += _names("thread", processes[span.process], threads[key], span.thread)

    def place(number: int) -> dict[str, int]:
        span = spans[number]
        return {"pid": processes[span.process], "tid": threads[span.process, span.thread]}

    for number, span in enumerate(spans):
        times = {"ts": span.start_us, "dur": max(0.0, span.end_us - span.start_us)}
        events.append(
            {"ph": "X", "name": span.name, "cat": span.category, **times, **place(number), "args": span.details}
        )
    for number, arrow in enumerate(arrows):
        common = {"name": arrow.name, "cat": arrow.name, "id": number}
        end, start = spans[arrow.source].end_us, spans[arrow.target].start_us
        events.append({"ph": "s", "ts": end, **common, **place(arrow.source)})
        events.append({"ph": "f", "bp": "e", "ts": max(start, end), **common, **place(arrow.target)})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _names(kind: str, pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    order = pid if kind == "process" else tid
    return [
        {"name": f"{kind}_name", **place, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **place, "args": {"sort_index": order}},
    ]


def trace_text(document: dict[str, Any]) -> str:
    """As JSON, one event a line."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in document["traceEvents"])
    others = {name: value for name, value in document.items() if name != "traceEvents"}
    return f'{{"traceEvents":[\n{events}\n],\n{json.dumps(others, indent=1)[1:-1].strip()}\n}}\n'
