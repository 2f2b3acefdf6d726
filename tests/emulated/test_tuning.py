"""The table that decides ``protocol="auto"``, and what ``nvep tune`` makes of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nvep
from nvep.cli.tune import crossover_bytes
from nvep.exchange.tuning import device_key, measured_table, save_crossover, shipped_table, table_path


def test_the_shipped_table_knows_every_device() -> None:
    table = shipped_table()
    assert "any" in table
    assert all(isinstance(value, int) and value >= 0 for value in table.values())


def test_measurements_are_kept_beside_each_other(tmp_path: Path) -> None:
    save_crossover("GPU A", 1000, tmp_path / "cache")
    save_crossover("GPU B", 2000, tmp_path / "cache")
    save_crossover("GPU A", 3000, tmp_path / "cache")
    assert measured_table(tmp_path / "cache") == {"GPU A": 3000, "GPU B": 2000}
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"GPU": "many"}', '{"GPU": -1}'])
def test_a_damaged_table_counts_as_none(text: str, tmp_path: Path) -> None:
    table_path(tmp_path).write_text(text)
    assert measured_table(tmp_path) == {}


def test_devices_of_one_model_share_an_entry() -> None:
    assert device_key("NVIDIA H200 (GPU 3, sm_90a)") == "NVIDIA H200"


@pytest.mark.parametrize(
    ("sentinel", "expected"), [([1, 2, 9, 3], 2 * 16), ([1, 1, 1, 1], 8 * 16), ([9, 1, 1, 1], 0)]
)
def test_the_crossover_is_the_last_size_before_the_first_loss(sentinel: list[float], expected: int) -> None:
    rows = [{"tokens": 2**i, "fence": 5.0, "sentinel": s} for i, s in enumerate(sentinel)]
    assert crossover_bytes(rows, 16) == expected


@pytest.mark.parametrize(("crossover", "expected"), [(16 * 256, "sentinel"), (16 * 256 - 1, "fence")])
def test_auto_follows_rank_0(crossover: int, expected: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NVEP_CACHE_DIR", str(tmp_path))
    config = nvep.ExchangeConfig(num_experts=4, top_k=1, max_tokens=16, row_bytes=256, protocol="auto")

    def main(group: nvep.RankGroup) -> str:
        if group.rank == 0:
            save_crossover(device_key(group.device.name), crossover, tmp_path)
        group.barrier()
        with nvep.Exchange(group, config) as exchange:
            return exchange.protocol

    assert nvep.run_local(main, 2, device="emulated") == [expected] * 2
