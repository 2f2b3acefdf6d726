"""Measures the exchange: cases as data, how each is timed, and the floors of the machine it ran on."""

from nvep.bench.cases import Case, default_cases, full_cases, small
from nvep.bench.floors import Floors, floor_of, measure_floors
from nvep.bench.run import CaseResult, run_case, run_cases

__all__ = [
    "Case",
    "CaseResult",
    "Floors",
    "default_cases",
    "floor_of",
    "full_cases",
    "measure_floors",
    "run_case",
    "run_cases",
    "small",
]
