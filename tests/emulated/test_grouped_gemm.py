"""Grouped GEMM backends on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nvep.errors import ArgumentError
from nvep.moe.grouped_gemm import BACKENDS
from nvep.moe.grouped_gemm.library import STRATEGIES, LibraryGroupedGemm, choose_strategy
from nvep.runtime.emulated import EmulatedDevice
from nvep.testing import moe_gemm_checks as checks
from nvep.testing.moe_cublas import RecordingCublas
from nvep.testing.moe_gemms import GemmCase, check_partial_rows, gemm_bench, make_step
from nvep.testing.steps import same


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


@pytest.mark.parametrize("name", ["gather", "reference"])
@pytest.mark.parametrize("case", checks.CASES.values(), ids=checks.CASES.keys())
def test_within_bounds(device: EmulatedDevice, case: GemmCase, name: str) -> None:
    checks.check_case(device, case, BACKENDS[name])


@pytest.mark.parametrize("case", ["segments", "fp8", "token-tiles"])
def test_rows_do_not_depend_on_one_another(device: EmulatedDevice, case: str) -> None:
    checks.check_rows_alone(device, checks.CASES[case], BACKENDS["gather"])


@pytest.mark.parametrize("case", ["segments", "fp8", "many-experts"])
def test_bits_do_not_depend_on_the_number_of_blocks(case: str) -> None:
    """Blocks get other stretches of the work, tiles are shared by one, some or many of them."""
    chosen, rng = checks.CASES[case], np.random.default_rng(5)
    weights = chosen.weights(rng)
    step = make_step(chosen, rng, checks.counts_of(chosen, 2))
    results = []
    for blocks in (1, 3, 16):
        device = EmulatedDevice()
        device.default_blocks = blocks
        with gemm_bench(device, chosen, BACKENDS["gather"], weights) as bench:
            results.append(bench.run(step).copy())
        device.close()
    for got in results[1:]:
        same(got, results[0], "partial rows")


LIBRARY_CASES = ("small", "one-expert", "segments", "many-experts", "geglu", "clamped", "plain")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", LIBRARY_CASES)
def test_library_calls(device: EmulatedDevice, case: str, strategy: str) -> None:
    """The pointers of every product lie where its operands are, and the rest of a step fits around them."""
    double = RecordingCublas()
    make = partial(LibraryGroupedGemm, strategy=strategy, cublas=double)
    checks.check_case(device, checks.CASES[case], make, rounds=True)
    # Packed, a step whose rows all belong to other ranks calls nothing.
    assert len(double.calls) in ((2, 4) if strategy == "packed" else (6,))
    shape = checks.CASES[case].shape
    gate_up, down = double.calls[:2]
    assert (gate_up.outputs, gate_up.inner) == (shape.intermediate, shape.hidden)
    assert (down.outputs, down.inner) == (shape.hidden, shape.intermediate)
    assert sum(gate_up.members) == 2 * sum(down.members)
    if strategy != "packed":
        assert gate_up.source.nbytes == 2 * shape.rows * shape.hidden  # the receive buffer itself


def test_strategies_by_size() -> None:
    few = GemmCase(max_tokens=1, ranks=1, top_k=2, local=(0, 1, 2)).shape
    assert choose_strategy(few) == "pairs"
    assert choose_strategy(replace(few, max_tokens=64)) == "slices"
    assert choose_strategy(replace(few, max_tokens=65)) == "packed"


@pytest.mark.parametrize("name", ["nvmath", "packed"])
def test_library_is_refused_without_a_gpu(device: EmulatedDevice, name: str) -> None:
    case = GemmCase()
    weights = case.weights(np.random.default_rng(0))
    refused = pytest.raises(ArgumentError, match=f"grouped_gemm: got '{name}'.*emulated")
    with refused, gemm_bench(device, case, BACKENDS[name], weights):
        pass


def test_library_refuses_other_formats(device: EmulatedDevice) -> None:
    case = GemmCase(weight_format="fp8_block")
    weights = case.weights(np.random.default_rng(0))
    make = partial(LibraryGroupedGemm, cublas=RecordingCublas())
    with pytest.raises(ArgumentError, match="bf16"), gemm_bench(device, case, make, weights):
        pass


def test_packed_steps_are_not_captured(device: EmulatedDevice) -> None:
    case = GemmCase()
    make = partial(LibraryGroupedGemm, strategy="packed", cublas=RecordingCublas())
    with gemm_bench(device, case, make, case.weights(np.random.default_rng(0))) as bench:
        stream = device.create_stream()
        with pytest.raises(ArgumentError, match="captured"), device.capture(stream):
            bench.gemm.run(bench.arrivals, bench.arrivals.partial_rows, stream)


@pytest.mark.parametrize("strategy", ["pairs", "slices"])
def test_library_steps_in_a_graph(device: EmulatedDevice, strategy: str) -> None:
    case = GemmCase()
    rng = np.random.default_rng(3)
    weights = case.weights(rng)
    make = partial(LibraryGroupedGemm, strategy=strategy, cublas=RecordingCublas())
    with gemm_bench(device, case, make, weights) as bench:
        stream = device.create_stream()
        with device.capture(stream) as graph:
            bench.gemm.run(bench.arrivals, bench.arrivals.partial_rows, stream)
        for index in range(3):
            step = make_step(case, rng, checks.counts_of(case, index))
            bench.fill(step, stream)
            graph.launch(stream)
            stream.synchronize()
            got = bench.arrivals.partial_rows.numpy().reshape(-1, case.hidden)
            check_partial_rows(got, step, (case, weights), f"replay {index}", rounds=True)
        graph.close()


@pytest.mark.parametrize("name", checks.ACCURACY)
def test_accuracy(device: EmulatedDevice, name: str) -> None:
    case, limit = checks.ACCURACY[name]
    checks.check_accuracy(device, case, BACKENDS["gather"], limit)


def test_e4m3_codes(device: EmulatedDevice) -> None:
    checks.check_e4m3_codes(device, BACKENDS["gather"])


def test_nan_weights_are_refused(device: EmulatedDevice) -> None:
    case = GemmCase(weight_format="fp8_block")
    weights = case.weights(np.random.default_rng(0))
    weights.up[3, 2, 1] = np.nan
    with (
        pytest.raises(ArgumentError, match="weights: got 'NaN in expert 3'"),
        gemm_bench(device, case, BACKENDS["gather"], weights),
    ):
        pass
