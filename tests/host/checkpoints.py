"""Small checkpoints in the storage of every model family, with the matrices that must come out of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
EXPERTS, INTERMEDIATE, HIDDEN = 6, 160, 288  # neither is a multiple of 128, both are of 32
Tensors = dict[str, np.ndarray]
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]
MODULES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen-moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "deepseek": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def bf16_matrices(seed: int = 0, experts: int = EXPERTS) -> Matrices:
    rng = np.random.default_rng(seed)
    shapes = ((experts, INTERMEDIATE, HIDDEN), (experts, INTERMEDIATE, HIDDEN), (experts, HIDDEN, INTERMEDIATE))
    gate, up, down = (rng.standard_normal(shape).astype(BF16) for shape in shapes)
    return gate, up, down


def per_expert(naming: str, matrices: Matrices, layer: int = 3, prefix: str = "model.") -> Tensors:
    """A tensor for each expert and matrix, and the router's."""
    module, names = MODULES[naming]
    start = f"{prefix}layers.{layer}.{module}."
    tensors = {f"{start}gate.weight": np.zeros((len(matrices[0]), matrices[0].shape[2]), BF16)}
    for name, stack in zip(names, matrices, strict=True):
        for expert, matrix in enumerate(stack):
            tensors[f"{start}experts.{expert}.{name}.weight"] = np.ascontiguousarray(matrix)
    return tensors


def fp8(naming: str, seed: int = 1, scale_dtype: Any = np.float32) -> tuple[Tensors, Matrices]:
    """e4m3 with 128 x 128 block scales, and the bf16 matrices that they mean."""
    rng = np.random.default_rng(seed)
    tensors = per_expert(naming, bf16_matrices(seed))
    meaning: dict[str, np.ndarray] = {}
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors[name].shape
        bits = rng.integers(0, 127, (rows, columns), dtype=np.uint8) | (rng.integers(0, 2, (rows, columns)) << 7)
        tensors[name] = bits.astype(np.uint8).view(E4M3)
        scales = rng.uniform(1e-4, 1e-2, (-(-rows // 128), -(-columns // 128))).astype(scale_dtype)
        tensors[f"{name}_scale_inv"] = scales
        spread = np.repeat(np.repeat(scales.astype(np.float32), 128, 0), 128, 1)[:rows, :columns]
        meaning[name] = (tensors[name].astype(np.float32) * spread).astype(BF16)
    module, names = MODULES[naming]
    stacks = [
        np.stack([meaning[f"model.layers.3.{module}.experts.{e}.{matrix}.weight"] for e in range(EXPERTS)])
        for matrix in names
    ]
    return tensors, (stacks[0], stacks[1], stacks[2])


def _interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows (axis 1) of both in turns."""
    both = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), gate.dtype)
    both[:, ::2], both[:, 1::2] = gate, up
    return both


def gpt_oss_biases(seed: int = 2) -> tuple[Tensors, Matrices]:
    rng = np.random.default_rng(seed)
    gate, up = (rng.standard_normal((EXPERTS, INTERMEDIATE)).astype(BF16) for _ in range(2))
    down = rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16)
    start = "model.layers.3.mlp.experts."
    return {f"{start}gate_up_proj_bias": _interleaved(gate, up), f"{start}down_proj_bias": down}, (gate, up, down)


def gpt_oss_bf16() -> tuple[Tensors, Matrices]:
    gate, up, down = bf16_matrices(5)
    start = "model.layers.3.mlp.experts."
    both = np.ascontiguousarray(_interleaved(gate, up).swapaxes(1, 2))
    tensors = {f"{start}gate_up_proj": both, f"{start}down_proj": np.ascontiguousarray(down.swapaxes(1, 2))}
    return {**tensors, **gpt_oss_biases()[0]}, (gate, up, down)


def gpt_oss_mxfp4(seed: int = 6) -> tuple[Tensors, Matrices]:
    """Random codes and scales, and what they mean by the definition of e2m1 and ue8m0."""
    rng = np.random.default_rng(seed)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def stack(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes = rng.integers(0, 16, (EXPERTS, rows, columns), dtype=np.uint8)
        scales = rng.integers(100, 140, (EXPERTS, rows, columns // 32), dtype=np.uint8)
        meaning = (values[codes] * 2.0 ** (np.repeat(scales, 32, axis=2).astype(float) - 127)).astype(BF16)
        blocks = (codes[:, :, ::2] | codes[:, :, 1::2] << 4).reshape(EXPERTS, rows, columns // 32, 16)
        return blocks, scales, meaning

    gate, up, down = (stack(*size) for size in ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)))
    start = "model.layers.3.mlp.experts."
    tensors = {
        f"{start}gate_up_proj_blocks": _interleaved(gate[0], up[0]),
        f"{start}gate_up_proj_scales": _interleaved(gate[1], up[1]),
        f"{start}down_proj_blocks": down[0],
        f"{start}down_proj_scales": down[1],
    }
    return {**tensors, **gpt_oss_biases()[0]}, (gate[2], up[2], down[2])


def stacked() -> tuple[Tensors, Matrices]:
    matrices = bf16_matrices(7)
    return {f"layers.3.experts.{n}": m for n, m in zip(("gate", "up", "down"), matrices, strict=True)}, matrices


def save(folder: Path, tensors: Tensors) -> Path:
    """One file."""
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return path


def save_sharded(folder: Path, tensors: Tensors, files: int = 3) -> Path:
    """Several files, tensors dealt out in turns, and the index."""
    names = sorted(tensors)
    weight_map = {}
    for number in range(files):
        mine = names[number::files]
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
