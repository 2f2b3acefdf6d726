"""What a trace file holds, and the order in which phases can have run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

CHAIN = ("attention", "dispatch_send", "dispatch_recv", "experts", "combine_send", "combine_recv")
Spans = dict[tuple[int, str], tuple[float, float, int]]


def spans_of(document: dict[str, Any], mode: str) -> Spans:
    """(rank, phase with layer and micro-batch): start, end, row."""
    pids = {
        event["pid"]
        for event in document["traceEvents"]
        if event["name"] == "process_name" and f"overlap {mode}," in event["args"]["name"]
    }
    return {
        (event["args"]["rank"], event["name"]): (event["ts"], event["ts"] + event["dur"], event["tid"])
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["pid"] in pids
    }


def check_order(spans: Spans, *, ranks: int, layers: int, error_us: float = 0.0) -> None:
    """Phases of a micro-batch follow one another, and no receive ends before every rank began to send.

    ``error_us`` is by how much ranks' clocks may differ.
    """
    batches = {name.rpartition(".")[2] for _, name in spans}
    for rank in range(ranks):
        for batch in batches:
            names = [f"{phase} {layer}.{batch}" for layer in range(layers) for phase in CHAIN]
            for before, after in pairwise(names):
                assert spans[rank, before][1] <= spans[rank, after][0], (rank, before, after)
    for (rank, name), (_, end, _) in spans.items():
        if name.split()[0].endswith("recv"):
            sent = [spans[other, name.replace("recv", "send")][0] for other in range(ranks)]
            assert max(sent) <= end + error_us, (rank, name)
