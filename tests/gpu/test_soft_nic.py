"""Send schemes on the soft NIC of a GPU: a persistent kernel on a stream of its own."""

from __future__ import annotations

from nvep.testing.nic_conformance import NicConformance, SchemeConformance


class TestSchemes(SchemeConformance):
    device = "cuda"


class TestNic(NicConformance):
    device = "cuda"
