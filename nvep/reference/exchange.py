"""Dispatch and combine on lists over ranks, in the Fence layout: slots compact and in token order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvep.config import ExchangeConfig, partial_dtype
from nvep.reference.routing import Float32Array, Int32Array, distinct_targets, sanitised_ids, slots

ByteArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
PartialArray = npt.NDArray[np.generic]


@dataclass(frozen=True)
class RankTokens:
    """What one source rank brings to a step of T tokens.

    Attributes
    ----------
    payloads : sequence of numpy.ndarray
        uint8 ``[T, payload_bytes]`` each, the row first.
    expert_ids : numpy.ndarray
        int32 ``[T, top_k]``; ids outside ``0 .. num_experts - 1`` choose nobody.
    expert_weights : numpy.ndarray
        float32 ``[T, top_k]``.
    """

    payloads: Sequence[ByteArray]
    expert_ids: Int32Array
    expert_weights: Float32Array


@dataclass(frozen=True)
class ReferenceArrivals:
    """What one target rank has after dispatch; R source ranks, M = ``config.max_tokens`` slots each.

    Attributes
    ----------
    payloads : tuple of numpy.ndarray
        uint8 ``[R, M, payload_bytes]`` each, zero in slots that hold no token.
    valid : numpy.ndarray
        bool ``[R, M]``: slots that hold a token.
    expert_ids : numpy.ndarray
        int32 ``[R, M, top_k]``: all ids of the token, global; ``config.invalid_expert`` in slots that hold no token,
        for ids out of range and for repeated ids.
    expert_weights : numpy.ndarray
        float32 ``[R, M, top_k]``, zero in slots that hold no token.
    counts : numpy.ndarray
        int32 ``[R]``: slots in use.
    """

    payloads: tuple[ByteArray, ...]
    valid: BoolArray
    expert_ids: Int32Array
    expert_weights: Float32Array
    counts: Int32Array


def dispatch_to(
    target: int, sources: Sequence[RankTokens], *, config: ExchangeConfig, masked: Collection[int] = ()
) -> ReferenceArrivals:
    """What rank ``target`` receives from all ranks; see :func:`dispatch`."""
    num_ranks, slots_each, top_k = len(sources), config.max_tokens, config.top_k
    expert_ranks = config.expert_ranks(num_ranks)
    arrivals = ReferenceArrivals(
        payloads=tuple(np.zeros((num_ranks, slots_each, nbytes), dtype=np.uint8) for nbytes in config.payload_bytes),
        valid=np.zeros((num_ranks, slots_each), dtype=np.bool_),
        expert_ids=np.full((num_ranks, slots_each, top_k), config.invalid_expert, dtype=np.int32),
        expert_weights=np.zeros((num_ranks, slots_each, top_k), dtype=np.float32),
        counts=np.zeros(num_ranks, dtype=np.int32),
    )
    for source, step in enumerate(sources):
        if source in masked or target in masked:
            continue
        for token, ids in enumerate(step.expert_ids.tolist()):
            if target not in distinct_targets(ids, expert_ranks):
                continue
            slot = arrivals.counts[source]
            for received, sent in zip(arrivals.payloads, step.payloads, strict=True):
                received[source, slot] = sent[token]
            arrivals.expert_ids[source, slot] = sanitised_ids(ids, config.num_experts, config.invalid_expert)
            arrivals.expert_weights[source, slot] = step.expert_weights[token]
            arrivals.valid[source, slot] = True
            arrivals.counts[source] += 1
    return arrivals


def dispatch(
    sources: Sequence[RankTokens], config: ExchangeConfig, *, masked: Collection[int] = ()
) -> list[ReferenceArrivals]:
    """Move every token once to every rank that owns one of its experts.

    Parameters
    ----------
    sources : sequence of RankTokens
        By rank.
    config : ExchangeConfig
        Sizes and placement.
    masked : collection of int
        Ranks left out: they send nothing and nothing is sent to them.

    Returns
    -------
    list of ReferenceArrivals
        By target rank.
    """
    return [dispatch_to(target, sources, config=config, masked=masked) for target in range(len(sources))]


def round_to_partial(values: Float32Array, config: ExchangeConfig) -> PartialArray:
    """float32 rounded once, to nearest even, to the element type of partial rows; too large becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(partial_dtype(config.partial_format))


def combine_at(
    source: int,
    partial_rows: Sequence[PartialArray],
    *,
    expert_ids: Int32Array,
    config: ExchangeConfig,
    masked: Collection[int] = (),
) -> PartialArray:
    """What rank ``source`` gets back for its tokens with ``expert_ids`` ``[T, top_k]``; see :func:`combine`."""
    num_ranks = len(partial_rows)
    expert_ranks = config.expert_ranks(num_ranks)
    slot_of = slots(expert_ids, expert_ranks, num_ranks)
    assert config.partial_elements is not None
    result = np.zeros((len(expert_ids), config.partial_elements), dtype=partial_dtype(config.partial_format))
    if source in masked:
        return result
    for token, ids in enumerate(expert_ids.tolist()):
        total = None
        for target in distinct_targets(ids, expert_ranks):
            if target in masked:
                continue
            row = partial_rows[target][source, slot_of[token, target]].astype(np.float32)
            total = row if total is None else total + row
        if total is not None:
            result[token] = round_to_partial(total, config)
    return result


def combine(
    partial_rows: Sequence[PartialArray],
    expert_ids: Sequence[Int32Array],
    *,
    config: ExchangeConfig,
    masked: Collection[int] = (),
) -> list[PartialArray]:
    """Bring partial rows back and sum them in float32 over target ranks, ascending; round once.

    Parameters
    ----------
    partial_rows : sequence of numpy.ndarray
        By target rank: partial dtype, ``[R, max_tokens, partial_elements]``.
    expert_ids : sequence of numpy.ndarray
        By source rank: int32 ``[T, top_k]``, as given to dispatch.
    config : ExchangeConfig
        Sizes, placement and partial format.
    masked : collection of int
        Ranks left out of the sum.

    Returns
    -------
    list of numpy.ndarray
        By source rank: partial dtype, ``[T, partial_elements]``; zeros for a token that was sent nowhere.
    """
    return [
        combine_at(source, partial_rows, expert_ids=ids, config=config, masked=masked)
        for source, ids in enumerate(expert_ids)
    ]
