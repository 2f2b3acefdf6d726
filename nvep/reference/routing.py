"""Routing: the router's choice of experts, and where each token goes because of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


def softmax_top_k(logits: npt.ArrayLike, top_k: int, *, renormalise: bool = False) -> tuple[Int32Array, Float32Array]:
    """Softmax over all experts, then the ``top_k`` most probable.

    Parameters
    ----------
    logits : array_like
        float32 ``[tokens, experts]``.
    top_k : int
        Experts per token.
    renormalise : bool
        Divide the chosen weights by their sum.

    Returns
    -------
    ids : numpy.ndarray
        int32 ``[tokens, top_k]``, most probable first; of equal logits the lower expert id comes first.
    weights : numpy.ndarray
        float32 ``[tokens, top_k]``.
    """
    scores = np.asarray(logits, dtype=np.float32)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True, dtype=np.float32)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if renormalise:
        weights = weights / weights.sum(axis=1, keepdims=True, dtype=np.float32)
    return ids.astype(np.int32), weights.astype(np.float32)


def sanitised_ids(expert_ids_row: Sequence[int], num_experts: int, invalid: int) -> list[int]:
    """One token's ids as they travel: ``invalid`` in place of ids out of range and of repetitions."""
    result: list[int] = []
    for expert in expert_ids_row:
        good = 0 <= expert < num_experts and expert not in result
        result.append(expert if good else invalid)
    return result


def distinct_targets(expert_ids_row: Sequence[int] | Int32Array, expert_ranks: Int32Array) -> list[int]:
    """Target ranks of one token, ascending, each once.

    Parameters
    ----------
    expert_ids_row : sequence of int
        The token's ``top_k`` expert ids; ids outside ``0 .. experts - 1`` choose nobody.
    expert_ranks : numpy.ndarray
        int32 ``[experts]``: the rank that owns each expert.
    """
    num_experts = len(expert_ranks)
    return sorted({int(expert_ranks[e]) for e in expert_ids_row if 0 <= e < num_experts})


def slots(expert_ids: Int32Array, expert_ranks: Int32Array, num_ranks: int) -> Int32Array:
    """Slot that each token of one source takes at each target: compact, in token order.

    Parameters
    ----------
    expert_ids : numpy.ndarray
        int32 ``[tokens, top_k]``.
    expert_ranks : numpy.ndarray
        int32 ``[experts]``.
    num_ranks : int
        Ranks of the group.

    Returns
    -------
    numpy.ndarray
        int32 ``[tokens, num_ranks]``, -1 where the token is not sent to that rank.
    """
    taken = [0] * num_ranks
    result = np.full((len(expert_ids), num_ranks), -1, dtype=np.int32)
    for token, row in enumerate(expert_ids.tolist()):
        for target in distinct_targets(row, expert_ranks):
            result[token, target] = taken[target]
            taken[target] += 1
    return result


def counts(expert_ids: Int32Array, expert_ranks: Int32Array, num_ranks: int) -> Int32Array:
    """Rows that one source sends to each target: int32 ``[num_ranks]``."""
    result = np.zeros(num_ranks, dtype=np.int32)
    for row in expert_ids.tolist():
        for target in distinct_targets(row, expert_ranks):
            result[target] += 1
    return result
