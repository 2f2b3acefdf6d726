"""The guards of tests/conftest.py do fail: hangs are cut, tiers skip only for absence, a broken driver is an error."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run pytest on ``files`` below a copy of the project's configuration and conftest."""
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "conftest.py", folder / "tests")
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:hypothesispytest"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_driver(monkeypatch: pytest.MonkeyPatch, *, init: int = 0, gpus: int = 0) -> None:
    def count(pointer: object) -> int:
        pointer._obj.value = gpus  # type: ignore[attr-defined]
        return 0

    library = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    conftest.count_gpus.cache_clear()


@pytest.fixture(autouse=True)
def _forget_fake_driver():
    yield
    conftest.count_gpus.cache_clear()


def test_a_hang_fails_its_test_with_stacks_and_the_run_goes_on(tmp_path):
    hang = "import pytest, time\n@pytest.mark.timeout(0.5)\ndef test_hang():\n    time.sleep(60)\n"
    result = run_pytest(tmp_path, {"host/test_hang.py": hang + "def test_next(): pass\n"})
    assert result.returncode == 1
    assert "still running after 0.5 s" in result.stdout
    assert "test_hang.py\", line 4 in test_hang" in result.stdout
    assert "1 failed, 1 passed" in result.stdout
    assert "host      ran: 1 failed, 1 passed" in result.stdout


def test_every_tier_says_what_it_did(tmp_path):
    result = run_pytest(tmp_path, {"host/test_a.py": "def test_a(): pass\n"})
    assert result.returncode == 0, result.stdout
    assert "host      ran: 1 passed" in result.stdout
    assert "emulated  did not run: no test selected" in result.stdout


def test_a_test_outside_the_tiers_is_refused(tmp_path):
    result = run_pytest(tmp_path, {"elsewhere/test_a.py": "def test_a(): pass\n"})
    assert result.returncode == 4
    assert "tests live in one of host, emulated, gpu, multi_gpu" in result.stderr


def test_an_unknown_marker_is_refused(tmp_path):
    result = run_pytest(tmp_path, {"host/test_a.py": "import pytest\n@pytest.mark.gpuu\ndef test_a(): pass\n"})
    assert result.returncode != 0
    assert "'gpuu' not found in `markers`" in result.stdout


@pytest.mark.parametrize(
    ("init", "gpus", "gpu", "multi_gpu"),
    [
        (0, 2, None, None),
        (0, 1, None, "needs 2 GPUs, found 1"),
        (0, 0, "the CUDA driver finds no GPU", "the CUDA driver finds no GPU"),
        (100, 0, "the CUDA driver finds no GPU", "the CUDA driver finds no GPU"),
        (34, 0, "libcuda.so.1 is the toolkit's stub, not a driver", "libcuda.so.1 is the toolkit's stub, not a driver"),
    ],
)
def test_gpu_tiers_skip_only_for_absence(monkeypatch, init, gpus, gpu, multi_gpu):
    fake_driver(monkeypatch, init=init, gpus=gpus)
    assert conftest.unavailable("gpu") == gpu
    assert conftest.unavailable("multi_gpu") == multi_gpu
    assert conftest.unavailable("emulated") is None


def test_a_broken_driver_is_an_error(monkeypatch):
    fake_driver(monkeypatch, init=999)
    with pytest.raises(conftest.BrokenDriver, match="CUDA error 999"):
        conftest.unavailable("gpu")


def test_no_driver(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    conftest.count_gpus.cache_clear()
    assert conftest.unavailable("gpu") == "no CUDA driver (libcuda.so.1 not found)"
