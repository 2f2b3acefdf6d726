"""Clocks of several devices brought together by steps that no rank leaves before all have entered."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


class ClockOffsets(NamedTuple):
    """What to add to each rank's clock to read rank 0's.

    Attributes
    ----------
    offset_ns, error_ns : numpy.ndarray
        float64 ``[ranks]``: the middle of what is possible, and half its width.
    """

    offset_ns: npt.NDArray[np.float64]
    error_ns: npt.NDArray[np.float64]


def one_clock(ranks: int) -> ClockOffsets:
    """All ranks read the same clock."""
    return ClockOffsets(np.zeros(ranks), np.zeros(ranks))


def clock_offsets(entered: Times, left: Times) -> ClockOffsets:
    """Offsets from barriers: on one clock, whoever leaves does so after everybody has entered.

    So ``entered[s] + offset[s] <= left[r] + offset[r]`` for every pair in every round, and the narrowest of all rounds
    bound the offset from both sides.

    Parameters
    ----------
    entered, left : numpy.ndarray
        int64 ``[rounds, ranks]``: nanoseconds, each rank's on its own clock.
    """
    above = (left[:, :1] - entered).min(axis=0)  # offset[s] <= left[0] - entered[s]
    below = (entered[:, :1] - left).max(axis=0)  # offset[s] >= entered[0] - left[s]
    middle, half = (above + below) / 2.0, (above - below) / 2.0
    middle[0] = half[0] = 0.0
    return ClockOffsets(middle, half)
