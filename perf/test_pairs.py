"""Dispatch + combine of a local group: ``pytest perf`` (``--benchmark-disable`` runs each case once).

On the emulated device only the relation between cases means anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nvep.config import Settings
from nvep.exchange.timing import PairCase, time_pairs
from nvep.runtime import choose_device_kind

DEVICE = choose_device_kind(Settings.from_environment().device)
PROTOCOLS = ("fence", "sentinel")
EMULATED = [PairCase(ranks, tokens, protocol=p) for ranks, tokens in ((2, 16), (8, 64)) for p in PROTOCOLS]
SIZES = [(ranks, tokens) for ranks in (2, 4, 8) for tokens in (1, 8, 32, 128, 512)] + [(2, 64), (2, 256), (2, 1024)]
CUDA = [PairCase(ranks, tokens, protocol=p) for ranks, tokens in SIZES for p in PROTOCOLS]
CUDA += [PairCase(2, tokens) for tokens in (2048, 4096)]


@pytest.mark.parametrize(
    "case", EMULATED if DEVICE == "emulated" else CUDA, ids=lambda c: f"{c.protocol}-{c.ranks}x{c.tokens}"
)
def test_pair(benchmark: Any, case: PairCase) -> None:
    if DEVICE == "emulated":
        case = dataclasses.replace(case, unrolled=2, replays=3)
    result = benchmark.pedantic(time_pairs, args=(case,), kwargs={"device": DEVICE}, rounds=1)
    benchmark.extra_info.update(dataclasses.asdict(result))
    assert result.remote_rows > 0
    print(
        f"\n{result.device}, {case.protocol}, {case.ranks} ranks x {case.tokens} tokens: "
        f"{result.median_us:.1f} us a pair "
        f"(best {result.best_us:.1f}, worst {result.worst_us:.1f}), {result.remote_rows} remote rows"
    )
