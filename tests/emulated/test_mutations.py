"""Each rule of the Fence protocol that order alone can break is broken in a copy of the kernels; the steps must notice.

Rules of the memory model (acquire, release, the system fence) cannot fail on strongly ordered CPUs such as x86-64.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import nvep_kernels

ROOT = Path(nvep_kernels.__file__).parent


class Mutation(NamedTuple):
    """``old`` occurs exactly once in ``file``."""

    file: str
    old: str
    new: str


MUTATIONS = {
    "any-record-will-do": Mutation("protocols/lane.cuh", "if (record_epoch(value) == step.epoch) {", "if (true) {"),
    "record-of-the-step-before": Mutation(
        "transports/nvlink_fence_dispatch.cuh",
        "[&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch); },",
        "[&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch + 1); },",
    ),
    "record-after-the-first-block": Mutation(
        "protocols/fence.cuh",
        "if (fetch_add_acq_rel_device(arrivals, 1u) != gridDim.x - 1) return false;",
        "u32 before = fetch_add_acq_rel_device(arrivals, 1u);\n"
        "    if (before == gridDim.x - 1) store_relaxed_device(arrivals, 0u);\n"
        "    if (before != 0) return false;\n    if (gridDim.x > 1) arrivals = &arrivals[1];",
    ),
    "no-barrier-before-the-increment": Mutation(
        "protocols/fence.cuh",
        "    __syncthreads();\n    if (threadIdx.x != 0) return false;",
        "    if (threadIdx.x != 0) return false;",
    ),
    "combine-without-waiting": Mutation(
        "transports/nvlink_fence.cuh",
        "    if (await_combine(step)) {",
        "    {",
    ),
    "step-record-only-with-tokens": Mutation(
        "transports/nvlink_fence_dispatch.cuh",
        "    bool announced = Protocol::announce_blocks(",
        "    if (block.tokens == 0) {\n"
        "      if (blockIdx.x == 0 && threadIdx.x == 0) close_dispatch_send(a, step, 0);\n"
        "      return;\n    }\n"
        "    bool announced = Protocol::announce_blocks(",
    ),
    "combine-record-only-with-rows": Mutation(
        "transports/nvlink_fence.cuh",
        "    announce_combine(step, copies);\n",
        "    i32 rows = 0;\n"
        "    for (u32 r = 0; r < config::kRanks; ++r) rows += step.local_region<i32>(local::kCountsOffset)[r];\n"
        "    if (rows != 0) announce_combine(step, copies);\n",
    ),
    "epoch-never-completed": Mutation(
        "transports/nvlink.cuh", "counters->completed = step.epoch;", "counters->completed = step.epoch - 1;"
    ),
}


def run_steps(kernels: Path | None) -> subprocess.CompletedProcess[str]:
    """Run the skewed steps with another copy of ``nvep_kernels`` in front."""
    paths = [str(kernels.parent)] if kernels else []
    paths += [p for p in sys.path if p]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("skewed_program.py"))]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_true_protocol_passes() -> None:
    done = run_steps(None)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    kernels = tmp_path / "nvep_kernels"
    shutil.copytree(ROOT, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    text = (kernels / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} holds the mutated text {text.count(mutation.old)} times"
    (kernels / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    done = run_steps(kernels)
    assert done.returncode == 1, f"nobody noticed {name}"
    assert "CompilationError" not in done.stderr
    assert done.stderr.startswith("seed"), done.stderr
