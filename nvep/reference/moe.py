"""A whole MoE layer in one process, with the sums in the order that the exchange takes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvep.config import ExchangeConfig, partial_dtype
from nvep.reference.exchange import PartialArray, round_to_partial
from nvep.reference.experts import BF16, ExpertMatrices, swiglu_expert, weighted_sum
from nvep.reference.routing import Float32Array, Int32Array, distinct_targets, sanitised_ids


def moe_layer(
    rows: npt.NDArray[np.generic],
    expert_ids: Int32Array,
    *,
    expert_weights: Float32Array,
    matrices: ExpertMatrices,
    config: ExchangeConfig,
    num_ranks: int = 1,
) -> PartialArray:
    """Routed experts of any number of tokens, as ``num_ranks`` ranks would compute them.

    Parameters
    ----------
    rows : numpy.ndarray
        bf16 ``[tokens, hidden]``.
    expert_ids : numpy.ndarray
        int32 ``[tokens, top_k]``; ids out of range choose nobody.
    expert_weights : numpy.ndarray
        float32 ``[tokens, top_k]``.
    matrices : ExpertMatrices
        Weights of all experts.
    config : ExchangeConfig
        Placement and partial format (``max_tokens`` does not matter here).
    num_ranks : int
        Ranks whose partial rows are rounded and then summed; it changes the last bits of the result.

    Returns
    -------
    numpy.ndarray
        Partial dtype, ``[tokens, hidden]``; zeros for a token that chose nobody.
    """
    expert_ranks = config.expert_ranks(num_ranks)
    result = np.zeros(rows.shape, dtype=partial_dtype(config.partial_format))
    for token, given in enumerate(expert_ids.tolist()):
        ids = sanitised_ids(given, config.num_experts, config.invalid_expert)
        row = rows[token].astype(BF16).astype(np.float32)
        total = None
        for target in distinct_targets(ids, expert_ranks):
            partial = weighted_sum(
                row,
                ids,
                expert_weights[token],
                lambda x, expert: swiglu_expert(x, expert, matrices),
                owned=expert_ranks == target,
            )
            rounded = round_to_partial(partial, config).astype(np.float32)
            total = rounded if total is None else total + rounded
        if total is not None:
            result[token] = round_to_partial(total, config)
    return result
