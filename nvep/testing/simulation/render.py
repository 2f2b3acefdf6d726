"""Addresses as places and events as lines: what a person reads of a failed simulation."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from nvep.exchange import Exchange
from nvep.runtime.simulated import TraceEvent
from nvep.symmetric.layout import Layout

_RECORDS = ("Record", "CombineRecord")
_DID = {
    1: "load", 2: "store", 3: "update", 4: "fence", 5: "weak load", 6: "weak store", 7: "barrier", 8: "starts",
    9: "ends", 10: "copy", 11: "CONFLICT", 12: "bulk load", 13: "bulk store", 14: "bulk copies end", 15: "proxy fence",
}  # fmt: skip
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("device", "system")
_FENCE, _BARRIER, _START, _END, _COPY, _BULK_END, _PROXY_FENCE = 4, 7, 8, 9, 10, 14, 15


class Places:
    """Names for the addresses of a simulation: rank, lane, region and offset.

    Parameters
    ----------
    exchanges : sequence of Exchange
        By rank.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        spans: list[tuple[int, int, str]] = []
        self._records: list[tuple[int, int]] = []
        for rank, exchange in enumerate(exchanges):
            memory = exchange.memory
            spans += self._regions(f"rank {rank}", memory.heap.base, memory.heap.layout)
            spans += self._regions(f"rank {rank} private", memory.local.address, memory.plan.local)
            spans.append((memory.mask.address, memory.mask.nbytes, f"rank {rank} mask"))
            for lane in range(exchange.config.lanes):
                for placed in memory.heap.layout.regions:
                    if placed.name in _RECORDS:
                        self._records.append((memory.heap.address(placed.name, lane=lane), placed.nbytes))
        self._spans = sorted(spans)
        self._starts = [start for start, _, _ in self._spans]

    @staticmethod
    def _regions(owner: str, base: int, layout: Layout) -> Iterator[tuple[int, int, str]]:
        for lane in range(layout.lanes):
            for placed in layout.regions:
                yield base + layout.offset(placed.name, lane), placed.nbytes, f"{owner} lane {lane} {placed.name}"

    def records(self) -> list[tuple[int, int]]:
        """Start and size of the records of all ranks and lanes."""
        return self._records

    def name(self, address: int) -> str:
        """``rank 1 lane 0 Record+0x8``; ``elsewhere`` for what is none of the exchange's."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0:
            start, nbytes, label = self._spans[index]
            if address < start + nbytes:
                return f"{label}+{address - start:#x}"
        return "elsewhere"

    def name_addresses(self, text: str) -> str:
        """``text`` with every address named and every path shortened, so that it is the same in every process."""
        return re.sub(r"0x[0-9a-f]{9,}", lambda found: self.name(int(found.group(), 16)), short_paths(text))


def short_paths(text: str) -> str:
    """Kernel files relative to ``nvep_kernels``, or to what overlays it."""
    return re.sub(r"[^\s:]*/(?:nvep_kernels|overlays/[0-9a-f]+)/", "", text)


def render_trace(events: Sequence[TraceEvent], places: Places) -> str:
    """One line an event; runs of ordinary accesses of one thread at one source line become one."""
    lines: list[str] = []
    last: tuple[object, ...] = ()
    repeated = 0
    for event in events:
        key = (event.did, event.rank, event.block, event.thread, event.file, event.line)
        if key == last and event.did in (5, 6):
            repeated += 1
            continue
        if repeated:
            lines[-1] += f" and {repeated} more"
        last, repeated = key, 0
        lines.append(_line(event, places))
    if repeated:
        lines[-1] += f" and {repeated} more"
    return "\n".join(lines)


def _line(event: TraceEvent, places: Places) -> str:
    who = f"rank {event.rank} block {event.block} thread {event.thread:<3}"
    where = f"{short_paths(event.file)}:{event.line}" if event.line else ""
    return f"{event.number:>7} {who} {event.kernel:<14} {where:<46} {_what(event, places)}".rstrip()


def _what(event: TraceEvent, places: Places) -> str:
    did = _DID.get(event.did, "?")
    if event.did in (_BARRIER, _END, _BULK_END, _PROXY_FENCE):
        return did
    if event.did == _START:
        return f"starts: {event.address} blocks of {event.value} threads"
    if event.did == _FENCE:
        return f"fence {_SCOPES[event.order]}"
    place = places.name(event.address)
    if event.did == _COPY:
        return f"copy of {event.value} bytes to {place}"
    if event.did in (1, 2, 3):
        behind = f", {event.distance} newer" if event.did == 1 else f", before {event.distance} others"
        return f"{did} {_ORDERS[event.order]} {place} = {event.value:#x}" + (behind if event.distance else "")
    return f"{did} {place}" + (f" = {event.value:#x}" if event.did in (5, 6) else "")
