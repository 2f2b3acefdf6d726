"""Bad arguments of everything that is constructed: the same typed error on every rank, before device work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvep
from nvep.errors import (
    ArgumentError,
    ConfigMismatch,
    DTypeError,
    ExchangeClosed,
    GroupError,
    HeapTooLarge,
    NvepError,
    ShapeError,
)
from nvep.group import RankGroup
from nvep.moe import MoEWeights
from nvep.symmetric import Layout, Region, SymmetricHeap
from nvep.testing.mpirun import run_mpi
from tests.emulated.bad_input import CONFIG, Bad, Watch, check_error, errors_everywhere, everywhere

SMALL: dict[str, Any] = {"num_experts": 8, "top_k": 2, "max_tokens": 16, "row_bytes": 64}
FIELDS: dict[str, list[tuple[Any, str]]] = {
    "num_experts": [(0, "an integer from 1"), (-1, ""), (8.0, ""), (True, ""), ("8", ""), (None, ""), (1 << 21, "")],
    "top_k": [(0, "an integer from 1 to 8"), (9, "an integer from 1 to 8"), (2.0, ""), (None, "")],
    "max_tokens": [(0, "an integer from 1"), (-1, ""), (1 << 21, ""), (np.float32(4), "")],
    "row_bytes": [(0, "an integer from 16"), (24, "a multiple of 16 bytes"), (1 << 25, ""), (64.0, "")],
    "extra_payload_bytes": [
        ((8,), "an integer from 16"),
        ((24,), "a multiple of 16"),
        ((16,) * 8, "at most 7"),
        (16, ""),
    ],
    "partial_format": [("fp8", "bf16, fp16, fp32"), (None, "bf16, fp16, fp32"), (2, ""), ([], "bf16")],
    "partial_elements": [(0, "an integer from 1"), (7, "a partial row that is a multiple of 16 bytes"), (2.5, "")],
    "placement": [
        ((0,) * 7, "one rank per expert: 8 entries"),
        ((-1,) * 8, "an integer from 0"),
        (("a",) * 8, ""),
        (3, ""),
    ],
    "lanes": [(0, "an integer from 1 to 16"), (17, ""), (1.0, "")],
    "protocol": [("flag", "fence"), (None, "fence")],
    "transport": [("pcie", "nvlink"), (None, "nvlink")],
    "max_blocks": [(0, "an integer from 1"), (1 << 20, ""), (2.0, "")],
    "deadline": [(0.0, "seconds, above 0"), (-1.0, ""), (float("nan"), ""), (float("inf"), ""), ("30", "")],
    "invalid_expert": [(0, "an integer from -2147483648 to -1"), (5, ""), (-(1 << 40), ""), (-1.5, ""), ("-1", "")],
    "first_epoch": [(-1, "an integer from 0"), (1 << 32, ""), (1.0, "")],
}


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [(name, value, allowed) for name, rows in FIELDS.items() for value, allowed in rows]
)
def test_exchange_config(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(NvepError) as caught:
        nvep.ExchangeConfig(**{**SMALL, name: value})
    check_error(caught.value, Bad({}, ArgumentError, rf"{name}: got .+; allowed: {allowed}"))


DIFFERENCES: dict[str, Any] = {
    "num_experts": 9,
    "top_k": 3,
    "max_tokens": 17,
    "row_bytes": 80,
    "extra_payload_bytes": (32,),
    "partial_format": "bf16",
    "partial_elements": 32,
    "placement": (0, 1) * 4,
    "lanes": 1,
    "max_blocks": 2,
    "deadline": 1.0,
    "invalid_expert": -2,
    "first_epoch": 5,
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_configurations_that_differ_between_ranks(field: str) -> None:
    other = dataclasses.replace(CONFIG, **{field: DIFFERENCES[field]})
    errors = errors_everywhere(lambda g: nvep.Exchange(g, other if g.rank == 1 else CONFIG), 3)
    what = "placement" if field == "placement" else "ExchangeConfig"
    for error in errors:
        check_error(
            error, Bad({}, ConfigMismatch, rf"{what} must be equal on all ranks; rank 0: .*, rank 1: .*, rank 2: ")
        )
    assert len({str(e) for e in errors}) == 1
    assert repr(DIFFERENCES[field]) in str(errors[0])


EXCHANGES: dict[str, tuple[Callable[[RankGroup], Any], type[NvepError], str]] = {
    "no config": (lambda g: nvep.Exchange(g, None), ArgumentError, r"config: got None; allowed: an ExchangeConfig"),  # type: ignore[arg-type]
    "dict": (lambda g: nvep.Exchange(g, SMALL), ArgumentError, r"config: got \{.*; allowed: an ExchangeConfig"),  # type: ignore[arg-type]
    "dict on one rank": (
        lambda g: nvep.Exchange(g, SMALL if g.rank else CONFIG),  # type: ignore[arg-type]
        ArgumentError,
        r"config: got \{.*; allowed: an ExchangeConfig",
    ),
    "placement": (
        lambda g: nvep.Exchange(g, dataclasses.replace(CONFIG, placement=(0, 1, 2, 0, 1, 0, 1, 0))),
        ArgumentError,
        r"placement: got 2; allowed: ranks below 2",
    ),
    "no group": (lambda g: nvep.Exchange(None, CONFIG), ArgumentError, r"group: got None; allowed: a RankGroup"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges(name: str) -> None:
    build, kind, text = EXCHANGES[name]
    errors = errors_everywhere(build)
    for error in errors:
        check_error(error, Bad({}, kind, text))
    assert str(errors[0]) == str(errors[1])


def test_closed_groups() -> None:
    [group] = nvep.local_groups(1, device="emulated")
    group.close()
    for use in (lambda: nvep.Exchange(group, CONFIG), group.barrier, lambda: group.allgather(1)):
        with pytest.raises(GroupError, match=r"rank 0 used its group after close\(\)"):
            use()


# --- layers -----------------------------------------------------------------------------------------------------------

BF16 = np.dtype(ml_dtypes.bfloat16)


def weights(**changes: Any) -> MoEWeights:
    """Four experts, hidden 16, intermediate 8."""
    good = {"gate": np.zeros((4, 8, 16), BF16), "up": np.zeros((4, 8, 16), BF16), "down": np.zeros((4, 16, 8), BF16)}
    return MoEWeights(**{**good, **changes})


def layer(group: RankGroup, given: Any = None, **changes: Any) -> nvep.MoELayer:
    options: dict[str, Any] = {"top_k": 2, "max_tokens": 8, "partial_format": "fp32"}
    return nvep.MoELayer(group, weights() if given is None else given, **{**options, **changes})


LAYERS: dict[str, tuple[Callable[[RankGroup], Any], type[NvepError], str]] = {
    "dict": (lambda g: layer(g, {"gate": 1}), ArgumentError, r"weights: got \{'gate': 1\}; allowed: MoEWeights"),
    "no gate": (lambda g: layer(g, weights(gate=None)), ArgumentError, r"weights\.gate: got None; allowed: an array"),
    "float32": (
        lambda g: layer(g, weights(up=np.zeros((4, 8, 16), np.float32))),
        DTypeError,
        r"weights\.up: got 'float32'; allowed: bfloat16",
    ),
    "other shape": (
        lambda g: layer(g, weights(down=np.zeros((4, 8, 16), BF16))),
        ShapeError,
        r"weights\.down: got \(4, 8, 16\); allowed: \(4, 16, 8\)",
    ),
    "two axes": (
        lambda g: layer(g, weights(gate=np.zeros((8, 16), BF16))),
        ShapeError,
        r"weights\.gate: got \(8, 16\); allowed: \(experts, intermediate, hidden\)",
    ),
    "odd hidden": (
        lambda g: layer(g, weights(gate=np.zeros((4, 8, 12), BF16))),
        ShapeError,
        r"weights\.gate: got \(4, 8, 12\); allowed: .*multiples of 8",
    ),
    "transposed": (
        lambda g: layer(g, weights(up=np.zeros((4, 16, 8), BF16).transpose(0, 2, 1))),
        ShapeError,
        r"weights\.up: got 'strides .*C-contiguous",
    ),
    "top_k": (lambda g: layer(g, top_k=5), ArgumentError, r"top_k: got 5; allowed: an integer from 1 to 4"),
    "max_tokens": (lambda g: layer(g, max_tokens=0), ArgumentError, r"max_tokens: got 0; allowed: an integer from 1"),
    "format": (
        lambda g: layer(g, partial_format="fp8"),
        ArgumentError,
        r"partial_format: got 'fp8'; allowed: bf16, fp16",
    ),
    "backend": (
        lambda g: layer(g, grouped_gemm="cublas"),
        ArgumentError,
        r"grouped_gemm: got 'cublas'; allowed: gather, ",
    ),
    "option": (lambda g: layer(g, topk=2), ArgumentError, r"topk: got 2; allowed: only the options .*partial_format"),
    "placement": (
        lambda g: layer(g, placement=(0, 1, 2, 0)),
        ArgumentError,
        r"placement: got 2; allowed: ranks below 2",
    ),
    "no group": (lambda g: layer(None), ArgumentError, r"group: got None; allowed: a RankGroup"),  # type: ignore[arg-type]
    "one rank alone": (
        lambda g: layer(g, weights(gate=np.zeros(3)) if g.rank else None),
        DTypeError,
        r"weights\.gate: got 'float64'; allowed: bfloat16",
    ),
    "sizes differ": (
        lambda g: layer(g, max_tokens=8 + g.rank),
        ConfigMismatch,
        r"ExchangeConfig must be equal on all ranks; rank 0: .*max_tokens=8, .*rank 1: .*max_tokens=9, ",
    ),
    "experts differ": (
        lambda g: layer(g, weights(**{n: getattr(weights(), n)[: 4 - g.rank] for n in ("gate", "up", "down")})),
        ConfigMismatch,
        r"weights .*must be equal on all ranks; rank 0: .*4, 8, 16.*rank 1: .*3, 8, 16",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    build, kind, text = LAYERS[name]
    errors = errors_everywhere(build)
    for error in errors:
        check_error(error, Bad({}, kind, text))
    assert str(errors[0]) == str(errors[1])


X, IDS, WEIGHTS = np.zeros((3, 16), BF16), np.array([[0, 1]] * 3), np.ones((3, 2), np.float32)
CALLS: dict[str, tuple[dict[str, Any], type[NvepError], str]] = {
    "none": ({"x": None}, ArgumentError, r"x: got None; allowed: an array"),
    "float32": ({"x": np.zeros((3, 8), np.float32)}, DTypeError, r"x: got 'float32'; allowed: bfloat16"),
    "bytes": ({"x": np.zeros((3, 32), np.uint8)}, DTypeError, r"x: got 'uint8'; allowed: bfloat16"),
    "hidden": ({"x": np.zeros((3, 8), BF16)}, ShapeError, r"x: got \(3, 8\); allowed: \(tokens <= 8, 16\)"),
    "three axes": ({"x": np.zeros((3, 2, 8), BF16)}, ShapeError, r"x: got \(3, 2, 8\); allowed: \(tokens <= 8, 16\)"),
    "too many": ({"x": np.zeros((9, 16), BF16)}, ShapeError, r"x: got \(9, 16\); allowed: \(tokens <= 8, 16\)"),
    "transposed": ({"x": np.zeros((16, 3), BF16).T}, ShapeError, r"x: got 'strides .*axis 1 must step 2 bytes"),
    "ids": ({"expert_ids": IDS + 4}, ArgumentError, r"expert_ids\[0, 0\]: got 4; allowed: 0 to 3"),
    "same ids": ({"expert_ids": IDS * 0}, ArgumentError, r"expert_ids\[0\]: got \[0, 0\]; allowed: distinct experts"),
    "weights": (
        {"expert_weights": WEIGHTS.astype(BF16)},
        DTypeError,
        r"expert_weights: got 'bfloat16'; allowed: float32",
    ),
    "count": ({"num_tokens": 4}, ArgumentError, r"num_tokens: got 4; allowed: 0 to 3"),
    "stream": ({"stream": "x"}, ArgumentError, r"stream: got 'x'; allowed: "),
}


def test_calls_of_a_layer() -> None:
    groups = nvep.local_groups(2, device="emulated")
    layers = everywhere(layer, groups)
    watch = Watch([g.device for g in groups])
    for changes, kind, text in CALLS.values():
        for made in layers:
            with pytest.raises(NvepError) as caught:
                made(**{"x": X, "expert_ids": IDS, "expert_weights": WEIGHTS, **changes})
            check_error(caught.value, Bad({}, kind, text))
    assert watch.seen == []
    outputs = everywhere(lambda g: layers[g.rank](X, IDS, WEIGHTS), groups)
    assert not any(output.numpy().any() for output in outputs)
    everywhere(lambda g: layers[g.rank].close(), groups)
    for made, output in zip(layers, outputs):
        with pytest.raises(ExchangeClosed, match="closed"):
            made(X, IDS, WEIGHTS)
        with pytest.raises(ExchangeClosed, match="closed"):
            output.numpy()
    for group in groups:
        group.close()


# --- groups and heaps -------------------------------------------------------------------------------------------------

LOCAL_GROUPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    **{repr(n): ((n,), {}, rf"n: got {n!r}; allowed: an integer from 1") for n in (0, -1, 1025, True, 2.0, "2", None)},
    "device": ((2,), {"device": "gpu"}, r"device: got 'gpu'; allowed: auto, cuda or emulated"),
    "too few ordinals": ((2,), {"ordinals": [0]}, r"ordinals: got \[0\]; allowed: 2 device numbers"),
    "unknown ordinal": ((2,), {"ordinals": [0, 7]}, r"ordinals: got \[0, 7\]; allowed: 2 device numbers below 1"),
    "bad ordinal": ((1,), {"ordinals": ["0"]}, r"ordinals: got \['0'\]; allowed: 1 device numbers"),
}


@pytest.mark.parametrize("name", LOCAL_GROUPS)
def test_local_groups(name: str) -> None:
    args, options, text = LOCAL_GROUPS[name]
    with pytest.raises(NvepError) as caught:
        nvep.local_groups(*args, **{"device": "emulated", **options})
    check_error(caught.value, Bad({}, ArgumentError, text))


RUN_LOCAL: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "ranks": ((len, 0), {}, r"n: got 0; allowed: an integer from 1"),
    "device": ((len, 1), {"device": "tpu"}, r"device: got 'tpu'; allowed: auto, cuda or emulated"),
    "function": ((None, 1), {}, r"function: got None; allowed: a callable"),
    "timeout": ((len, 1), {"timeout": -1.0}, r"timeout: got -1\.0; allowed: seconds above 0"),
}


@pytest.mark.parametrize("name", RUN_LOCAL)
def test_run_local(name: str) -> None:
    args, options, text = RUN_LOCAL[name]
    with pytest.raises(NvepError) as caught:
        nvep.run_local(*args, **{"device": "emulated", **options})
    check_error(caught.value, Bad({}, ArgumentError, text))


LAYOUT = Layout([Region("Rows", 1024)], lanes=2)
HEAPS: dict[str, tuple[Callable[[RankGroup], Any], type[NvepError], str]] = {
    "no layout": (lambda g: SymmetricHeap(g, None), ArgumentError, r"layout: got None; allowed: a Layout"),  # type: ignore[arg-type]
    "no group": (lambda g: SymmetricHeap(None, LAYOUT), ArgumentError, r"group: got None; allowed: a RankGroup"),  # type: ignore[arg-type]
    "sizes differ": (
        lambda g: SymmetricHeap(g, Layout([Region("Rows", 1024 * (1 + g.rank))])),
        ConfigMismatch,
        r"the size of the symmetric heap in bytes must be equal on all ranks; rank 0: 1024, rank 1: 2048",
    ),
    "too large": (
        lambda g: SymmetricHeap(g, Layout([Region("Rows", 1 << 50)])),
        HeapTooLarge,
        r"the symmetric heap needs 2,251,799,813,685,248 B for 2 rank\(s\) on emulated.* are free",
    ),
}


@pytest.mark.parametrize("name", HEAPS)
def test_heaps(name: str) -> None:
    build, kind, text = HEAPS[name]
    errors = errors_everywhere(build)
    for error in errors:
        check_error(error, Bad({}, kind, text))
    assert str(errors[0]) == str(errors[1]) or kind is HeapTooLarge  # what is free is read per rank


ADDRESSES: dict[str, tuple[dict[str, Any], str]] = {
    "region": ({"region": "Scales"}, r"region: got 'Scales'; allowed: Rows"),
    "lane": ({"lane": 2}, r"lane: got 2; allowed: 0 to 1"),
    "negative lane": ({"lane": -1}, r"lane: got -1; allowed: 0 to 1"),
    "rank": ({"rank": 1}, r"rank: got 1; allowed: 0 to 0"),
    "negative rank": ({"rank": -1}, r"rank: got -1; allowed: 0 to 0"),
}


def test_heap_addresses() -> None:
    [group] = nvep.local_groups(1, device="emulated")
    with group, SymmetricHeap(group, LAYOUT) as heap:
        for change, text in ADDRESSES.values():
            with pytest.raises(NvepError) as caught:
                heap.address(**{"region": "Rows", **change})
            check_error(caught.value, Bad({}, ArgumentError, text))
    with pytest.raises(ExchangeClosed, match="the symmetric heap is closed"):
        heap.address("Rows")


@pytest.mark.parametrize("regions", [[Region("A", 16), Region("A", 16)], [Region("A", -1)]], ids=["twice", "negative"])
def test_layouts(regions: list[Region]) -> None:
    with pytest.raises(ArgumentError, match=r"regions: got .*A.*; allowed: "):
        Layout(regions)


MPI_PROGRAM = """
import dataclasses, json, nvep
from mpi4py import MPI
from nvep.errors import NvepError
world = MPI.COMM_WORLD
group = nvep.RankGroup.from_mpi(world, device="emulated")
config = nvep.ExchangeConfig(num_experts=8, top_k=2, max_tokens=16, row_bytes=64)
other = dataclasses.replace(config, top_k=3) if group.rank else config
calls = {
    "comm": lambda: nvep.RankGroup.from_mpi(None),
    "null": lambda: nvep.RankGroup.from_mpi(MPI.COMM_NULL),
    "device": lambda: nvep.RankGroup.from_mpi(world, device="gpu"),
    "device on one rank": lambda: nvep.RankGroup.from_mpi(world, device="gpu" if world.rank else "emulated"),
    "mismatch": lambda: nvep.Exchange(group, other),
    "placement": lambda: nvep.Exchange(group, dataclasses.replace(config, placement=(2,) * 8)),
}
found = {}
for name, call in calls.items():
    try:
        call()
    except NvepError as error:
        found[name] = [type(error).__name__, str(error)]
found["after"] = group.allgather(group.rank)
group.close()
texts = world.gather(found)
if world.rank == 0:
    print(json.dumps(texts))
"""


def test_groups_over_mpi() -> None:
    job = run_mpi(2, MPI_PROGRAM, timeout=100).require_success()
    first, second = json.loads(job.stdout.splitlines()[-1])
    assert first["null"][1].startswith("comm: got <")
    del first["null"], second["null"]  # their text holds an address
    assert first == second
    expected = {
        "comm": (ArgumentError, "comm: got None; allowed: an mpi4py intracommunicator"),
        "device": (ArgumentError, "device: got 'gpu'; allowed: auto, cuda or emulated"),
        "device on one rank": (ArgumentError, "device: got 'gpu'; allowed: auto, cuda or emulated"),
        "mismatch": (ConfigMismatch, "ExchangeConfig must be equal on all ranks; rank 0: ExchangeConfig("),
        "placement": (ArgumentError, "placement: got 2; allowed: ranks below 2"),
    }
    for name, (kind, text) in expected.items():
        assert first[name][0] == kind.__name__
        assert first[name][1].startswith(text)
    assert first["after"] == [0, 1]
