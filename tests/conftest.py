"""Test tiers by folder, the limit of one test, and a summary of which tiers ran."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

import pytest

TESTS = Path(__file__).resolve().parent
TIERS = {"host": 0, "emulated": 0, "gpu": 1, "multi_gpu": 2}  # GPUs that a tier needs
DEFAULT_LIMIT = 120.0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY: the toolkit's link-time stand-in, not a driver
_tier_of = pytest.StashKey[str]()
_outcomes = pytest.StashKey[dict[str, Counter[str]]]()


class BrokenDriver(pytest.UsageError):
    """There is a CUDA driver and it does not work: tests must fail, not skip."""


@lru_cache(maxsize=1)
def count_gpus() -> tuple[int, str]:
    """Return the number of GPUs and, when there is none, why. Raises BrokenDriver for anything but absence."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as nvep.config does, which comes too late after cuInit
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "no CUDA driver (libcuda.so.1 not found)"
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return 0, "the CUDA driver finds no GPU"
    if status == _STUB_LIBRARY:
        return 0, "libcuda.so.1 is the toolkit's stub, not a driver"
    if status != 0:
        raise BrokenDriver(f"cuInit failed with CUDA error {status}: the driver is there and does not work")
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        raise BrokenDriver(f"cuDeviceGetCount failed with CUDA error {status}")
    return count.value, "" if count.value else "the CUDA driver finds no GPU"


def unavailable(tier: str) -> str | None:
    """Why a tier cannot run here, or None if it can."""
    needed = TIERS[tier]
    if needed == 0:
        return None
    found, why = count_gpus()
    if found >= needed:
        return None
    return why or f"needs {needed} GPUs, found {found}"


def _folder(path: Path) -> str | None:
    relative = path.resolve().relative_to(TESTS) if path.resolve().is_relative_to(TESTS) else None
    return relative.parts[0] if relative is not None and len(relative.parts) > 1 else None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_outcomes] = {tier: Counter() for tier in TIERS}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tier = _folder(item.path)
        if tier is None:
            continue
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path}: tests live in one of {', '.join(TIERS)}")
        item.stash[_tier_of] = tier
        item.add_marker(tier)
        reason = unavailable(tier)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else DEFAULT_LIMIT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test that outlives its limit, with the stack of every thread.

    The signal cannot interrupt a main thread that waits in native code; for that pyproject.toml sets a hard limit that
    ends the run.
    """
    if threading.current_thread() is not threading.main_thread():
        return (yield)
    limit = _limit(item)

    def expired(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail(f"still running after {limit:g} s (stacks of all threads are on stderr)")

    previous = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield
    tier = item.stash.get(_tier_of, None)
    if tier is not None and (report.when == "call" or report.outcome != "passed"):
        item.config.stash[_outcomes][tier][report.outcome] += 1
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line a tier: what it did, or why it did nothing."""
    terminalreporter.section("tiers")
    for tier in TIERS:
        counts = config.stash[_outcomes][tier]
        try:
            reason = unavailable(tier)
        except BrokenDriver as error:
            reason = str(error)
        if reason is not None:
            text = f"did not run: {reason} ({counts['skipped']} tests)"
        elif not counts:
            text = "did not run: no test selected"
        else:
            text = "ran: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        terminalreporter.line(f"{tier:<10}{text}")
