"""Recorded router logs: what ``nvep replay`` reads, whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nvep.errors import TraceError

MAX_EXPERTS = 1 << 20  # the largest number of experts that ExchangeConfig accepts
MAX_TOP_K = 64  # and the most experts of a token
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RoutingTrace:
    """What a router chose for a series of tokens, one layer.

    Attributes
    ----------
    ids : numpy.ndarray
        int32 ``[tokens, top_k]``, at least one token, no id twice in a token.
    weights : numpy.ndarray
        float32 ``[tokens, top_k]``; ``1 / top_k`` where the log has none.
    num_experts : int
        As asked for, else as the log says, else the largest id plus one.
    layer : str or None
        Label of the layer, ``None`` where the log names none.
    source : str
        The file.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    num_experts: int
    layer: str | None
    source: str

    def first(self, tokens: int) -> RoutingTrace:
        """The first ``tokens`` tokens, or all where there are fewer."""
        return replace(self, ids=self.ids[:tokens], weights=self.weights[:tokens])


def read_trace(path: str | Path, *, layer: str | None = None, num_experts: int | None = None) -> RoutingTrace:
    """Read a router log; the format is recognised by content. Memory is that of the result and of one record.

    Parameters
    ----------
    path : str or Path
        JSONL with a line a token, JSONL of the Megatron router tracer, ``.npy`` or ``.npz``.
    layer : str, optional
        Label of the layer to take (``"8"``, or ``"mtp0.1"`` for a multi-token-prediction layer); needed when the log
        holds several.
    num_experts : int, optional
        Number of experts; ids must be below it.

    Raises
    ------
    TraceError
        Anything in the file is wrong, also in layers not asked for.
    """
    from nvep.cli.trace_formats import read_archive, read_array, read_jsonl

    collector = Collector(str(path), layer, num_experts)
    try:
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise collector.fail(None, "not a regular file: it is opened more than once")
        with open(path, "rb") as file:
            magic = file.read(6)
        if magic == b"\x93NUMPY":
            read_array(collector)
        elif magic[:2] == b"PK":
            read_archive(collector)
        else:
            read_jsonl(collector)
    except OSError as error:
        raise TraceError(str(path), None, error.strerror or str(error)) from error
    return collector.result()


class Collector:
    """Checks every token of every layer and keeps those of the layer asked for.

    Parameters
    ----------
    path : str
        The file, for errors.
    layer : str or None
        Layer to keep; ``None``: the only one.
    num_experts : int or None
        Bound on ids.
    """

    def __init__(self, path: str, layer: str | None, num_experts: int | None) -> None:
        self.path = path
        self.num_experts = num_experts
        self.declared_top_k: int | None = None  # as the log states it, before its tokens
        self.top_k_of: dict[str | None, int] = {}
        self._asked = layer
        self._kept: str | None = layer
        self._ids = array("i")
        self._weights = array("f")
        self._weighted: bool | None = None
        self._first = True

    def fail(self, line: int | None, cause: str) -> TraceError:
        """The error to raise."""
        return TraceError(self.path, line, cause)

    def declare_experts(self, number: int, line: int | None) -> None:
        """The log states its number of experts; one that the user gave goes before."""
        if self.num_experts is None:
            if number > MAX_EXPERTS:
                raise self.fail(line, f"num_experts is {number}, more than {MAX_EXPERTS}")
            self.num_experts = number

    def keeps(self, layer: str | None, top_k: int, line: int | None) -> bool:
        """Note a record of ``layer``; tell whether its tokens are kept.

        Raises
        ------
        TraceError
            ``top_k`` is not positive, too large, or differs from earlier records of the layer.
        """
        if top_k < 1:
            raise self.fail(line, "a token without experts")
        if top_k > MAX_TOP_K:
            raise self.fail(line, f"{top_k} experts in a token, at most {MAX_TOP_K} are possible")
        expected = self.declared_top_k or self.top_k_of.get(layer, top_k)
        if top_k != expected:
            where = "the meta line says" if self.declared_top_k else "earlier tokens have"
            raise self.fail(line, f"{top_k} experts in a token, {where} {expected}")
        self.top_k_of[layer] = top_k
        if self._first and self._asked is None:
            self._kept = layer
        self._first = False
        return layer == self._kept

    def check_ids(self, ids: Sequence[object], line: int | None, where: str = "") -> None:
        """Raise unless ``ids`` are different integers within range."""
        bound = self.num_experts or MAX_EXPERTS
        for value in ids:
            if type(value) is not int:  # a bool is an int to isinstance
                raise self.fail(line, f"{where}expert id {value!r} is not an integer")
            if not 0 <= value < bound:
                raise self.fail(line, f"{where}expert id {value} is out of range 0..{bound - 1}")
        if len(set(ids)) != len(ids):
            raise self.fail(line, f"{where}an expert id is repeated in {list(ids)}")

    def check_weights(self, weights: Sequence[object], top_k: int, line: int | None) -> None:
        """Raise unless ``weights`` are ``top_k`` finite numbers."""
        if len(weights) != top_k:
            raise self.fail(line, f"{len(weights)} weights for {top_k} experts")
        for value in weights:
            if type(value) not in (int, float) or not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # type: ignore[operator]
                raise self.fail(line, f"weight {value!r} is not a finite float32 number")

    def keep(self, ids: Iterable[int], weights: Iterable[float] | None, line: int | None) -> None:
        """Add one or more checked tokens, flattened."""
        if self._weighted is None:
            self._weighted = weights is not None
        if self._weighted != (weights is not None):
            raise self.fail(line, "some tokens have weights and some have none")
        self._ids.extend(ids)
        if weights is not None:
            self._weights.extend(weights)

    def result(self) -> RoutingTrace:
        """The layer that was asked for, once the whole file has been read."""
        layers = ", ".join(str(label) for label in self.top_k_of)
        if not self.top_k_of:
            raise self.fail(None, "no tokens")
        if self._kept not in self.top_k_of:
            has = f"has layers {layers}" if None not in self.top_k_of else "does not tell layers apart"
            raise self.fail(None, f"no tokens of layer {self._kept}; the log {has}")
        if self._asked is None and len(self.top_k_of) > 1:
            raise self.fail(None, f"several layers ({layers}): choose one with --layer")
        top_k = self.top_k_of[self._kept]
        if not self._ids:
            raise self.fail(None, "no tokens")
        ids = np.frombuffer(self._ids, dtype=np.int32).reshape(-1, top_k)
        if self._weighted:
            weights = np.frombuffer(self._weights, dtype=np.float32).reshape(-1, top_k)
        else:
            weights = np.full(ids.shape, 1.0 / top_k, dtype=np.float32)
        ids.flags.writeable = weights.flags.writeable = False
        return RoutingTrace(ids, weights, self.num_experts or int(ids.max()) + 1, self._kept, self.path)
