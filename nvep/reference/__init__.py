"""NumPy oracle of routing, exchange and the MoE layer: obvious loops in float32; it never touches a device."""

from nvep.reference.exchange import RankTokens, ReferenceArrivals, combine, combine_at, dispatch, dispatch_to
from nvep.reference.experts import ExpertMatrices, expert_scale, moe_experts, scale_experts
from nvep.reference.moe import moe_layer
from nvep.reference.routing import counts, distinct_targets, route, slots

__all__ = [
    "ExpertMatrices",
    "RankTokens",
    "ReferenceArrivals",
    "combine",
    "combine_at",
    "counts",
    "dispatch",
    "dispatch_to",
    "distinct_targets",
    "expert_scale",
    "moe_experts",
    "moe_layer",
    "route",
    "scale_experts",
    "slots",
]
