"""Phases launched before their predecessors end: results and failures are those of ordinary launches."""

from __future__ import annotations

from typing import Any

from nvep.config import ExchangeConfig
from nvep.testing.conformance import ExchangeConformance
from nvep.testing.conformance_failures import FailureConformance


class _Dependent(ExchangeConformance, FailureConformance):
    device = "cuda"
    wide_ranks = 8

    def config(self, **fields: Any) -> ExchangeConfig:
        return super().config(**{"dependent_launch": True, **fields})


class TestFence(_Dependent):
    protocol = "fence"


class TestSentinel(_Dependent):
    protocol = "sentinel"
