"""Rank groups: MPI ranks, or threads of one process."""

from nvep.group.base import RankGroup
from nvep.group.local import local_groups, run_local

__all__ = ["RankGroup", "local_groups", "run_local"]
