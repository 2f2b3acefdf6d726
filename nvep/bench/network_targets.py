"""What the offloaded transports are to reach against GDAKI, and what a sweep says about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nvep.bench.network import NetworkCase
from nvep.bench.network_run import NetworkResult

BASE = "gdaki"
HOLD_AT_128 = {"gpi": 0.7, "gpi-mc": 0.45, "free-flow": 0.8}  # of GDAKI's send hold time, the same blocks
BELOW_SHARE = 0.8  # of the swept points
LARGEST_CROSSOVER_US = 512.0
_MODEL = (7168, 256, 8)


@dataclass(frozen=True)
class Target:
    """One target and what was found.

    Attributes
    ----------
    transport, what : str
    limit, found : float
        NaN where nothing was found.
    most : bool
        ``found`` may be at most ``limit``; otherwise at least.
    """

    transport: str
    what: str
    limit: float
    found: float
    most: bool

    @property
    def met(self) -> bool:
        """False where nothing was found."""
        return self.found <= self.limit if self.most else self.found >= self.limit


Points = Mapping[tuple[object, ...], NetworkResult]


def by_transport(results: Iterable[NetworkResult]) -> dict[str, Points]:
    """Timed, not accounted, results by transport and point."""
    found: dict[str, dict[tuple[object, ...], NetworkResult]] = {}
    for result in results:
        if result.timing is not None and not result.case.accounted:
            found.setdefault(result.case.transport, {})[result.case.point()] = result
    return dict(found)


def hold_ratios(results: Iterable[NetworkResult], transport: str) -> list[tuple[NetworkCase, float]]:
    """Hold time of D.send over GDAKI's, at every point where both were timed."""
    found = by_transport(results)
    base, own = found.get(BASE, {}), found.get(transport, {})
    return [(own[point].case, own[point].hold_us / base[point].hold_us) for point in own if point in base]


def crossover_us(base: Mapping[int, float], own: Mapping[int, float]) -> float:
    """Work between send and receive from which ``own`` leaves less exposed than ``base``, both microseconds by delay.

    Between delays that were measured exposed times are taken for straight lines. 0 where ``own`` is below at once,
    NaN where it never is.
    """
    delays = sorted(set(base) & set(own))
    gaps = [own[delay] - base[delay] for delay in delays]
    for index, gap in enumerate(gaps):
        if gap < 0:
            if index == 0:
                return float(delays[0])
            before, first = gaps[index - 1], delays[index - 1]
            return first + (delays[index] - first) * before / (before - gap)
    return math.nan


def targets(results: Sequence[NetworkResult]) -> list[Target]:
    """All of them for the transports that were swept; points of 8 or more ranks of DeepSeek-V3 rows."""
    return [target for transport in HOLD_AT_128 for target in _of_transport(results, transport)]


def _of_transport(results: Sequence[NetworkResult], transport: str) -> Iterator[Target]:
    ratios = [(case, ratio) for case, ratio in hold_ratios(results, transport) if case.ranks >= 8]
    if not ratios:
        return
    below = sum(ratio < 1.0 for _, ratio in ratios) / len(ratios)
    yield Target(transport, f"share of {len(ratios)} points with a shorter hold", BELOW_SHARE, below, most=False)
    found = by_transport(results)
    for case, ratio in ratios:
        if (case.hidden, case.experts, case.top_k, case.tokens) != (*_MODEL, 128):
            continue
        at = f"{case.ranks} ranks, {case.blocks} blocks, rings {case.ring_memory}"
        at += f", domains of {case.domain_size}" if case.domain_size > 1 else ""
        at += f", rings of {case.queue_depth}" if case.queue_depth else ""
        yield Target(transport, f"hold at 128 tokens over GDAKI's, {at}", HOLD_AT_128[transport], ratio, most=True)
        base, own = found[BASE][case.point()].exposed_us, found[transport][case.point()].exposed_us
        if len(own) > 1:
            text = f"us of work from which less is exposed, {at}"
            yield Target(transport, text, LARGEST_CROSSOVER_US, crossover_us(base, own), most=True)
