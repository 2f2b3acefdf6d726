"""What a `MoELayer` is asked for, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError
from nvep.formats import FORMATS, payload_format
from nvep.group import RankGroup
from nvep.moe.grouped_gemm import ACTIVATIONS, BACKENDS
from nvep.moe.weights import CheckedWeights, MoEWeights

# Fields of ExchangeConfig that a layer's caller may give.
OPTIONS = {
    "chunk_bytes",
    "deadline",
    "lanes",
    "max_blocks",
    "partial_format",
    "placement",
    "protocol",
    "strict_ptx",
    "transport",
}
# Options of the layer itself, and what they are if not given.
CHOICES: dict[str, Any] = {"activation": "swiglu", "row_format": "bf16", "row_scale": None, "shared": None}
_LARGEST_SCALE = 2.0**126


@dataclass(frozen=True)
class LayerPlan:
    """What every rank agrees on before anything is allocated."""

    config: ExchangeConfig
    parts: CheckedWeights
    shared: CheckedWeights | None
    grouped_gemm: str
    activation: str
    row_format: str
    row_scale: float

    @property
    def agreed(self) -> tuple[Any, ...]:
        """Equal on all ranks."""
        shared = () if self.shared is None else (self.shared.gate.shape, self.shared.format)
        parts = (self.parts.gate.shape, self.parts.format, self.parts.biases is not None)
        return *parts, self.grouped_gemm, self.activation, self.row_format, self.row_scale, *shared


def row_scale(row_format: str, scale: object) -> float:
    """The scale of all rows, 1 for formats without one."""
    if not payload_format(row_format).tensor_scale:
        if scale is not None:
            raise ArgumentError("row_scale", scale, f"None: {row_format} has no scale for all rows")
        return 1.0
    number = isinstance(scale, (int, float, np.floating)) and not isinstance(scale, bool)
    if not number or not 1 / _LARGEST_SCALE <= float(scale) <= _LARGEST_SCALE:  # type: ignore[arg-type]
        raise ArgumentError(
            "row_scale", scale, f"a number from 2**-126 to 2**126: {row_format} has a scale for all rows"
        )
    return float(np.float32(scale))  # type: ignore[arg-type]


def check_options(grouped_gemm: str, chosen: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ArgumentError, naming the first option that is not right."""
    for name, value, allowed in (
        ("grouped_gemm", grouped_gemm, (*BACKENDS, "auto")),
        ("activation", chosen["activation"], ACTIVATIONS),
        ("row_format", chosen["row_format"], tuple(FORMATS)),
    ):
        if value not in allowed:
            raise ArgumentError(name, value, ", ".join(allowed))
    for name in options.keys() - OPTIONS:
        raise ArgumentError(name, options[name], f"only the options {', '.join(sorted({*CHOICES, *OPTIONS}))}")


def checked_weights(name: str, weights: object, group: RankGroup) -> CheckedWeights:
    """``weights``, given as argument ``name``, if a layer can compute with them."""
    if not isinstance(weights, MoEWeights):
        raise ArgumentError(name, weights, "MoEWeights")
    return weights.checked(group.device)
