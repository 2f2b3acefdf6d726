"""Named regions of the symmetric heap. Offsets and size derive from one declaration; nothing is kept by hand."""

from __future__ import annotations

from dataclasses import dataclass

from nvep.errors import ArgumentError

REGION_ALIGNMENT = 256


@dataclass(frozen=True)
class Region:
    """``name`` in CamelCase (it becomes ``k<name>Offset`` in C++) and size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Placed:
    """A region with its byte offset from the start of the heap."""

    name: str
    offset: int
    nbytes: int


class Layout:
    """Regions of one lane, repeated for each lane.

    Parameters
    ----------
    regions : list of Region
        Fixed at planning: no offset depends on a step.
    lanes : int
        Copies of the whole set, one after the other.
    """

    def __init__(self, regions: list[Region], lanes: int = 1) -> None:
        self._placed: dict[str, Placed] = {}
        offset = 0
        for region in regions:
            if region.name in self._placed:
                raise ArgumentError("regions", f"{region.name} declared twice", "each name once")
            if region.nbytes < 0:
                raise ArgumentError("regions", region, "sizes of 0 bytes or more")
            self._placed[region.name] = Placed(region.name, offset, region.nbytes)
            offset += -(-region.nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        self.lane_bytes = offset
        self.lanes = lanes

    @property
    def nbytes(self) -> int:
        """Bytes of the heap on each rank."""
        return self.lane_bytes * self.lanes

    @property
    def regions(self) -> tuple[Placed, ...]:
        return tuple(self._placed.values())

    def offset(self, name: str, lane: int = 0) -> int:
        """Byte offset of a region from the start of a rank's heap."""
        return lane * self.lane_bytes + self._placed[name].offset

    def region(self, name: str) -> Placed:
        return self._placed[name]

    def cpp(self) -> str:
        """``constexpr`` offsets for kernels, relative to the start of a lane."""
        lines = [f"constexpr unsigned long long kLaneBytes = {self.lane_bytes}ull;"]
        lines += [f"constexpr unsigned long long k{p.name}Offset = {p.offset}ull;" for p in self.regions]
        return "\n".join(lines)

    def describe(self) -> str:
        """The sum, line by line, for people."""
        rows = [f"  {p.name:<24}{p.nbytes:>16,} B" for p in self.regions]
        rows.append(f"  {'one lane':<24}{self.lane_bytes:>16,} B")
        rows.append(f"  {f'{self.lanes} lane(s)':<24}{self.nbytes:>16,} B")
        return "\n".join(rows)
