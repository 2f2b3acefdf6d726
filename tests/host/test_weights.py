"""Expert weights from checkpoints: every family's storage, streaming, and errors that name the tensor."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nvep.errors import ArgumentError, DTypeError, ShapeError
from nvep.moe import MoEWeights, Placement
from nvep.moe.naming import ExpertParts
from nvep.moe.weights import LocalExperts
from nvep.runtime.emulated import EmulatedDevice
from tests.host import checkpoints as make

BF16 = make.BF16


def _bf16(naming: str) -> tuple[make.Tensors, make.Matrices]:
    matrices = make.bf16_matrices()
    return make.per_expert(naming, matrices), matrices


CASES: dict[str, tuple[str, Callable[[], tuple[make.Tensors, make.Matrices]]]] = {
    **{name: (name, partial(_bf16, name)) for name in make.MODULES},
    "deepseek fp8": ("deepseek", partial(make.fp8, "deepseek")),
    "qwen-moe fp8": ("qwen-moe", partial(make.fp8, "qwen-moe", scale_dtype=BF16)),
    "gpt-oss bf16": ("gpt-oss", make.gpt_oss_bf16),
    "gpt-oss mxfp4": ("gpt-oss", make.gpt_oss_mxfp4),
    "stacked": ("stacked", make.stacked),
}


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def same_matrices(weights: MoEWeights, expected: make.Matrices) -> None:
    for name, stack in zip(("gate", "up", "down"), expected, strict=True):
        got = getattr(weights, name)
        assert got.shape == stack.shape
        assert got.dtype == BF16
        assert (bits(got) == bits(stack)).all(), name
        last = got[len(got) - 1]
        assert last.flags.c_contiguous
        assert (bits(last) == bits(stack[-1])).all(), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_familys_experts_come_out(case: str, sharded: bool, tmp_path: Path) -> None:
    naming, build = CASES[case]
    tensors, expected = build()
    tensors["model.embed_tokens.weight"] = np.zeros((4, 4), np.float16)
    path = (make.save_sharded if sharded else make.save)(tmp_path, tensors)
    weights = MoEWeights.from_safetensors(path, layer=3, naming=naming)
    same_matrices(weights, expected)
    assert weights.scales is None
    if naming != "gpt-oss":
        assert weights.biases is None
        return
    assert weights.biases is not None
    for got, bias in zip(weights.biases, make.gpt_oss_biases()[1], strict=True):
        assert got.shape == bias.shape
        assert (bits(got) == bits(bias)).all()


def test_quantised_experts_can_stay_as_they_are(tmp_path: Path) -> None:
    tensors, _ = make.fp8("deepseek")
    weights = MoEWeights.from_safetensors(make.save(tmp_path, tensors), layer=3, naming="deepseek", dequantise=False)
    name = "model.layers.3.mlp.experts.4.down_proj.weight"
    assert weights.scales is not None
    assert weights.down.dtype == make.E4M3
    np.testing.assert_array_equal(weights.down[4].view(np.uint8), tensors[name].view(np.uint8))
    np.testing.assert_array_equal(weights.scales.down[4], tensors[f"{name}_scale_inv"])
    assert weights.scales.gate.shape == (6, 2, 3)

    tensors, _ = make.fp8("qwen-moe", scale_dtype=BF16)
    weights = MoEWeights.from_safetensors(make.save(tmp_path, tensors), layer=3, naming="qwen-moe", dequantise=False)
    assert weights.scales is not None
    assert weights.scales.up.dtype == weights.scales.up[5].dtype == np.float32

    tensors, _ = make.gpt_oss_mxfp4()
    path = tmp_path / "other.safetensors"
    save_file(tensors, path)
    weights = MoEWeights.from_safetensors(path, layer=3, naming="gpt-oss", dequantise=False)
    start = "model.layers.3.mlp.experts.gate_up_proj_"
    assert weights.scales is not None
    np.testing.assert_array_equal(weights.up[2], tensors[f"{start}blocks"][2, 1::2])
    np.testing.assert_array_equal(weights.scales.up[2], tensors[f"{start}scales"][2, 1::2])


def test_the_index_itself_and_a_folder_without_one_are_accepted(tmp_path: Path) -> None:
    matrices = make.bf16_matrices()
    folder = make.save_sharded(tmp_path, make.per_expert("olmoe", matrices))
    index = folder / "model.safetensors.index.json"
    same_matrices(MoEWeights.from_safetensors(str(index), layer=3, naming="olmoe"), matrices)
    index.unlink()
    same_matrices(MoEWeights.from_safetensors(folder, layer=3, naming="olmoe"), matrices)


def test_a_model_within_a_larger_one_is_found(tmp_path: Path) -> None:
    matrices = make.bf16_matrices()
    tensors = make.per_expert("qwen-moe", matrices, prefix="model.language_model.")
    same_matrices(MoEWeights.from_safetensors(make.save(tmp_path, tensors), layer=3, naming="qwen-moe"), matrices)
    tensors |= make.per_expert("qwen-moe", matrices, prefix="draft.")
    with pytest.raises(ArgumentError, match=r"not several: draft\.layers\.3\.mlp\.experts\., model\.language_model"):
        MoEWeights.from_safetensors(make.save(tmp_path, tensors), layer=3, naming="qwen-moe")
    tensors |= make.per_expert("qwen-moe", matrices)
    same_matrices(MoEWeights.from_safetensors(make.save(tmp_path, tensors), layer=3, naming="qwen-moe"), matrices)


def test_other_layers_are_not_mixed_up(tmp_path: Path) -> None:
    third, thirteenth = make.bf16_matrices(1), make.bf16_matrices(2)
    tensors = make.per_expert("mixtral", third, 3) | make.per_expert("mixtral", thirteenth, 13)
    path = make.save(tmp_path, tensors)
    same_matrices(MoEWeights.from_safetensors(path, layer=3, naming="mixtral"), third)
    same_matrices(MoEWeights.from_safetensors(path, layer=13, naming="mixtral"), thirteenth)
    with pytest.raises(ArgumentError, match=r"the tensor model\.layers\.4\.block_sparse_moe\.experts\.0\.w1\.weight"):
        MoEWeights.from_safetensors(path, layer=4, naming="mixtral")


# --- errors -----------------------------------------------------------------------------------------------------------

START = "model.layers.3.mlp.experts."


def _removed(name: str) -> Callable[[make.Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _replaced(name: str, array: np.ndarray) -> Callable[[make.Tensors], object]:
    return lambda tensors: tensors.update({name: array})


WRONG: list[tuple[str, Callable[[make.Tensors], object], type[Exception], str]] = [
    ("deepseek", _removed(f"{START}2.up_proj.weight"), ArgumentError, r"the tensor .*experts\.2\.up_proj\.weight"),
    ("deepseek", _removed(f"{START}5.down_proj.weight"), ArgumentError, r"the tensor .*experts\.5\.down_proj\.weight"),
    (
        "deepseek",
        lambda t: [t.pop(f"{START}5.{m}_proj.weight") for m in ("gate", "up", "down")],  # the router tells of a sixth
        ArgumentError,
        r"the tensor .*experts\.5\.gate_proj\.weight",
    ),
    (
        "deepseek",
        _replaced(f"{START}1.gate_proj.weight", np.zeros((160, 280), BF16)),
        ShapeError,
        r"experts\.1\.gate_proj\.weight: got \(160, 280\); allowed: \(160, 288\)",
    ),
    ("deepseek", _replaced(f"{START}0.gate_proj.weight", np.zeros(160, BF16)), ShapeError, r"\(intermediate, hidden\)"),
    (
        "deepseek",
        _replaced(f"{START}4.down_proj.weight", np.zeros((288, 160), np.float32)),
        DTypeError,
        r"experts\.4\.down_proj\.weight: got 'F32'; allowed: BF16",
    ),
    (
        "deepseek",
        _replaced(f"{START}0.gate_proj.weight", np.zeros((160, 288), np.float16)),
        DTypeError,
        r"got 'F16'; allowed: BF16 or F8_E4M3",
    ),
    ("deepseek", _replaced(f"{START}0.gate_proj.weight", np.zeros((160, 288), np.int8)), DTypeError, r"got 'I8'"),
    ("deepseek fp8", _removed(f"{START}3.up_proj.weight_scale_inv"), ArgumentError, r"up_proj\.weight_scale_inv"),
    (
        "deepseek fp8",
        _replaced(f"{START}3.up_proj.weight_scale_inv", np.zeros((160, 1), np.float32)),
        ShapeError,
        r"weight_scale_inv: got \(160, 1\); allowed: \(2, 3\)",
    ),
    (
        "deepseek fp8",
        _replaced(f"{START}3.up_proj.weight", np.zeros((160, 288), BF16)),
        DTypeError,
        r"got 'BF16'; allowed: F8_E4M3",
    ),
    ("gpt-oss mxfp4", _removed(f"{START}gate_up_proj_scales"), ArgumentError, r"gate_up_proj_scales"),
    ("gpt-oss mxfp4", _removed(f"{START}down_proj_bias"), ArgumentError, r"down_proj_bias"),
    (
        "gpt-oss mxfp4",
        _replaced(f"{START}gate_up_proj_blocks", np.zeros((6, 328, 9, 16), np.uint8)),
        ShapeError,
        r"an intermediate size that is a multiple of 32",
    ),
    (
        "gpt-oss mxfp4",
        _replaced(f"{START}gate_up_proj_blocks", np.zeros((6, 320, 9, 32), np.uint8)),
        ShapeError,
        r"allowed: \(experts, 2 \* intermediate, hidden / 32, 16\)",
    ),
    ("gpt-oss mxfp4", _replaced(f"{START}down_proj_scales", np.zeros((6, 288, 5), BF16)), DTypeError, r"allowed: U8"),
    ("gpt-oss bf16", _replaced(f"{START}gate_up_proj", np.zeros((6, 288, 321), BF16)), ShapeError, r"interleaved"),
    ("gpt-oss bf16", _removed(f"{START}down_proj"), ArgumentError, r"the tensor .*experts\.down_proj"),
    ("stacked", _replaced("layers.3.experts.up", np.zeros((5, 160, 288), BF16)), ShapeError, r"experts\.up: got \(5,"),
    ("stacked", _removed("layers.3.experts.gate"), ArgumentError, r"the tensor layers\.3\.experts\.gate"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_named(number: int, tmp_path: Path) -> None:
    case, change, error, text = WRONG[number]
    naming, build = CASES[case]
    tensors, _ = build()
    change(tensors)
    path = make.save(tmp_path, tensors)
    with pytest.raises(error, match=text):
        MoEWeights.from_safetensors(path, layer=3, naming=naming)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"naming": "llama"}, r"naming: got 'llama'; allowed: mixtral, qwen-moe, deepseek, olmoe, gpt-oss, stacked"),
        ({"layer": -1}, r"layer: got -1"),
        ({"layer": True}, r"layer: got True"),
        ({"naming": "mixtral"}, r"a checkpoint with the tensor model\.layers\.3\.block_sparse_moe"),
        ({"naming": "gpt-oss"}, r"the tensor model\.layers\.3\.mlp\.experts\.gate_up_proj or gate_up_proj_blocks"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = make.save(tmp_path, make.per_expert("olmoe", make.bf16_matrices()))
    with pytest.raises(ArgumentError, match=text):
        MoEWeights.from_safetensors(path, **{"layer": 3, "naming": "olmoe", **arguments})


def test_files_that_are_not_there_or_not_intact_are_named(tmp_path: Path) -> None:
    def load(path: Any) -> MoEWeights:
        return MoEWeights.from_safetensors(path, layer=3, naming="stacked")

    with pytest.raises(ArgumentError, match=r"path: got '.*nowhere'; allowed: a file or folder that exists"):
        load(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match=r"path: got None"):
        load(None)
    with pytest.raises(ArgumentError, match=r"a folder with model.safetensors.index.json or .safetensors files"):
        load(tmp_path)
    path = make.save(tmp_path, make.stacked()[0])
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    broken = {
        "empty": b"",
        "long header": (1 << 60).to_bytes(8, "little") + whole[8:],
        "no header": whole[:8] + b"x" * length + whole[8 + length :],
        "cut off": whole[:-100],
        "other shape": whole.replace(b"288", b"287", 1),
        "outside": whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
    }
    for content in broken.values():
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"an intact safetensors file"):
            load(path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ArgumentError, match=r"an index with a weight_map"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(make.stacked()[0], "model.safetensors")})
    )
    save_file({"layers.3.experts.up": np.zeros(3, BF16)}, path)
    with pytest.raises(ArgumentError, match=r"a file with the tensor layers\.3\.experts\.gate, as the index says"):
        load(tmp_path)


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = make.save(tmp_path, make.stacked()[0])
    weights = MoEWeights.from_safetensors(path, layer=3, naming="stacked")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ArgumentError, match=r"a file that holds all of layers\.3\.experts\.gate"):
        weights.gate[5]


# --- onto a device ----------------------------------------------------------------------------------------------------


def on_device(experts: LocalExperts, device: EmulatedDevice, shape: tuple[int, ...], name: str) -> np.ndarray:
    result = np.empty(shape, BF16)
    device.copy_out(result, getattr(experts, name).address, device.default_stream)
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_own_experts_only(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naming, build = CASES[case]
    tensors, expected = build()
    weights = MoEWeights.from_safetensors(make.save_sharded(tmp_path, tensors), layer=3, naming=naming)
    index = np.array([-1, 0, -1, -1, 1, -1], np.int32)
    device = EmulatedDevice()
    try:
        plain = MoEWeights(weights.gate, weights.up, weights.down)
        experts = LocalExperts(device, plain.checked(device), index)
        for name, stack in zip(("gate", "up", "down"), expected, strict=True):
            got = on_device(experts, device, (2, *stack.shape[1:]), name)
            assert (bits(got) == bits(stack[[1, 4]])).all(), name
        experts.close()
    finally:
        device.close()


@pytest.mark.parametrize("case", ["mixtral", "deepseek fp8", "gpt-oss bf16", "gpt-oss mxfp4"])
def test_loading_takes_less_host_memory_than_one_expert(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's memory apart: nothing of an expert is kept on the host."""
    monkeypatch.setattr(make, "INTERMEDIATE", 1024)
    monkeypatch.setattr(make, "HIDDEN", 1536)
    naming, build = CASES[case]
    path = make.save_sharded(tmp_path, build()[0])
    device = EmulatedDevice()
    index = np.arange(6, dtype=np.int32)
    one_expert = 3 * 1024 * 1536 * 2
    try:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        weights = MoEWeights.from_safetensors(path, layer=3, naming=naming)
        plain = MoEWeights(weights.gate, weights.up, weights.down)
        experts = LocalExperts(device, plain.checked(device), index)
        kept, peak = (value - before for value in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        experts.close()
    finally:
        tracemalloc.stop()
        device.close()
    assert peak > one_expert / 8  # something was read through memory that is counted
    assert peak < one_expert
    assert kept < one_expert / 8


def test_replicas_share_what_they_copy(tmp_path: Path) -> None:
    matrices = make.bf16_matrices()
    path = make.save(tmp_path, make.per_expert("mixtral", matrices))
    placement = Placement((0, 3, 1, 2, 3, 4, 5, 0), (0, 0, 0, 0, 1, 1, 1, 1))
    copies = list(placement.logical)
    device = EmulatedDevice()
    for weights in (MoEWeights.from_safetensors(path, layer=3, naming="mixtral"), MoEWeights(*matrices)):
        physical = weights.replicated(placement)
        same_matrices(physical, tuple(stack[copies] for stack in matrices))  # type: ignore[arg-type]
        gate, up, down = physical.checked(device)[:3]
        assert gate.shape == up.shape == (8, 160, 288)
        assert (bits(down[7]) == bits(matrices[2][0])).all()
    biased = MoEWeights(*matrices, biases=ExpertParts(*(np.arange(6) for _ in range(3)))).replicated(placement)
    assert biased.biases is not None
    assert [int(biased.biases.up[p]) for p in range(8)] == copies
    with pytest.raises(ArgumentError, match=r"a Placement of 6 experts"):
        MoEWeights(*matrices).replicated(Placement((0, 1), (0, 1)))
    device.close()


def test_what_a_layer_cannot_compute_is_refused(tmp_path: Path) -> None:
    device = EmulatedDevice()
    path = make.save(tmp_path, make.gpt_oss_mxfp4()[0])
    biased = MoEWeights.from_safetensors(path, layer=3, naming="gpt-oss")
    assert biased.checked(device).biases is not None
    with pytest.raises(DTypeError, match=r"weights\.gate: got 'uint8'; allowed: bfloat16"):
        MoEWeights.from_safetensors(path, layer=3, naming="gpt-oss", dequantise=False).checked(device)
    path = make.save(tmp_path, make.fp8("deepseek")[0])
    quantised = MoEWeights.from_safetensors(path, layer=3, naming="deepseek", dequantise=False)
    assert quantised.checked(device).format == "fp8_block"
    with pytest.raises(ArgumentError, match=r"weights\.scales: got None"):
        MoEWeights(quantised.gate, quantised.up, quantised.down).checked(device)
    gate, up, down = make.bf16_matrices()
    placement = Placement(tuple(range(6)), (0,) * 6)
    with pytest.raises(ShapeError, match=r"weights\.up: got \(5, 160, 288\)"):
        MoEWeights(gate, up[:5], down).checked(device)
    with pytest.raises(ShapeError, match=r"weights\.down: got \(6, 160, 288\)"):
        MoEWeights(gate, up, up).replicated(placement).checked(device)
    device.close()


def test_a_whole_stack_can_be_had_as_an_array(tmp_path: Path) -> None:
    path = make.save(tmp_path, make.stacked()[0])
    weights = MoEWeights.from_safetensors(path, layer=3, naming="stacked")
    assert np.asarray(weights.gate, dtype=np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="a copy cannot be avoided"):
        np.asarray(weights.gate, copy=False)
