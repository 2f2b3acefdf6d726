"""Both protocols over peer load/store, on a GPU that all ranks of a local group share."""

from nvep.testing.conformance import ExchangeConformance
from nvep.testing.conformance_failures import FailureConformance
from nvep.testing.conformance_protocols import ProtocolConformance


class TestFenceNvlink(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "nvlink"
    protocol = "fence"
    wide_ranks = 16


class TestSentinelNvlink(ExchangeConformance, FailureConformance):
    device = "cuda"
    transport = "nvlink"
    protocol = "sentinel"
    wide_ranks = 16


class TestBothProtocolsNvlink(ProtocolConformance):
    device = "cuda"
    transport = "nvlink"
