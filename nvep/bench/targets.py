"""Targets in microseconds for dispatch + combine, random routing, two ranks on two GPUs, each at its best protocol."""

from __future__ import annotations

from nvep.bench.cases import PROFILES, Case
from nvep.bench.floors import Floors

_FP8 = (7168 + 224 + 14336) / (2 * 14336)  # of the bytes of bf16 rows both ways
# profile, then microseconds by tokens a rank
H200_BF16 = {
    "deepseek-v3": {
        1: 5.0,
        8: 5.5,
        32: 7.5,
        64: 10.0,
        128: 15.5,
        256: 27.5,
        512: 49.0,
        1024: 89.0,
        2048: 172.0,
        4096: 335.0,
    },
    "qwen3-235b": {1: 4.9, 32: 6.3, 128: 10.5, 4096: 195.0},
}


def target_us(case: Case, floors: Floors) -> float | None:
    """Target of a case, None where there is none: other ranks, models, routing, or ranks that share a GPU.

    Targets up to 128 tokens are Sentinel's or ``auto``'s, those above are for whichever protocol is faster.
    fp8 rows (DeepSeek-V3) in proportion to their bytes, from 256 tokens on, where bytes are what takes time.
    """
    apart = case.ranks == 2 and len(set(floors.gpus)) == 2 and "H200" in floors.device
    plain = case.routing == "uniform" and case.max_blocks is None and not case.flush_l2 and case.spans == "joined"
    if not (apart and plain) or (case.protocol == "fence" and case.tokens <= 128):
        return None
    model = (case.hidden, case.experts, case.top_k)
    name = next((name for name in H200_BF16 if PROFILES[name] == model), None)
    base = H200_BF16[name].get(case.tokens) if name else None
    if base is None or case.format == "bf16":
        return base
    return base * _FP8 if case.format == "fp8" and name == "deepseek-v3" and case.tokens >= 256 else None
