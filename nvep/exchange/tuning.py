"""Which protocol is faster for how many bytes: a table shipped with nvep, and what ``nvep tune`` measured here."""

from __future__ import annotations

import json
import os
import tempfile
from importlib import resources
from pathlib import Path

from nvep.config import ExchangeConfig, Settings
from nvep.group import RankGroup

_FILE = "tuning.json"
_ANY_DEVICE = "any"


def table_path(cache_dir: Path) -> Path:
    """Where ``nvep tune`` keeps its measurements."""
    return cache_dir / _FILE


def shipped_table() -> dict[str, int]:
    """Bytes a rank sends in a step up to which Sentinel is faster, by device; ``any`` for devices not measured."""
    table: dict[str, int] = json.loads(resources.files("nvep.exchange").joinpath(_FILE).read_text())
    return table


def measured_table(cache_dir: Path) -> dict[str, int]:
    """The same, measured on this machine; empty if nothing was, or if the file is damaged."""
    try:
        table = json.loads(table_path(cache_dir).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {str(name): value for name, value in table.items() if isinstance(value, int) and value >= 0}


def save_crossover(device: str, nbytes: int, cache_dir: Path) -> Path:
    """Remember a measurement of this machine for ``device``; other devices' entries stay."""
    table = {**measured_table(cache_dir), device: nbytes}
    cache_dir.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache_dir, prefix=_FILE)
    with os.fdopen(handle, "w") as file:
        json.dump(table, file, indent=1, sort_keys=True)
    os.replace(name, table_path(cache_dir))
    return table_path(cache_dir)


def device_key(name: str) -> str:
    """A device's model: its name without number and architecture."""
    return name.split(" (", 1)[0]


def choose_protocol(config: ExchangeConfig, group: RankGroup) -> str:
    """Protocol of the first step, the same on all ranks. Collective where the configuration says ``auto``.

    The largest step decides: ``max_tokens`` rows of all payloads. Ranks may have different tables, so rank 0's counts.
    """
    if config.protocol != "auto":
        return config.protocol
    cache_dir = Settings.from_environment().cache_dir
    table = {**shipped_table(), **measured_table(cache_dir)}
    key = device_key(group.device.name)
    crossover = table.get(key, table[_ANY_DEVICE])
    largest = config.max_tokens * sum(config.payload_bytes)
    choices: list[str] = group.allgather("sentinel" if largest <= crossover else "fence")
    return choices[0]
