"""Readers of the formats that router logs come in; each feeds a Collector.

Token log (JSONL): a line ``{"type": "meta", "top_k": ..}``, then per token ``{"type": "route", "layer": .., "topk_ids":
[..], "topk_weights": [..]}``. Megatron router tracer (JSONL): a line per step, layer and rank with ``num_tokens``,
``topk``, ``top_indices`` (a list per token), ``layer`` and, in newer ones, ``block`` and ``mtp_idx``. Arrays:
``[tokens, top_k]`` or ``[tokens, layers, top_k]``.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from nvep.cli.traces import MAX_EXPERTS, Collector

MAX_LINE_BYTES = 1 << 28
CHUNK_BYTES = 1 << 22
ID_KEYS = ("ids", "topk_ids", "expert_ids", "top_indices", "routed_experts")
WEIGHT_KEYS = ("weights", "topk_weights", "expert_weights")
Record = dict[str, Any]
Array = npt.NDArray[Any]


# --- JSONL ------------------------------------------------------------------------------------------------------------


def read_jsonl(collector: Collector) -> None:
    """Read a token log or a Megatron trace, whichever the first line is."""
    read: Callable[[Collector, Record, int], None] | None = None
    for line, record in _records(collector):
        if read is None:
            if "top_indices" in record:
                read = _read_megatron
            elif record.get("type") == "meta" or "topk_ids" in record:
                read = _read_token
            else:
                raise collector.fail(
                    line, "neither a meta line, a token (topk_ids) nor a Megatron record (top_indices)"
                )
            if record.get("type") == "meta":
                _read_meta(collector, record, line)
                continue
        read(collector, record, line)


def _records(collector: Collector) -> Iterator[tuple[int, Record]]:
    with open(collector.path, "rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, 1):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise collector.fail(number, f"longer than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                raise collector.fail(number, "empty line")
            try:
                record = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise collector.fail(number, f"not JSON: {error}") from error
            if not isinstance(record, dict):
                raise collector.fail(number, f"a JSON object expected, not {type(record).__name__}")
            yield number, record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(collector: Collector, record: Record, key: str, line: int, *, low: int = 0) -> int:
    if key not in record:
        raise collector.fail(line, f"field {key} is missing")
    value = record[key]
    if type(value) is not int or value < low:
        raise collector.fail(line, f"{key} is {value!r}, not an integer of at least {low}")
    return value


def _list(collector: Collector, record: Record, key: str, line: int) -> list[Any]:
    if key not in record:
        raise collector.fail(line, f"field {key} is missing")
    value = record[key]
    if not isinstance(value, list):
        raise collector.fail(line, f"{key} is {value!r:.80}, not a list")
    return value


def _read_meta(collector: Collector, record: Record, line: int) -> None:
    if "num_experts" in record:
        collector.declare_experts(_integer(collector, record, "num_experts", line, low=1), line)
    if "top_k" in record:
        collector.declared_top_k = _integer(collector, record, "top_k", line, low=1)


def _read_token(collector: Collector, record: Record, line: int) -> None:
    kind = record.get("type", "route")
    if kind != "route":
        raise collector.fail(line, f"a line of type {kind!r} among the tokens")
    layer = str(_integer(collector, record, "layer", line))
    ids = _list(collector, record, "topk_ids", line)
    kept = collector.keeps(layer, len(ids), line)
    collector.check_ids(ids, line)
    weights = _list(collector, record, "topk_weights", line) if "topk_weights" in record else None
    if weights is not None:
        collector.check_weights(weights, len(ids), line)
    if kept:
        collector.keep(ids, weights, line)


def _read_megatron(collector: Collector, record: Record, line: int) -> None:
    layer = _megatron_layer(collector, record, line)
    tokens = _integer(collector, record, "num_tokens", line)
    top_k = _integer(collector, record, "topk", line, low=1)
    rows = _list(collector, record, "top_indices", line)
    if len(rows) != tokens:
        raise collector.fail(line, f"num_tokens is {tokens} but top_indices has {len(rows)} tokens")
    kept = collector.keeps(layer, top_k, line)
    for token, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != top_k:
            raise collector.fail(line, f"token {token} of top_indices is not a list of topk = {top_k} ids")
        collector.check_ids(row, line, f"token {token}: ")
        if kept:
            collector.keep(row, None, line)


def _megatron_layer(collector: Collector, record: Record, line: int) -> str:
    layer = _integer(collector, record, "layer", line)
    block = record.get("block", "decoder")
    if not isinstance(block, str):
        raise collector.fail(line, f"block is {block!r}, not a name")
    if block == "decoder":
        return str(layer)
    head = _integer(collector, record, "mtp_idx", line) if "mtp_idx" in record else ""
    return f"{block}{head}.{layer}"


# --- arrays -----------------------------------------------------------------------------------------------------------


def read_array(collector: Collector) -> None:
    """Read one ``.npy`` array of ids."""
    with open(collector.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        ids = _OpenArray(
            collector, "ids", (file, size), lambda: np.load(collector.path, mmap_mode="r", allow_pickle=False)
        )
        _read_tokens(collector, ids, None)


def read_archive(collector: Collector) -> None:
    """Read an ``.npz``: ids under one of ID_KEYS (or the only array), perhaps weights under one of WEIGHT_KEYS."""
    try:
        with zipfile.ZipFile(collector.path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            ids_key = _key(collector, names, ID_KEYS, "ids") or (names[0] if len(names) == 1 else None)
            if ids_key is None:
                raise collector.fail(None, f"no array of ids ({', '.join(ID_KEYS)}) among {', '.join(names)}")
            weights_key = _key(collector, names, WEIGHT_KEYS, "weights")
            with archive.open(f"{ids_key}.npy") as ids_file:
                ids = _member(collector, ids_key, (ids_file, archive.getinfo(ids_file.name).file_size))
                if weights_key is None:
                    _read_tokens(collector, ids, None)
                    return
                with archive.open(f"{weights_key}.npy") as weights_file:
                    size = archive.getinfo(weights_file.name).file_size
                    _read_tokens(collector, ids, _member(collector, weights_key, (weights_file, size)))
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, KeyError, EOFError, RuntimeError) as error:
        raise collector.fail(None, f"not a NumPy archive: {error}") from error


def _key(collector: Collector, names: list[str], keys: tuple[str, ...], what: str) -> str | None:
    found = [name for name in names if name in keys]
    if len(found) > 1:
        raise collector.fail(None, f"several arrays of {what}: {', '.join(found)}")
    return found[0] if found else None


def _member(collector: Collector, key: str, file: tuple[Any, int]) -> _OpenArray:
    return _OpenArray(collector, key, file, lambda: np.load(collector.path, allow_pickle=False)[key])


class _OpenArray:
    """An array in a file of so many bytes, read by tokens from the front; in Fortran order loaded whole by ``load``."""

    def __init__(self, collector: Collector, name: str, file: tuple[Any, int], load: Callable[[], Array]) -> None:
        self._collector = collector
        self.name = name
        self._file, size = file
        self._whole: Array | None = None
        try:
            version = np.lib.format.read_magic(self._file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self.dtype = header(self._file)
            if self.dtype.hasobject:
                raise ValueError("it holds Python objects")
            if min(self.shape, default=0) < 0:
                raise ValueError(f"its shape is {list(self.shape)}")
            # Before anything of that size is allocated: a header of a few bytes may state any shape.
            if math.prod(self.shape) * self.dtype.itemsize > size - self._file.tell():
                raise ValueError(f"the file is too short for its shape {list(self.shape)}")
            if fortran:
                self._whole = load()
        except ValueError as error:
            raise collector.fail(None, f"array {name}: {error}") from error
        self._position = 0

    def take(self, tokens: int) -> Array:
        """The next ``tokens`` tokens, ``[tokens, ...]``."""
        start, self._position = self._position, self._position + tokens
        if self._whole is not None:
            return self._whole[start : self._position]
        count = tokens * math.prod(self.shape[1:])
        data = self._file.read(count * self.dtype.itemsize)
        if len(data) != count * self.dtype.itemsize:
            raise self._collector.fail(None, f"array {self.name} ends within token {start + tokens - 1}")
        return np.frombuffer(data, dtype=self.dtype).reshape(tokens, *self.shape[1:])


def _read_tokens(collector: Collector, ids: _OpenArray, weights: _OpenArray | None) -> None:
    if len(ids.shape) not in (2, 3):
        shape = list(ids.shape)
        raise collector.fail(
            None, f"array {ids.name} has shape {shape}, not [tokens, top_k] or [tokens, layers, top_k]"
        )
    if ids.dtype.kind not in "iu":
        raise collector.fail(None, f"array {ids.name} has dtype {ids.dtype}, not an integer type")
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        expected = f"floating point of shape {list(ids.shape)}"
        raise collector.fail(None, f"array {weights.name} is {weights.dtype} {list(weights.shape)}, not {expected}")
    tokens, top_k = ids.shape[0], ids.shape[-1]
    labels = [None] if len(ids.shape) == 2 else [str(index) for index in range(ids.shape[1])]
    kept = [index for index, label in enumerate(labels) if collector.keeps(label, top_k, None)]
    step = max(1, CHUNK_BYTES // max(1, len(labels) * top_k * ids.dtype.itemsize))
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        chunk = ids.take(count).reshape(count, len(labels), top_k)
        _check_id_array(collector, chunk, start)
        chosen = weights.take(count).reshape(chunk.shape) if weights is not None else None
        if chosen is not None:
            _check_weight_array(collector, chosen, start)
        for index in kept:
            row_weights = None if chosen is None else chosen[:, index].ravel().tolist()
            collector.keep(chunk[:, index].ravel().tolist(), row_weights, None)


def _check_id_array(collector: Collector, ids: Array, first: int) -> None:
    bound = collector.num_experts or MAX_EXPERTS
    ordered = np.sort(ids, axis=2)
    suspicious = (
        (ordered[..., 0] < 0) | (ordered[..., -1] >= bound) | (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    )
    for token, layer in np.argwhere(suspicious)[:1].tolist():
        collector.check_ids(ids[token, layer].tolist(), None, f"token {first + token}: ")


def _check_weight_array(collector: Collector, weights: Array, first: int) -> None:
    with np.errstate(over="ignore"):
        finite = np.isfinite(weights.astype(np.float32))
    for token, layer, k in np.argwhere(~finite)[:1].tolist():
        value = weights[token, layer, k]
        raise collector.fail(None, f"token {first + token}: weight {value} is not a finite float32 number")
