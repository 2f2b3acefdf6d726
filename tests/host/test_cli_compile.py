"""``nvep compile``: the table, the cache, the exit status."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from nvep.cli import compile as command
from nvep.cli.main import main
from nvep.runtime.source import KernelSource
from tests.host.test_jit import SCALE, source

Catalog = list[tuple[str, KernelSource]]


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Stands in for the committed list, which takes longer; a test may change it."""
    kernels: Catalog = [("scale plain", source(tmp_path))]
    monkeypatch.setenv("NVEP_CACHE_DIR", str(tmp_path / "cache"))
    module = types.ModuleType("nvep.cli.catalog")
    module.kernel_catalog = lambda: kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernels


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.search(r"\bsm_\d+", line)]


def test_every_kernel_meets_every_architecture(
    catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog.append(("scale again", source(tmp_path, prelude="constexpr int kOther = 1;")))
    assert main(["compile", "--arch", "sm_90a, sm_120,sm_90a", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert [row[-8] for row in rows(shown)] == ["sm_90a", "sm_120", "sm_90a", "sm_120"]
    assert [row[:2] for row in rows(shown)[::2]] == [["scale", "plain"], ["scale", "again"]]
    assert [row[-4] for row in rows(shown)] == ["256"] * 4
    assert re.search(r"4 kernels with NVRTC 13\.\d+: 4 compiled, 0 cached, 0 failed, 0 with spills", shown)


def test_the_second_run_takes_everything_from_the_cache(catalog: Catalog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90a"]) == 0
    assert "1 compiled, 0 cached" in capsys.readouterr().out
    assert main(["compile", "--arch", "sm_90a"]) == 0
    shown = capsys.readouterr().out
    assert rows(shown)[0][-1] == "cached"
    assert "0 compiled, 1 cached" in shown


def test_one_failure_fails_the_command_and_shows_the_log(
    catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = source(tmp_path, SCALE.replace("float row", "flat row").replace("scale(", "broken("), name="broken")
    catalog.append(("broken one", broken))
    report = tmp_path / "report.json"
    assert main(["compile", "--arch", "sm_90a,sm_120", "--json", str(report)]) == 1
    shown = capsys.readouterr()
    assert "4 kernels" in shown.out
    assert "2 compiled, 0 cached, 2 failed" in shown.out
    assert [row[-1] for row in rows(shown.out)].count("failed") == 2
    assert shown.err.count('broken.cu(3): error: identifier "flat" is undefined') == 2
    records = json.loads(report.read_text())["kernels"]
    assert [record["ok"] for record in records] == [True, True, False, False]
    assert "flat" in records[2]["error"]


def test_the_report_holds_what_the_table_shows(catalog: Catalog, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["compile", "--arch", "sm_90a", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert re.fullmatch(r"13\.\d+", written["nvrtc"])
    (record,) = written["kernels"]
    assert record["kernel"] == "scale plain"
    assert record["arch"] == "sm_90a"
    assert record["shared_bytes"] == 256
    assert record["spill_bytes"] == 0
    assert 0 < record["registers"] < 64
    assert record["cubin_bytes"] > 1000
    assert record["seconds"] > 0
    assert record["cached"] is False


def test_an_architecture_the_compiler_does_not_know_fails(
    catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_90a,sm_42"]) == 1
    shown = capsys.readouterr()
    assert "1 compiled, 0 cached, 1 failed" in shown.out
    assert "scale for sm_42" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "hopper"], "--arch: got 'hopper'"),
        (["--arch", ","], "--arch: got ','"),
        (["--jobs", "0"], "--jobs: got 0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    assert f"nvep: error: {message}" in capsys.readouterr().err


def test_warnings_are_shown_once(catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog[0] = ("scale plain", source(tmp_path, f"#warning look here\n{SCALE}"))
    assert main(["compile", "--arch", "sm_90a,sm_120"]) == 0
    assert capsys.readouterr().err.count("warning #") == 1


def test_outcomes_keep_the_order_of_the_catalogue(tmp_path: Path) -> None:
    kernels = [(f"kernel {i}", source(tmp_path, SCALE, prelude=f"// {i}")) for i in range(4)]
    seen: list[str] = []
    outcomes = command.compile_catalog(
        kernels, ["sm_90a"], jobs=4, cache_dir=tmp_path / "cache", done=lambda outcome: seen.append(outcome.label)
    )
    assert [outcome.label for outcome in outcomes] == [label for label, _ in kernels]
    assert sorted(seen) == [label for label, _ in kernels]
