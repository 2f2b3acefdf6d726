"""JAX (CPU) in and out, where installed: bf16 and fp8 keep their bits."""

from __future__ import annotations

import numpy as np
import pytest

from nvep.inputs import InputSpec, as_input
from tests.host.array_support import EXTENSION, NATIVE, FakeDevice, device_array, values

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int32", "uint8"])
def test_jax_arrays_come_in_and_go_out(name: str) -> None:
    dtype = next(d for d in NATIVE + EXTENSION if d.name == name)
    host = values(dtype, (4, 6))
    array = jax.numpy.asarray(host)
    view = as_input(array, InputSpec("x", (dtype,), ("n", 6)), device=FakeDevice())
    assert view.to_numpy().tobytes() == host.tobytes()
    assert view.address == array.unsafe_buffer_pointer()
    back = jax.dlpack.from_dlpack(device_array(host))
    assert back.dtype == dtype
    assert np.asarray(back).tobytes() == host.tobytes()
