"""Runs cases on a group of ranks: checked first, then timed, with the floor beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nvep.bench.cases import Case
from nvep.bench.check import WrongResult, check_step
from nvep.bench.floors import CaseFloor, Floors, floor_of
from nvep.bench.inputs import Ids, Inputs
from nvep.bench.kernels import FloorKernels
from nvep.bench.targets import target_us
from nvep.bench.timing import Timing, time_exchange
from nvep.errors import ArgumentError, CompilationError, HeapTooLarge
from nvep.exchange import Exchange
from nvep.group import RankGroup

# Raised alike on every rank: the next case can run.
_REFUSALS = (ArgumentError, HeapTooLarge)  # the machine is too small for the case
_FAILURES = (CompilationError, WrongResult)


@dataclass(frozen=True)
class CaseResult:
    """What a case gave: figures, or ``refused`` or ``failed``, the reason why there are none.

    Attributes
    ----------
    protocol : str
        That ran; what ``auto`` chose.
    timing, floor : Timing, CaseFloor
        Microseconds.
    target_us : float or None
        See `nvep.bench.targets`.
    """

    case: Case
    protocol: str = ""
    timing: Timing | None = None
    floor: CaseFloor | None = None
    target_us: float | None = None
    refused: str = ""
    failed: str = ""

    @property
    def median_us(self) -> float:
        """Of a pair, over replays, on the slowest rank."""
        assert self.timing is not None
        return float(np.median(self.timing.pair_us))

    @property
    def p99_us(self) -> float:
        """99th percentile of the same."""
        assert self.timing is not None
        return float(np.percentile(self.timing.pair_us, 99))

    @property
    def ratio(self) -> float:
        """Figure over floor."""
        assert self.floor is not None
        return self.median_us / self.floor.pair_us

    @property
    def gbs(self) -> float:
        """GB/s: bytes on the busiest direction of a GPU's links, or all that went between ranks sharing one."""
        assert self.floor is not None
        return (self.floor.link_bytes or self.floor.remote_bytes) / self.median_us / 1e3

    def as_json(self) -> dict[str, Any]:
        """Plain values, derived ones included."""
        found: dict[str, Any] = {"label": self.case.label(), **asdict(self)}
        if self.timing is not None and self.floor is not None:
            found |= {"median_us": self.median_us, "p99_us": self.p99_us, "floor_us": self.floor.pair_us}
            found |= {"ratio": self.ratio, "gbs": self.gbs}
        return found


def run_case(
    group: RankGroup, case: Case, *, floors: Floors, kernels: FloorKernels, recorded: Ids | None = None
) -> CaseResult:
    """Check and time one case. Collective; the same result on every rank.

    Parameters
    ----------
    group : RankGroup
        Of ``case.ranks`` ranks.
    case : Case
        What to run.
    floors : Floors
        Measured on this group.
    kernels : FloorKernels
        On this rank's device.
    recorded : numpy.ndarray, optional
        int32 ``[tokens, top_k]`` of a router log, for ``routing="recorded"``.

    Raises
    ------
    PeerTimeout
        A rank did not answer. Refusals and failures on which all ranks agree are part of the result.
    """
    try:
        group.together(lambda: _require_ranks(case, group))
        with ExitStack() as cleanup:
            inputs = group.together(lambda: Inputs(group, case, recorded))
            cleanup.callback(inputs.close)
            exchange = cleanup.enter_context(Exchange(group, case.config()))
            check_step(exchange, case, inputs=inputs, stream=exchange.device.default_stream)
            timing = time_exchange(exchange, case, inputs=inputs, kernels=kernels)
            floor = floor_of(case, floors, group.allgather(inputs.ids[0]))
            return CaseResult(case, exchange.protocol, timing, floor, target_us(case, floors))
    except _REFUSALS as error:
        return CaseResult(case, refused=_short(error))
    except _FAILURES as error:
        return CaseResult(case, failed=_short(error))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]


def _require_ranks(case: Case, group: RankGroup) -> None:
    if case.ranks != group.size:
        raise ArgumentError("ranks", case.ranks, f"{group.size}, the size of the group")


def run_cases(
    group: RankGroup,
    cases: Sequence[Case],
    *,
    floors: Floors,
    kernels: FloorKernels,
    recorded: Ids | None = None,
    report: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run cases one after the other; ``report`` is called on rank 0 as each is done. Collective."""
    results = []
    for case in cases:
        results.append(run_case(group, case, floors=floors, kernels=kernels, recorded=recorded))
        if report is not None and group.rank == 0:
            report(results[-1])
    return results
