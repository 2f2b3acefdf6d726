"""MoE layers on top of the exchange."""

from nvep.moe.layer import MoELayer
from nvep.moe.weights import MoEWeights

__all__ = ["MoELayer", "MoEWeights"]
