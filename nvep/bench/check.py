"""One step of a case, compared with the reference: rows, headers, counts and sums, every byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvep.bench.cases import Case
from nvep.bench.inputs import Inputs, payloads, weights
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import NvepError
from nvep.exchange import Arrivals, Exchange
from nvep.reference import combine_at, slots
from nvep.runtime.device import Stream

_PERIOD = 31  # of the tokens whose partial rows are alike


class WrongResult(NvepError):
    """A step brought something else than the reference says; its time is worth nothing."""


def check_step(exchange: Exchange, case: Case, *, inputs: Inputs, stream: Stream) -> None:
    """Run the first input set and compare all that it brought. Collective.

    Raises
    ------
    WrongResult
        With the same text on every rank.
    """
    group = exchange.group
    owners = exchange.config.expert_ranks(group.size)
    placed = group.allgather((inputs.ids[0], slots(inputs.ids[0], owners, group.size)))
    arrivals = exchange.dispatch(*inputs[0], stream=stream)
    found = [
        np.array(a.numpy()) for a in (*arrivals.payloads, arrivals.expert_weights, arrivals.expert_ids, arrivals.counts)
    ]
    tokens = [_tokens(taken, group.rank) for _, taken in placed]
    rows = np.zeros(arrivals.partial_rows.shape, dtype=partial_dtype(exchange.config.partial_format))
    for source, sent in enumerate(tokens):
        rows[source, _positions(sent, arrivals)] = _partial(exchange.config, source, group.rank)[sent % _PERIOD]
    exchange.device.copy_in(arrivals.partial_rows.address, rows, exchange.work(arrivals, stream=stream))
    output = np.array(exchange.combine(arrivals.partial_rows, arrivals, stream=stream).numpy())
    exchange.synchronize(stream)
    wrong = _wrong_arrivals(exchange, case, found, placed=placed, compact=arrivals.protocol != "sentinel")
    wrong = wrong or _wrong_sums(exchange, output, placed[group.rank])
    everyone = [text for text in group.allgather(wrong) if text]
    if everyone:
        raise WrongResult(f"{case.label()}: {everyone[0]}")


def _tokens(taken: npt.NDArray[np.int32], target: int) -> npt.NDArray[np.intp]:
    """Tokens that go to ``target``, in the order of compact slots."""
    return np.flatnonzero(taken[:, target] >= 0)


def _positions(sent: npt.NDArray[np.intp], arrivals: Arrivals) -> npt.NDArray[np.intp]:
    return np.arange(len(sent)) if arrivals.protocol != "sentinel" else sent


def _partial(config: ExchangeConfig, source: int, target: int) -> np.ndarray:
    """`_PERIOD` partial rows of ``target`` for a source: small integers, other ones for every pair of ranks."""
    t, e = np.arange(_PERIOD)[:, None], np.arange(config.elements)[None, :]
    return ((t * 7 + e * 3 + source * 5 + target * 11) % 13).astype(partial_dtype(config.partial_format))


def _wrong_arrivals(
    exchange: Exchange,
    case: Case,
    found: list[np.ndarray],
    *,
    placed: list[tuple[np.ndarray, np.ndarray]],
    compact: bool,
) -> str:
    """What differs first in what arrived here, or nothing."""
    me, config = exchange.group.rank, exchange.config
    *rows, headers, counts = found
    for source, (ids, taken) in enumerate(placed):
        sent = _tokens(taken, me)
        where = np.arange(len(sent)) if compact else sent
        if counts[source] != (len(sent) if compact else case.tokens):
            return f"rank {me}: {counts[source]} rows from rank {source}"
        expected = np.full((config.max_tokens, config.top_k), config.invalid_expert, dtype=np.int32)
        expected[where] = ids[sent]
        if (headers[source] != expected).any():
            return f"rank {me}: expert ids from rank {source}"
        wanted: list[np.ndarray] = [*payloads(config, source, 0, case.tokens), weights(case, source, 0)]
        for index, want in enumerate(wanted):
            different = (rows[index][source, where] != want[sent]).any(axis=1)
            if different.any():
                name = "weights" if index == len(wanted) - 1 else f"payload {index}"
                return f"rank {me}: {name} of token {sent[different.argmax()]} of rank {source}"
    return ""


def _wrong_sums(exchange: Exchange, output: np.ndarray, placed: tuple[np.ndarray, np.ndarray]) -> str:
    """The same for what combine brought back."""
    group, config = exchange.group, exchange.config
    ids, taken = placed
    returned = []
    for target in range(group.size):
        rows = np.zeros((1, config.max_tokens, config.elements), dtype=partial_dtype(config.partial_format))
        sent = _tokens(taken, target)
        rows[0, : len(sent)] = _partial(config, group.rank, target)[sent % _PERIOD]
        returned.append(np.broadcast_to(rows, (group.size, *rows.shape[1:])))
    want = combine_at(group.rank, returned, expert_ids=ids, config=config)
    different = (output.view(np.uint16) != want.view(np.uint16)).any(axis=1)
    return f"rank {group.rank}: sum of token {different.argmax()}" if different.any() else ""
