"""The table that decides ``protocol="auto"`` and the blocks, and what ``nvep tune`` makes of measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import nvep
from nvep.cli.main import main as nvep_command
from nvep.cli.tune import tuning_from
from nvep.exchange.tuning import (
    Tuning,
    choose_blocks,
    device_key,
    measured_table,
    save_tuning,
    shipped_table,
    table_path,
    tuning_of,
)


def test_the_shipped_table_knows_every_device() -> None:
    table = shipped_table()
    assert {"any", "NVIDIA H200"} <= set(table)
    assert all(entry.sentinel_bytes > 0 for entry in table.values())


def test_measurements_are_kept_beside_each_other(tmp_path: Path) -> None:
    first, second = Tuning(1000, {"fence": ((10, 4), (20, 8))}), Tuning(2000, {})
    save_tuning("GPU A", Tuning(5), tmp_path / "cache")
    save_tuning("GPU B", second, tmp_path / "cache")
    save_tuning("GPU A", first, tmp_path / "cache")
    assert measured_table(tmp_path / "cache") == {"GPU A": first, "GPU B": second}
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["tuning.json"]
    assert tuning_of("GPU A (GPU 3, sm_90a)", tmp_path / "cache") == first
    assert tuning_of("GPU C", tmp_path / "cache") == shipped_table()["any"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        "3",
        '{"GPU": 917504}',
        '{"version": 1, "devices": {}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": "many", "blocks": {}}}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": -1, "blocks": {}}}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": 1}}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": 1, "blocks": {"other": [[1, 2]]}}}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": 1, "blocks": {"fence": [[2, 2], [1, 2]]}}}}',
        '{"version": 2, "devices": {"GPU": {"sentinel_bytes": 1, "blocks": {"fence": [1]}}}}',
    ],
)
def test_a_damaged_table_counts_as_none(text: str, tmp_path: Path) -> None:
    table_path(tmp_path).write_text(text)
    assert measured_table(tmp_path) == {}


def test_devices_of_one_model_share_an_entry() -> None:
    assert device_key("NVIDIA H200 (GPU 3, sm_90a)") == "NVIDIA H200"


def _rows(sentinel: list[dict[int, float]]) -> list[dict[str, Any]]:
    fence = {4: 5.0, 8: 5.1, 16: 9.0}
    return [{"bytes": 16 * 2**i, "times": {"fence": fence, "sentinel": s}} for i, s in enumerate(sentinel)]


@pytest.mark.parametrize(("sentinel", "expected"), [([1, 2, 9, 3], 2 * 16), ([1, 1, 1, 1], 8 * 16), ([9, 1, 1, 1], 0)])
def test_the_crossover_is_the_last_size_before_the_first_loss(sentinel: list[float], expected: int) -> None:
    assert tuning_from(_rows([{4: us, 8: 30.0} for us in sentinel])).sentinel_bytes == expected


def test_sizes_with_the_same_best_number_of_blocks_make_one_class() -> None:
    best_is = {4: {4: 1.0, 8: 2.0}, 8: {4: 2.0, 8: 1.0}, 0: {}}
    tuning = tuning_from(_rows([best_is[b] for b in (4, 4, 8, 8, 0)]))
    assert tuning.blocks["sentinel"] == ((32, 4), (128, 8))
    assert tuning.blocks["fence"] == ((256, 4),)
    assert [tuning.best_blocks("sentinel", n) for n in (1, 32, 33, 1000)] == [4, 4, 8, 8]
    assert Tuning(0).best_blocks("sentinel", 1) is None


def test_fewer_blocks_that_are_almost_as_fast_are_better() -> None:
    assert tuning_from(_rows([{8: 1.02, 16: 1.0, 4: 1.04}])).blocks["sentinel"] == ((16, 8),)


@pytest.mark.parametrize(("crossover", "expected"), [(16 * 256, "sentinel"), (16 * 256 - 1, "fence")])
def test_auto_follows_rank_0(crossover: int, expected: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NVEP_CACHE_DIR", str(tmp_path))
    config = nvep.ExchangeConfig(num_experts=4, top_k=1, max_tokens=16, row_bytes=256, protocol="auto")

    def main(group: nvep.RankGroup) -> str:
        if group.rank == 0:
            save_tuning(device_key(group.device.name), Tuning(crossover), tmp_path)
        group.barrier()
        with nvep.Exchange(group, config) as exchange:
            return exchange.protocol

    assert nvep.run_local(main, 2, device="emulated") == [expected] * 2


def test_blocks_come_from_the_configuration_then_from_the_table(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NVEP_CACHE_DIR", str(tmp_path))
    save_tuning("GPU A", Tuning(0, {"fence": ((4096, 8), (8192, 16))}), tmp_path)
    config = nvep.ExchangeConfig(num_experts=4, top_k=1, max_tokens=17, row_bytes=256)
    assert choose_blocks(config, "fence", "GPU A (GPU 0, sm_90a)") == 16
    assert choose_blocks(config, "sentinel", "GPU A (GPU 0, sm_90a)") is None
    fixed = nvep.ExchangeConfig(num_experts=4, top_k=1, max_tokens=17, row_bytes=256, max_blocks=3)
    assert choose_blocks(fixed, "fence", "GPU A (GPU 0, sm_90a)") == 3


def test_nvep_tune_measures_and_keeps(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("NVEP_DEVICE", "emulated")
    out = tmp_path / "tune.json"
    with monkeypatch.context() as patch:
        patch.setattr("nvep.cli.tune.save_tuning", lambda device, tuning, folder: save_tuning(device, tuning, tmp_path))
        options = ["--hidden", "64", "--tokens", "1", "2", "--blocks", "1", "2", "--json", str(out)]
        assert nvep_command(["tune", *options]) == 0
    printed = capsys.readouterr().out
    assert "EMULATED" in printed
    found = json.loads(out.read_text())
    assert [row["bytes"] for row in found["rows"]] == [128, 256]
    assert all(us > 0 for row in found["rows"] for times in row["times"].values() for us in times.values())
    (kept,) = measured_table(tmp_path).values()
    assert kept == tuning_from([{**row, "times": _numbered(row["times"])} for row in found["rows"]])


def _numbered(times: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {protocol: {int(count): us for count, us in found.items()} for protocol, found in times.items()}
