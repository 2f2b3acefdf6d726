"""Expert compute of one rank's share: right speed cannot be asserted, but that a figure and its floor come out can."""

from __future__ import annotations

import pytest

from nvep.bench.moe import MoECase, copy_bandwidth, open_device, share, time_experts
from nvep.bench.moe_layer import time_layer
from nvep.group import run_local


@pytest.mark.parametrize("formats", ["bf16", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_timing(formats: str, tokens: int) -> None:
    device = open_device()
    case = MoECase(tokens, formats, "gather", 2, 8, 2, hidden=64, intermediate=48)
    if not device.emulated:
        case = MoECase(tokens, formats)
    with share(device, case) as experts:
        timing = time_experts(device, case, experts, bandwidth=copy_bandwidth(device))
    device.close()
    assert timing.us > timing.floor_us > 0
    assert 0 < timing.active <= case.local_experts
    assert timing.pairs >= timing.rows >= timing.active / case.top_k


def test_layer_timing() -> None:
    case = MoECase(2, "fp8_block", "gather", 2, 8, 2, hidden=64, intermediate=48)
    timing = run_local(lambda group: time_layer(group, case), 2)[0]
    assert timing.step_us > 0
    assert next(iter(timing.parts_us)) == "quantise"
