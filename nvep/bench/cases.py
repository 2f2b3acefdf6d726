"""What is measured, as data: one case is one exchange, its routing and how it is timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nvep.config import ROW_ALIGNMENT, ExchangeConfig
from nvep.errors import ArgumentError

FORMATS = ("bf16", "fp8", "nvfp4")
ROUTINGS = ("uniform", "balanced", "hot", "local", "recorded")
SPANS = ("joined", "split", "none")
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS = (4, 8, 16, 32, 64, 132)
# hidden, experts, top_k
PROFILES = {
    "deepseek-v3": (7168, 256, 8),
    "v4-flash": (4096, 256, 6),
    "kimi-k2": (7168, 384, 8),
    "qwen3-235b": (4096, 128, 8),
    "gpt-oss-120b": (2880, 128, 4),
    "mixtral": (4096, 8, 2),
    "qwen3-30b-a3b": (2048, 128, 8),
    "qwen1.5-moe": (2048, 60, 4),
}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class Case:
    """One exchange over ``ranks`` ranks with ``tokens`` tokens each.

    Attributes
    ----------
    ranks, tokens : int
        Ranks of the group, and tokens of each in every step.
    hidden : int
        Elements of a row; combine returns as many in bf16.
    format : str
        Of dispatched rows: ``"bf16"``; ``"fp8"`` with a float32 scale for 128 elements; ``"nvfp4"`` with a byte for
        16. Scales are a payload of their own.
    experts, top_k : int
        Routing.
    protocol : str
        ``"fence"``, ``"sentinel"`` or ``"auto"``.
    max_blocks : int or None
        Blocks of an exchange kernel; None is the exchange's own choice.
    dependent : bool
        Each phase is launched as a dependent of the one before (``ExchangeConfig.dependent_launch``).
    routing : str
        ``"uniform"``: distinct experts at random. ``"balanced"``: every expert equally often. ``"hot"``: one expert is
        in half of all tokens. ``"local"``: experts of the token's own rank. ``"recorded"``: a router log.
    spans : str
        Which kernels are told apart: ``"joined"`` is dispatch and combine, ``"split"`` their send and receive halves,
        ``"none"`` neither.
    flush_l2 : bool
        Every timed step finds nothing of its data in the second-level cache.
    unrolled, replays : int
        Steps in the timed graph, and how often it is replayed.
    """

    ranks: int = 2
    tokens: int = 128
    hidden: int = 7168
    format: str = "bf16"
    experts: int = 256
    top_k: int = 8
    protocol: str = "auto"
    max_blocks: int | None = None
    dependent: bool = False
    routing: str = "uniform"
    spans: str = "joined"
    flush_l2: bool = False
    unrolled: int = 20
    replays: int = 30

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("routing", ROUTINGS), ("spans", SPANS)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), ", ".join(allowed))
        for name in ("ranks", "tokens", "hidden", "unrolled", "replays"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "1 or more")

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of each payload of a token: the row, then its scales."""
        rows = {"bf16": 2 * self.hidden, "fp8": self.hidden, "nvfp4": self.hidden // 2}
        scales = {"bf16": 0, "fp8": -(-self.hidden // 128) * 4, "nvfp4": self.hidden // 16}
        sizes = (_aligned(rows[self.format]), _aligned(scales[self.format]))
        return tuple(nbytes for nbytes in sizes if nbytes)

    def config(self) -> ExchangeConfig:
        """The exchange it runs on."""
        row, *scales = self.payload_bytes
        return ExchangeConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.tokens,
            row_bytes=row,
            extra_payload_bytes=tuple(scales),
            partial_elements=self.hidden,
            protocol=self.protocol,
            max_blocks=self.max_blocks,
            dependent_launch=self.dependent,
            deadline=20.0,
        )

    def label(self) -> str:
        """Short name: only what differs from the base case, after protocol, ranks and tokens."""
        base = Case()
        parts = [self.protocol, f"{self.ranks}x{self.tokens}"]
        model = (self.hidden, self.experts, self.top_k)
        profile = next((name for name, values in PROFILES.items() if values == model), None)
        if model != (base.hidden, base.experts, base.top_k):
            parts.append(profile or f"h{self.hidden}-e{self.experts}-k{self.top_k}")
        parts += [value for value in (self.format, self.routing) if value not in (base.format, base.routing)]
        parts += [f"{self.max_blocks}b"] if self.max_blocks else []
        parts += ["dependent"] if self.dependent else []
        parts += ["split"] if self.spans == "split" else []
        parts += ["flushed"] if self.flush_l2 else []
        return "-".join(parts)


def profile(name: str) -> dict[str, Any]:
    """Hidden size, experts and top_k of a model, as fields of `Case`."""
    return dict(zip(("hidden", "experts", "top_k"), PROFILES[name], strict=True))


def _sized(case: Case) -> Case:
    """Fewer steps where each takes long."""
    nbytes = case.ranks * case.tokens * (sum(case.payload_bytes) + 2 * case.hidden)
    return case if nbytes < 1 << 26 else replace(case, unrolled=min(case.unrolled, 8), replays=min(case.replays, 15))


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(_sized(case) for case in cases))


def _vary(base: Case, name: str, values: Iterable[Any]) -> list[Case]:
    return [replace(base, **{name: value}) for value in values]


def default_cases(ranks: int = 2, *, other_ranks: tuple[int, ...] = (4, 8)) -> list[Case]:
    """Around one base case, one axis at a time; ``other_ranks`` are the rank counts of that axis."""
    base = Case(ranks=ranks)
    cases = [c for t in TOKENS for c in _vary(replace(base, tokens=t), "protocol", ("sentinel", "fence"))]
    cases = [c for c in cases if c.protocol == "fence" or c.tokens <= 1024]
    cases += [replace(base, tokens=t, protocol="sentinel", dependent=True) for t in TOKENS if t <= 128]
    cases += [replace(base, tokens=t, **profile("qwen3-235b")) for t in (1, 32, 128, 4096)]
    cases += _vary(base, "hidden", (2048, 4096, 5120, 8192))
    cases += [replace(base, format=f, tokens=t) for f in ("fp8", "nvfp4") for t in (8, 128, 4096)]
    cases += _vary(base, "top_k", (1, 2, 4, 10))
    cases += _vary(base, "routing", ("balanced", "hot", "local"))
    cases += [replace(base, tokens=1024, max_blocks=b) for b in BLOCKS]
    cases += [replace(base, **profile(name)) for name in PROFILES]
    cases += [replace(base, tokens=t, protocol=p, spans="split") for t, p in ((8, "sentinel"), (1024, "fence"))]
    cases += [replace(base, ranks=n, tokens=t) for n in other_ranks for t in (8, 128)]
    return _unique(cases)


def full_cases(ranks: int = 2, *, other_ranks: tuple[int, ...] = (4, 8)) -> list[Case]:
    """The default sweep and everything else: profiles by tokens and formats, routing by tokens, spans, ranks, flush."""
    base = Case(ranks=ranks)
    cases = default_cases(ranks, other_ranks=other_ranks)
    tokens = (1, 8, 64, 512, 4096, 8192)
    cases += [
        replace(base, tokens=t, format=f, **profile(name))
        for name, t, f in itertools.product(PROFILES, tokens, FORMATS)
    ]
    cases += [replace(base, tokens=t, routing=r) for t in tokens for r in ROUTINGS if r != "recorded"]
    cases += [replace(base, tokens=t, spans="split", protocol=p) for t in (1, 64, 512) for p in ("sentinel", "fence")]
    cases += [replace(base, tokens=t, flush_l2=True) for t in TOKENS]
    cases += [
        replace(base, tokens=t, protocol=p, max_blocks=b)
        for t, p, b in itertools.product((8, 128, 4096), ("sentinel", "fence"), BLOCKS)
        if p == "fence" or t <= 1024
    ]
    cases += [replace(base, ranks=n, tokens=t) for n in other_ranks for t in TOKENS]
    cases += _vary(base, "top_k", (3, 5, 6, 7, 9))
    return _unique(cases)


def small(case: Case) -> Case:
    """The same case at a size for CPU cores: every axis keeps its meaning, and few distinct kernels are compiled."""
    return replace(
        case,
        ranks=min(case.ranks, 4),
        tokens=min(case.tokens, 8),
        hidden=256 if case.hidden >= 4096 else 128,
        experts=case.experts if case.routing == "recorded" else max(case.top_k, min(case.experts, 16)),
        max_blocks=case.max_blocks and min(case.max_blocks, 4),
        unrolled=2,
        replays=3,
    )
