"""Send schemes on the soft NIC of the emulated device."""

from __future__ import annotations

from nvep.testing.nic_conformance import NicConformance, SchemeConformance


class TestSchemes(SchemeConformance):
    device = "emulated"


class TestNic(NicConformance):
    device = "emulated"
