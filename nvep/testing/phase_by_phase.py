"""Steps in which no kernel waits for one that has not finished: for tools that run one kernel at a time.

Every rank's D.send has ended before any D.recv starts, and so on through C.recv. Under such tools a joined phase, a
release of a Fence step or a receive started early would wait for a peer's kernel that cannot start before it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nvep.config import PROTOCOLS, ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local
from nvep.testing.steps import (
    Step,
    arrivals_of,
    check_arrivals,
    fill_unused,
    output_of,
    poison_receive_buffers,
    random_step,
    same,
)

STEPS = 4  # of each protocol: random counts, nobody has tokens, one rank has tokens, all are full


@dataclass(frozen=True)
class PhasedCase:
    """An exchange, and how many ranks take part."""

    ranks: int
    config: ExchangeConfig


def phased_case(ranks: int, **fields: object) -> PhasedCase:
    """A case with both protocols planned and few blocks, since such tools are slow."""
    defaults: dict[str, object] = {"protocol": "auto", "max_blocks": 2, "deadline": 60.0}
    return PhasedCase(ranks, ExchangeConfig(**{**defaults, **fields}))  # type: ignore[arg-type]


SMALL = phased_case(2, num_experts=6, top_k=2, max_tokens=9, row_bytes=80, lanes=2)
WIDE = phased_case(
    3, num_experts=10, top_k=4, max_tokens=6, row_bytes=2192, extra_payload_bytes=(16,), partial_elements=24
)
STRICT = phased_case(2, num_experts=5, top_k=3, max_tokens=7, row_bytes=96, partial_format="fp32", strict_ptx=True)
CASES = (SMALL, WIDE, STRICT)


def run_phase_by_phase(cases: Sequence[PhasedCase] = CASES, *, device: str) -> int:
    """Run every case on a local group and compare everything with the reference.

    Parameters
    ----------
    cases : sequence of PhasedCase
        One exchange each.
    device : str
        ``"cuda"`` or ``"emulated"``.

    Returns
    -------
    int
        Steps that every rank verified, over all cases.

    Raises
    ------
    AssertionError
        A result differs from the reference; says which.
    """
    total = 0
    for number, case in enumerate(cases):
        done: list[int] = run_local(partial(_run_rank, case, number), case.ranks, device=device)
        assert len(set(done)) == 1, done
        total += done[0]
    return total


def _counts(kind: int, config: ExchangeConfig, ranks: int) -> list[int] | None:
    full = config.max_tokens
    return [None, [0] * ranks, [full] + [0] * (ranks - 1), [full] * ranks][kind]  # None: random


def _run_rank(case: PhasedCase, number: int, group: RankGroup) -> int:
    done = 0
    with Exchange(group, case.config) as exchange:
        for kind in range(STEPS):
            for protocol in PROTOCOLS:
                exchange.protocol = protocol
                poison_receive_buffers(exchange)
                counts = _counts(kind, case.config, group.size)
                step = random_step((number, kind), case.config, group.size, counts=counts)
                where = f"case {number}, step {kind}, {protocol}, rank {group.rank}"
                phased = _PhasedStep(exchange, step, where, lane=done % case.config.lanes)
                phased.dispatch()
                phased.combine()
                done += 1
    return done


class _PhasedStep:
    """This rank's part of a step."""

    def __init__(self, exchange: Exchange, step: Step, where: str, *, lane: int) -> None:
        self._exchange, self._step, self._where, self._lane = exchange, step, where, lane
        rank = exchange.group.rank
        self._expected = arrivals_of(step, exchange.config, rank, protocol=exchange.protocol)

    def _everywhere(self) -> None:
        """Every rank's kernels so far have ended."""
        self._exchange.synchronize()
        self._exchange.group.barrier()

    def dispatch(self) -> None:
        source = self._step.sources[self._exchange.group.rank]
        inputs = (tuple(source.payloads), source.expert_ids, source.expert_weights)
        self._exchange.dispatch_send(*inputs, lane=self._lane)
        self._everywhere()
        self._arrivals = self._exchange.dispatch_recv(lane=self._lane)
        self._everywhere()
        check_arrivals(self._arrivals, self._expected, self._where)

    def combine(self) -> None:
        exchange, rank = self._exchange, self._exchange.group.rank
        rows = fill_unused(self._step, self._expected, rank, protocol=exchange.protocol)
        exchange.combine_send(rows, self._arrivals)
        self._everywhere()
        output = exchange.combine_recv(self._arrivals)
        self._everywhere()
        same(output.numpy(), output_of(self._step, exchange.config, rank), f"{self._where}: output")
