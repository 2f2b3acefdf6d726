"""What the tables of bad input share: exchanges whose lanes stand in every state, and a watch on device work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nvep
from nvep.errors import NvepError
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup

DEVICE_WORK = ("launch", "copy_in", "copy", "fill", "allocate", "allocate_host")
RANKS = 2
CONFIG = nvep.ExchangeConfig(
    num_experts=8,
    top_k=2,
    max_tokens=16,
    row_bytes=64,
    extra_payload_bytes=(16,),
    partial_format="fp32",
    partial_elements=16,
    lanes=4,
    deadline=60.0,
)
# Lane by the phase that comes next; the lane of "combine" also takes release, that of "dispatch" also dispatch_send.
LANES = {"dispatch": 0, "dispatch_recv": 1, "combine": 2, "combine_recv": 3}


@dataclass(frozen=True)
class Bad:
    """One bad call.

    Attributes
    ----------
    change : dict
        Arguments that differ from a good call's; callables are called with the exchange first.
    error : type
        Its exact type.
    text : str
        Regular expression that the message matches from its start: argument, value, what is allowed.
    """

    change: dict[str, Any]
    error: type[NvepError]
    text: str = field(repr=False)


class Watch:
    """Counts what is enqueued or allocated on devices."""

    def __init__(self, devices: list[Any]) -> None:
        self.seen: list[str] = []
        for device in devices:
            for name in DEVICE_WORK:
                setattr(device, name, self._counting(name, getattr(device, name)))

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.seen.append(name)
            return method(*args, **options)

        return counted


def everywhere(function: Callable[[RankGroup], Any], groups: list[RankGroup]) -> list[Any]:
    """Run a collective on all ranks at once and return the results by rank."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(function, groups))


def errors_everywhere(function: Callable[[RankGroup], Any], ranks: int = RANKS) -> list[BaseException]:
    """What each rank of a fresh group raised. Asserts that every rank raised, before any device work."""
    with ExitStack() as opened:
        groups = nvep.local_groups(ranks, device="emulated")
        for group in groups:
            opened.callback(group.close)
        watch = Watch([g.device for g in groups])

        def call(group: RankGroup) -> BaseException:
            try:
                made = function(group)
            except Exception as error:
                return error
            raise AssertionError(f"rank {group.rank} accepted it: {made!r}")

        errors = everywhere(call, groups)
        assert watch.seen == []
    return errors


def check_error(error: BaseException, case: Bad) -> None:
    """Type, and text from its start."""
    assert type(error) is case.error, f"{type(error).__name__}: {error}"
    assert re.match(case.text, str(error), re.DOTALL), f"{error}\ndoes not match\n{case.text}"


def good_inputs(tokens: int = 5) -> dict[str, Any]:
    """Arguments of a good dispatch."""
    ids = np.arange(tokens * CONFIG.top_k, dtype=np.int32).reshape(tokens, CONFIG.top_k) % CONFIG.num_experts
    return {
        "tokens": (np.ones((tokens, 64), np.uint8), np.ones((tokens, 16), np.uint8)),
        "expert_ids": ids,
        "expert_weights": np.ones((tokens, CONFIG.top_k), np.float32),
    }


def good_partial() -> np.ndarray:
    """Partial rows of a good combine."""
    return np.ones((RANKS, CONFIG.max_tokens, CONFIG.elements), np.float32)


@dataclass
class Staged:
    """Exchanges of all ranks, their lanes where `LANES` says, and the arrivals of those that have any."""

    exchanges: list[Exchange]
    arrivals: list[dict[str, Arrivals]]
    watch: Watch

    def finish(self) -> None:
        """Complete the steps in flight, run one more good step on every lane, and check its sums."""
        for rank, exchange in enumerate(self.exchanges):
            received = exchange.dispatch_recv(lane=LANES["dispatch_recv"])
            exchange.release(received)
            exchange.combine(good_partial(), self.arrivals[rank]["combine"])
            exchange.combine_recv(self.arrivals[rank]["combine_recv"])
        for lane in range(CONFIG.lanes):
            received = [e.dispatch(**good_inputs(), lane=lane) for e in self.exchanges]
            outputs = [e.combine(good_partial(), r) for e, r in zip(self.exchanges, received)]
            expected = [len(set(ids // (CONFIG.num_experts // RANKS))) for ids in good_inputs()["expert_ids"]]
            for exchange, output in zip(self.exchanges, outputs):
                exchange.synchronize()
                assert output.numpy()[:, 0].tolist() == expected


@contextmanager
def staged() -> Iterator[Staged]:
    """Two emulated ranks of one process, driven from this thread."""
    with ExitStack() as opened:
        groups = nvep.local_groups(RANKS, device="emulated")
        for group in groups:
            opened.callback(group.close)
        exchanges = everywhere(lambda group: Exchange(group, CONFIG), groups)
        opened.callback(lambda: everywhere(lambda group: exchanges[group.rank].close(), groups))
        for exchange in exchanges:
            exchange.dispatch_send(**good_inputs(), lane=LANES["dispatch_recv"])
        arrivals = [
            {phase: e.dispatch(**good_inputs(), lane=LANES[phase]) for phase in ("combine", "combine_recv")}
            for e in exchanges
        ]
        for exchange, received in zip(exchanges, arrivals):
            exchange.combine_send(good_partial(), received["combine_recv"])
        for exchange in exchanges:
            exchange.drain()
        yield Staged(exchanges, arrivals, Watch([g.device for g in groups]))
