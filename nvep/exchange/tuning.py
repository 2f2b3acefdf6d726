"""The fastest protocol and number of blocks by bytes of a step: shipped with nvep, or measured by ``nvep tune``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from nvep.config import PROTOCOLS, ExchangeConfig, Settings
from nvep.group import RankGroup

VERSION = 2
_FILE = "tuning.json"
_ANY_DEVICE = "any"


@dataclass(frozen=True)
class Tuning:
    """What is fastest on a device model, by the bytes that a rank sends in a step (``max_tokens`` of all payloads).

    Attributes
    ----------
    sentinel_bytes : int
        Sentinel is the faster protocol up to here, Fence beyond.
    blocks : dict of str to tuple of (int, int)
        By protocol: size classes, ascending, as pairs of the largest size in the class and the best number of blocks.
        Sizes beyond the last class belong to it. A protocol without classes was not measured.
    """

    sentinel_bytes: int
    blocks: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def best_blocks(self, protocol: str, nbytes: int) -> int | None:
        """Number of blocks for a step of ``nbytes``, None where nothing was measured."""
        classes = self.blocks.get(protocol, ())
        return next((blocks for limit, blocks in classes if nbytes <= limit), classes[-1][1] if classes else None)


def table_path(cache_dir: Path) -> Path:
    """Where ``nvep tune`` keeps its measurements."""
    return cache_dir / _FILE


def shipped_table() -> dict[str, Tuning]:
    """By device model; ``any`` for devices not measured."""
    return _parse(resources.files("nvep.exchange").joinpath(_FILE).read_text())


def measured_table(cache_dir: Path) -> dict[str, Tuning]:
    """The same, measured on this machine; empty if nothing was, or if the file is damaged or of another version."""
    try:
        return _parse(table_path(cache_dir).read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _parse(text: str) -> dict[str, Tuning]:
    table = json.loads(text)
    if table["version"] != VERSION:
        return {}
    return {str(device): _tuning(entry) for device, entry in table["devices"].items()}


def _tuning(entry: Mapping[str, Any]) -> Tuning:
    """Raises ValueError, TypeError, KeyError or AttributeError for anything but a tuning."""
    blocks = {}
    for protocol, classes in entry["blocks"].items():
        blocks[protocol] = tuple((_natural(limit), max(1, _natural(count))) for limit, count in classes)
        if protocol not in PROTOCOLS or list(blocks[protocol]) != sorted(blocks[protocol]):
            raise ValueError(f"{protocol}: {classes}")
    return Tuning(_natural(entry["sentinel_bytes"]), blocks)


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def save_tuning(device: str, tuning: Tuning, cache_dir: Path) -> Path:
    """Remember a measurement of this machine for ``device``; other devices' entries stay."""
    entries = {name: asdict(entry) for name, entry in {**measured_table(cache_dir), device: tuning}.items()}
    cache_dir.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache_dir, prefix=_FILE)
    with os.fdopen(handle, "w") as file:
        json.dump({"version": VERSION, "devices": entries}, file, indent=1, sort_keys=True)
    os.replace(name, table_path(cache_dir))
    return table_path(cache_dir)


def device_key(name: str) -> str:
    """A device's model: its name without number and architecture."""
    return name.split(" (", 1)[0]


def tuning_of(device: str, cache_dir: Path) -> Tuning:
    """What is known of a device, by its full name: measured here, else shipped, else a sound guess."""
    table = {**shipped_table(), **measured_table(cache_dir)}
    return table.get(device_key(device), table[_ANY_DEVICE])


def largest_step(config: ExchangeConfig) -> int:
    """Bytes that a rank sends in a step of ``max_tokens``: what the table is asked for."""
    return config.max_tokens * sum(config.payload_bytes)


def choose_protocol(config: ExchangeConfig, group: RankGroup) -> str:
    """Protocol of the first step, the same on all ranks. Collective where the configuration says ``auto``.

    The largest step decides. Ranks may have different tables, so rank 0's counts.
    """
    if config.protocol != "auto":
        return config.protocol
    tuning = tuning_of(group.device.name, Settings.from_environment().cache_dir)
    choices: list[str] = group.allgather("sentinel" if largest_step(config) <= tuning.sentinel_bytes else "fence")
    return choices[0]


def choose_blocks(config: ExchangeConfig, protocol: str, device: str) -> int | None:
    """Blocks of an exchange kernel: the configuration's, else the table's for this device, else None.

    Ranks may differ in it.
    """
    if config.max_blocks is not None:
        return config.max_blocks
    tuning = tuning_of(device, Settings.from_environment().cache_dir)
    return tuning.best_blocks(protocol, largest_step(config))
