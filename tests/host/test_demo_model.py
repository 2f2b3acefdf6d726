"""The demo's model: its weights, its agreement with the training script, and bits that do not depend on the batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nvep.cli.demo_model import (
    PROMPTS,
    DecoderModel,
    Generated,
    ReferenceExperts,
    generate,
    load_weights,
    plan_steps,
    split_prompts,
)
from nvep.cli.demo_model.model import Rows, TextState, route
from nvep.cli.demo_model.weights import WEIGHTS_FILE
from nvep.errors import ArgumentError, ShapeError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "tools" / "demo_model_results.json").read_text())
MAX_WEIGHT_BYTES = 8_000_000


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel(load_weights())


@pytest.fixture(scope="module")
def experts(model: DecoderModel) -> ReferenceExperts:
    return ReferenceExperts(model.weights)


def feed(model: DecoderModel, experts: Any, text: bytes, chunks: list[int]) -> np.ndarray:
    """Logits at every byte of ``text``, fed in chunks of the given sizes (the last one takes the rest)."""
    state, logits, begin = TextState(model.shape, len(text)), [], 0
    for size in [*chunks, len(text)]:
        part = text[begin : begin + size]
        rows = Rows([state] * len(part), np.arange(begin, begin + len(part)), np.frombuffer(part, np.uint8))
        logits.append(model.logits(model.forward(rows, experts)[0]))
        begin += len(part)
    return np.concatenate(logits)


def test_numpy_model_predicts_held_out_text_as_well_as_the_trained_one(
    model: DecoderModel, experts: ReferenceExperts
) -> None:
    text = RESULTS["check"]["text"].encode()
    logits = feed(model, experts, text[:-1], []).astype(np.float64)
    nats = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(text) - 1), np.frombuffer(text[1:], np.uint8)]
    assert nats.mean() / math.log(2) == pytest.approx(RESULTS["check"]["bits_per_byte"], abs=2e-3)


def test_recorded_results_hold_what_the_readme_claims() -> None:
    held_out = {name: RESULTS[name]["held_out_bits_per_byte"] for name in ("mixture_of_experts", "dense_equal_active")}
    unigram = RESULTS["unigram"]["held_out_bits_per_byte"]
    assert held_out["mixture_of_experts"] < held_out["dense_equal_active"] < unigram
    assert RESULTS["dense_equal_active"]["parameters"] <= RESULTS["mixture_of_experts"]["active_parameters"]
    readme = (ROOT / "tools" / "README.md").read_text()
    for figure in (*held_out.values(), unigram):
        assert f"{figure:.3f}" in readme
    assert RESULTS["corpus"]["sha256"] in readme


def test_every_expert_is_used() -> None:
    even = 1 / RESULTS["mixture_of_experts"]["shape"]["num_experts"]
    for layer in RESULTS["mixture_of_experts"]["expert_use_validation"]:
        assert sum(layer) == pytest.approx(1, abs=1e-3)
        assert 0.5 * even < min(layer) <= max(layer) < 2 * even


def test_weights_are_small_bf16_and_fit_the_recorded_shape(model: DecoderModel) -> None:
    assert WEIGHTS_FILE.stat().st_size <= MAX_WEIGHT_BYTES
    tensors = load_file(WEIGHTS_FILE)
    assert {t.dtype for t in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert sum(t.size for t in tensors.values()) == RESULTS["mixture_of_experts"]["parameters"]
    assert vars(model.shape) == RESULTS["mixture_of_experts"]["shape"]
    assert model.shape.hidden * 2 % 16 == 0


def test_bits_do_not_depend_on_how_rows_are_chunked(model: DecoderModel, experts: ReferenceExperts) -> None:
    text = PROMPTS[1]
    whole = feed(model, experts, text, [])
    for chunks in ([1] * 8, [0, 7, 0, 13], [len(text) - 1]):
        np.testing.assert_array_equal(feed(model, experts, text, chunks).view(np.uint32), whole.view(np.uint32))


def run(model: DecoderModel, experts: Any, prompts_by_rank: list[list[bytes]], **options: int) -> list[Generated]:
    plan = plan_steps(prompts_by_rank, options.get("max_tokens", 64))
    count = options.get("new_tokens", 20)
    return [generate(model, prompts, new_tokens=count, plan=plan, experts=experts) for prompts in prompts_by_rank]


@pytest.mark.parametrize("ranks", [2, 3, 8, 11])
def test_text_and_margins_do_not_depend_on_the_split(
    model: DecoderModel, experts: ReferenceExperts, ranks: int
) -> None:
    (alone,) = run(model, experts, [list(PROMPTS)])
    parts = run(model, experts, split_prompts(PROMPTS, ranks), max_tokens=5)
    assert tuple(text for part in parts for text in part.texts) == alone.texts
    assert min(part.logit_margin for part in parts) == alone.logit_margin
    assert min(part.router_margin for part in parts) == alone.router_margin


def test_prompts_keep_the_margin_that_they_were_picked_for(model: DecoderModel, experts: ReferenceExperts) -> None:
    (text,) = run(model, experts, [list(PROMPTS)], new_tokens=160)
    assert text.logit_margin > 0.09


def test_text_is_stable_where_sums_differ_in_their_last_bits(model: DecoderModel, experts: ReferenceExperts) -> None:
    noise = np.random.default_rng(3)

    def noisy(layer: int, rows: Any, ids: Any, weights: Any) -> Any:
        y = np.asarray(experts(layer, rows, ids, weights))
        return y * (1 + 1e-6 * noise.standard_normal(y.shape)).astype(np.float32)

    (exact,) = run(model, experts, [list(PROMPTS)], new_tokens=96)
    (moved,) = run(model, noisy, [list(PROMPTS)], new_tokens=96)
    assert moved.logit_margin != exact.logit_margin
    assert moved.texts == exact.texts


def test_text_depends_on_the_experts(model: DecoderModel, experts: ReferenceExperts) -> None:
    def broken(layer: int, rows: Any, ids: Any, weights: Any) -> Any:
        return np.asarray(experts(layer, rows, np.roll(ids, 1, axis=1), weights))

    (exact,), (wrong,) = run(model, experts, [list(PROMPTS[:2])]), run(model, broken, [list(PROMPTS[:2])])
    assert exact.texts != wrong.texts


def test_every_rank_takes_every_step_and_tokens_are_reported_in_order(
    model: DecoderModel, experts: ReferenceExperts
) -> None:
    parts = split_prompts(PROMPTS[:3], 4)
    plan = plan_steps(parts, 16)
    for prompts in parts:
        rows: list[int] = []
        told: list[tuple[int, int]] = []

        def counted(
            layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, rows: list[int] = rows
        ) -> np.ndarray:
            assert x.dtype == ml_dtypes.bfloat16
            assert ids.dtype == np.int32
            rows.append(len(x))
            return np.asarray(experts(layer, x, ids, weights))

        def on_token(text: int, byte: int, told: list[tuple[int, int]] = told) -> None:
            told.append((text, byte))

        result = generate(model, prompts, new_tokens=4, plan=plan, experts=counted, on_token=on_token)
        assert len(rows) == model.shape.layers * (plan.prompt_steps + 3 * plan.steps_per_token)
        assert sum(rows) == model.shape.layers * (sum(map(len, prompts)) + 3 * len(prompts))
        assert max(rows) <= 16
        assert [t for t, _ in told] == list(range(len(prompts))) * 4
        assert tuple(bytes(b for t, b in told if t == i) for i in range(len(prompts))) == result.texts


def test_a_text_longer_than_the_context_sees_the_last_bytes_only(
    model: DecoderModel, experts: ReferenceExperts
) -> None:
    short = ModelWithContext(model, 8)
    text = b"In the beginning God created the heaven"
    first = feed(short, experts, text, [])
    # With one layer's window of 8 and 4 layers, nothing before the last 4 * 7 + 1 bytes can reach the last logits.
    other = feed(short, experts, b"XYZ" + text[3:], [])
    reach = short.shape.layers * 7
    np.testing.assert_array_equal(first[3 + reach :], other[3 + reach :])
    assert not np.array_equal(first[3 + reach - 1], other[3 + reach - 1])


class ModelWithContext(DecoderModel):
    """The same weights with a shorter window of attention."""

    def __init__(self, model: DecoderModel, context: int) -> None:
        super().__init__(model.weights)
        self.shape = type(model.shape)(**{**vars(model.shape), "context": context})


def test_route_takes_the_largest_and_ties_go_to_the_lower_id() -> None:
    logits = np.array([[0.0, 2.0, 2.0, -1.0, 1.0], [3.0, 0.0, 1.0, 2.0, 1.5]], np.float32)
    ids, weights, margin = route(logits, 2)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 3]])
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights[0], [0.5, 0.5])
    np.testing.assert_allclose(weights[1, 0] / weights[1, 1], np.e, rtol=1e-6)
    assert margin == 0.5
    assert route(logits[:0], 2)[2] == math.inf


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 9])
def test_prompts_are_split_contiguously_and_evenly(ranks: int) -> None:
    parts = split_prompts(PROMPTS, ranks)
    assert [p for part in parts for p in part] == list(PROMPTS)
    assert len(parts) == ranks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def rewrite(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> Path:
    tensors, metadata = load_file(WEIGHTS_FILE), {"shape": json.dumps(RESULTS["mixture_of_experts"]["shape"])}
    change(tensors, metadata)
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path, metadata=metadata)
    return path


def test_files_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"layers\.2\.router"):
        load_weights(rewrite(tmp_path, lambda tensors, _: tensors.pop("layers.2.router")))
    with pytest.raises(ShapeError, match=r"final_norm.*\(160,\)"):
        load_weights(rewrite(tmp_path, lambda tensors, _: tensors.update(final_norm=tensors["final_norm"][:-1].copy())))
    with pytest.raises(ArgumentError, match="metadata names the sizes"):
        load_weights(rewrite(tmp_path, lambda _, metadata: metadata.clear()))
    (tmp_path / "text").write_text("not weights at all")
    with pytest.raises(ArgumentError, match="a safetensors file"):
        load_weights(tmp_path / "text")


def test_bad_arguments_are_named(model: DecoderModel, experts: ReferenceExperts) -> None:
    plan = plan_steps([[b"a"]], 4)
    with pytest.raises(ArgumentError, match="new_tokens"):
        generate(model, [b"a"], new_tokens=0, plan=plan, experts=experts)
    with pytest.raises(ArgumentError, match="prompts"):
        generate(model, [b"a", b""], new_tokens=1, plan=plan, experts=experts)
    with pytest.raises(ArgumentError, match="max_tokens"):
        plan_steps([[b"a"]], 0)
    with pytest.raises(ArgumentError, match="num_ranks"):
        split_prompts(PROMPTS, 0)
