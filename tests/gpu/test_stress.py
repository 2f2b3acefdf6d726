"""Long runs on a GPU, every row checked on the device."""

from __future__ import annotations

import pytest

from nvep.testing.stress import StressCase, run_stress, small_sentinel_steps


def test_ten_thousand_steps_of_alternating_protocols() -> None:
    assert run_stress(StressCase(), device="cuda") == 10_000


@pytest.mark.parametrize("strict_ptx", [False, True])
def test_twenty_thousand_steps_under_the_axiom_and_without(strict_ptx: bool) -> None:
    case = StressCase(steps=20_000, protocols=("sentinel",), strict_ptx=strict_ptx)
    assert run_stress(case, device="cuda") == 20_000


def test_a_million_small_sentinel_steps() -> None:
    assert run_stress(small_sentinel_steps(1_000_000), device="cuda") == 1_000_000
