"""Expert functions: what a rank does with its arrivals to get partial rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError
from nvep.reference.exchange import BoolArray, PartialArray, ReferenceArrivals, round_to_partial
from nvep.reference.routing import Float32Array

BF16 = np.dtype(ml_dtypes.bfloat16)
ExpertFunction = Callable[[Float32Array, int], Float32Array]


@dataclass(frozen=True)
class ExpertMatrices:
    """Weights of all experts, bf16 (or float32 that holds bf16 values).

    Attributes
    ----------
    gate, up : numpy.ndarray
        ``[experts, intermediate, hidden]``.
    down : numpy.ndarray
        ``[experts, hidden, intermediate]``.
    """

    gate: npt.NDArray[np.generic]
    up: npt.NDArray[np.generic]
    down: npt.NDArray[np.generic]


def expert_scale(expert: int) -> np.float32:
    """Factor of the synthetic expert: ``1 + expert / 1024``, exact in float32 for every legal expert id."""
    return np.float32(1.0) + np.float32(expert) * np.float32(1.0 / 1024.0)


def swiglu_expert(row: Float32Array, expert: int, matrices: ExpertMatrices) -> Float32Array:
    """``down(silu(gate x) * up x)`` of one token, float32 ``[hidden]``: float32 sums, activation rounded to bf16."""
    gate = matrices.gate[expert].astype(np.float32, copy=False) @ row
    up = matrices.up[expert].astype(np.float32, copy=False) @ row
    with np.errstate(over="ignore"):  # exp(-gate) becomes infinite and the quotient zero, as it should
        activation = gate / (np.float32(1.0) + np.exp(-gate)) * up
    down = matrices.down[expert].astype(np.float32, copy=False)
    result: Float32Array = down @ activation.astype(BF16).astype(np.float32)
    return result


def weighted_sum(
    row: Float32Array, expert_ids: Sequence[int], weights: Float32Array, expert: ExpertFunction, *, owned: BoolArray
) -> Float32Array:
    """Sum of ``weight * expert(row, id)`` over the owned ids of one token.

    Parameters
    ----------
    row : numpy.ndarray
        float32 ``[hidden]``.
    expert_ids, weights : sequence
        The token's ``top_k`` ids and float32 weights; ids out of range count as not owned.
    expert : callable
        ``expert(row, id)``: float32 ``[hidden]``.
    owned : numpy.ndarray
        bool ``[experts]``.

    Returns
    -------
    numpy.ndarray
        float32 ``[hidden]``: starts from zero, adds in top-k order, every product and every sum rounded.
    """
    total = np.zeros_like(row)
    for expert_id, weight in zip(expert_ids, weights, strict=True):
        if 0 <= expert_id < len(owned) and owned[expert_id]:
            total = total + weight * expert(row, expert_id)
    return total


def _partial_rows(
    arrivals: ReferenceArrivals, config: ExchangeConfig, expert: ExpertFunction, *, owned: BoolArray
) -> PartialArray:
    assert config.partial_elements is not None
    if config.partial_elements * BF16.itemsize != config.row_bytes:
        raise ArgumentError(
            "partial_elements", config.partial_elements, f"the row's {config.row_bytes // 2} bf16 elements"
        )
    result = np.zeros((*arrivals.valid.shape, config.partial_elements), dtype=partial_dtype(config.partial_format))
    for source, slot in np.argwhere(arrivals.valid).tolist():
        row = arrivals.payloads[0][source, slot].view(BF16).astype(np.float32)
        ids = arrivals.expert_ids[source, slot].tolist()
        total = weighted_sum(row, ids, arrivals.expert_weights[source, slot], expert, owned=owned)
        result[source, slot] = round_to_partial(total, config)
    return result


def scale_experts(arrivals: ReferenceArrivals, *, rank: int, config: ExchangeConfig, num_ranks: int) -> PartialArray:
    """Partial rows of the synthetic expert of `nvep replay`, which multiplies a bf16 row by :func:`expert_scale`.

    Parameters
    ----------
    arrivals : ReferenceArrivals
        What ``rank`` received.
    rank : int
        The target rank whose experts run.
    config : ExchangeConfig
        ``partial_elements`` must be the row's bf16 elements.
    num_ranks : int
        Ranks of the group.

    Returns
    -------
    numpy.ndarray
        Partial dtype, ``[R, max_tokens, partial_elements]``; zeros in slots that hold no token.
    """
    owned = config.expert_ranks(num_ranks) == rank
    return _partial_rows(arrivals, config, lambda row, expert: row * expert_scale(expert), owned=owned)


def moe_experts(
    arrivals: ReferenceArrivals, matrices: ExpertMatrices, *, rank: int, config: ExchangeConfig, num_ranks: int
) -> PartialArray:
    """Partial rows of SwiGLU experts; as :func:`scale_experts`, with the ``matrices`` of all experts."""
    owned = config.expert_ranks(num_ranks) == rank
    return _partial_rows(arrivals, config, lambda row, expert: swiglu_expert(row, expert, matrices), owned=owned)
