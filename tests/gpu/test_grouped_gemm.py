"""Grouped GEMM backends on a GPU: the checks of the emulated device, and rows enough for every path of a tile."""

from __future__ import annotations

from functools import partial

import pytest

from nvep.moe.grouped_gemm import BACKENDS
from nvep.moe.grouped_gemm.cublas import missing
from nvep.moe.grouped_gemm.library import STRATEGIES, LibraryGroupedGemm
from nvep.runtime.cuda import CudaDevice
from nvep.testing import moe_gemm_checks as checks
from nvep.testing.moe_gemms import GemmCase

LARGER = {
    "deepseek-like": GemmCase(
        ranks=2, max_tokens=40, top_k=4, num_experts=16, local=(0, 1, 2, 5, 6, 7, 8, 15), hidden=1024, intermediate=512
    ),
    "deepseek-like-fp8": GemmCase(
        ranks=2, max_tokens=40, top_k=4, num_experts=16, local=tuple(range(8)), hidden=1024, intermediate=512,
        row_format="fp8_block", weight_format="fp8_block", partial_format="bf16",
    ),
    "gpt-oss-like": GemmCase(
        ranks=4, max_tokens=12, top_k=4, num_experts=8, local=(2, 3, 4), hidden=720, intermediate=720,
        activation="swiglu_clamped", biases=True, partial_format="bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*checks.CASES.values(), *LARGER.values()], ids=[*checks.CASES, *LARGER])
def test_within_bounds(device: CudaDevice, case: GemmCase) -> None:
    checks.check_case(device, case, BACKENDS["gather"])


@pytest.mark.parametrize("case", ["segments", "fp8", "token-tiles"])
def test_rows_do_not_depend_on_one_another(device: CudaDevice, case: str) -> None:
    checks.check_rows_alone(device, checks.CASES[case], BACKENDS["gather"])


@pytest.mark.parametrize("case", LARGER.values(), ids=LARGER)
def test_larger_rows_do_not_depend_on_one_another(device: CudaDevice, case: GemmCase) -> None:
    checks.check_rows_alone(device, case, BACKENDS["gather"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["small", "segments", "many-experts", "clamped", "deepseek-like"])
def test_library_within_bounds(device: CudaDevice, case: str, strategy: str) -> None:
    device.make_current()
    why = missing()
    if why is not None:
        pytest.skip(why)
    make = partial(LibraryGroupedGemm, strategy=strategy)
    checks.check_case(device, {**checks.CASES, **LARGER}[case], make, rounds=True)


@pytest.mark.parametrize("name", checks.ACCURACY)
def test_accuracy(device: CudaDevice, name: str) -> None:
    case, limit = checks.ACCURACY[name]
    checks.check_accuracy(device, case, BACKENDS["gather"], limit)


def test_e4m3_codes(device: CudaDevice) -> None:
    checks.check_e4m3_codes(device, BACKENDS["gather"])
