"""The demo's decoder in NumPy, row by row; its experts are a callable, so that one process or many can compute them.

Every operation treats a row by itself, with sums in an order that does not depend on the other rows. A text therefore
gets the same bits whichever rows share its batch: alone, beside others, in one chunk or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nvep.cli.demo_model.weights import Float32Array, LayerWeights, ModelShape, ModelWeights
from nvep.config import ExchangeConfig
from nvep.reference.experts import BF16, ExpertMatrices
from nvep.reference.moe import moe_layer

Int32Array = npt.NDArray[np.int32]


class Experts(Protocol):
    """What computes the routed experts of a batch of rows."""

    def __call__(
        self, layer: int, rows: npt.NDArray[np.generic], expert_ids: Int32Array, expert_weights: Float32Array
    ) -> npt.NDArray[np.generic]:
        """Weighted sum of each row's experts.

        Parameters
        ----------
        layer : int
            Index of the layer.
        rows : numpy.ndarray
            bf16 ``[rows, hidden]``, possibly no row.
        expert_ids, expert_weights : numpy.ndarray
            int32 and float32 ``[rows, top_k]``, largest weight first.

        Returns
        -------
        numpy.ndarray
            ``[rows, hidden]``; read before the next call.
        """


class ReferenceExperts:
    """All experts in this process, from :mod:`nvep.reference`."""

    def __init__(self, weights: ModelWeights) -> None:
        shape = weights.shape
        self._config = ExchangeConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            max_tokens=1,
            row_bytes=shape.hidden * BF16.itemsize,
            partial_format="fp32",
        )
        self._matrices = [_as_float32(layer.experts) for layer in weights.layers]

    def __call__(
        self, layer: int, rows: npt.NDArray[np.generic], expert_ids: Int32Array, expert_weights: Float32Array
    ) -> npt.NDArray[np.generic]:
        return moe_layer(
            rows,
            expert_ids,
            expert_weights=expert_weights,
            matrices=self._matrices[layer],
            config=self._config,
        )


def _as_float32(experts: ExpertMatrices) -> ExpertMatrices:
    return ExpertMatrices(*(m.astype(np.float32) for m in (experts.gate, experts.up, experts.down)))


class TextState:
    """Keys and values of one text so far.

    Parameters
    ----------
    shape : ModelShape
        Sizes of the model.
    capacity : int
        Bytes that will be fed at most.
    """

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        size = (shape.layers, shape.heads, capacity, shape.hidden // shape.heads)
        self.keys = np.zeros(size, np.float32)
        self.values = np.zeros(size, np.float32)


@dataclass(frozen=True)
class Rows:
    """Bytes to feed, possibly none; those of one text stand in the order of their positions.

    Attributes
    ----------
    states : sequence of TextState
        The text of each row.
    positions : numpy.ndarray
        int64 ``[rows]``, from 0 in each text; all earlier positions were fed before or stand earlier in these rows.
    values : numpy.ndarray
        uint8 ``[rows]``.
    """

    states: Sequence[TextState]
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint8]


class DecoderModel:
    """Byte-level decoder: attention here, routed experts wherever the caller computes them.

    Parameters
    ----------
    weights : ModelWeights
        From :func:`load_weights`.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        self.shape = weights.shape
        self._unembedding = np.ascontiguousarray(weights.embedding.T)
        half = self.shape.hidden // self.shape.heads // 2
        self._frequencies = self.shape.rope_base ** (-np.arange(half) / half)

    def forward(self, rows: Rows, experts: Experts) -> tuple[Float32Array, float]:
        """Feed rows; ``experts`` is called once a layer, also without rows.

        Parameters
        ----------
        rows : Rows
            What to feed; the keys and values of their states are extended.
        experts : Experts
            Computes the routed experts.

        Returns
        -------
        numpy.ndarray, float
            The residual stream after the last layer, float32 ``[rows, hidden]`` (see :meth:`logits`), and the smallest
            distance, over rows and layers, between the router logits of the last expert chosen and the first one not.
        """
        x = self.weights.embedding[rows.values]
        angles = rows.positions[:, None] * self._frequencies
        rotation = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        margin = np.inf
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(x, layer.attention_norm)
            x = x + _product(self._attend(index, _product(normed, layer.qkv), rotation, rows), layer.attention_out)
            normed = self._norm(x, layer.moe_norm)
            ids, weights, distance = route(_product(normed, layer.router), self.shape.top_k)
            routed = experts(index, normed.astype(BF16), ids, weights).astype(np.float32, copy=False)
            x = x + (_shared_expert(normed, layer) + routed)
            margin = min(margin, distance)
        return x, margin

    def logits(self, x: Float32Array) -> Float32Array:
        """float32 ``[rows, 256]`` of the residual stream that :meth:`forward` returns, or of some of its rows."""
        return _product(self._norm(x, self.weights.final_norm), self._unembedding)

    def _norm(self, x: Float32Array, weight: Float32Array) -> Float32Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Float32Array = x / np.sqrt(mean_square + np.float32(self.shape.norm_epsilon)) * weight
        return normed

    def _attend(
        self, index: int, qkv: Float32Array, rotation: tuple[Float32Array, Float32Array], rows: Rows
    ) -> Float32Array:
        heads, width = self.shape.heads, self.shape.hidden // self.shape.heads
        queries, keys, values = qkv.reshape(-1, 3, heads, width).swapaxes(0, 1)
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        out = np.empty((len(qkv), heads, width), np.float32)
        for row, (state, position) in enumerate(zip(rows.states, rows.positions.tolist(), strict=True)):
            state.keys[index, :, position] = keys[row]
            state.values[index, :, position] = values[row]
            seen = slice(max(0, position + 1 - self.shape.context), position + 1)
            scores = np.einsum("hd,htd->ht", queries[row], state.keys[index, :, seen]) / np.float32(np.sqrt(width))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[row] = np.einsum("ht,htd->hd", weights, state.values[index, :, seen])
        attended: Float32Array = out.reshape(len(qkv), heads * width)
        return attended


def route(logits: Float32Array, top_k: int) -> tuple[Int32Array, Float32Array, float]:
    """Top experts of each row, largest first, ties to the lower id.

    Parameters
    ----------
    logits : numpy.ndarray
        float32 ``[rows, num_experts]``, more than ``top_k`` experts.
    top_k : int
        Experts a row.

    Returns
    -------
    numpy.ndarray, numpy.ndarray, float
        int32 ids and float32 weights ``[rows, top_k]`` (softmax over all experts, renormalised over those chosen), and
        the smallest distance between the logits of the last expert chosen and the first one not.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, : top_k + 1]
    best = np.take_along_axis(logits, order, axis=1)
    margin = float((best[:, top_k - 1] - best[:, top_k]).min(initial=np.inf))
    weights = np.exp(best[:, :top_k] - best[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    return np.ascontiguousarray(order[:, :top_k], dtype=np.int32), weights, margin


def _product(x: Float32Array, matrix: Float32Array) -> Float32Array:
    """``x @ matrix`` with one order of summation for every number of rows, which a BLAS does not promise."""
    result: Float32Array = np.einsum("ri,io->ro", x, matrix)
    return result


def _shared_expert(x: Float32Array, layer: LayerWeights) -> Float32Array:
    gate, up = _product(x, layer.shared_gate), _product(x, layer.shared_up)
    activation = gate / (np.float32(1.0) + np.exp(-gate)) * up
    return _product(activation.astype(np.float32, copy=False), layer.shared_down)


def _rotate(x: Float32Array, rotation: tuple[Float32Array, Float32Array]) -> Float32Array:
    """Rotary positions of ``[rows, heads, width]``: the first half of a head is paired with its second half."""
    cosine, sine = (part[:, None, :] for part in rotation)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cosine - b * sine, a * sine + b * cosine), axis=-1)
