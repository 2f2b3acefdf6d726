"""Symmetric memory: the same layout on every rank, every rank's slice mapped on all."""

from nvep.symmetric.heap import SymmetricHeap
from nvep.symmetric.layout import Layout, Placed, Region

__all__ = ["Layout", "Placed", "Region", "SymmetricHeap"]
