"""Quantise and dequantise kernels on the emulated device: bit by bit what the reference gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nvep.runtime.emulated import EmulatedDevice
from nvep.testing.format_checks import FormatChecks


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice()
    yield opened
    opened.close()


class TestFormats(FormatChecks):
    """The whole suite."""


def test_host_arrays_need_no_copy_here(device: EmulatedDevice) -> None:
    from nvep.formats import FORMATS, Quantiser

    with Quantiser(device, FORMATS["mxfp8"], hidden=32, max_tokens=2, elements="fp32") as quantise:
        (payload, scales) = quantise(np.ones((1, 32), np.float32))
        assert payload.shape == (1, 32)
        assert scales.shape == (1, 16)
