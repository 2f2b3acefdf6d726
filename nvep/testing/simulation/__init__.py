"""Exchanges under the deterministic simulation: random scenarios, planted bugs, and how a failure is shown."""

from nvep.testing.simulation.runner import Failure, Run, Simulator, run_scenario
from nvep.testing.simulation.scenario import Scenario, ScenarioKind, random_scenario

__all__ = ["Failure", "Run", "Scenario", "ScenarioKind", "Simulator", "random_scenario", "run_scenario"]
