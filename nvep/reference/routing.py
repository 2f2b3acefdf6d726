"""Routing: the router's choice of experts, and where each token goes because of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class RoutingRule(Protocol):
    """A routing function; see ``nvep.moe.Routing``."""

    @property
    def top_k(self) -> int: ...
    @property
    def scores(self) -> str: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_score(self) -> str: ...
    @property
    def scale(self) -> float: ...


def exp_nonpositive(x: Float32Array) -> Float32Array:
    """exp(x) for x <= 0, within two units in the last place, from float32 operations that are rounded one by one.

    Zero below -87, where the exact value is less than 2e-38, and for NaN.
    """
    magic, one = np.float32(12582912.0), np.float32(1.0)  # 1.5 * 2**23: adding it rounds to an integer
    inside = x >= np.float32(-87.0)
    x = np.where(inside, x, np.float32(0.0))
    shifted = x * np.float32(1.44269504) + magic
    n = shifted - magic
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p: Float32Array = np.full(x.shape, one / np.float32(5040.0))
    for divisor in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        p = p * r + one / np.float32(divisor)
    scaled: Float32Array = (p.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(np.float32)
    result: Float32Array = np.where(inside, scaled, np.float32(0.0))
    return result


def logistic(x: Float32Array) -> Float32Array:
    """1 / (1 + exp(-x)), with :func:`exp_nonpositive`."""
    one = np.float32(1.0)
    e = exp_nonpositive(np.where(x > 0, -x, x))
    result: Float32Array = np.where(x >= 0, one, e) / (one + e)
    return result


def sum_over_experts(values: Float32Array) -> Float32Array:
    """Row sums in the order of a warp: lane ``e % 32`` adds its experts, then halves are added to halves."""
    tokens, experts = values.shape
    lanes = np.pad(values, ((0, 0), (0, -experts % 32))).reshape(tokens, -1, 32)
    total = np.zeros((tokens, 32), np.float32)
    for part in range(lanes.shape[1]):
        total = total + lanes[:, part]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _clamp(values: Float32Array) -> Float32Array:
    """Infinite becomes the largest float; NaN becomes -infinity, which means that an expert is not available."""
    largest = np.finfo(np.float32).max
    return np.where(np.isnan(values), np.float32(-np.inf), np.minimum(values, largest))


def _numerators(logits: Float32Array, rule: RoutingRule) -> Float32Array:
    """Logistic scores, or exponentials of which a softmax takes shares; zero for experts that are not available."""
    available = logits > -np.inf
    if rule.scores == "sigmoid":
        return np.where(available, logistic(np.where(available, logits, np.float32(0.0))), np.float32(0.0))
    largest = logits.max(axis=1, keepdims=True)
    distance = np.where(available, logits - largest, np.float32(-np.inf))
    return np.where(available, exp_nonpositive(distance), np.float32(0.0))


def _best(values: Float32Array, count: int) -> Int32Array:
    """Positions of the ``count`` largest, the lower position first among equals; -1 where -infinity is left."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.where(np.take_along_axis(values, order, axis=1) > -np.inf, order, -1).astype(np.int32)


def _keep_best_groups(values: Float32Array, rule: RoutingRule) -> Float32Array:
    tokens, experts = values.shape
    grouped = np.sort(values.reshape(tokens, rule.groups, experts // rule.groups), axis=2)[:, :, ::-1]
    scores = grouped[:, :, 0]
    if rule.group_score == "top2" and grouped.shape[2] > 1:
        second = grouped[:, :, 1]
        scores = np.where(second > -np.inf, _clamp(scores + second), scores)
    kept = np.zeros((tokens, rule.groups), bool)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : rule.top_groups]
    np.put_along_axis(kept, chosen, True, axis=1)
    return np.where(np.repeat(kept, experts // rule.groups, axis=1), values, np.float32(-np.inf))


def route(
    logits: npt.NDArray[np.generic], rule: RoutingRule, *, bias: Float32Array | None = None
) -> tuple[Int32Array, Float32Array]:
    """Experts and weights of every token.

    Parameters
    ----------
    logits : numpy.ndarray
        float32 or bf16 ``[tokens, experts]``.
    rule : RoutingRule
        The function, for example a ``nvep.moe.Routing``.
    bias : numpy.ndarray, optional
        float32 ``[experts]``, added to scores where experts are chosen.

    Returns
    -------
    ids : numpy.ndarray
        int32 ``[tokens, top_k]``, best first, the lower id first among equals; -1 where no expert is available.
    weights : numpy.ndarray
        float32 ``[tokens, top_k]``: scores without bias, divided by their sum if the rule says so, times its scale.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        clean = _clamp(logits.astype(np.float32))
        numerators = _numerators(clean, rule)
        softmax = rule.scores == "softmax"
        scores = numerators / sum_over_experts(numerators)[:, None] if softmax else numerators
        values = clean
        if bias is not None:
            values = _clamp(scores + bias)
        elif rule.groups > 1 and rule.group_score == "top2":
            values = scores
        values = np.where(clean > -np.inf, values, np.float32(-np.inf))
        if rule.groups > 1:
            values = _keep_best_groups(values, rule)
        ids = _best(values, rule.top_k)
        parts = numerators if rule.renormalise else scores
        weights = np.where(ids >= 0, np.take_along_axis(parts, np.maximum(ids, 0), axis=1), np.float32(0.0))
    if rule.renormalise:
        total = np.zeros(len(weights), np.float32)
        for k in range(rule.top_k):
            total = total + weights[:, k]
        weights = weights / (total + np.float32(1e-20))[:, None]
    return ids, weights * np.float32(rule.scale)


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
