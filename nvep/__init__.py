"""Expert parallelism for mixture-of-experts layers in CUDA-Python: no deep-learning framework needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvep import errors
from nvep.config import ExchangeConfig

if TYPE_CHECKING:
    from nvep.exchange import Arrivals, Exchange
    from nvep.group import RankGroup, local_groups, run_local
    from nvep.moe import MoELayer

_LAZY = {
    "Arrivals": "nvep.exchange",
    "Exchange": "nvep.exchange",
    "RankGroup": "nvep.group",
    "local_groups": "nvep.group",
    "run_local": "nvep.group",
    "MoELayer": "nvep.moe",
}

__all__ = ["Arrivals", "Exchange", "ExchangeConfig", "MoELayer", "RankGroup", "errors", "local_groups", "run_local"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nvep' has no attribute {name!r}")
