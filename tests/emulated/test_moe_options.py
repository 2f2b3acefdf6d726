"""Options of `MoELayer` on the emulated device: formats end to end, biases, activations, shared experts, profile."""

from __future__ import annotations

import numpy as np
import pytest

from nvep import errors
from nvep.group import run_local
from nvep.moe import MoELayer
from nvep.testing import moe_layer_checks as checks
from nvep.testing.moe_layer_checks import CASES, LayerCase

DEVICE = "emulated"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_within_bounds(case: LayerCase) -> None:
    checks.check_options(case, DEVICE)


@pytest.mark.parametrize("case", ["fp8", "shared"])
def test_profile_and_memory(case: str) -> None:
    checks.check_profile(CASES[case], DEVICE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation": "relu"}, "activation: got 'relu'; allowed: swiglu, geglu, swiglu_clamped, plain"),
        ({"row_format": "int8"}, "row_format: got 'int8'; allowed: bf16"),
        ({"row_format": "nvfp4"}, "row_scale: got None; allowed: a number from"),
        ({"row_format": "nvfp4", "row_scale": 0.0}, "row_scale: got 0.0; allowed: a number from"),
        ({"row_scale": 0.5}, "row_scale: got 0.5; allowed: None: bf16 has no scale"),
        ({"shared": np.zeros(3)}, "shared: got .*; allowed: MoEWeights"),
        ({"grouped_gemm": "nvmath", "row_format": "mxfp8"}, "grouped_gemm: got 'nvmath'; allowed: a backend that"),
        ({"grouped_gemm": "packed"}, "grouped_gemm: got 'packed'; allowed: a backend without cuBLAS"),
    ],
)
def test_refused(change: dict[str, object], text: str) -> None:
    case = CASES["shared"]

    def main(group: object) -> str:
        with pytest.raises(errors.ArgumentError, match=text) as caught:
            MoELayer(group, case.weights()[0], **{**checks.options_of(case), **change})  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(run_local(main, 2, device=DEVICE))) == 1
