"""Expert compute: grouped GEMMs over the rank-major receive buffer."""

from nvep.moe.grouped_gemm.base import ACTIVATIONS, ExpertShape, GroupedGemm
from nvep.moe.grouped_gemm.choice import BACKENDS, choose

__all__ = ["ACTIVATIONS", "BACKENDS", "ExpertShape", "GroupedGemm", "choose"]
