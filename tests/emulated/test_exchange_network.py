"""The exchange over every network transport, on the emulated device."""

from __future__ import annotations

from nvep.testing.conformance import ExchangeConformance


class TestGdaki(ExchangeConformance):
    device = "emulated"
    transport = "gdaki"
    protocol = "signal"


class TestGpi(ExchangeConformance):
    device = "emulated"
    transport = "gpi"
    protocol = "signal"


class TestGpiMc(ExchangeConformance):
    device = "emulated"
    transport = "gpi-mc"
    protocol = "signal"


class TestFreeFlow(ExchangeConformance):
    device = "emulated"
    transport = "free-flow"
    protocol = "signal"
