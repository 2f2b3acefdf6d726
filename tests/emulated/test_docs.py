"""Every snippet of the documentation runs, on the emulated device, and prints what the page says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host import snippets


@pytest.mark.parametrize("program", snippets.all_programs(), ids=lambda program: program.name)
def test_snippet(program: snippets.Program, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(program.text)
    command = [sys.executable, str(script)]
    if program.ranks:
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert mpirun, "the mpich wheel brings mpirun"
        command = [mpirun, "-n", str(program.ranks), sys.executable, "-m", "mpi4py", str(script)]
    path = os.pathsep.join([str(snippets.REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NVEP_DEVICE": "emulated", "PYTHONPATH": path}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    if program.output is not None:
        assert result.stdout == program.output


def test_the_readme_and_the_start_page_have_snippets() -> None:
    pages = [program.page for program in snippets.all_programs()]
    assert "README.md" in pages
    assert "docs/start.md" in pages
