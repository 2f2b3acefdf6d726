"""Where an MoE layer's output must lie, derived from its number formats alone.

Every intermediate value is a pair (centre, radius) in float64. Rounding errors enter as bounds, never as estimates:
a float32 sum of n terms, in whatever order and with or without fused multiply-adds, is off by at most gamma(n) times
the sum of the magnitudes, and rounding is monotonic, so both ends of an interval are rounded. The interval therefore
holds whatever a correct implementation may give, and little else: its width is that of one rounding of the partial
format wherever no bf16 activation sits on the border between two values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvep.config import ExchangeConfig, partial_dtype
from nvep.reference import ExpertMatrices
from nvep.reference.routing import distinct_targets, sanitised_ids

Float64Array = npt.NDArray[np.float64]
_BF16 = np.dtype(ml_dtypes.bfloat16)
_UNIT = 2.0**-24  # unit roundoff of float32
_EXPONENTIAL = 2  # units in the last place that expf may be off: CUDA's bound, the larger of the two devices
_ACTIVATION = 2 * (
    _EXPONENTIAL + 4
)  # ... plus 1 + e, the quotient and the product, and as much again for float32 sizes
_SLOPE = 1.13  # the largest slope of x / (1 + exp(-x)) is 1.0998, that of gelu 1.129
_TINY = 2.0**-120  # far below every value here, far above where float32 loses its relative precision


@dataclass(frozen=True)
class Interval:
    """``centre - radius`` to ``centre + radius``, element by element."""

    centre: Float64Array
    radius: Float64Array

    @property
    def magnitude(self) -> Float64Array:
        """Largest absolute value inside."""
        return np.abs(self.centre) + self.radius

    def rounded(self, dtype: np.dtype[Any]) -> Interval:
        """What rounding any value inside to ``dtype`` may give."""
        low, high = (_round(self.centre + sign * self.radius, dtype) for sign in (-1.0, 1.0))
        return Interval((low + high) / 2, (high - low) / 2)


def _round(values: Float64Array, dtype: np.dtype[Any]) -> Float64Array:
    # float32 first, as both devices do: double rounding is theirs, not an error of this bound.
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype).astype(np.float64)


def gamma(terms: int) -> float:
    """Relative error of a float32 sum of ``terms`` rounded products; tensor cores cut off, but once for sixteen."""
    return terms * _UNIT / (1.0 - terms * _UNIT)


def _product(matrix: Float64Array, vector: Interval) -> Interval:
    terms = matrix.shape[1]
    sizes = np.abs(matrix) @ vector.magnitude
    return Interval(matrix @ vector.centre, np.abs(matrix) @ vector.radius + gamma(terms) * sizes)


def _joined(gate: Float64Array, up: Float64Array, activation: str) -> tuple[Float64Array, Float64Array]:
    """The two factors that an activation multiplies."""
    if activation == "plain":
        return gate, up
    steepness = gate
    if activation == "geglu":
        steepness = np.sqrt(8.0 / np.pi) * (gate + 0.044715 * gate**3)
    elif activation == "swiglu_clamped":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1.0
        steepness = 1.702 * gate
    with np.errstate(over="ignore"):
        return gate / (1.0 + np.exp(-steepness)), up


def _activation(gate: Interval, up: Interval, activation: str = "swiglu") -> Interval:
    left, right = _joined(gate.centre, up.centre, activation)
    slack = _SLOPE * gate.radius
    # The steepness of the other activations is a float32 sum of rounded products: six roundings, and the logistic
    # function changes by at most 0.224 of its argument's relative error.
    slack = slack + (0.0 if activation == "swiglu" else 6 * _UNIT * np.abs(gate.centre))
    value = left * right
    radius = np.abs(left) * up.radius + np.abs(right) * slack + slack * up.radius
    return Interval(value, radius + _ACTIVATION * _UNIT * (np.abs(value) + radius) + _TINY).rounded(_BF16)


@dataclass(frozen=True)
class WideExpert:
    """An expert in float64; biases are zero where there are none."""

    gate: Float64Array
    up: Float64Array
    down: Float64Array
    biases: tuple[Float64Array, Float64Array, Float64Array] | None = None


def expert_bounds(row: Interval, expert: WideExpert, activation: str = "swiglu", *, rounds: bool = False) -> Interval:
    """One expert's output for one row; with ``rounds``, projections are rounded to bf16."""
    gate, up = _projected(expert.gate, row, rounds), _projected(expert.up, row, rounds)
    if expert.biases is not None:
        gate, up = _biased(gate, expert.biases[0]), _biased(up, expert.biases[1])
    down = _projected(expert.down, _activation(gate, up, activation), rounds)
    return down if expert.biases is None else _biased(down, expert.biases[2])


def _projected(matrix: Float64Array, vector: Interval, rounds: bool) -> Interval:
    result = _product(matrix, vector)
    return result.rounded(_BF16) if rounds else result


def _biased(value: Interval, bias: Float64Array) -> Interval:
    return Interval(value.centre + bias, value.radius + gamma(1) * (value.magnitude + np.abs(bias)))


def _expert(row: Float64Array, expert: int, matrices: ExpertMatrices) -> Interval:
    gate, up, down = (m[expert].astype(np.float64) for m in (matrices.gate, matrices.up, matrices.down))
    return expert_bounds(Interval(row, np.zeros_like(row)), WideExpert(gate, up, down))


def weighted_bounds(terms: list[tuple[float, Interval]]) -> Interval:
    """A float32 sum of weighted values."""
    centre: Float64Array = np.sum([weight * value.centre for weight, value in terms], axis=0)
    radius: Float64Array = np.sum([abs(weight) * value.radius for weight, value in terms], axis=0)
    sizes: Float64Array = np.sum([abs(weight) * value.magnitude for weight, value in terms], axis=0)
    return Interval(centre, radius + gamma(len(terms) + 1) * sizes + _TINY)


def partial_bounds(
    row: npt.NDArray[np.generic],
    choice: list[tuple[int, float]],
    *,
    matrices: ExpertMatrices,
    config: ExchangeConfig,
) -> Interval:
    """A target's partial row for one token: ``choice`` lists its (expert, weight) there, at least one."""
    wide = row.astype(np.float64)
    terms = [(weight, _expert(wide, expert, matrices)) for expert, weight in choice]
    return weighted_bounds(terms).rounded(partial_dtype(config.partial_format))


def output_bounds(
    rows: npt.NDArray[np.generic],
    expert_ids: npt.NDArray[np.int32],
    expert_weights: npt.NDArray[np.float32],
    *,
    matrices: ExpertMatrices,
    config: ExchangeConfig,
    num_ranks: int,
) -> Interval:
    """The layer's output for ``rows`` (bf16 ``[tokens, hidden]``): ``[tokens, hidden]``, exactly zero for no expert."""
    expert_ranks = config.expert_ranks(num_ranks)
    dtype = partial_dtype(config.partial_format)
    result = Interval(np.zeros(rows.shape), np.zeros(rows.shape))
    for token, given in enumerate(expert_ids.tolist()):
        ids = sanitised_ids(given, config.num_experts, config.invalid_expert)
        weights = expert_weights[token].tolist()
        parts = []
        for target in distinct_targets(ids, expert_ranks):
            choice = [(e, w) for e, w in zip(ids, weights, strict=True) if e >= 0 and expert_ranks[e] == target]
            parts.append((1.0, partial_bounds(rows[token], choice, matrices=matrices, config=config)))
        if parts:
            total = weighted_bounds(parts).rounded(dtype)
            result.centre[token], result.radius[token] = total.centre, total.radius
    return result


def require_inside(got: npt.NDArray[np.generic], bounds: Interval, where: str) -> None:
    """Raise AssertionError naming the element that is farthest outside its interval; NaN is outside."""
    values = got.astype(np.float64)
    assert values.shape == bounds.centre.shape, f"{where}: shape {values.shape}, expected {bounds.centre.shape}"
    # Halving the sum of two ends may round in float64: 2**-50 of slack, a billionth of any format's step.
    allowed = bounds.radius + 2.0**-50 * bounds.magnitude
    distance = np.abs(values - bounds.centre)
    outside = ~(distance <= allowed)
    if not outside.any():
        return
    worst = np.unravel_index(int(np.argmax(np.where(np.isnan(distance), np.inf, distance - allowed))), values.shape)
    at = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{where}: {int(outside.sum())} of {values.size} elements outside, worst at {at}: {values[at]!r}, "
        f"allowed {bounds.centre[at]!r} +- {allowed[at]:.3g}"
    )
