"""Arrays of other libraries as inputs: read in place, kept alive, ordered, or refused with a typed error."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvep.errors import ArgumentError, DTypeError, ExchangeClosed, NvepError, ShapeError
from nvep.inputs import InputSpec, as_input
from tests.host.array_support import (
    EXTENSION,
    NATIVE,
    FakeDevice,
    FakeStream,
    Foreign,
    OldForeign,
    device_array,
    values,
)

BF16, E4M3 = EXTENSION[0], EXTENSION[4]
INT32, INT64, FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
IDS = InputSpec("expert_ids", (INT32, INT64), (("tokens", 16), 8), alignment=4)
ROWS = InputSpec.rows("tokens", 64, 16)
ANY = InputSpec("x", (), ("n",))
EMULATED = FakeDevice()


class CudaInterface:
    """A library that knows only the CUDA array interface."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        data = (array.ctypes.data if array.size else 0, False)
        interface = {"shape": array.shape, "typestr": array.dtype.str, "data": data, "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**interface, **changes}


class HostInterface:
    """A library that knows only the array interface."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


HOST_SOURCES = {
    "numpy": lambda a: a,
    "subclass": lambda a: a.view(type("Own", (np.ndarray,), {})),
    "array interface": HostInterface,
    "dlpack": lambda a: Foreign(a, (0, 64)),
    "dlpack before 1.0": lambda a: OldForeign(a, (0, 64)),
    "own": device_array,
}


@pytest.mark.parametrize("source", HOST_SOURCES)
def test_host_arrays_are_used_in_place(source: str) -> None:
    host = values(INT64, (5, 8))
    view = as_input(HOST_SOURCES[source](host), IDS, device=EMULATED)
    assert (view.address, view.shape, view.strides, view.dtype) == (host.ctypes.data, (5, 8), (64, 8), INT64)
    assert (view.host, view.settled, view.readonly) == (False, source != "own", False)
    assert view.nbytes == 320
    assert np.shares_memory(view.to_numpy(), host)
    assert np.array_equal(view.to_numpy(), host)


@pytest.mark.parametrize("source", HOST_SOURCES)
def test_host_arrays_are_marked_for_copying_on_a_gpu(source: str) -> None:
    host = values(INT64, (5, 8))
    view = as_input(HOST_SOURCES[source](host), IDS, device=FakeDevice("cuda"), stream=FakeStream())
    assert (view.host, view.settled) == (True, True)
    assert np.array_equal(view.to_numpy(), host)


GPU_SOURCES = {
    "dlpack": lambda a, n: Foreign(a, (0, 64), device=(2, n)),
    "own": lambda a, n: device_array(a, FakeDevice("cuda", n)),
}


@pytest.mark.parametrize("source", GPU_SOURCES)
def test_gpu_arrays_are_used_where_they_are(source: str) -> None:
    host = values(INT64, (5, 8))
    view = as_input(GPU_SOURCES[source](host, 1), IDS, device=FakeDevice("cuda", 1), stream=FakeStream())
    assert (view.address, view.host, view.settled) == (host.ctypes.data, False, False)


@pytest.mark.parametrize("source", GPU_SOURCES)
def test_the_wrong_gpu_is_named(source: str) -> None:
    array = GPU_SOURCES[source](values(INT64, (5, 8)), 2)
    with pytest.raises(ArgumentError, match=r"expert_ids: got 'an array on cuda:2'; allowed: cuda:1"):
        as_input(array, IDS, device=FakeDevice("cuda", 1))
    with pytest.raises(ArgumentError, match=r"cuda:2.*device is emulated"):
        as_input(array, IDS, device=EMULATED)


def test_other_devices_of_dlpack() -> None:
    host = values(INT64, (5, 8))
    pinned, managed, rocm = (Foreign(host, (0, 64), device=(kind, 0)) for kind in (3, 13, 10))
    gpu = FakeDevice("cuda")
    assert as_input(pinned, IDS, device=gpu).host
    assert not as_input(pinned, IDS, device=EMULATED).host
    assert not as_input(managed, IDS, device=gpu).host
    for device in (gpu, EMULATED):
        with pytest.raises(ArgumentError, match="DLPack device 10:0"):
            as_input(rocm, IDS, device=device)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), st.sampled_from(NATIVE + EXTENSION))
def test_any_array_of_the_right_bytes_is_rows(shape: tuple[int, ...], dtype: Any) -> None:
    host = values(dtype, shape)
    row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
    spec = InputSpec.rows("tokens", row_bytes, 4, alignment=1)
    view = as_input(host, spec, device=EMULATED)
    assert (view.shape, view.dtype, view.strides) == ((shape[0], row_bytes), np.uint8, (row_bytes, 1))
    assert view.to_numpy().tobytes() == host.tobytes()
    with pytest.raises(ShapeError, match=f"with {row_bytes + 16} bytes per token"):
        as_input(host, InputSpec.rows("tokens", row_bytes + 16, 4, alignment=1), device=EMULATED)


MASKED = np.ma.masked_array(np.zeros((4, 8), np.int64), mask=True)
WIDE = np.zeros((4, 16), np.int64)
REFUSED: dict[str, tuple[Any, InputSpec, type[NvepError], str]] = {
    "none": (None, IDS, ArgumentError, "got None; allowed: an array"),
    "list": ([[1] * 8], IDS, ArgumentError, "builtins.list"),
    "number": (3, IDS, ArgumentError, "builtins.int"),
    "bytes": (b"12345678", IDS, ArgumentError, "builtins.bytes"),
    "masked": (MASKED, IDS, ArgumentError, "masked"),
    "float ids": (np.zeros((4, 8)), IDS, DTypeError, "got 'float64'; allowed: int32 or int64"),
    "unsigned ids": (np.zeros((4, 8), np.uint32), IDS, DTypeError, "uint32"),
    "swapped ids": (np.zeros((4, 8), ">i4"), IDS, DTypeError, ">i4"),
    "bf16 ids": (np.zeros((4, 8), BF16), IDS, DTypeError, "bfloat16"),
    "swapped rows": (np.zeros((4, 16), ">f4"), ROWS, DTypeError, ">f4.*native byte order"),
    "object rows": (np.zeros((4, 8), object), ROWS, DTypeError, "object"),
    "no axis": (np.zeros((), np.int64), IDS, ShapeError, r"\(\).*\(tokens <= 16, 8\)"),
    "no axis in rows": (np.zeros((), "V64"), ROWS, ShapeError, r"\(tokens <= 16, \.\.\.\) with 64 bytes"),
    "one axis": (np.zeros(8, np.int64), IDS, ShapeError, r"\(8,\)"),
    "wrong extent": (np.zeros((4, 7), np.int64), IDS, ShapeError, r"\(4, 7\)"),
    "too many": (np.zeros((17, 8), np.int64), IDS, ShapeError, "tokens <= 16"),
    "too many rows": (np.zeros((17, 64), np.uint8), ROWS, ShapeError, "tokens <= 16"),
    "short rows": (np.zeros((4, 60), np.uint8), ROWS, ShapeError, "64 bytes per token"),
    "columns": (WIDE[:, :8], IDS, ShapeError, r"strides \(128, 8\).*axis 0 must step 64"),
    "every other": (WIDE[:, ::2], IDS, ShapeError, "axis 1 must step 8"),
    "transposed": (np.zeros((8, 4), np.int64).T, IDS, ShapeError, "C-contiguous"),
    "reversed": (np.zeros((4, 8), np.int64)[::-1], IDS, ShapeError, "axis 0 must step 64"),
    "broadcast": (np.broadcast_to(np.zeros(8, np.int64), (4, 8)), IDS, ShapeError, "axis 0 must step 64"),
    "own columns": (device_array(WIDE)[:, :8], IDS, ShapeError, "axis 0 must step 64"),
    "misaligned": (aligned(264)[4:260].view(np.int64).reshape(4, 8), IDS, ShapeError, "multiple of 8 bytes"),
    "misaligned rows": (aligned(264)[8:].reshape(4, 64), ROWS, ShapeError, "multiple of 16 bytes"),
    "misaligned own": (device_array(aligned(264)[8:].reshape(4, 64)), ROWS, ShapeError, "multiple of 16 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    array, spec, kind, text = REFUSED[case]
    with pytest.raises(NvepError, match=text) as caught:
        as_input(array, spec, device=EMULATED)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{spec.name}: got ")
    assert "; allowed: " in str(caught.value)


def test_addresses_that_are_copied_anyway_need_no_alignment() -> None:
    array = aligned(264)[8:].reshape(4, 64)
    assert as_input(array, ROWS, device=FakeDevice("cuda")).host


def test_strides_of_axes_that_never_step_do_not_matter() -> None:
    host = np.zeros(8, np.int64)
    odd = np.lib.stride_tricks.as_strided(host, (1, 8), (1 << 40, 8))
    assert as_input(odd, IDS, device=EMULATED).address == host.ctypes.data
    empty = np.lib.stride_tricks.as_strided(host, (0, 8), (12345, 8))
    assert as_input(empty, IDS, device=EMULATED).shape == (0, 8)


def test_arrays_without_elements() -> None:
    gpu = FakeDevice("cuda")
    for empty in (np.zeros((0, 8), np.int64), device_array(np.zeros((3, 8), np.int64))[:0]):
        assert as_input(empty, IDS, device=EMULATED).nbytes == 0
    for empty in (Foreign(np.zeros((0, 8), np.int64), (0, 64)), CudaInterface(np.zeros((0, 8), np.int64))):
        view = as_input(empty, IDS, device=gpu)
        assert (view.address, view.nbytes) == (0, 0)
    assert as_input(np.zeros((0, 64), np.uint8)[:, ::1], ROWS, device=EMULATED).shape == (0, 64)
    with pytest.raises(ShapeError):
        as_input(np.zeros(0, np.uint8), ROWS, device=EMULATED)


def test_null_pointers_are_refused_where_there_are_elements() -> None:
    array = CudaInterface(np.zeros((4, 8), np.int64), data=(0, False))
    with pytest.raises(ArgumentError, match="null pointer"):
        as_input(array, IDS, device=FakeDevice("cuda"))


def test_read_only_arrays_are_inputs_and_no_outputs() -> None:
    out = InputSpec("out", (FLOAT32,), ("tokens", 4), writable=True)
    host = np.zeros((2, 4), np.float32)
    host.flags.writeable = False
    foreign = Foreign(np.zeros((2, 4), np.float32), (2, 32))
    foreign.flags = 1
    gpu = CudaInterface(np.zeros((2, 4), np.float32), data=(16, True))
    for array, device in ((host, EMULATED), (foreign, EMULATED), (gpu, FakeDevice("cuda"))):
        assert as_input(array, InputSpec("x", (), (2, 4)), device=device).readonly
        with pytest.raises(ArgumentError, match="out: got 'a read-only array'; allowed: a writable array"):
            as_input(array, out, device=device)
    own = device_array(np.zeros((2, 4), np.float32), readonly=True)
    with pytest.raises(ArgumentError, match="read-only"):
        as_input(own, out, device=EMULATED)


def test_expired_arrays_are_named() -> None:
    array = device_array(np.zeros((4, 8), np.int64))
    array.owner.expire("the exchange is closed")
    with pytest.raises(ExchangeClosed, match="expert_ids: the exchange is closed"):
        as_input(array, IDS, device=EMULATED)


def test_numpy_arrays_and_own_arrays_stay_alive() -> None:
    host = values(INT64, (4, 8))
    for make in (lambda a: a, device_array, HostInterface):
        array = np.copy(host)
        alive = weakref.ref(array)
        view: Any = as_input(make(array), IDS, device=EMULATED)
        del array
        gc.collect()
        assert alive() is not None
        kept = view.to_numpy()
        del view
        gc.collect()
        assert np.array_equal(kept, host)
        del kept
        gc.collect()
        assert alive() is None


def test_capsules_are_given_back_once() -> None:
    foreign = Foreign(values(INT64, (4, 8)), (0, 64))
    view: Any = as_input(foreign, IDS, device=EMULATED)
    kept = view.to_numpy()
    del view
    gc.collect()
    assert foreign.deleted == 0
    del kept
    gc.collect()
    assert foreign.deleted == 1


def test_capsules_of_refused_arrays_are_given_back() -> None:
    foreign = Foreign(np.zeros((4, 7), np.int64), (0, 64))
    with pytest.raises(ShapeError):
        as_input(foreign, IDS, device=EMULATED)
    gc.collect()
    assert foreign.deleted == 1


def test_nothing_is_left_behind_by_many_calls() -> None:
    host = values(INT64, (4, 8))
    own, foreign = device_array(host), Foreign(host, (0, 64))
    before = sys.getrefcount(host)
    for _ in range(100):
        as_input(host, IDS, device=EMULATED)
        as_input(own, IDS, device=EMULATED)
        as_input(foreign, IDS, device=EMULATED)
        foreign._kept.clear()
    gc.collect()
    after = sys.getrefcount(host)
    assert after == before
    assert foreign.deleted == 100


def test_dlpack_producers_are_asked_to_order_themselves() -> None:
    foreign, gpu = Foreign(values(INT64, (4, 8)), (0, 64), device=(2, 0)), FakeDevice("cuda")
    as_input(foreign, IDS, device=gpu, stream=FakeStream(77))
    as_input(foreign, IDS, device=gpu, stream=FakeStream(0))
    as_input(foreign, IDS, device=gpu)
    on_host = Foreign(values(INT64, (4, 8)), (0, 64))
    as_input(on_host, IDS, device=gpu, stream=FakeStream(77))
    assert [options["stream"] for options in foreign.asked] == [77, 1, -1]
    assert on_host.asked == [{"max_version": (1, 1)}]


@pytest.mark.parametrize(("producer", "waits"), [(None, []), (9, [("event", 9)]), (77, [])])
def test_the_cuda_array_interface_says_what_to_wait_for(producer: int | None, waits: list[Any]) -> None:
    array, stream = CudaInterface(values(INT64, (4, 8)), stream=producer), FakeStream(77)
    as_input(array, IDS, device=FakeDevice("cuda"), stream=stream)
    as_input(array, IDS, device=FakeDevice("cuda"))
    assert stream.waited == waits


def test_own_arrays_are_ordered_behind_their_stream() -> None:
    for kind in ("emulated", "cuda"):
        device, producer, consumer = FakeDevice(kind), FakeStream(5), FakeStream(6)
        array = device_array(values(INT64, (4, 8)), device, stream=producer)
        view = as_input(array, IDS, device=device, stream=consumer)
        assert consumer.waited == [("event", 5)]
        assert not view.settled
        as_input(array, IDS, device=device, stream=producer)
        assert producer.waited == []
        assert producer.synchronized == 0


def test_emulated_arrays_given_to_a_gpu_are_settled_first() -> None:
    producer, consumer = FakeStream(5), FakeStream(6)
    array = device_array(values(INT64, (4, 8)), stream=producer)
    view = as_input(array, IDS, device=FakeDevice("cuda"), stream=consumer)
    assert (view.host, view.settled, producer.synchronized, consumer.waited) == (True, True, 1, [])


def test_refused_arrays_order_nothing() -> None:
    device, consumer = FakeDevice("cuda"), FakeStream(6)
    array = device_array(np.zeros((4, 7), np.int64), device, stream=FakeStream(5))
    with pytest.raises(ShapeError):
        as_input(array, IDS, device=device, stream=consumer)
    assert consumer.waited == []


def test_the_cuda_array_interface_of_extension_types() -> None:
    gpu = FakeDevice("cuda")
    array = CudaInterface(np.zeros((2, 32), np.uint16), typestr="<V2")
    assert as_input(array, ROWS, device=gpu).nbytes == 128
    spec = InputSpec("x", (BF16,), (2, 32))
    with pytest.raises(DTypeError, match=r"x: got '\|V2'; allowed: bfloat16"):
        as_input(array, spec, device=gpu)
    array.dtype = BF16
    assert as_input(array, spec, device=gpu).dtype == BF16


def test_the_cuda_array_interface_refuses() -> None:
    gpu = FakeDevice("cuda")
    with pytest.raises(ArgumentError, match="masked"):
        as_input(CudaInterface(np.zeros(2), mask=object()), ANY, device=gpu)
    with pytest.raises(ShapeError, match="axis 0 must step 8"):
        as_input(CudaInterface(np.zeros(2), strides=(16,)), ANY, device=gpu)
    with pytest.raises(ArgumentError, match="emulated"):
        as_input(CudaInterface(np.zeros(2)), ANY, device=EMULATED)


class Broken:
    """Refuses to export, as torch does for tensors that require gradients."""

    def __init__(self, error: Exception, interface: dict[str, Any] | None = None) -> None:
        self.error, self.interface = error, interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.interface is None:
            raise AttributeError
        return self.interface


@pytest.mark.parametrize("error", [BufferError("use detach"), RuntimeError("use detach"), TypeError("use detach")])
def test_refusals_of_other_libraries_are_passed_on(error: Exception) -> None:
    with pytest.raises(ArgumentError, match=r"x: .*Broken.*can be exported \(use detach\)") as caught:
        as_input(Broken(error), ANY, device=EMULATED)
    assert caught.value.__cause__ is error


def test_an_interface_with_stream_order_stands_in_for_a_refused_capsule() -> None:
    gpu, host = FakeDevice("cuda"), values(FLOAT32, (3,))
    interface = CudaInterface(host).__cuda_array_interface__
    assert as_input(Broken(BufferError("no"), interface), ANY, device=gpu).address == host.ctypes.data
    with pytest.raises(ArgumentError, match="can be exported"):
        as_input(Broken(BufferError("no"), {**interface, "version": 2}), ANY, device=gpu)


def test_errors_do_not_print_contents() -> None:
    class Loud(np.ndarray):
        def __repr__(self) -> str:
            raise AssertionError("contents were printed")

    with pytest.raises(ShapeError, match=re.escape("(3, 3)")):
        as_input(np.zeros((3, 3), np.int64).view(Loud), IDS, device=EMULATED)
