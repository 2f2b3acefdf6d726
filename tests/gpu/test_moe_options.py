"""Options of `MoELayer` on a GPU that all ranks of a local group share."""

from __future__ import annotations

import pytest

from nvep.testing import moe_layer_checks as checks
from nvep.testing.moe_layer_checks import CASES, LayerCase


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_within_bounds(case: LayerCase) -> None:
    checks.check_options(case, "cuda")


@pytest.mark.parametrize("case", ["fp8", "shared"])
def test_profile_and_memory(case: str) -> None:
    checks.check_profile(CASES[case], "cuda")
