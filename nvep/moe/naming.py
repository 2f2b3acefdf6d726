"""How model families call the tensors of their experts in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nvep.errors import ArgumentError, ShapeError
from nvep.moe.checkpoint import Checkpoint, StoredTensor
from nvep.moe.stored import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    ExpertTensor,
    Fp8PerExpert,
    LazyExperts,
    Mxfp4,
    PerExpert,
    Stacked,
    Transposed,
)


class ExpertParts(NamedTuple):
    """The same thing of each of an expert's three matrices."""

    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor


class StoredWeights(NamedTuple):
    """Everything that a checkpoint holds of a layer's experts.

    Attributes
    ----------
    matrices : ExpertParts
        ``[experts, intermediate, hidden]`` twice, ``[experts, hidden, intermediate]``; mxfp4 packs two elements a byte.
    biases : ExpertParts or None
        ``[experts, intermediate]`` twice, ``[experts, hidden]``.
    scales : ExpertParts or None
        Of matrices that were left quantised.
    """

    matrices: ExpertParts
    biases: ExpertParts | None = None
    scales: ExpertParts | None = None


@dataclass(frozen=True)
class _Family:
    """Tensors of each expert: ``<prefix>layers.<layer>.<module>.<expert>.<matrix>.weight``."""

    module: str
    gate: str
    up: str
    down: str


_FAMILIES = {
    "mixtral": _Family("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen-moe": _Family("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "deepseek": _Family("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "olmoe": _Family("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
NAMINGS = (*_FAMILIES, "gpt-oss", "stacked")
_SCALE_SUFFIX = "_scale_inv"


def stored_weights(checkpoint: Checkpoint, layer: int, naming: str, *, dequantise: bool) -> StoredWeights:
    """Find and check the tensors of a layer's experts; nothing but headers is read.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where they are.
    layer : int
        Number of the layer in the model.
    naming : str
        One of ``NAMINGS``.
    dequantise : bool
        Whether quantised matrices shall read as bf16.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError
        Naming the tensor.
    """
    if naming not in NAMINGS:
        raise ArgumentError("naming", naming, ", ".join(NAMINGS))
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise ArgumentError("layer", layer, "the number of a layer, from 0")
    if naming == "stacked":
        return _stacked(checkpoint, f"layers.{layer}.experts.")
    if naming == "gpt-oss":
        prefix = _prefix(checkpoint, f"layers.{layer}.mlp.experts.", ("gate_up_proj", "gate_up_proj_blocks"))
        quantised = checkpoint.find(f"{prefix}gate_up_proj_blocks") is not None
        return _gpt_oss_mxfp4(checkpoint, prefix, dequantise) if quantised else _gpt_oss_bf16(checkpoint, prefix)
    family = _FAMILIES[naming]
    prefix = _prefix(checkpoint, f"layers.{layer}.{family.module}.", (f"0.{family.gate}.weight",))
    return _per_expert(checkpoint, prefix, family, dequantise)


def _prefix(checkpoint: Checkpoint, middle: str, endings: tuple[str, ...]) -> str:
    """Start of the names, up to and with ``middle``. Models within larger ones have more than ``model.`` before it."""
    usual = f"model.{middle}"
    names = checkpoint.names
    found = {name[: -len(end)] for name in names for end in endings if name.endswith(middle + end)}
    whole = {name for name in found if name == middle or name.endswith(f".{middle}")}
    if usual in whole:
        return usual
    if len(whole) == 1:
        return whole.pop()
    allowed = f"a checkpoint with the tensor {usual}{' or '.join(endings)}"
    if whole:
        allowed = f"a checkpoint with one of these, not several: {', '.join(sorted(whole))}"
    raise ArgumentError("path", str(checkpoint.path), allowed)


def _per_expert(checkpoint: Checkpoint, prefix: str, family: _Family, dequantise: bool) -> StoredWeights:
    experts = _count_experts(checkpoint, prefix)
    matrices = (family.gate, family.up, family.down)
    names = {matrix: [f"{prefix}{e}.{matrix}.weight" for e in range(experts)] for matrix in matrices}
    first = checkpoint.tensor(names[family.gate][0]).require(("BF16", "F8_E4M3"), ("intermediate", "hidden"))
    wide, narrow = first.shape, first.shape[::-1]
    shapes = {family.gate: wide, family.up: wide, family.down: narrow}
    tensors = {
        matrix: [checkpoint.tensor(name).require((first.kind,), shapes[matrix]) for name in names[matrix]]
        for matrix in names
    }
    if first.kind == "BF16":
        return StoredWeights(ExpertParts(*(PerExpert(each) for each in tensors.values())))
    scales = {matrix: [_fp8_scale(checkpoint, tensor) for tensor in each] for matrix, each in tensors.items()}
    if dequantise:
        return StoredWeights(ExpertParts(*(Fp8PerExpert(tensors[matrix], scales[matrix]) for matrix in tensors)))
    factors = ExpertParts(*(PerExpert(each, np.float32) for each in scales.values()))
    return StoredWeights(ExpertParts(*(PerExpert(each) for each in tensors.values())), scales=factors)


def _count_experts(checkpoint: Checkpoint, prefix: str) -> int:
    """Experts that there should be: those with a tensor, or outputs of the router if it has more."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    named = max(int(match[1]) for name in checkpoint.names if (match := pattern.match(name)))
    router = checkpoint.find(prefix.removesuffix("experts.") + "gate.weight")
    return max(named + 1, router.shape[0] if router is not None and router.shape else 0)


def _fp8_scale(checkpoint: Checkpoint, tensor: StoredTensor) -> StoredTensor:
    blocks = tuple(-(-extent // FP8_BLOCK) for extent in tensor.shape)
    return checkpoint.tensor(tensor.name + _SCALE_SUFFIX).require(("F32", "BF16"), blocks)


def _stacked(checkpoint: Checkpoint, prefix: str) -> StoredWeights:
    gate = checkpoint.tensor(f"{prefix}gate").require(("BF16",), ("experts", "intermediate", "hidden"))
    experts, intermediate, hidden = gate.shape
    up = checkpoint.tensor(f"{prefix}up").require(("BF16",), gate.shape)
    down = checkpoint.tensor(f"{prefix}down").require(("BF16",), (experts, hidden, intermediate))
    return StoredWeights(ExpertParts(Stacked(gate), Stacked(up), Stacked(down)))


def _gpt_oss_biases(checkpoint: Checkpoint, prefix: str, experts: int, sizes: tuple[int, int]) -> ExpertParts:
    intermediate, hidden = sizes
    both = checkpoint.tensor(f"{prefix}gate_up_proj_bias").require(("BF16",), (experts, 2 * intermediate))
    down = checkpoint.tensor(f"{prefix}down_proj_bias").require(("BF16",), (experts, hidden))
    return ExpertParts(Stacked(both, first=0, step=2), Stacked(both, first=1, step=2), Stacked(down))


def _gpt_oss_bf16(checkpoint: Checkpoint, prefix: str) -> StoredWeights:
    both = checkpoint.tensor(f"{prefix}gate_up_proj").require(("BF16",), ("experts", "hidden", "2 * intermediate"))
    experts, hidden, width = both.shape
    if width % 2:
        raise ShapeError(both.name, both.shape, "an even last axis: gate and up are interleaved")
    down = checkpoint.tensor(f"{prefix}down_proj").require(("BF16",), (experts, width // 2, hidden))
    matrices = ExpertParts(Transposed(both, first=0, step=2), Transposed(both, first=1, step=2), Transposed(down))
    return StoredWeights(matrices, biases=_gpt_oss_biases(checkpoint, prefix, experts, (width // 2, hidden)))


def _gpt_oss_mxfp4(checkpoint: Checkpoint, prefix: str, dequantise: bool) -> StoredWeights:
    half = MXFP4_BLOCK // 2
    both = checkpoint.tensor(f"{prefix}gate_up_proj_blocks")
    both.require(("U8",), ("experts", "2 * intermediate", "hidden / 32", half))
    experts, width, hidden_blocks, _ = both.shape
    intermediate, hidden = width // 2, hidden_blocks * MXFP4_BLOCK
    if width % (2 * MXFP4_BLOCK):
        raise ShapeError(both.name, both.shape, f"an intermediate size that is a multiple of {MXFP4_BLOCK}")
    down = checkpoint.tensor(f"{prefix}down_proj_blocks")
    down.require(("U8",), (experts, hidden, intermediate // MXFP4_BLOCK, half))
    both_scales = checkpoint.tensor(f"{prefix}gate_up_proj_scales").require(("U8",), both.shape[:3])
    down_scales = checkpoint.tensor(f"{prefix}down_proj_scales").require(("U8",), down.shape[:3])
    blocks = (Stacked(both, first=0, step=2), Stacked(both, first=1, step=2), Stacked(down))
    scales = (Stacked(both_scales, first=0, step=2), Stacked(both_scales, first=1, step=2), Stacked(down_scales))
    biases = _gpt_oss_biases(checkpoint, prefix, experts, (intermediate, hidden))
    if dequantise:
        parts: list[LazyExperts] = [Mxfp4(*pair) for pair in zip(blocks, scales, strict=True)]
        return StoredWeights(ExpertParts(*parts), biases)
    return StoredWeights(ExpertParts(*blocks), biases, ExpertParts(*scales))
