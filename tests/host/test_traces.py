"""Router logs: every format, and every way in which a file can be wrong."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvep.cli import trace_formats
from nvep.cli.traces import read_trace
from nvep.errors import TraceError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
META = {"type": "meta", "model_id": "m", "layers_logged": [3], "top_k": 2}


def token(ids: Any, weights: Any = None, layer: Any = 3, **more: Any) -> dict[str, Any]:
    record = {"type": "route", "req_id": "r1", "token_idx": 0, "layer": layer, "topk_ids": ids, **more}
    return record if weights is None else {**record, "topk_weights": weights}


def megatron(indices: Any, layer: Any = 3, **more: Any) -> dict[str, Any]:
    record = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return {**record, "num_tokens": len(indices), "topk": 2, "top_indices": indices, **more}


Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def lines(*records: Any) -> Path:
        path = tmp_path / "log.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return path

    return lines


# --- what is read -----------------------------------------------------------------------------------------------------


def test_token_log(write: Writer) -> None:
    trace = read_trace(write(META, token([4, 1], [0.5, 0.25]), token([0, 7], [1, 0.125])))
    assert trace.ids.tolist() == [[4, 1], [0, 7]]
    assert trace.weights.tolist() == [[0.5, 0.25], [1.0, 0.125]]
    assert (trace.ids.dtype, trace.weights.dtype) == (np.int32, np.float32)
    assert (trace.num_experts, trace.layer) == (8, "3")
    assert not trace.ids.flags.writeable


def test_token_log_without_weights_or_meta(write: Writer) -> None:
    trace = read_trace(write({"layer": 0, "topk_ids": [4, 1, 3]}), num_experts=60)
    assert trace.weights.tolist() == [[np.float32(1 / 3)] * 3]
    assert trace.num_experts == 60


def test_the_meta_line_may_state_the_number_of_experts(write: Writer) -> None:
    path = write({**META, "num_experts": 32}, token([4, 1]))
    assert read_trace(path).num_experts == 32
    assert read_trace(path, num_experts=64).num_experts == 64


def test_layers_are_told_apart(write: Writer) -> None:
    path = write(META, token([0, 1], layer=3), token([2, 3], layer=4), token([4, 5], layer=3))
    assert read_trace(path, layer="3").ids.tolist() == [[0, 1], [4, 5]]
    assert read_trace(path, layer="4").ids.tolist() == [[2, 3]]


def test_megatron_trace_of_several_steps_and_ranks(write: Writer) -> None:
    path = write(
        megatron([[1, 2], [3, 0]]),
        megatron([[7, 6]], layer=4),
        megatron([[5, 4]], block="mtp", mtp_idx=0),
        megatron([], rank=1),
        megatron([[2, 9]], step=1),
    )
    trace = read_trace(path, layer="3")
    assert trace.ids.tolist() == [[1, 2], [3, 0], [2, 9]]
    assert trace.weights.tolist() == [[0.5, 0.5]] * 3
    assert read_trace(path, layer="mtp0.3").ids.tolist() == [[5, 4]]
    assert read_trace(path, layer="4").num_experts == 8


def test_megatron_trace_of_the_first_version_has_no_block(write: Writer) -> None:
    record = megatron([[1, 2]])
    del record["block"]
    assert read_trace(write(record)).ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", ["u1", "i2", "<i4", ">i4", "i8", "u8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("archive", [False, True])
def test_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, order: Any, archive: bool) -> None:
    monkeypatch.setattr(trace_formats, "CHUNK_BYTES", 64)  # several chunks
    base = np.arange(10)[:, None, None] * 2 + np.arange(3)[None, :, None] * 20 + np.arange(2)[None, None, :]
    path = tmp_path / "log"
    with path.open("wb") as file:
        ids = np.asarray(base, dtype=dtype, order=order)
        np.savez_compressed(file, topk_ids=ids) if archive else np.save(file, ids)
    for layer in range(3):
        trace = read_trace(path, layer=str(layer))
        assert np.array_equal(trace.ids, base[:, layer])
        assert (trace.weights == 0.5).all()


def test_array_of_one_layer(tmp_path: Path) -> None:
    path = tmp_path / "log.npy"
    np.save(path, np.array([[3, 1], [0, 2]]))
    trace = read_trace(path)
    assert trace.ids.tolist() == [[3, 1], [0, 2]]
    assert trace.layer is None


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_archive_with_weights(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "log.npz"
    weights = np.arange(8, dtype=dtype).reshape(2, 2, 2) / 3
    np.savez(path, ids=np.arange(8).reshape(2, 2, 2), weights=weights, note=np.array("recorded"))
    trace = read_trace(path, layer="1")
    assert trace.ids.tolist() == [[2, 3], [6, 7]]
    assert np.array_equal(trace.weights, weights[:, 1].astype(np.float32))


def test_archive_with_one_array_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "log.npz"
    np.savez(path, np.array([[3, 1]]))
    assert read_trace(path).ids.tolist() == [[3, 1]]


def test_memory_is_bounded_by_the_result(tmp_path: Path) -> None:
    path = tmp_path / "log.npz"
    np.savez_compressed(path, ids=np.tile(np.arange(4), (50_000, 40, 1)))  # 64 MB of ids, 1.6 MB of them in a layer
    tracemalloc.start()
    try:
        read_trace(path, layer="5")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32e6


@pytest.mark.parametrize("layer", [8, 12])
def test_shared_logs(layer: int) -> None:
    path = SHARED / f"qwen1.5-moe-a2.7b-gsm8k-layer{layer}.jsonl"
    if not path.exists():
        pytest.skip("the shared logs are not here")
    trace = read_trace(path)
    assert trace.ids.shape == (12805, 4)
    assert (trace.num_experts, trace.layer) == (60, str(layer))


# --- what is refused: (lines, line number, cause) ---------------------------------------------------------------------

GOOD = token([0, 1])
BAD_LINES = {
    "empty file": ((), None, "no tokens"),
    "meta only": ((META,), None, "no tokens"),
    "truncated": ((META, GOOD, json.dumps(GOOD)[:-9]), 3, "not JSON"),
    "not UTF-8": ((META, '"\udcff"'), 2, "not JSON"),
    "nested too deep": ((META, "[" * 100_000), 2, "not JSON"),
    "blank line": ((META, GOOD, "", GOOD), 3, "empty line"),
    "not an object": ((META, "[1, 2]"), 2, "a JSON object expected, not list"),
    "unknown kind": (({"a": 1},), 1, "neither a meta line"),
    "second meta": ((META, GOOD, META), 3, "a line of type 'meta' among the tokens"),
    "no layer": ((META, {"type": "route", "topk_ids": [0, 1]}), 2, "field layer is missing"),
    "layer is a name": ((META, token([0, 1], layer="x")), 2, "layer is 'x', not an integer"),
    "no ids": ((META, {"type": "route", "layer": 3}), 2, "field topk_ids is missing"),
    "ids not a list": ((META, token("01")), 2, "topk_ids is '01', not a list"),
    "no experts": ((token([]),), 1, "a token without experts"),
    "negative id": ((META, token([0, -1])), 2, "expert id -1 is out of range"),
    "huge id": ((META, token([0, 1 << 20])), 2, "expert id 1048576 is out of range 0..1048575"),
    "id beyond meta": (({**META, "num_experts": 8}, token([0, 8])), 2, "expert id 8 is out of range 0..7"),
    "float id": ((META, token([0, 1.0])), 2, "expert id 1.0 is not an integer"),
    "bool id": ((META, token([0, True])), 2, "expert id True is not an integer"),
    "nested id": ((META, token([0, [1]])), 2, r"expert id \[1\] is not an integer"),
    "repeated id": ((META, token([5, 5])), 2, r"an expert id is repeated in \[5, 5\]"),
    "mixed top_k": ((token([0, 1]), token([0, 1, 2])), 2, "3 experts in a token, earlier tokens have 2"),
    "top_k unlike meta": ((META, token([0, 1, 2])), 2, "3 experts in a token, the meta line says 2"),
    "bad meta top_k": (({**META, "top_k": "4"},), 1, "top_k is '4', not an integer of at least 1"),
    "bad meta experts": (({**META, "num_experts": 0},), 1, "num_experts is 0, not an integer of at least 1"),
    "too many experts": ((token(list(range(65))),), 1, "65 experts in a token, at most 64"),
    "meta beyond any experts": (({**META, "num_experts": 1 << 21}, GOOD), 1, "num_experts is 2097152, more than"),
    "weights too few": ((META, token([0, 1], [0.5])), 2, "1 weights for 2 experts"),
    "weights not a list": ((META, token([0, 1], 0.5)), 2, "topk_weights is 0.5, not a list"),
    "weights missing": ((META, token([0, 1], [0.5, 0.5]), GOOD), 3, "some tokens have weights and some have none"),
    "weights NaN": ((META, token([0, 1], [0.5, float("nan")])), 2, "NaN is not a JSON number"),
    "weights infinite": ((META, json.dumps(token([0, 1], [0.5, 7])).replace("7", "1e999")), 2, "weight inf is not"),
    "weights too large": ((META, token([0, 1], [0.5, 1e39])), 2, r"weight 1e\+39 is not a finite float32 number"),
    "weights bool": ((META, token([0, 1], [0.5, True])), 2, "weight True is not a finite float32 number"),
    "error in another layer": ((token([0, 1], layer=3), token([0, 0], layer=4)), 2, "an expert id is repeated"),
    "several layers": ((token([0, 1], layer=3), token([0, 1], layer=4)), None, r"several layers \(3, 4\)"),
    "megatron: count": ((megatron([[1, 2]], num_tokens=2),), 1, "num_tokens is 2 but top_indices has 1 tokens"),
    "megatron: no count": (({"top_indices": [], "layer": 1},), 1, "field num_tokens is missing"),
    "megatron: no indices": (
        (megatron([[1, 2]]), {"layer": 3, "num_tokens": 1, "topk": 2}),
        2,
        "top_indices is missing",
    ),
    "megatron: short row": ((megatron([[1, 2], [1]]),), 1, "token 1 of top_indices is not a list of topk = 2 ids"),
    "megatron: flat": ((megatron([1, 2]),), 1, "token 0 of top_indices is not a list of topk = 2 ids"),
    "megatron: mixed": (
        (megatron([[1, 2]]), megatron([[1]], topk=1)),
        2,
        "1 experts in a token, earlier tokens have 2",
    ),
    "megatron: id": ((megatron([[1, 2], [3, -1]]),), 1, "token 1: expert id -1 is out of range"),
    "megatron: repeated": ((megatron([[2, 2]]),), 1, "token 0: an expert id is repeated"),
    "megatron: no layer": (({**megatron([[1, 2]]), "layer": None},), 1, "layer is None, not an integer"),
    "megatron: block": ((megatron([[1, 2]], block=3),), 1, "block is 3, not a name"),
    "megatron: no tokens": ((megatron([]),), None, "no tokens"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines(tmp_path: Path, name: str) -> None:
    records, line, cause = BAD_LINES[name]
    path = tmp_path / "log.jsonl"
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match=cause) as caught:
        read_trace(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")


def test_experts_asked_for_bound_the_ids(write: Writer) -> None:
    with pytest.raises(TraceError, match=r":2: expert id 4 is out of range 0\.\.3"):
        read_trace(write(META, token([4, 1])), num_experts=4)


def test_layer_that_is_not_there(write: Writer, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no tokens of layer 7; the log has layers 3, 4"):
        read_trace(write(token([0, 1], layer=3), token([0, 1], layer=4)), layer="7")
    np.save(tmp_path / "log.npy", np.array([[3, 1]]))
    with pytest.raises(TraceError, match="no tokens of layer 7; the log does not tell layers apart"):
        read_trace(tmp_path / "log.npy", layer="7")


def test_line_too_long(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_formats, "MAX_LINE_BYTES", 300)
    with pytest.raises(TraceError, match=":2: longer than 300 bytes"):
        read_trace(write(token([0, 1]), token([0, 1], note="x" * 300)))


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe: not a regular file"):
        read_trace(tmp_path / "pipe")


def test_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file or directory"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npz_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ids.npy", content)
    return buffer.getvalue()


def encrypted(archive: bytes) -> bytes:
    """``archive`` whose only member claims to be encrypted, in both of its headers."""
    data = bytearray(archive)
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def npy_header(*shape: int, fortran_order: bool = False) -> bytes:
    """A file that states a shape and holds 16 bytes of it."""
    header = {"descr": "<i8", "fortran_order": fortran_order, "shape": shape}
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + bytes(16)


PAIR = np.array([[3, 1], [0, 2]])
HALF = np.full((2, 2), 0.5, np.float32)
BAD_ARRAYS = {
    "truncated npy": (npy(PAIR)[:-1], r"array ids: the file is too short for its shape \[2, 2\]"),
    "more tokens than bytes": (npy_header(10**12, 2), "too short for its shape"),
    "more experts than bytes": (npy_header(2, 10**12), "too short for its shape"),
    "more layers than bytes": (npy_header(2, 10**12, 1), "too short for its shape"),
    "Fortran order": (npy_header(10**12, 2, fortran_order=True), "too short for its shape"),
    "bytes beyond 64 bits": (npy_header(1, 1 << 32, 1 << 32), "too short for its shape"),
    "negative shape": (npy_header(-3, 2), r"array ids: its shape is \[-3, 2\]"),
    "too many experts": (npy(np.arange(65)[None]), "65 experts in a token, at most 64"),
    "npy header": (b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8'}", "array ids: "),
    "pickle": (npy(np.array([[{}]]), allow_pickle=True), "array ids: it holds Python objects"),
    "one axis": (npy(np.arange(3)), r"array ids has shape \[3\], not \[tokens, top_k\] or \[tokens, layers, top_k\]"),
    "four axes": (npy(np.zeros((1, 1, 1, 1), int)), r"array ids has shape \[1, 1, 1, 1\]"),
    "floats": (npy(PAIR.astype(float)), "array ids has dtype float64, not an integer type"),
    "bools": (npy(PAIR > 1), "array ids has dtype bool"),
    "no tokens": (npy(np.zeros((0, 4), int)), "no tokens"),
    "no layers": (npy(np.zeros((4, 0, 2), int)), "no tokens"),
    "no experts": (npy(np.zeros((4, 0), int)), "a token without experts"),
    "several layers": (npy(np.tile(PAIR[:, None], (1, 2, 1))), r"several layers \(0, 1\): choose one with --layer"),
    "negative": (npy([[0, 1], [2, -1]]), "token 1: expert id -1 is out of range"),
    "too large": (npy(np.array([[0, 1 << 63]], np.uint64)), "token 0: expert id 9223372036854775808 is out of range"),
    "repeated": (npy([[0, 1], [2, 2]]), r"token 1: an expert id is repeated in \[2, 2\]"),
    "empty zip": (npz(), "no array of ids"),
    "encrypted zip": (encrypted(npz(ids=PAIR)), "not a NumPy archive: .*encrypted"),
    "truncated in a zip": (npz_of(npy_header(2, 2)), "too short for its shape"),
    "not a zip": (b"PK\x03\x04 and then nothing", "not a NumPy archive"),
    "damaged zip": (npz(ids=PAIR).replace(PAIR.tobytes(), PAIR[::-1].tobytes()), "not a NumPy archive: Bad CRC"),
    "no ids": (npz(a=PAIR, b=PAIR), "no array of ids .* among a, b"),
    "ids twice": (npz(ids=PAIR, topk_ids=PAIR), "several arrays of ids: ids, topk_ids"),
    "weights twice": (npz(ids=PAIR, weights=HALF, topk_weights=HALF), "several arrays of weights"),
    "weights shape": (
        npz(ids=PAIR, weights=HALF[:1]),
        r"weights is float32 \[1, 2\], not floating point of shape \[2, 2\]",
    ),
    "weights dtype": (npz(ids=PAIR, weights=PAIR), r"weights is int64 \[2, 2\], not floating point"),
    "weights NaN": (
        npz(ids=PAIR, weights=HALF * [[1], [np.nan]]),
        "token 1: weight nan is not a finite float32 number",
    ),
    "weights too large": (npz(ids=PAIR, weights=np.full((2, 2), 5e38)), r"token 0: weight 5e\+38 is not a finite"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays(tmp_path: Path, name: str) -> None:
    content, cause = BAD_ARRAYS[name]
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=cause) as caught:
        read_trace(path)
    assert caught.value.path == str(path)
    assert caught.value.line is None
