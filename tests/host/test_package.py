"""The wheel holds what it must, installs without a compiler or a GPU, and works from outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEPENDENCIES = {
    "numpy",
    "ml-dtypes",
    "cuda-python<14,>=13",
    "nvidia-cuda-nvrtc<14,>=13",
    "nvmath-python",
    "mpi4py",
    "mpich",
    "safetensors",
    "rich",
}
EXTRAS = {"gemm", "verbs", "plot", "docs", "dev"}
MODEL_BYTES = 8_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100)
    (path,) = folder.glob("nvep-*.whl")
    return zipfile.ZipFile(path)


def _sources() -> set[str]:
    folders = (REPOSITORY / "nvep", REPOSITORY / "nvep_kernels")
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(REPOSITORY)) for path in files if "__pycache__" not in path.parts}


def _metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (entry,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(entry).decode()


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == _sources()
    assert "nvep/py.typed" in shipped
    assert any(name.startswith("nvep_kernels/kernels/") and name.endswith(".cu") for name in shipped)
    assert any(name.endswith(".cuh") for name in shipped)
    assert any(name.startswith("nvep_kernels/emulator/") for name in shipped)


def test_the_wheel_is_not_tied_to_a_platform(wheel: zipfile.ZipFile) -> None:
    assert str(wheel.filename).endswith("-py3-none-any.whl")


def test_the_demo_model_is_shipped_and_small(wheel: zipfile.ZipFile) -> None:
    models = [info for info in wheel.infolist() if info.filename.endswith(".safetensors")]
    assert models
    assert all(info.filename.startswith("nvep/cli/demo_model/") for info in models)
    assert sum(info.file_size for info in models) <= MODEL_BYTES


def test_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(_metadata(wheel, "METADATA"))
    requirements = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    exact = {text for text in DEPENDENCIES if "<" in text}
    assert {text for text in requirements if "<" in text} == exact
    assert {text.partition(">")[0].partition("<")[0] for text in requirements} == {
        text.partition("<")[0] for text in DEPENDENCIES
    }
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "nvep = nvep.cli.main:main" in _metadata(wheel, "entry_points.txt")
    licence = _metadata(wheel, "licenses/LICENSE")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


INSTALLED = """
import sys
from pathlib import Path
import nvep, nvep_kernels
from nvep.runtime.source import KERNEL_ROOT, headers_digest
assert Path(nvep.__file__).is_relative_to(sys.prefix), nvep.__file__
assert Path(nvep_kernels.__file__).is_relative_to(sys.prefix), nvep_kernels.__file__
assert list((KERNEL_ROOT / "kernels").glob("*.cu")), KERNEL_ROOT
assert len(headers_digest()) == 64
assert list((Path(nvep.__file__).parent / "cli" / "demo_model").glob("*.safetensors"))
print(nvep.__version__)
"""


def test_it_works_installed_outside_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    python = environment / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel.filename)]
    subprocess.run([sys.executable, *install], check=True, timeout=60)
    # The dependencies come from the environment of this test run; .pth files there, such as the one of an editable
    # install, have no effect from PYTHONPATH.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
    clean["PYTHONPATH"] = sysconfig.get_paths()["purelib"]
    run = {"cwd": tmp_path, "env": clean, "capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run([str(python), "-c", INSTALLED], **run)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stderr
    assert f"nvep-{result.stdout.strip()}-" in str(wheel.filename)
    result = subprocess.run([str(environment / "bin" / "nvep"), "--help"], **run)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout
