"""Conformance suite of routing, for every device: kernels against the reference, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvep.config import partial_dtype
from nvep.errors import ArgumentError, DTypeError, ShapeError
from nvep.moe.placement import balance
from nvep.moe.routing import ROUTINGS, Router, Routing
from nvep.reference.routing import route
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device, LaunchShape
from nvep.runtime.source import KERNEL_ROOT, KernelSource
from nvep.testing.format_checks import on_device, same

COUNT_LOAD = KernelSource(
    "count_load",
    ArgumentStruct(
        "CountLoadArguments",
        [
            Field("expert_ids", "const int*"),
            Field("load", "unsigned int*"),
            Field("count", "u32"),
            Field("first", "i32"),
            Field("end", "i32"),
        ],
    ),
    file=KERNEL_ROOT / "testing" / "count_load.cu",
)
# Sizes at the borders of lanes and of choices a lane; each of the options; groups larger and smaller than a warp.
SHAPES = {
    "one expert": Routing(1, 1),
    "all experts": Routing(5, 5, renormalise=True),
    "two lanes' worth": Routing(33, 4, "sigmoid", renormalise=True, scale=0.5),
    "64 choices": Routing(96, 64, bias=True, renormalise=True),
    "33 choices": Routing(64, 33, "sigmoid"),
    "1024 experts": Routing(1024, 8, renormalise=True),
    "1030 experts": Routing(1030, 8, "sigmoid", bias=True),
    "4096 experts": Routing(4096, 16),
    "groups of 3": Routing(96, 6, groups=32, top_groups=3, group_score="top2"),
    "groups of 1": Routing(16, 2, "sigmoid", groups=16, top_groups=5, group_score="top2"),
    "groups of 40": Routing(120, 8, groups=3, top_groups=2, renormalise=True),
    "one group of many": Routing(64, 4, "sigmoid", bias=True, groups=8, top_groups=1, group_score="max"),
    "softmax with bias": Routing(72, 6, bias=True),
}


def difficult_logits(experts: int, logits: str = "fp32", tokens: int = 40) -> np.ndarray:
    """Ordinary logits, ties of all kinds, masked experts, infinities, NaN, extremes."""
    rng = np.random.default_rng(experts)
    rows = rng.standard_normal((tokens, experts)) * rng.choice([0.1, 2.0, 20.0], (tokens, 1))
    rows[1] = 0.0
    rows[2] = np.where(rng.random(experts) < 0.5, 0.0, -0.0)
    rows[3] = np.round(rows[3])
    rows[4, rng.random(experts) < 0.4] = np.nan
    rows[5, rng.random(experts) < 0.7] = -np.inf
    rows[6] = -np.inf
    rows[7] = np.nan
    rows[8, rng.integers(0, experts, 3)] = np.inf
    rows[9] = -rng.uniform(80, 120, experts)
    rows[10] = rng.uniform(80, 120, experts)
    rows[11] = rng.choice([3e38, -3e38, 1.0], experts)
    rows[12] *= 1e-40
    rows[13, 1:] = -np.inf
    narrow: np.ndarray = rows.astype(partial_dtype(logits))
    return narrow


def bias_for(routing: Routing) -> np.ndarray | None:
    """A correction bias with ties and with an expert that it takes out."""
    if not routing.bias:
        return None
    rng = np.random.default_rng(routing.top_k)
    bias = np.round(rng.standard_normal(routing.num_experts), 1).astype(np.float32)
    bias[routing.num_experts // 2] = -np.inf
    bias[routing.num_experts // 3] = np.nan
    return bias


def routed(device: Device, routing: Routing, logits: np.ndarray, kind: str, **options: Any) -> tuple[np.ndarray, ...]:
    with (
        on_device(device, logits) as (given,),
        Router(device, routing, max_tokens=len(logits), logits=kind, **options) as router,
    ):
        ids, weights = router(given)
        return ids.numpy().copy(), weights.numpy().copy()


class RoutingChecks:
    """Subclass it where a ``device`` fixture exists."""

    @pytest.mark.parametrize("kind", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", [*SHAPES, *ROUTINGS])
    def test_choices_are_the_references_bits(self, device: Device, name: str, kind: str) -> None:
        routing = SHAPES.get(name) or ROUTINGS[name]
        logits, bias = difficult_logits(routing.num_experts, kind), bias_for(routing)
        ids, weights = routed(device, routing, logits, kind, bias=bias)
        expected_ids, expected_weights = route(logits, routing, bias=bias)
        same(ids, expected_ids, f"{name}: ids")
        same(weights.view(np.uint32), expected_weights.view(np.uint32), f"{name}: bits of weights")

    def test_replicas_are_chosen_by_token_and_source(self, device: Device) -> None:
        routing = Routing(24, 4, renormalise=True)
        placement = balance(np.arange(24.0) ** 2, 4, 40)
        logits = difficult_logits(24)
        logical, _ = route(logits, routing)
        for rank in range(4):
            for local in (False, True):
                replicas = placement.replicas(rank, prefer_local=local)
                ids, _ = routed(device, routing, logits, "fp32", replicas=replicas)
                same(ids, replicas.choose(logical), f"rank {rank}, prefer_local={local}")
                back = np.where(ids < 0, -1, np.array(placement.logical)[np.maximum(ids, 0)])
                same(back, logical, f"rank {rank}: logical experts")

    def test_only_the_tokens_that_count_are_routed(self, device: Device) -> None:
        routing = ROUTINGS["olmoe"]
        logits = difficult_logits(routing.num_experts)
        expected, _ = route(logits, routing)
        with (
            on_device(device, logits, np.array([11], np.int32)) as (given, count),
            Router(device, routing, max_tokens=64) as router,
        ):
            for tokens, argument in ((5, 5), (11, count), (40, None), (0, 0)):
                whole = router._ids
                device.fill(whole.address, 0xEE, whole.nbytes, device.default_stream)
                ids, weights = router(given, num_tokens=argument)
                assert weights.shape == ids.shape == (40, 8)
                same(ids.numpy()[:tokens], expected[:tokens], f"{tokens} tokens")
                assert (ids.numpy()[tokens:].view(np.uint32) == 0xEEEEEEEE).all()
            assert [part.shape for part in router(given[:0])] == [(0, 8), (0, 8)]

    def test_a_graph_replays_with_new_logits(self, device: Device) -> None:
        routing = ROUTINGS["deepseek-v3"]
        bias = bias_for(routing)
        first = difficult_logits(routing.num_experts)
        stream = device.create_stream()
        with (
            on_device(device, first, np.array([40], np.int32)) as (logits, count),
            Router(device, routing, max_tokens=40, bias=bias) as router,
        ):
            with device.capture(stream) as graph:
                ids, weights = router(logits, num_tokens=count, stream=stream)
            for given in (first, first[::-1].copy()):
                device.copy_in(logits.address, given, stream)
                graph.launch(stream)
                stream.synchronize()
                expected = route(given, routing, bias=bias)
                same(ids.numpy(), expected[0], "ids")
                same(weights.numpy().view(np.uint32), expected[1].view(np.uint32), "weights")
            graph.close()

    def test_received_tokens_are_counted_by_expert(self, device: Device) -> None:
        rng = np.random.default_rng(5)
        ids = np.concatenate([rng.integers(-1, 64, 3000), np.full(500, 20)]).astype(np.int32)
        kernel = device.load(COUNT_LOAD)
        with on_device(device, ids, np.zeros(64, np.uint32)) as (given, load):
            arguments = COUNT_LOAD.arguments.new(
                expert_ids=given.address, load=load.address, count=len(ids), first=16, end=48
            )
            for step in (1, 2):
                device.launch(kernel, LaunchShape(3, 64), arguments, device.default_stream)
                device.default_stream.synchronize()
                expected = np.bincount(ids[(ids >= 16) & (ids < 48)], minlength=64) * step
                same(load.numpy(), expected.astype(np.uint32), f"step {step}")

    def test_bad_arguments_are_named(self, device: Device) -> None:
        plain, biased = Routing(8, 2), Routing(8, 2, bias=True)
        calls: list[tuple[dict[str, Any], str]] = [
            ({"routing": "softmax"}, r"routing: got 'softmax'; allowed: a Routing"),
            ({"max_tokens": 0}, r"max_tokens: got 0"),
            ({"logits": "fp16"}, r"logits: got 'fp16'; allowed: fp32, bf16"),
            ({"bias": np.zeros(8, np.float32)}, r"bias: got 'an array'; allowed: None"),
            ({"routing": biased}, r"bias: got None; allowed: a NumPy array float32 \(8,\)"),
            ({"routing": biased, "bias": np.zeros(8)}, r"bias: got 'float64 \(8,\)'"),
            ({"replicas": balance(np.ones(4), 2, 4).replicas(0)}, r"replicas: got 4; allowed: replicas of the 8"),
        ]
        for changes, text in calls:
            arguments = {"routing": plain, "max_tokens": 4, **changes}
            with pytest.raises(ArgumentError, match=text):
                Router(device, arguments.pop("routing"), **arguments)
        with (
            on_device(device, np.zeros((4, 8), np.float32), np.zeros((4, 9), np.float32)) as (good, wide),
            Router(device, plain, max_tokens=3) as router,
        ):
            with pytest.raises(ShapeError, match=r"logits: got \(4, 9\); allowed: \(tokens <= 3, 8\)"):
                router(wide)
            with pytest.raises(ShapeError, match=r"logits: got \(4, 8\)"):
                router(good)
            with pytest.raises(DTypeError, match=r"logits: got 'int32'; allowed: float32"):
                router(good[:2].view(np.int32))
