"""Runs the network sweep on a group of ranks: an exchange is checked once, then all its cases are timed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from nvep.bench.check import WrongResult, check_step
from nvep.bench.inputs import Inputs
from nvep.bench.network import NetworkCase
from nvep.bench.network_kernels import NetworkKernels
from nvep.bench.network_timing import NetworkTiming, time_network
from nvep.errors import ArgumentError, CompilationError, HeapTooLarge
from nvep.exchange import Exchange
from nvep.group import RankGroup

# Raised alike on every rank: the next case can run.
_REFUSALS = (ArgumentError, HeapTooLarge)  # the machine is too small for the case
_FAILURES = (CompilationError, WrongResult)


@dataclass(frozen=True)
class NetworkResult:
    """What a case gave: figures, or ``refused`` or ``failed``, the reason why there are none.

    Attributes
    ----------
    label : str
        What executed the messages; empty for the base line.
    """

    case: NetworkCase
    label: str = ""
    timing: NetworkTiming | None = None
    refused: str = ""
    failed: str = ""

    @property
    def hold_us(self) -> float:
        """Of D.send, on the slowest rank."""
        assert self.timing is not None
        return self.timing.hold_us["dispatch"]

    @property
    def exposed_us(self) -> dict[int, float]:
        """Of dispatch and combine together, by delay."""
        assert self.timing is not None
        return {delay: sum(found[delay] for found in self.timing.exposed_us.values()) for delay in self.case.delays}

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the case's name."""
        return {"name": self.case.label(), **asdict(self)}


Report = Callable[[NetworkResult], None]


def run_network_cases(
    group: RankGroup, cases: Sequence[NetworkCase], *, report: Report | None = None
) -> list[NetworkResult]:
    """Check and time cases of ``group.size`` ranks; ``report`` is called on rank 0 as each is done. Collective.

    Each exchange is checked with the fewest tokens of its cases. Cases that share one run together, in the order in
    which the first of each comes.

    Raises
    ------
    PeerTimeout
        A rank did not answer. Refusals and failures on which all ranks agree are part of the results.
    """
    first = {case.exchange_key(): index for index, case in reversed(list(enumerate(cases)))}
    ordered = sorted(cases, key=lambda case: first[case.exchange_key()])
    results: list[NetworkResult] = []
    with _kernels(group) as kernels:
        for _, shared in groupby(ordered, key=NetworkCase.exchange_key):
            for result in _run_exchange(group, list(shared), kernels):
                results.append(result)
                if report is not None and group.rank == 0:
                    report(result)
    return results


@contextmanager
def _kernels(group: RankGroup) -> Iterator[NetworkKernels]:
    kernels = NetworkKernels(group)
    try:
        yield kernels
        group.barrier()  # no peer's kernel writes to this rank's words any more
    finally:
        kernels.close()


def _run_exchange(group: RankGroup, cases: list[NetworkCase], kernels: NetworkKernels) -> Iterator[NetworkResult]:
    """Every case, whatever happens on the way: those that could not be timed say why."""
    left = sorted(cases, key=lambda case: case.tokens)
    try:
        group.together(lambda: _require_ranks(left[0], group))
        with ExitStack() as cleanup:  # inputs around the exchange: freeing would wait for the adapter's kernel
            inputs = {case.tokens: _inputs(group, case, cleanup) for case in left}
            exchange = cleanup.enter_context(Exchange(group, left[0].config(), nic=left[0].model(group.device.kind)))
            label = "" if exchange.network is None else exchange.network.label
            stream = exchange.device.default_stream
            check_step(exchange, left[0].base(), inputs=inputs[left[0].tokens], stream=stream)
            while left:
                timing = time_network(exchange, left[0], inputs=inputs[left[0].tokens], kernels=kernels)
                yield NetworkResult(left.pop(0), label, timing)
    except (*_REFUSALS, *_FAILURES) as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
        refused = isinstance(error, _REFUSALS)
        yield from (NetworkResult(c, refused=text if refused else "", failed="" if refused else text) for c in left)


def _inputs(group: RankGroup, case: NetworkCase, cleanup: ExitStack) -> Inputs:
    inputs = group.together(lambda: Inputs(group, case.base()))
    cleanup.callback(inputs.close)
    return inputs


def _require_ranks(case: NetworkCase, group: RankGroup) -> None:
    if case.ranks != group.size:
        raise ArgumentError("ranks", case.ranks, f"{group.size}, the size of the group")
