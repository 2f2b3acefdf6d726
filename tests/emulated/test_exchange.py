"""Both protocols over peer load/store, on the emulated device."""

from nvep.testing.conformance import ExchangeConformance
from nvep.testing.conformance_failures import FailureConformance
from nvep.testing.conformance_protocols import ProtocolConformance


class TestFenceNvlink(ExchangeConformance, FailureConformance):
    device = "emulated"
    transport = "nvlink"
    protocol = "fence"


class TestSentinelNvlink(ExchangeConformance, FailureConformance):
    device = "emulated"
    transport = "nvlink"
    protocol = "sentinel"


class TestBothProtocolsNvlink(ProtocolConformance):
    device = "emulated"
    transport = "nvlink"
