"""DLPack capsules: what is written into them, who owns them, which stream waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvep import dlpack
from nvep.errors import ArgumentError
from tests.host.array_support import (
    CODES,
    EXTENSION,
    NATIVE,
    FakeDevice,
    FakeStream,
    Foreign,
    capsule_name,
    device_array,
    read_capsule,
    values,
)

BF16 = EXTENSION[0]
VERSIONED = pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1), (2, 0)], ids=str)


@VERSIONED
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("kind", ["emulated", "cuda"])
def test_the_capsule_says_what_the_array_is(name: str, kind: str, max_version: tuple[int, int] | None) -> None:
    dtype = next(d for d in NATIVE + EXTENSION if d.name == name)
    host = values(dtype, (3, 4, 5))
    array = device_array(host, FakeDevice(kind, 3))[1:, :, 1:4]
    capsule = array.__dlpack__(max_version=max_version)
    tensor, versioned = read_capsule(capsule)
    assert (tensor.code, tensor.bits, tensor.lanes) == (*CODES[name], 1)
    assert tuple(tensor.device) == ((2, 3) if kind == "cuda" else (1, 0))
    assert tensor.data + tensor.byte_offset == host[1:, :, 1:].ctypes.data
    assert tensor.shape[: tensor.ndim] == [2, 4, 3]
    assert tensor.strides[: tensor.ndim] == [20, 5, 1]
    if max_version is None or max_version[0] < 1:
        assert versioned is None
    else:
        assert versioned is not None
        assert tuple(versioned.version) == (1, 1)
        assert versioned.flags == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=5).map(tuple), st.sampled_from(NATIVE + EXTENSION), st.booleans())
def test_what_goes_out_comes_in_the_same(shape: tuple[int, ...], dtype: Any, versioned: bool) -> None:
    host = values(dtype, shape)
    array = device_array(host, FakeDevice("cuda", 1))
    found = dlpack.take_capsule(array.__dlpack__(max_version=(1, 1) if versioned else None))
    assert found.shape == shape
    assert found.dtype == dtype
    assert (found.device_type, found.device_id, found.readonly) == (2, 1, False)
    assert found.address == (host.ctypes.data if host.size else 0)
    strides = host.strides if found.strides is None else found.strides
    assert all(a == b for a, b, n in zip(strides, host.strides, shape) if n > 1) or 0 in shape


def test_numpy_reads_emulated_arrays_in_place() -> None:
    host = values(np.dtype(np.float32), (3, 4))
    seen = np.from_dlpack(device_array(host))
    assert np.shares_memory(seen, host)
    assert np.array_equal(seen, host)


def test_read_only_is_passed_on_where_the_capsule_can_say_it() -> None:
    array = device_array(np.zeros((2, 2), np.float32), readonly=True)
    _, versioned = read_capsule(array.__dlpack__(max_version=(1, 0)))
    assert versioned is not None
    assert versioned.flags == dlpack.READ_ONLY
    assert dlpack.take_capsule(array.__dlpack__(max_version=(1, 0))).readonly
    assert not np.from_dlpack(array).flags.writeable
    with pytest.raises(BufferError):
        array.__dlpack__()


def test_a_type_that_the_consumer_lacks_is_its_own_clear_error() -> None:
    """NumPy drops the capsule while its own error is being raised: the destructor must not lose that error."""
    array = device_array(np.zeros((2, 2), BF16))
    before = sys.getrefcount(array.owner._lifetime.lease)
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError), match="Unsupported dtype"):
            np.from_dlpack(array)
    gc.collect()
    after = sys.getrefcount(array.owner._lifetime.lease)
    assert after == before


def test_types_that_dlpack_lacks_are_refused() -> None:
    for dtype in ("V3", "M8[s]", [("a", "i4")]):
        with pytest.raises(BufferError, match="no element type"):
            device_array(np.zeros(2, dtype)).__dlpack__(max_version=(1, 1))


@VERSIONED
def test_an_unused_capsule_frees_its_array(max_version: tuple[int, int] | None) -> None:
    host = np.zeros(4, np.float32)
    alive = weakref.ref(host)
    capsule = device_array(host).__dlpack__(max_version=max_version)
    del host
    gc.collect()
    assert alive() is not None
    del capsule
    assert alive() is None


@VERSIONED
def test_a_used_capsule_frees_its_array_with_the_consumer(max_version: tuple[int, int] | None) -> None:
    host = np.zeros(4, np.float32)
    alive = weakref.ref(host)
    capsule = device_array(host).__dlpack__(max_version=max_version)
    found = dlpack.take_capsule(capsule)
    assert capsule_name(capsule).startswith(b"used_dltensor")
    del host, capsule
    gc.collect()
    assert alive() is not None
    del found
    assert alive() is None


@pytest.mark.parametrize(
    ("asked", "ordered"),
    [(None, [(1, 7)]), (1, [(1, 7)]), (2, [(2, 7)]), (4096, [(4096, 7)]), (-1, []), (7, [])],
)
def test_the_consumers_stream_waits_for_the_producer(asked: int | None, ordered: list[tuple[int, int]]) -> None:
    device, stream = FakeDevice("cuda"), FakeStream(7)
    device_array(np.zeros(4, np.float32), device, stream=stream).__dlpack__(stream=asked)
    assert device.ordered == ordered
    assert stream.synchronized == 0


def test_streams_that_are_refused() -> None:
    on_gpu = device_array(np.zeros(4, np.float32), FakeDevice("cuda"), stream=FakeStream())
    for stream in (0, -2, True, "1"):
        with pytest.raises(ArgumentError, match="stream"):
            on_gpu.__dlpack__(stream=stream)
    with pytest.raises(ArgumentError, match="host memory"):
        device_array(np.zeros(4, np.float32)).__dlpack__(stream=1)


def test_an_array_without_producer_orders_nothing() -> None:
    device = FakeDevice("cuda")
    device_array(np.zeros(4, np.float32), device).__dlpack__(stream=5)
    assert device.ordered == []


def test_a_copy_towards_the_host() -> None:
    host = values(BF16, (3, 4))
    device = FakeDevice("cuda")
    array = device_array(host, device, stream=FakeStream())
    assert array.__dlpack_device__() == (2, 0)
    found = dlpack.take_capsule(array[:, 1:].__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
    assert (found.device_type, found.shape, found.dtype) == (1, (3, 3), BF16)
    assert device.copies == 1
    _, versioned = read_capsule(array.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
    assert versioned is not None
    assert versioned.flags == dlpack.IS_COPIED
    as_float = np.from_dlpack(array.view(np.int16), device="cpu")
    assert as_float.tobytes() == host.tobytes()
    copied = np.from_dlpack(device_array(host.view(np.int16)), copy=True)
    assert not np.shares_memory(copied, host)


def test_destinations_that_are_refused() -> None:
    on_gpu = device_array(np.zeros(4, np.float32), FakeDevice("cuda", 1))
    towards_host = {"dl_device": (1, 0), "copy": False}
    for options in ({"dl_device": (2, 0)}, {"dl_device": (10, 0)}, {"copy": True}, towards_host):
        with pytest.raises(BufferError):
            on_gpu.__dlpack__(**options)
    with pytest.raises(BufferError):
        device_array(np.zeros(4, np.float32)).__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (1, 99)], ids=str)
@pytest.mark.parametrize("byte_offset", [0, 64])
def test_a_foreign_tensor_is_read_and_deleted_once(version: tuple[int, int] | None, byte_offset: int) -> None:
    host = values(np.dtype(np.uint16), (4, 6))[1:, ::2]
    foreign = Foreign(host, (4, 16))
    foreign.version, foreign.byte_offset = version, byte_offset
    found = dlpack.take_capsule(foreign.__dlpack__())
    assert found[:4] == (host.ctypes.data, (3, 3), (12, 4), BF16)
    gc.collect()
    assert foreign.deleted == 0
    keepalive = found.keepalive
    del found
    assert foreign.deleted == 0
    del keepalive
    gc.collect()
    assert foreign.deleted == 1


def test_a_foreign_tensor_without_strides_is_contiguous() -> None:
    foreign = Foreign(np.zeros((2, 3), np.float32), (2, 32))
    foreign.null_strides = True
    assert dlpack.take_capsule(foreign.__dlpack__()).strides is None


def test_a_foreign_tensor_without_deleter_is_just_read() -> None:
    foreign = Foreign(np.zeros((2, 3), np.float32), (2, 32))
    capsule = foreign.__dlpack__()
    _, versioned = read_capsule(capsule)
    assert versioned is not None
    versioned.deleter = None
    del versioned
    found = dlpack.take_capsule(capsule)
    del found
    gc.collect()
    assert foreign.deleted == 0


def test_foreign_flags() -> None:
    foreign = Foreign(np.zeros(3, np.float32), (2, 32))
    foreign.flags = dlpack.READ_ONLY
    assert dlpack.take_capsule(foreign.__dlpack__()).readonly
    foreign.flags = dlpack.IS_COPIED
    assert not dlpack.take_capsule(foreign.__dlpack__()).readonly


def test_packed_fp4_is_bytes() -> None:
    assert dlpack.element_dtype(17, 4, 2) == np.uint8


@pytest.mark.parametrize("code", [(17, 4), (2, 32, 4), (3, 64), (0, 128), (2, 8), (99, 8)])
def test_foreign_types_that_are_refused_stay_with_their_producer(code: tuple[int, ...]) -> None:
    foreign = Foreign(np.zeros(3, np.float32), code)
    capsule = foreign.__dlpack__()
    with pytest.raises(BufferError, match="no NumPy equivalent"):
        dlpack.take_capsule(capsule)
    assert capsule_name(capsule) == b"dltensor_versioned"
    assert foreign.deleted == 0


def test_capsules_that_are_refused() -> None:
    foreign = Foreign(np.zeros(3, np.float32), (2, 32))
    foreign.version = (2, 0)
    with pytest.raises(BufferError, match=r"version 2\.0"):
        dlpack.take_capsule(foreign.__dlpack__())
    foreign.version = None
    capsule = foreign.__dlpack__()
    kept = dlpack.take_capsule(capsule)
    with pytest.raises(BufferError, match="consumed before"):
        dlpack.take_capsule(capsule)
    assert foreign.deleted == 0
    del kept
    with pytest.raises(BufferError, match="not a DLPack capsule"):
        dlpack.take_capsule(object())


LAST_WORDS = """
import sys
import numpy as np
from nvep import dlpack
from tests.host.array_support import EXTENSION, Foreign, device_array
array = device_array(np.zeros((4, 6), EXTENSION[0]))
foreign = Foreign(np.zeros(3, np.float32), (2, 32))
taken = dlpack.take_capsule(foreign.__dlpack__())
sys.kept = (array.__dlpack__(), np.asarray(array), taken)
"""


def test_arrays_that_live_until_the_interpreter_exits() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", LAST_WORDS], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
