"""The exchange over every network transport, on a GPU that all ranks of a local group share."""

from nvep.testing.conformance import ExchangeConformance
from nvep.testing.conformance_failures import FailureConformance


class TestGdaki(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "gdaki"
    protocol = "signal"
    wide_ranks = 8


class TestGpi(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "gpi"
    protocol = "signal"
    wide_ranks = 8


class TestGpiMc(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "gpi-mc"
    protocol = "signal"
    wide_ranks = 8


class TestFreeFlow(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "free-flow"
    protocol = "signal"
    wide_ranks = 8
