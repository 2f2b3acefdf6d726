"""Expert compute: grouped GEMMs over the rank-major receive buffer."""

from nvep.moe.grouped_gemm.base import ExpertShape, GroupedGemm
from nvep.moe.grouped_gemm.plain import PlainGroupedGemm

BACKENDS: dict[str, type[GroupedGemm]] = {PlainGroupedGemm.name: PlainGroupedGemm}

__all__ = ["BACKENDS", "ExpertShape", "GroupedGemm", "PlainGroupedGemm"]
