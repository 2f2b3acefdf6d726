"""The command table: what is imported, what errors become."""

from __future__ import annotations

import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import nvep
from nvep.cli import main as cli
from nvep.errors import ArgumentError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command ``probe`` whose behaviour a test sets."""
    module = types.ModuleType("probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    module.run = lambda namespace: namespace.number  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", (module.__name__, "only here"))
    return module


def test_the_status_is_the_commands(command: types.ModuleType) -> None:
    assert cli.main(["probe", "--number", "7"]) == 7


def test_an_error_of_nvep_is_one_line_and_status_2(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(namespace: object) -> int:
        raise ArgumentError("--ranks", 0, "1 or more")

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "nvep: error: --ranks: got 0; allowed: 1 or more\n"
    assert shown.out == ""


def test_other_errors_keep_their_traceback(command: types.ModuleType) -> None:
    def run(namespace: object) -> int:
        raise ZeroDivisionError

    command.run = run  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_interrupt_is_quiet(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(namespace: object) -> int:
        raise KeyboardInterrupt

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["probe", "--number", "x"], ["probe", "--bogus"]])
def test_bad_usage_is_status_2(
    arguments: list[str], command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: nvep" in capsys.readouterr().err


def test_help_names_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys\nfrom nvep.cli import main\ntry: main.main(['--help'])\nexcept SystemExit: pass\n"
        "print('imported:', [m for m, _ in main.COMMANDS.values() if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert "imported: []" in answer.stdout
    for name in ("demo", "replay", "info", "compile"):
        assert f"\n    {name} " in answer.stdout


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"nvep {nvep.__version__}\n"


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    program = "from nvep.cli.main import main; import sys; sys.exit(main(['info']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.wait(timeout=60) == 1
    assert child.stderr.read() == ""
    child.stderr.close()


@pytest.mark.parametrize(("redirection", "status"), [(">&-", 0), (">/dev/full", 2)])
def test_output_that_is_closed_or_full_gives_no_traceback(redirection: str, status: int) -> None:
    program = f"{shlex.quote(sys.executable)} -m nvep.cli info {redirection}"
    answer = subprocess.run(
        program, shell=True, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == status
    assert answer.stderr == ("" if status == 0 else "nvep: error: No space left on device\n")
