"""`MoELayer` on a GPU that all ranks of a local group share: the checks of the emulated device."""

from __future__ import annotations

import pytest

from nvep.testing import moe_checks as checks
from nvep.testing.moe_checks import CASES, ODD, MoECase

DEVICE = "cuda"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_calls_with_changing_counts(case: MoECase) -> None:
    checks.check_calls(case, DEVICE)


@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
@pytest.mark.parametrize("case", [ODD, CASES["four-ranks"]], ids=["placement", "four-ranks"])
def test_phase_by_phase(case: MoECase, split: bool) -> None:
    checks.check_phases(case, DEVICE, split=split)


@pytest.mark.parametrize("replay", [False, True], ids=["calls", "graph"])
def test_counts_on_the_device(replay: bool) -> None:
    checks.check_device_counts(ODD, DEVICE, replay=replay)


def test_bitwise_repeatable() -> None:
    checks.check_repeatable(ODD, DEVICE)


def test_two_layers() -> None:
    checks.check_two_layers(DEVICE)
