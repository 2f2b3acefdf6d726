"""compute-sanitizer over steps of all ranks on one GPU, phase by phase, since it runs one kernel at a time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvep.testing.phase_by_phase import run_phase_by_phase

PROGRAM = Path(__file__).with_name("sanitized_program.py")
# No error is planted for synccheck: on Hopper it does not report a barrier that half of a warp passes and the other
# half leaves out by returning, which is what the emulated device reports.
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 9  # exit status of a run in which a tool found something
LIMIT = 240.0  # seconds of one run
# Calls that fail are not looked for: nvep probes what a driver offers, and turns other failures into its own errors.
OPTIONS = ("--error-exitcode", str(FOUND), "--target-processes", "all", "--report-api-errors", "no")
# racecheck warns where threads of one warp touch a barrier of bulk copies that another lane initialised: it takes no
# __syncwarp into account. synccheck keeps a record of every such barrier of every block.
OF_TOOL = {"racecheck": ("--print-level", "error"), "synccheck": ("--num-cuda-barriers", "65536")}

pytestmark = pytest.mark.timeout(LIMIT + 30)


def _run(tool: str, what: str) -> tuple[int, str]:
    """Exit status and output of a run under ``tool``; whatever happens, nothing of it is left."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [path, "--tool", tool, *OPTIONS, *OF_TOOL.get(tool, ()), sys.executable, str(PROGRAM), what]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    job = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        pytest.fail(f"still running after {LIMIT:g} s:\n{output[-6000:]}")
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return job.returncode, output


def test_phases_without_a_tool() -> None:
    assert run_phase_by_phase(device="cuda") == 24


@pytest.mark.parametrize("tool", TOOLS)
def test_true_kernels_are_clean(tool: str) -> None:
    status, output = _run(tool, "phases")
    assert status == 0, f"status {status}\n{output[:3000]}\n...\n{output[-3000:]}"
    assert "COMPUTE-SANITIZER" in output, output


@pytest.mark.parametrize(
    ("tool", "mode", "report"),
    [
        ("memcheck", "outside", "Invalid __global__ write"),
        ("racecheck", "no-barrier", "hazard"),
    ],
)
def test_a_planted_error_is_found(tool: str, mode: str, report: str) -> None:
    status, output = _run(tool, mode)
    assert status == FOUND, f"status {status}\n{output[-6000:]}"
    assert report in output, output[-6000:]


def test_the_correct_twin_is_clean() -> None:
    status, output = _run("racecheck", "barrier")
    assert status == 0, output[-6000:]
