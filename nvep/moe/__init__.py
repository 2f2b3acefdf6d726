"""MoE layers on top of the exchange."""

from nvep.moe.layer import MoELayer
from nvep.moe.placement import Placement, Replicas, balance
from nvep.moe.routing import ROUTINGS, Router, Routing
from nvep.moe.weights import MoEWeights

__all__ = ["ROUTINGS", "MoELayer", "MoEWeights", "Placement", "Replicas", "Router", "Routing", "balance"]
