"""Frees are put off while an exchange is open, and none is lost."""

from __future__ import annotations

import pytest

from nvep.errors import DeviceError
from nvep.runtime.frees import Frees


def test_nothing_open_frees_at_once() -> None:
    frees, done = Frees(), []  # type: tuple[Frees, list[int]]
    frees.defer(lambda: done.append(1))
    assert done == [1]


def test_the_last_to_leave_frees_in_order() -> None:
    frees, done = Frees(), []  # type: tuple[Frees, list[int]]
    frees.enter()
    frees.enter()
    frees.defer(lambda: done.append(1))
    frees.leave()
    frees.defer(lambda: done.append(2))
    assert done == []
    frees.leave()
    assert done == [1, 2]


def test_settling_leaves_the_count_alone() -> None:
    frees, done = Frees(), []  # type: tuple[Frees, list[int]]
    frees.enter()
    frees.defer(lambda: done.append(1))
    frees.settle()
    assert done == [1]
    frees.defer(lambda: done.append(2))
    assert done == [1]


def test_a_failure_spares_the_rest() -> None:
    frees, done = Frees(), []  # type: tuple[Frees, list[int]]

    def fail() -> None:
        raise ValueError("the first")

    frees.enter()
    for free in (fail, lambda: done.append(1), fail, lambda: done.append(2)):
        frees.defer(free)
    with pytest.raises(DeviceError, match="the first"):
        frees.leave()
    assert done == [1, 2]
    frees.settle()  # nothing is tried twice


def test_a_free_may_hand_over_another() -> None:
    frees, done = Frees(), []  # type: tuple[Frees, list[int]]
    frees.enter()
    frees.defer(lambda: frees.defer(lambda: done.append(1)))
    frees.leave()
    assert done == [1]
