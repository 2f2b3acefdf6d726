"""Rings in a file: for each a line of JSON that says what it is, then its raw bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import numpy as np

from nvep.errors import ArgumentError
from nvep.nic.layouts import ENTRY_BYTES, KINDS

FORMAT = "nvep ring 1"
_MOST_HEADER_BYTES = 4096


@dataclass(frozen=True)
class RingDump:
    """A ring's memory at one moment.

    Attributes
    ----------
    kind : str
        ``"send_queue"`` or ``"gfd"``.
    engine : str
        Who executes it.
    rank, number, depth : int
        Owner, the ring's number and its entries.
    peer : int or None
        Rank that a send queue leads to.
    state : dict of str to int
        ``reserved``, and where the kind has them ``ready``, ``posted``, ``doorbell``, ``consumer``.
    entries : numpy.ndarray
        uint64, shape ``[depth, 8]``.
    completions : numpy.ndarray
        uint64, shape ``[depth, 8]``, or ``[0, 8]`` for a descriptor ring.
    ready_words : numpy.ndarray
        uint64, shape ``[depth]`` for Free Flow, else ``[0]``.
    """

    kind: str
    engine: str
    rank: int
    number: int
    depth: int
    peer: int | None
    state: dict[str, int]
    entries: np.ndarray = field(repr=False)
    completions: np.ndarray = field(repr=False)
    ready_words: np.ndarray = field(repr=False)

    def write(self, file: BinaryIO) -> None:
        """Append to a binary file."""
        arrays = {name: getattr(self, name) for name in ("entries", "completions", "ready_words")}
        header = {k: v for k, v in asdict(self).items() if k not in arrays}
        header |= {"format": FORMAT, "arrays": {name: array.size for name, array in arrays.items()}}
        file.write(json.dumps(header).encode() + b"\n")
        for array in arrays.values():
            file.write(np.ascontiguousarray(array, dtype="<u8").tobytes())


def read_dumps(file: BinaryIO, name: str = "FILE") -> Iterable[RingDump]:
    """Yield the rings of a binary file.

    Raises
    ------
    ArgumentError
        The file, called ``name`` in the message, holds something else or ends early.
    """
    while line := file.readline(_MOST_HEADER_BYTES):
        try:
            header = json.loads(line)
            if header.pop("format") != FORMAT or header["kind"] not in KINDS:
                raise ValueError("another format")
            sizes = {key: int(size) for key, size in header.pop("arrays").items()}
            arrays: dict[str, Any] = {key: _words(file, size) for key, size in sizes.items()}
            entry_words = ENTRY_BYTES // 8
            for key in ("entries", "completions"):
                arrays[key] = arrays[key].reshape(-1, entry_words)
            if len(arrays["entries"]) != header["depth"]:
                raise ValueError("as many entries as the ring is deep")
            dump = RingDump(**header, **arrays)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(name, str(error), f"rings written as {FORMAT!r}") from error
        yield dump


def _words(file: BinaryIO, count: int) -> np.ndarray:
    data = file.read(8 * count)
    if len(data) != 8 * count:
        raise ValueError(f"{len(data)} bytes where {8 * count} should be")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
