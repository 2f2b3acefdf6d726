"""Views that nvep hands out: metadata, indexing, NumPy and CUDA array interface, lifetime."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, ShapeError
from nvep.inputs import InputSpec, as_input
from tests.host.array_support import EXTENSION, NATIVE, FakeDevice, FakeStream, device_array, values

BF16, E4M3, E5M2 = EXTENSION[0], EXTENSION[4], EXTENSION[6]
DTYPES = st.sampled_from(NATIVE + EXTENSION)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
ON = pytest.mark.parametrize("kind", ["emulated", "cuda"])


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """A shape and a basic index into it."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
    index: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        if extent and draw(st.booleans()):
            index.append(draw(st.integers(-extent, extent - 1)))
        else:
            bound = st.none() | st.integers(-6, 6)
            index.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), Ellipsis)
    at = next((i for i, e in enumerate(index) if e is Ellipsis), len(index))
    tail = index[at + 1 :]  # entries behind an ellipsis address the last axes
    for place, entry in enumerate(tail):
        extent = shape[len(shape) - len(tail) + place]
        if isinstance(entry, int):
            index[at + 1 + place] = entry % extent if extent else slice(None)
    return shape, tuple(index)


@settings(max_examples=300, deadline=None)
@given(indexed(), DTYPES, st.sampled_from(["emulated", "cuda"]))
def test_indexing_selects_what_numpy_selects(case: tuple[Any, Any], dtype: Any, kind: str) -> None:
    shape, index = case
    host = values(dtype, shape)
    picked = device_array(host, FakeDevice(kind))[index]
    expected = host[index]
    assert picked.shape == expected.shape
    assert picked.numpy().tobytes() == expected.tobytes()
    assert picked.dtype == dtype


@settings(max_examples=200, deadline=None)
@given(SHAPES, DTYPES)
def test_numpy_reads_emulated_memory_in_place(shape: tuple[int, ...], dtype: Any) -> None:
    host = values(dtype, shape)
    seen = np.asarray(device_array(host))
    assert seen.dtype == dtype
    assert seen.shape == shape
    assert seen.tobytes() == host.tobytes()
    assert seen.size == 0 or np.shares_memory(seen, host)


@pytest.mark.parametrize("dtype", NATIVE + EXTENSION, ids=str)
@ON
def test_numpy_copies(dtype: np.dtype[Any], kind: str) -> None:
    host = values(dtype, (3, 4))
    stream, device = FakeStream(), FakeDevice(kind)
    copy = device_array(host, device, stream=stream, readonly=True).numpy()
    assert copy.tobytes() == host.tobytes()
    assert copy.flags.writeable
    assert not np.shares_memory(copy, host)
    assert stream.synchronized + device.copies == 1  # copy_out waits by contract


def test_the_host_waits_for_the_producer_before_it_looks() -> None:
    stream = FakeStream()
    array = device_array(values(BF16, (2, 2)), stream=stream)
    looks = [lambda: np.asarray(array), lambda: array.__dlpack__(), array.numpy, lambda: np.array(array)]
    for count, look in enumerate(looks, 1):
        look()
        assert stream.synchronized == count


def test_writes_through_a_numpy_view_reach_the_memory() -> None:
    host = np.zeros((2, 3), np.float32)
    np.asarray(device_array(host))[1, 2] = 7
    assert host[1, 2] == 7


def test_read_only_memory_gives_read_only_views() -> None:
    array = device_array(np.zeros((2, 3), np.float32), readonly=True)
    assert not np.asarray(array).flags.writeable
    assert not np.asarray(array[1:]).flags.writeable
    assert not np.asarray(array.view(BF16)).flags.writeable
    assert not np.asarray(array[:0]).flags.writeable


def test_array_function_options() -> None:
    host = values(np.dtype(np.int32), (4,))
    array = device_array(host)
    assert not np.shares_memory(np.array(array), host)
    assert np.asarray(array, dtype=np.int64).dtype == np.int64
    with pytest.raises(ValueError, match="without a copy"):
        array.__array__(np.int64, copy=False)
    on_gpu = device_array(host, FakeDevice("cuda"))
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.asarray(on_gpu)
    assert np.array_equal(np.array(on_gpu, copy=True), host)


@pytest.mark.parametrize(
    ("dtype", "typestr"),
    [
        (np.dtype(np.float32), "<f4"),
        (np.dtype(np.uint8), "|u1"),
        (np.dtype(bool), "|b1"),
        (BF16, "<V2"),
        (E4M3, "|V1"),
        (E5M2, "|V1"),
    ],
    ids=str,
)
def test_cuda_array_interface(dtype: np.dtype[Any], typestr: str) -> None:
    host = values(dtype, (3, 4))
    stream = FakeStream(4096)
    array = device_array(host, FakeDevice("cuda", 1), stream=stream)
    assert array.__cuda_array_interface__ == {
        "version": 3,
        "shape": (3, 4),
        "typestr": typestr,
        "data": (host.ctypes.data, False),
        "strides": None,
        "stream": 4096,
    }
    assert array[:, 1:3].__cuda_array_interface__["strides"] == host.strides
    assert array[:, 1:3].__cuda_array_interface__["data"][0] == host.ctypes.data + dtype.itemsize


def test_cuda_array_interface_edges() -> None:
    host = np.zeros((3, 4), np.float32)
    array = device_array(host, FakeDevice("cuda"), readonly=True)
    assert array.__cuda_array_interface__["stream"] is None
    assert array.__cuda_array_interface__["data"][1] is True
    assert array[1:1].__cuda_array_interface__["data"][0] == 0
    legacy = device_array(host, FakeDevice("cuda"), stream=FakeStream(0))
    assert legacy.__cuda_array_interface__["stream"] == 1
    assert not hasattr(device_array(host), "__cuda_array_interface__")


def test_view_changes_the_element_type() -> None:
    host = values(np.dtype(np.uint8), (3, 8))
    array = device_array(host)
    for dtype, shape in ((BF16, (3, 4)), (np.dtype(np.float64), (3, 1)), (E4M3, (3, 8)), (np.dtype(np.int8), (3, 8))):
        assert array.view(dtype).shape == shape
        assert array.view(dtype).numpy().tobytes() == host.tobytes()
    assert array[:, 2:6].view(np.uint16).numpy().tobytes() == host[:, 2:6].tobytes()
    assert array[:, ::2].view(np.int8).shape == (3, 4)
    for wrong in (array[:, :3], array[:, ::2], array[0, 0]):
        with pytest.raises(ShapeError, match="contiguous last axis"):
            wrong.view(np.uint16)


def test_reshape() -> None:
    array = device_array(values(np.dtype(np.int16), (4, 6)))
    assert array.reshape(2, -1).shape == (2, 12)
    assert array.reshape((24,)).shape == (24,)
    assert array.reshape(4, 2, 3).numpy().tobytes() == array.numpy().tobytes()
    assert array[:0].reshape(0, 9).shape == (0, 9)
    for shape in ((5, -1), (-1, -1), (4, 7), (-4, -6)):
        with pytest.raises(ShapeError, match="24 elements"):
            array.reshape(shape)
    with pytest.raises(ShapeError, match="contiguous"):
        array[:, 1:].reshape(-1)


def test_indices_that_are_refused() -> None:
    array = device_array(np.zeros((3, 4), np.float32))
    for index in (3, -4, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            array[index]
    for bad in (slice(None, None, -1), None, True, [0, 1], 1.0):
        with pytest.raises(ArgumentError, match="index"):
            array[bad]


def test_it_iterates_over_the_first_axis() -> None:
    host = values(np.dtype(np.int32), (3, 2))
    array = device_array(host)
    assert [row.numpy().tolist() for row in array] == host.tolist()
    assert len(array) == 3
    with pytest.raises(TypeError):
        len(array[0, 0])


def test_metadata() -> None:
    array = device_array(np.zeros((3, 4), BF16), FakeDevice("cuda", 2))
    assert (array.ndim, array.size, array.nbytes, array.contiguous) == (2, 12, 24, True)
    assert not array[:, :2].contiguous
    assert array[:1, :2].contiguous  # the stride of an axis with one entry never steps
    assert repr(array).startswith("DeviceArray(bfloat16[3, 4], cuda:2, 0x")
    assert "emulated" in repr(device_array(np.zeros(3)))
    assert "read-only" in repr(device_array(np.zeros(3), readonly=True))


@pytest.mark.parametrize("dtype", [object, ">i4", "V0", [("a", object)]], ids=str)
def test_element_types_that_are_refused(dtype: Any) -> None:
    with pytest.raises(DTypeError, match="native element type"):
        DeviceArray(0, (2,), dtype, owner=ArrayOwner(FakeDevice()))


ACCESSES = {
    "address": lambda a: a.address,
    "numpy": lambda a: a.numpy(),
    "asarray": lambda a: np.asarray(a),
    "dlpack": lambda a: a.__dlpack__(),
    "dlpack versioned": lambda a: a.__dlpack__(max_version=(1, 1)),
    "from_dlpack": lambda a: np.from_dlpack(a),
    "slice": lambda a: a[1:].numpy(),
    "view": lambda a: a.view(np.uint8).numpy(),
    "cuda array interface": lambda a: a.__cuda_array_interface__,
}


@pytest.mark.parametrize("access", ACCESSES)
@ON
def test_expired_arrays_say_so(access: str, kind: str) -> None:
    array = device_array(np.zeros((3, 4), np.float32), FakeDevice(kind))
    part = array[:2]
    array.owner.expire("the heap is unmapped")
    never = {
        ("cuda array interface", "emulated"): AttributeError,
        ("asarray", "cuda"): TypeError,
    }
    error = never.get((access, kind), ExchangeClosed)
    for candidate in (array, part):
        with pytest.raises(error):
            ACCESSES[access](candidate)
    assert "expired" in repr(array)
    assert array.shape == (3, 4)


@ON
def test_the_owner_keeps_memory_alive_as_long_as_any_view(kind: str) -> None:
    host = np.zeros((3, 4), np.float32)
    alive = weakref.ref(host)
    array = device_array(host, FakeDevice(kind))
    capsule = array[1:].__dlpack__()
    del host, array
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


READERS = {
    "numpy": np.asarray,
    "numpy view": lambda a: np.asarray(a)[1:, 1],
    "unused capsule": lambda a: a.__dlpack__(),
    "from_dlpack": np.from_dlpack,
    "input": lambda a: as_input(a, InputSpec("x", (), (3, 4)), device=FakeDevice()),
}


@pytest.mark.parametrize("reader", READERS)
def test_memory_is_given_back_when_the_last_reader_is_gone(reader: str) -> None:
    freed: list[str] = []
    array = device_array(np.zeros((3, 4), np.float32))
    reading = READERS[reader](array)
    array.owner.expire(then=lambda: freed.append("freed"))
    array.owner.expire(then=lambda: freed.append("twice"))
    gc.collect()
    assert freed == []
    del reading
    gc.collect()
    assert freed == ["freed"]


def test_memory_without_readers_is_given_back_at_once() -> None:
    freed: list[str] = []
    array = device_array(np.zeros((3, 4), np.float32))
    np.asarray(array).sum()
    array.owner.expire(then=lambda: freed.append("freed"))
    assert freed == ["freed"]

    def fail() -> None:
        raise OSError("cannot unmap")

    with pytest.raises(OSError, match="cannot unmap"):
        device_array(np.zeros(3)).owner.expire(then=fail)


def test_siblings_share_a_lifetime_and_not_a_stream() -> None:
    freed: list[str] = []
    first = device_array(np.zeros((3, 4), np.float32), stream=FakeStream(1))
    sibling = first.owner.sibling()
    sibling.stream = FakeStream(2)
    second = DeviceArray(first.address, (3, 4), np.float32, owner=sibling)
    view = np.asarray(second)
    first.owner.expire("over", then=lambda: freed.append("freed"))
    with pytest.raises(ExchangeClosed, match="over"):
        second.numpy()
    assert first.owner.stream.handle == 1
    assert freed == []
    del view
    gc.collect()
    assert freed == ["freed"]
