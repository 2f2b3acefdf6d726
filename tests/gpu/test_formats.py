"""Quantise and dequantise kernels on a GPU: bit by bit what the reference gives."""

from __future__ import annotations

import numpy as np
import pytest

from nvep.errors import ArgumentError
from nvep.formats import FORMATS, Quantiser
from nvep.runtime.cuda import CudaDevice
from nvep.testing.format_checks import FormatChecks


class TestFormats(FormatChecks):
    """The whole suite."""


def test_host_arrays_are_refused(device: CudaDevice) -> None:
    with (
        Quantiser(device, FORMATS["mxfp8"], hidden=32, max_tokens=2, elements="fp32") as quantise,
        pytest.raises(ArgumentError, match="rows: got 'a host array'"),
    ):
        quantise(np.ones((1, 32), np.float32))
