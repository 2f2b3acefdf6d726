"""What is measured of transports over a network adapter, as data; every case also at a size for CPU cores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nvep.bench.cases import Case
from nvep.config import NETWORK_TRANSPORTS, TRANSPORTS, ExchangeConfig
from nvep.errors import ArgumentError
from nvep.nic.base import PLACEMENTS
from nvep.nic.soft import SoftNicModel

DELAYS = (0, 32, 64, 128, 256, 512)
TOKENS = (1, 8, 32, 64, 128, 256, 512)
_ROOMS = (128, 512)  # tokens that exchanges are made for: few sizes, so that few kernels are compiled
# On a GPU the engine is gone soon after a case, because what is freed then waits for it. Nothing wakes it within a
# graph, and threads of CPU cores may stand still for longer.
_IDLE_S = {"cuda": 0.05, "emulated": 5.0}
_LARGEST_RING = 1 << 14
MOST_STEPS = 16  # of a timed graph


@dataclass(frozen=True)
class NetworkCase:
    """One point of the sweep over one transport.

    Attributes
    ----------
    transport : str
        ``"nvlink"`` is the base line, under Fence.
    ranks, tokens, hidden, experts, top_k : int
        As in `Case`; rows are bf16, routing is uniform.
    blocks : int
        Of every exchange kernel: the same for all transports.
    ring_memory : str
        Placement of rings, see `SoftNicModel`.
    domain_size : int
        Ranks in groups of this many reach one another directly.
    queue_depth : int or None
        Entries of each ring; None: as many as the messages of a step, so that nothing waits for room by their depth.
    delays : tuple of int
        Microseconds of other work of the GPU between a send and its receive, ascending.
    accounted : bool
        Kernels add up where the time of sends goes, in an exchange of its own.
    unrolled, replays : int
        Steps in a timed graph, and how often it is replayed.
    """

    transport: str = "gdaki"
    ranks: int = 8
    tokens: int = 128
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    blocks: int = 8
    ring_memory: str = "default"
    domain_size: int = 1
    queue_depth: int | None = None
    delays: tuple[int, ...] = (0,)
    accounted: bool = False
    unrolled: int = 4
    replays: int = 8

    def __post_init__(self) -> None:
        for name, allowed in (("transport", TRANSPORTS), ("ring_memory", PLACEMENTS)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), ", ".join(allowed))
        for name in ("ranks", "tokens", "hidden", "blocks", "domain_size", "unrolled", "replays"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "1 or more")
        if self.unrolled > MOST_STEPS:
            raise ArgumentError("unrolled", self.unrolled, f"at most {MOST_STEPS}")
        if not self.delays or min(self.delays) < 0 or list(self.delays) != sorted(set(self.delays)):
            raise ArgumentError("delays", self.delays, "microseconds, ascending, each once")

    @property
    def networked(self) -> bool:
        return self.transport in NETWORK_TRANSPORTS

    @property
    def room(self) -> int:
        """Tokens that the exchange is made for."""
        return next((room for room in _ROOMS if self.tokens <= room), self.tokens)

    def base(self) -> Case:
        """What is sent: the same for every transport."""
        return Case(self.ranks, self.tokens, self.hidden, "bf16", self.experts, self.top_k, max_blocks=self.blocks)

    def config(self) -> ExchangeConfig:
        """The exchange it runs on."""
        messages = self.room * min(self.top_k, self.ranks) + 2 * self.ranks
        network: dict[str, Any] = {"protocol": "fence"}
        if self.networked:
            depth = self.queue_depth or min(_LARGEST_RING, 1 << max(6, (messages - 1).bit_length()))
            network = {"domain_size": self.domain_size, "queue_depth": depth, "account_sends": self.accounted}
        return ExchangeConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.room,
            row_bytes=2 * self.hidden,
            max_blocks=self.blocks,
            transport=self.transport,
            deadline=20.0,
            **network,
        )

    def model(self, device_kind: str) -> SoftNicModel | None:
        """The emulated adapter; None for the base line."""
        return SoftNicModel(placement=self.ring_memory, idle_s=_IDLE_S[device_kind]) if self.networked else None

    def exchange_key(self) -> tuple[Any, ...]:
        """Cases with equal keys run on one exchange, one after the other."""
        return self.ranks, self.config(), self.ring_memory

    def point(self) -> tuple[Any, ...]:
        """What transports are compared at: everything but the transport and how it is timed."""
        sizes = (self.ranks, self.tokens, self.hidden, self.experts, self.top_k, self.blocks)
        return *sizes, self.ring_memory, self.domain_size, self.queue_depth

    def label(self) -> str:
        """Short name: only what differs from the base case, after transport, ranks and tokens."""
        base = NetworkCase()
        parts = [self.transport, f"{self.ranks}x{self.tokens}", f"{self.blocks}b"]
        parts += [f"h{self.hidden}"] if self.hidden != base.hidden else []
        parts += [f"e{self.experts}-k{self.top_k}"] if (self.experts, self.top_k) != (base.experts, base.top_k) else []
        parts += [f"rings-{self.ring_memory}"] if self.ring_memory != base.ring_memory else []
        parts += [f"domain{self.domain_size}"] if self.domain_size != base.domain_size else []
        parts += [f"depth{self.queue_depth}"] if self.queue_depth else []
        parts += ["accounted"] if self.accounted else []
        return "-".join(parts)


def _over(transports: Iterable[str], points: Iterable[NetworkCase]) -> list[NetworkCase]:
    """Every point over every transport; the base line has no rings that could be elsewhere, nor any to account."""
    cases = [replace(point, transport=transport) for point in points for transport in transports]
    default = NetworkCase()
    plain = (default.ring_memory, default.domain_size, None, False)
    found = [c for c in cases if c.networked or (c.ring_memory, c.domain_size, c.queue_depth, c.accounted) == plain]
    return sorted(unique(found), key=lambda case: case.ranks)


def unique(cases: Iterable[NetworkCase]) -> list[NetworkCase]:
    """One case of each point and transport, that with most delays, where the first of them was."""
    found: dict[tuple[Any, ...], NetworkCase] = {}
    for case in cases:
        key = case.transport, case.point(), case.accounted
        if key not in found or len(found[key].delays) < len(case.delays):
            found[key] = case
    return list(found.values())


def default_network_cases(transports: Iterable[str] = TRANSPORTS) -> list[NetworkCase]:
    """Around one point, one axis at a time."""
    base = NetworkCase()
    points = [replace(base, tokens=t, delays=DELAYS if t in (8, 128, 512) else (0,)) for t in TOKENS]
    points += [replace(base, ranks=n, tokens=t) for n in (2, 4) for t in (8, 128)]
    points += [replace(base, ranks=16, tokens=t, blocks=4) for t in (8, 128)]  # a block of each is resident at once
    points += [replace(base, hidden=h, tokens=t) for h in (2048, 4096) for t in (8, 128)]
    points += [replace(base, blocks=b) for b in (1, 2, 4, 14)]
    points += [replace(base, ranks=2, blocks=b) for b in (1, 32, 57)]
    points += [replace(base, ring_memory=m, tokens=t) for m in ("host", "device") for t in (8, 128)]
    points += [replace(base, accounted=True, tokens=t) for t in (8, 128)]
    return _over(transports, points)


def full_network_cases(transports: Iterable[str] = TRANSPORTS) -> list[NetworkCase]:
    """The default sweep, and tokens by ranks, hidden sizes, blocks, ring memory and domains, all delays."""
    base = replace(NetworkCase(), delays=DELAYS)
    points = [replace(base, ranks=n, tokens=t) for n in (2, 4, 8) for t in TOKENS]
    points += [replace(base, ranks=16, blocks=b, tokens=t) for b in (1, 4, 7) for t in TOKENS]
    points += [replace(base, hidden=h, tokens=t) for h in (2048, 4096, 5120) for t in TOKENS]
    points += [replace(base, blocks=b, tokens=t) for b in (1, 2, 4, 14) for t in TOKENS]
    points += [replace(base, ranks=2, blocks=b, tokens=t) for b in (1, 4, 16, 32, 57, 64) for t in (8, 128, 512)]
    points += [replace(base, ring_memory=m, tokens=t) for m in ("host", "device") for t in TOKENS]
    points += [replace(base, domain_size=d, tokens=t) for d in (2, 4) for t in (8, 128, 512)]
    points += [replace(base, queue_depth=d, tokens=t) for d in (128, 512) for t in (8, 128, 512)]
    points += [replace(base, accounted=True, delays=(0,), ring_memory=m) for m in ("host", "device")]
    points += [replace(base, accounted=True, delays=(0,), tokens=t) for t in TOKENS]
    return sorted(unique([*_over(transports, points), *default_network_cases(transports)]), key=lambda case: case.ranks)


def small_network(case: NetworkCase) -> NetworkCase:
    """The same case at a size for CPU cores."""
    return replace(
        case,
        ranks=min(case.ranks, 4),
        tokens=min(case.tokens, 8),
        hidden=256 if case.hidden >= 4096 else 128,
        experts=max(case.top_k, min(case.experts, 16)),
        blocks=min(case.blocks, 2),
        delays=tuple(d for d in case.delays if d in (0, 64, 512)) or case.delays[:1],
        unrolled=2,
        replays=2,
    )
