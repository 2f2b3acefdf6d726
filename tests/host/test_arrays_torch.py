"""torch (CPU) in and out, where installed: bf16 and fp8 keep their bits, nobody copies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from nvep.errors import ArgumentError, DTypeError, ShapeError
from nvep.inputs import InputSpec, as_input
from tests.host.array_support import EXTENSION, NATIVE, FakeDevice, device_array, values

torch = pytest.importorskip("torch")

ROWS = InputSpec.rows("tokens", 64, 16)
TORCH_LACKS = ("c8", "c16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")  # complex is left to NumPy here
DTYPES = [d for d in NATIVE + EXTENSION if d.kind != "c" and d.name not in TORCH_LACKS]
BF16 = EXTENSION[0]


def torch_type(dtype: np.dtype[Any]) -> Any:
    return getattr(torch, dtype.name)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_tensors_come_in(dtype: np.dtype[Any]) -> None:
    host = values(dtype, (4, 6))
    tensor = torch.from_numpy(host.view(np.uint8)).view(torch_type(dtype))
    view = as_input(tensor, InputSpec("x", (dtype,), ("n", 6)), device=FakeDevice())
    assert (view.address, view.shape, view.dtype) == (tensor.data_ptr(), (4, 6), dtype)
    assert view.to_numpy().tobytes() == host.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_what_goes_out(dtype: np.dtype[Any]) -> None:
    host = values(dtype, (4, 6))
    tensor = torch.from_dlpack(device_array(host)[1:])
    assert tensor.dtype == torch_type(dtype)
    assert tensor.data_ptr() == host[1:].ctypes.data
    assert tuple(tensor.shape) == (3, 6)
    assert bits(tensor) == host[1:].tobytes()


def test_torch_strides_and_empty_arrays_go_out() -> None:
    host = values(BF16, (4, 6))
    tensor = torch.from_dlpack(device_array(host)[::2, 1:4])
    assert tensor.stride() == (12, 1)
    assert bits(tensor) == host[::2, 1:4].tobytes()
    assert tuple(torch.from_dlpack(device_array(host)[:0]).shape) == (0, 6)
    assert torch.from_dlpack(device_array(host)[1, 2]).shape == ()


def test_a_tensor_made_from_nvep_memory_keeps_it() -> None:
    host = values(BF16, (4, 6))
    alive = weakref.ref(host)
    tensor = torch.from_dlpack(device_array(host))
    expected = host.tobytes()
    del host
    gc.collect()
    assert bits(tensor) == expected
    del tensor
    gc.collect()
    assert alive() is None


def test_an_input_keeps_its_tensor() -> None:
    memory = values(np.dtype(np.uint8), (4, 64))
    alive = weakref.ref(memory)
    view = as_input(torch.from_numpy(memory), ROWS, device=FakeDevice())
    del memory
    gc.collect()
    assert view.to_numpy()[3, 63] == 4 * 64 % 251 - 1
    del view
    gc.collect()
    assert alive() is None


def test_packed_fp4_is_payload() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no fp4")
    tensor = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert as_input(tensor, ROWS, device=FakeDevice()).shape == (4, 64)


def test_torch_tensors_that_are_refused() -> None:
    spec = InputSpec("x", (BF16,), ("n", 6))
    cases: list[tuple[Any, type[Exception], str]] = [
        (torch.zeros(4, 6), DTypeError, "x: got 'float32'; allowed: bfloat16"),
        (torch.zeros(4, 7, dtype=torch.bfloat16), ShapeError, r"x: got \(4, 7\); allowed: \(n, 6\)"),
        (torch.zeros(6, 4, dtype=torch.bfloat16).T, ShapeError, "axis 1 must step 2 bytes"),
        (torch.zeros(6, dtype=torch.bfloat16).expand(4, 6), ShapeError, "axis 0 must step 12 bytes"),
        (torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True), ArgumentError, r"x: .*detach"),
        (torch.zeros(4, 6, dtype=torch.bfloat16).to_sparse(), ArgumentError, "x: .*can be exported"),
        (torch.zeros(4, 6, dtype=torch.bfloat16, device="meta"), ArgumentError, "x: "),
    ]
    for tensor, kind, text in cases:
        with pytest.raises(kind, match=text):
            as_input(tensor, spec, device=FakeDevice())


def test_a_consumer_error_leaves_the_array_usable() -> None:
    array = device_array(np.zeros((2, 2), EXTENSION[1]))  # torch has no float8_e3m4
    with pytest.raises((BufferError, RuntimeError)):
        torch.from_dlpack(array)
    assert array.numpy().shape == (2, 2)
