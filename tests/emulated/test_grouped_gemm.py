"""Grouped GEMM backends on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvep.runtime.emulated import EmulatedDevice
from nvep.testing import moe_gemm_checks as checks
from nvep.testing.moe_gemms import GemmCase


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


@pytest.mark.parametrize("name", ["gather", "reference"])
@pytest.mark.parametrize("case", checks.CASES.values(), ids=checks.CASES.keys())
def test_within_bounds(device: EmulatedDevice, case: GemmCase, name: str) -> None:
    checks.check_case(device, case, name)


@pytest.mark.parametrize("case", ["segments", "fp8", "token-tiles"])
def test_rows_do_not_depend_on_one_another(device: EmulatedDevice, case: str) -> None:
    checks.check_rows_alone(device, checks.CASES[case], "gather")
