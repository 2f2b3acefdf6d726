"""What a replayed step must give, from the reference, and where it first differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvep import reference
from nvep.config import ExchangeConfig
from nvep.reference import RankTokens, ReferenceArrivals

AnyArray = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Difference:
    """First byte of a step in which the device and the reference disagree.

    Attributes
    ----------
    rank, step : int
        Where it was seen.
    what : str
        ``count``, ``expert id``, ``weight``, ``row`` or ``combined row``.
    place : str
        Source rank and slot, or token.
    byte : int
        Offset within that slot's (token's) record.
    expected, found : str
        Hexadecimal, from that byte on.
    """

    rank: int
    step: int
    what: str
    place: str
    byte: int
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, step {self.step}, {self.what} of {self.place}, byte {self.byte}: "
            f"expected {self.expected}, found {self.found}"
        )


@dataclass(frozen=True)
class Received:
    """Host copies of what a rank received in a step, as in Arrivals, and got back: combined ``[tokens, elements]``."""

    rows: AnyArray
    expert_ids: npt.NDArray[np.int32]
    expert_weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    combined: AnyArray


@dataclass(frozen=True)
class StepChecker:
    """Checks the steps of one rank, bit by bit.

    Attributes
    ----------
    rank : int
        The rank.
    config : ExchangeConfig
        Of the exchange.
    """

    rank: int
    config: ExchangeConfig

    def check(self, step: int, sources: Sequence[RankTokens], received: Received) -> Difference | None:
        """Compare one step with the reference.

        Parameters
        ----------
        step : int
            For the report.
        sources : sequence of RankTokens
            What every rank brought to the step.
        received : Received
            What this rank saw.

        Returns
        -------
        Difference or None
            The first difference: counts, then headers and rows, then combined rows.
        """
        expected = reference.dispatch_to(self.rank, sources, config=self.config)
        for what, place, good, bad in self._pairs(expected, self._combined(sources), received):
            found = _first_difference(good, bad)
            if found is not None:
                index, byte = found
                return Difference(
                    self.rank, step, what, f"{place} {index}", byte, _hex(good[index], byte), _hex(bad[index], byte)
                )
        return None

    def _pairs(
        self, expected: ReferenceArrivals, combined: AnyArray, received: Received
    ) -> Sequence[tuple[str, str, AnyArray, AnyArray]]:
        pairs: list[tuple[str, str, AnyArray, AnyArray]] = [("count", "source", expected.counts, received.counts)]
        for source, n in enumerate(expected.counts.tolist()):
            slot = f"source {source}, slot"
            # Ids are stated for every slot, so that none without a token leads anybody to it; the rest up to the count.
            pairs.append(("expert id", slot, expected.expert_ids[source], received.expert_ids[source]))
            pairs.append(("weight", slot, expected.expert_weights[source, :n], received.expert_weights[source, :n]))
            pairs.append(("row", slot, expected.payloads[0][source, :n], received.rows[source, :n]))
        pairs.append(("combined row", "token", combined, received.combined))
        return pairs

    def _combined(self, sources: Sequence[RankTokens]) -> AnyArray:
        """This rank's combined rows. They depend on its own tokens alone, so no other rank's are carried through."""
        mine = sources[self.rank]
        nothing = RankTokens([p[:0] for p in mine.payloads], mine.expert_ids[:0], mine.expert_weights[:0])
        only_mine = [mine if rank == self.rank else nothing for rank in range(len(sources))]
        num_ranks = len(sources)
        partial_rows = [
            reference.scale_experts(
                reference.dispatch_to(target, only_mine, config=self.config),
                rank=target,
                config=self.config,
                num_ranks=num_ranks,
            )
            for target in range(num_ranks)
        ]
        return reference.combine_at(self.rank, partial_rows, expert_ids=mine.expert_ids, config=self.config)


def _bytes(array: AnyArray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


def _first_difference(expected: AnyArray, found: AnyArray) -> tuple[int, int] | None:
    """Row and byte of the first difference."""
    if len(expected) == 0:
        return None
    different = _bytes(expected) != _bytes(found)
    if not different.any():
        return None
    row, byte = np.unravel_index(int(different.argmax()), different.shape)
    return int(row), int(byte)


def _hex(row: AnyArray, byte: int) -> str:
    return np.ascontiguousarray(row).tobytes()[byte : byte + 4].hex()
