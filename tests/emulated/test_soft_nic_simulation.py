"""Rings and the soft NIC under the weak memory model: true kernels stream cleanly, broken ones are noticed."""

from __future__ import annotations

import pytest

from nvep.config import NETWORK_TRANSPORTS
from nvep.runtime.simulated_library import SimulatorLibrary
from nvep.testing.nic_streams import SCHEMES
from nvep.testing.simulation.nic import run_nic_scenario
from nvep.testing.simulation.nic_mutations import NIC_MUTATIONS, find, fixed_scenario
from nvep.testing.simulation.runner import Simulator
from nvep.testing.simulation.scenario import ScenarioKind
from nvep.testing.simulation.search import search

# The others take longer: they end in streams that stand still.
QUICK = (
    "owner-one-segment",
    "signal-before-put",
    "ci-before-copy",
    "descriptor-before-payload",
    "ready-before-wqe",
    "near-without-fence",
)


@pytest.fixture(scope="module")
def library() -> SimulatorLibrary:
    return SimulatorLibrary()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_true_kernels_stream_cleanly(scheme: str, library: SimulatorLibrary) -> None:
    for seed in range(2):
        assert run_nic_scenario(library, fixed_scenario(scheme, seed)).symptom is None


@pytest.mark.parametrize("transport", NETWORK_TRANSPORTS)
def test_exchanges_over_an_adapter(transport: str) -> None:
    kind = ScenarioKind(ranks=3, steps=3, transport=transport)
    assert search(kind, range(3), simulator=Simulator()).failures == []


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert find(NIC_MUTATIONS[name], range(8)) is not None


def test_every_mutation_fits_the_sources() -> None:
    for mutation in NIC_MUTATIONS.values():
        mutation.overlay()
