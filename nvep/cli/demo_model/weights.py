"""Weights of the demo's model: read from the package, checked, turned into the arrays that the model uses."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.errors import ArgumentError, ShapeError
from nvep.reference.experts import ExpertMatrices

Float32Array = npt.NDArray[np.float32]
WEIGHTS_FILE = Path(__file__).with_name("weights.safetensors")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the decoder; the file of weights carries them. All counts, except the last two."""

    layers: int
    hidden: int
    heads: int
    num_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int
    context: int
    rope_base: float
    norm_epsilon: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are float32 (bf16 values) ``[in, out]``; the experts stay as stored, ``[expert, out, in]``.

    Attributes
    ----------
    attention_norm, moe_norm : numpy.ndarray
        ``[hidden]``.
    qkv, attention_out, router : numpy.ndarray
        ``[hidden, 3 * hidden]``, ``[hidden, hidden]``, ``[hidden, num_experts]``.
    shared_gate, shared_up, shared_down : numpy.ndarray
        The expert that every token uses: ``[hidden, shared_hidden]`` twice, ``[shared_hidden, hidden]``.
    experts : ExpertMatrices
        bf16.
    """

    attention_norm: Float32Array
    moe_norm: Float32Array
    qkv: Float32Array
    attention_out: Float32Array
    router: Float32Array
    shared_gate: Float32Array
    shared_up: Float32Array
    shared_down: Float32Array
    experts: ExpertMatrices


@dataclass(frozen=True)
class ModelWeights:
    """The whole model.

    Attributes
    ----------
    shape : ModelShape
        Sizes.
    embedding : numpy.ndarray
        float32 ``[256, hidden]``; its transpose gives the logits.
    final_norm : numpy.ndarray
        float32 ``[hidden]``.
    layers : tuple of LayerWeights
        From the input to the output.
    path : Path
        The file that all of this came from.
    """

    shape: ModelShape
    embedding: Float32Array
    final_norm: Float32Array
    layers: tuple[LayerWeights, ...]
    path: Path


def load_weights(path: Path = WEIGHTS_FILE) -> ModelWeights:
    """Read a file written by ``tools/train_demo_model.py``.

    Parameters
    ----------
    path : Path
        A safetensors file; default: the one in the package.

    Raises
    ------
    ArgumentError
        Not such a file: no sizes in it, or a tensor is missing.
    ShapeError
        A tensor does not have the shape that the sizes ask for.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = _Tensors(str(path), {name: file.get_tensor(name) for name in sorted(file.keys())})
            shape = _read_shape(path, file.metadata())
    except SafetensorError as error:
        raise ArgumentError("path", str(path), f"a safetensors file ({error})") from error
    return ModelWeights(
        shape,
        tensors.take("embedding", 256, shape.hidden).astype(np.float32),
        tensors.take("final_norm", shape.hidden).astype(np.float32),
        tuple(_layer(tensors, f"layers.{i}.", shape) for i in range(shape.layers)),
        Path(path),
    )


def _read_shape(path: Path, metadata: dict[str, str] | None) -> ModelShape:
    sizes = json.loads((metadata or {}).get("shape", "{}"))
    expected = sorted(f.name for f in fields(ModelShape))
    if sorted(sizes) != expected:
        raise ArgumentError("path", str(path), f"a file whose metadata names the sizes {', '.join(expected)}")
    return ModelShape(**sizes)


@dataclass(frozen=True)
class _Tensors:
    path: str
    by_name: dict[str, npt.NDArray[Any]]

    def take(self, name: str, *shape: int) -> npt.NDArray[Any]:
        array = self.by_name.get(name)
        if array is None:
            raise ArgumentError("path", self.path, f"a file with the tensor {name}")
        if array.shape != shape:
            raise ShapeError(name, array.shape, f"the shape {shape}")
        return array

    def matrix(self, name: str, out_width: int, in_width: int) -> Float32Array:
        """Stored ``[out, in]``; returned ``[in, out]``, so that a product runs along contiguous outputs."""
        return np.ascontiguousarray(self.take(name, out_width, in_width).astype(np.float32).T)


def _layer(tensors: _Tensors, prefix: str, shape: ModelShape) -> LayerWeights:
    d, e, f, s = shape.hidden, shape.num_experts, shape.expert_hidden, shape.shared_hidden
    return LayerWeights(
        attention_norm=tensors.take(prefix + "attention_norm", d).astype(np.float32),
        moe_norm=tensors.take(prefix + "moe_norm", d).astype(np.float32),
        qkv=tensors.matrix(prefix + "qkv", 3 * d, d),
        attention_out=tensors.matrix(prefix + "attention_out", d, d),
        router=tensors.matrix(prefix + "router", e, d),
        shared_gate=tensors.matrix(prefix + "shared.gate", s, d),
        shared_up=tensors.matrix(prefix + "shared.up", s, d),
        shared_down=tensors.matrix(prefix + "shared.down", d, s),
        experts=ExpertMatrices(
            gate=tensors.take(prefix + "experts.gate", e, f, d),
            up=tensors.take(prefix + "experts.up", e, f, d),
            down=tensors.take(prefix + "experts.down", e, d, f),
        ),
    )
