"""Regions of the symmetric heap: aligned, apart from one another, the same for every lane."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvep.symmetric.layout import REGION_ALIGNMENT, Layout, Region

SIZES = st.lists(st.integers(0, 1 << 24), max_size=12)


@given(sizes=SIZES, lanes=st.integers(1, 16))
def test_regions_of_all_lanes_are_aligned_and_disjoint(sizes: list[int], lanes: int) -> None:
    layout = Layout([Region(f"R{i}", size) for i, size in enumerate(sizes)], lanes)
    spans = sorted((layout.offset(p.name, lane), p.nbytes) for lane in range(lanes) for p in layout.regions)
    end = 0
    for offset, nbytes in spans:
        assert offset % REGION_ALIGNMENT == 0
        assert offset >= end
        end = offset + nbytes
    assert end <= layout.nbytes < end + REGION_ALIGNMENT * (len(sizes) + 1)
    assert layout.nbytes == lanes * layout.lane_bytes


@given(sizes=SIZES)
def test_a_later_region_never_moves_an_earlier_one(sizes: list[int]) -> None:
    regions = [Region(f"R{i}", size) for i, size in enumerate(sizes)]
    grown = Layout([*regions, Region("More", 4096)])
    assert [grown.offset(r.name) for r in regions] == [Layout(regions).offset(r.name) for r in regions]


def test_cpp_offsets_are_those_of_python() -> None:
    layout = Layout([Region("Records", 1), Region("Rows", 1000), Region("Headers", 8)], lanes=3)
    constants = {name: int(value) for name, value in re.findall(r"k(\w+) = (\d+)ull;", layout.cpp())}
    assert constants.pop("LaneBytes") == layout.lane_bytes == 256 + 1024 + 256
    assert constants == {f"{p.name}Offset": layout.offset(p.name) for p in layout.regions}


def test_describe_shows_every_region_and_the_sum() -> None:
    text = Layout([Region("Rows", 1_000_000), Region("Records", 16)], lanes=2).describe()
    assert re.search(r"Rows +1,000,000 B", text)
    assert re.search(r"Records +16 B", text)
    assert re.search(r"one lane +1,000,448 B", text)
    assert re.search(r"2 lane\(s\) +2,000,896 B", text)


def test_a_region_is_declared_once() -> None:
    with pytest.raises(ValueError, match="Rows declared twice"):
        Layout([Region("Rows", 1), Region("Rows", 2)])
    with pytest.raises(KeyError):
        Layout([Region("Rows", 1)]).offset("Columns")
