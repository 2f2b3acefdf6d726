"""``nvep info``, and the choice between a GPU and the emulated device that it reports."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from nvep.cli import info
from nvep.cli.main import main
from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError, CompilationError, DeviceError
from nvep.exchange.plan import heap_layout
from nvep.runtime import choose_device_kind, open_device
from nvep.runtime.cuda_facts import GpuFacts, Link

CONFIGURATION = ["--experts", "256", "--top-k", "8", "--max-tokens", "128", "--row-bytes", "14336"]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVEP_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NVEP_DEVICE", raising=False)


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvep.runtime.cuda_calls.count_devices", lambda: (0, "no driver for this test"))


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvep.runtime.cuda_calls.count_devices", lambda: (count, ""))


def section(text: str, title: str) -> list[str]:
    (found,) = (part for part in text.split("\n\n") if part.startswith(title))
    return found.splitlines()


def test_without_a_gpu_it_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_gpus(monkeypatch)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "device: emulated (CPU)" in lines
    assert "gpus: none (no driver for this test)" in lines


def test_a_gpu_that_was_asked_for_and_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_gpus(monkeypatch)
    monkeypatch.setenv("NVEP_DEVICE", "cuda")
    assert main(["info"]) == 0
    assert "device: none (no CUDA device: no driver for this test)" in capsys.readouterr().out.splitlines()


def test_gpus_and_their_links_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpus(2, monkeypatch)
    gpus = [GpuFacts(i, "Some GPU", f"0000:0{i}:00.0", (9, 0), 132, 3 << 30, True, i == 1, False) for i in range(2)]
    monkeypatch.setattr("nvep.runtime.cuda_facts.gpu_facts", lambda: gpus)
    monkeypatch.setattr("nvep.runtime.cuda_facts.driver_version", lambda: "13.0")
    monkeypatch.setattr("nvep.runtime.cuda_facts.link", lambda source, target: Link(source == 0, source == 0, 1))
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "device: cuda (GPU)" in shown.splitlines()
    lines = section(shown, "gpus: 2, driver for CUDA 13.0")
    assert lines[1].split(maxsplit=2)[2] == (
        "Some GPU at 0000:00:00.0, compute capability 9.0, 132 multiprocessors, 3.0 GiB"
    )
    assert "memory handles: POSIX file descriptors yes, fabric no, dma-buf no" in lines[2]
    assert "fabric yes" in lines[4]
    assert lines[-2].split() == ["GPU", "0", "-", "yes", "a", "r1"]
    assert lines[-1].split() == ["GPU", "1", "no", "-"]


def test_one_gpu_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(info._links(1)) == []


def test_the_cache_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel").write_bytes(bytes(1_500_000))
    assert main(["info"]) == 0
    assert f"cache: {tmp_path} (1 files, 1.5 MB)" in capsys.readouterr().out.splitlines()


def test_versions_are_those_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "PACKAGES", ("numpy", "no-such-package-at-all"))
    assert main(["info"]) == 0
    lines = [line.split(maxsplit=1) for line in section(capsys.readouterr().out, "packages")[1:]]
    assert lines == [["numpy", metadata.version("numpy")], ["no-such-package-at-all", "not installed"]]


def test_mpi_is_found_and_not_started_here(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py")
    assert main(["info"]) == 0
    rows = dict(line.split(maxsplit=1) for line in section(capsys.readouterr().out, "mpi")[1:])
    assert rows["mpi4py"] == metadata.version("mpi4py")
    assert rows["mpirun"] == "not found" or Path(rows["mpirun"]).is_file()
    assert "does not load" not in rows["library"]
    assert "\n" not in rows["library"]


def test_an_mpi_that_does_not_load_is_a_line_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info.sys, "executable", shutil.which("false"))
    assert info._mpi_library().startswith("does not load")
    monkeypatch.setattr(info.sys, "executable", "/no/such/python")
    assert info._mpi_library().startswith("does not load")


def test_missing_compilers_are_lines_not_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*arguments: object) -> None:
        raise CompilationError("nothing here")

    monkeypatch.setattr("nvep.runtime.host_jit.find_compiler", missing)
    monkeypatch.setattr("nvep.runtime.jit.nvrtc_version", missing)
    assert main(["info"]) == 0
    assert section(capsys.readouterr().out, "compilers")[1:] == [
        "  host C++  none (nothing here)",
        "  NVRTC     none (nothing here)",
    ]


def test_the_heap_of_a_configuration_is_summed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--ranks", "8", *CONFIGURATION, "--lanes", "2"]) == 0
    config = ExchangeConfig(num_experts=256, top_k=8, max_tokens=128, row_bytes=14336, lanes=2)
    layout = heap_layout(config, 8)
    shown = capsys.readouterr().out
    assert shown.endswith(f"\n\nheap of one rank\n{layout.describe()}\n")
    assert f"{layout.nbytes:,} B" in shown


def test_no_configuration_no_heap(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert "heap of one rank" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "8"], "--experts: got None"),
        (CONFIGURATION, "--ranks: got None"),
        (["--ranks", "0", *CONFIGURATION], "--ranks: got 0"),
        (["--ranks", "8", *CONFIGURATION, "--row-bytes", "100"], "row_bytes: got 100"),
        (["--ranks", "8", *CONFIGURATION, "--lanes", "0"], "lanes: got 0"),
    ],
)
def test_a_bad_configuration_is_the_only_output(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"nvep: error: {message}")
    assert shown.out == ""


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(1, monkeypatch)
    assert [choose_device_kind(setting) for setting in ("auto", "cuda", "emulated")] == ["cuda", "cuda", "emulated"]


def test_auto_is_emulated_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    assert [choose_device_kind(setting) for setting in ("auto", "emulated")] == ["emulated", "emulated"]
    with pytest.raises(DeviceError, match="no CUDA device: no driver for this test"):
        choose_device_kind("cuda")


def test_a_broken_driver_is_told_and_never_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> tuple[int, str]:
        raise DeviceError("cuInit failed: broken for this test")

    monkeypatch.setattr("nvep.runtime.cuda_calls.count_devices", broken)
    assert choose_device_kind("auto") == "emulated"
    assert "broken for this test" in caplog.text
    with pytest.raises(DeviceError, match="broken for this test"):
        choose_device_kind("cuda")
    assert main(["info"]) == 0


@pytest.mark.parametrize("setting", ["gpu", "", "CUDA"])
def test_no_other_setting_is_accepted(setting: str) -> None:
    with pytest.raises(ArgumentError, match="auto, cuda or emulated"):
        choose_device_kind(setting)


def test_an_emulated_device_opens_anywhere() -> None:
    device = open_device("emulated", 3)
    assert device.emulated
    device.close()


def test_no_other_kind_opens() -> None:
    with pytest.raises(ArgumentError, match="kind: got 'auto'"):
        open_device("auto")
