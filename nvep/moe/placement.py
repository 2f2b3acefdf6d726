"""Where experts live: physical copies of logical experts, balanced over ranks by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvep.errors import ArgumentError

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Replicas:
    """Which physical copies of each logical expert the tokens of one rank may go to.

    Attributes
    ----------
    starts : numpy.ndarray
        uint32 ``[num_logical + 1]``: expert ``e`` has ``physical[starts[e]:starts[e + 1]]``.
    physical : numpy.ndarray
        int32: physical ids.
    turn : int
        Copy that token 0 goes to, counted from the first and modulo their number; token ``t`` goes ``t`` further.
    """

    starts: npt.NDArray[np.uint32]
    physical: Int32Array
    turn: int

    @property
    def num_logical(self) -> int:
        return len(self.starts) - 1

    def choose(self, expert_ids: Int32Array) -> Int32Array:
        """Physical ids for logical ``[tokens, top_k]``, as the routing kernel chooses them; -1 stays."""
        tokens = np.arange(len(expert_ids), dtype=np.int64)[:, None]
        known = np.maximum(expert_ids, 0)
        first, end = (self.starts[known + i].astype(np.int64) for i in (0, 1))
        chosen = self.physical[first + (tokens + self.turn) % (end - first)]
        return np.where(expert_ids < 0, np.int32(-1), chosen)


@dataclass(frozen=True)
class Placement:
    """Physical experts: which logical expert each one is a copy of, and on which rank it lives.

    An exchange knows physical experts only: give it ``num_experts=placement.num_physical`` and
    ``placement=placement.ranks``. A token never meets an expert twice, since its logical experts are distinct.

    Attributes
    ----------
    logical : tuple of int
        Logical expert of each physical one; every expert from 0 to the largest has a copy.
    ranks : tuple of int
        Rank of each physical expert; copies of one expert are on different ranks.

    Raises
    ------
    ArgumentError
        The two do not fit together.
    """

    logical: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("logical", "ranks"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if not self.logical or len(self.logical) != len(self.ranks):
            raise ArgumentError("ranks", len(self.ranks), f"one rank per physical expert: {len(self.logical)}")
        missing = sorted(set(range(max(self.logical) + 1)) - set(self.logical))
        if missing:
            raise ArgumentError("logical", f"no copy of {missing[:8]}", "at least one copy of every expert")
        pairs = list(zip(self.logical, self.ranks, strict=True))
        if len(set(pairs)) != len(pairs):
            twice = next(pair for pair in pairs if pairs.count(pair) > 1)
            given = f"two copies of expert {twice[0]} on rank {twice[1]}"
            raise ArgumentError("ranks", given, "copies on different ranks")

    @property
    def num_logical(self) -> int:
        return max(self.logical) + 1

    @property
    def num_physical(self) -> int:
        return len(self.logical)

    def local(self, rank: int) -> list[int]:
        """Logical experts of a rank's physical ones, in the order of the physical ids."""
        return [expert for expert, owner in zip(self.logical, self.ranks, strict=True) if owner == rank]

    def replicas(self, rank: int, *, prefer_local: bool = False) -> Replicas:
        """What the router of ``rank`` needs.

        Parameters
        ----------
        rank : int
            Source rank. Sources start at different copies, so that single tokens spread, too.
        prefer_local : bool
            Where the rank has a copy itself, use only that: nothing is sent, but other copies get no relief.
        """
        copies: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, expert in enumerate(self.logical):
            copies[expert].append(physical)
        if prefer_local:
            copies = [[p for p in own if self.ranks[p] == rank] or own for own in copies]
        starts = np.cumsum([0, *(len(own) for own in copies)])
        return Replicas(starts.astype(np.uint32), np.array([p for own in copies for p in own], np.int32), rank)

    def logical_load(self, physical_load: npt.ArrayLike) -> Float64Array:
        """Load of each logical expert, float64 ``[num_logical]``, from that of the physical ones.

        Raises
        ------
        ArgumentError
            Not one number per physical expert.
        """
        load = np.asarray(physical_load, np.float64)
        if load.shape != (self.num_physical,):
            raise ArgumentError("physical_load", load.shape, f"one number per physical expert: ({self.num_physical},)")
        return np.bincount(np.array(self.logical), weights=load, minlength=self.num_logical).astype(np.float64)

    def rank_load(self, logical_load: npt.ArrayLike) -> Float64Array:
        """Load of each rank, float64, if the copies of an expert share its load evenly."""
        load = np.asarray(logical_load, np.float64)
        logical = np.array(self.logical)
        share = load[logical] / np.bincount(logical)[logical]
        return np.bincount(np.array(self.ranks), weights=share).astype(np.float64)


def _ids(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list, np.ndarray)):
        raise ArgumentError(name, values, "a sequence of integers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= int(value) < 1 << 20:
            raise ArgumentError(name, value, "integers from 0 to 2**20 - 1")
    return tuple(int(value) for value in values)


def balance(load: npt.ArrayLike, ranks: int, replicas: int) -> Placement:
    """Place copies of experts on ranks so that the busiest rank has little to do.

    Experts with the most load per copy get further copies, one by one; then copies are placed, heaviest first, on the
    rank with the least load; then pairs of ranks trade copies as long as that relieves the busier one. The same load
    gives the same placement.

    Parameters
    ----------
    load : array_like
        Load of each logical expert, not negative, for example tokens received (see `Placement.logical_load`).
    ranks : int
        Ranks.
    replicas : int
        Physical experts in all: a multiple of ``ranks``, at least as many as experts, at most ``ranks`` each.

    Returns
    -------
    Placement
        Every rank has ``replicas / ranks`` physical experts, numbered rank by rank: an exchange needs no ``placement``.

    Raises
    ------
    ArgumentError
        A value is not allowed.
    """
    loads = np.asarray(load, np.float64)
    if loads.ndim != 1 or not len(loads) or not np.isfinite(loads).all() or (loads < 0).any():
        raise ArgumentError("load", load, "one finite number, not negative, per expert")
    experts = len(loads)
    for name, value, low in (("ranks", ranks, 1), ("replicas", replicas, experts)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
            raise ArgumentError(name, value, f"an integer from {low}")
    if replicas % ranks or replicas > experts * ranks:
        raise ArgumentError("replicas", replicas, f"a multiple of {ranks}, at most {experts * ranks}")
    copies = _copies(loads, int(ranks), int(replicas))
    holdings = _pack(loads / copies, copies, int(ranks), int(replicas) // int(ranks))
    _trade(holdings, loads / copies)
    logical = [expert for held in holdings for expert in sorted(held)]
    return Placement(tuple(logical), tuple(np.repeat(np.arange(ranks), replicas // ranks).tolist()))


def _copies(loads: Float64Array, ranks: int, replicas: int) -> npt.NDArray[np.int64]:
    """Copies of each expert; handing out one at a time to the most loaded copy is optimal for the heaviest copy."""
    copies = np.ones(len(loads), np.int64)
    for _ in range(replicas - len(loads)):
        copies[int(np.argmax(np.where(copies < ranks, loads / copies, -1.0)))] += 1
    return copies


def _pack(share: Float64Array, copies: npt.NDArray[np.int64], ranks: int, slots: int) -> list[set[int]]:
    holdings: list[set[int]] = [set() for _ in range(ranks)]
    weight = np.zeros(ranks)
    order = sorted(range(len(share)), key=lambda expert: (-share[expert], expert))
    for expert in (e for e in order for _ in range(copies[e])):
        open_ranks = [r for r in range(ranks) if len(holdings[r]) < slots]
        fitting = [r for r in open_ranks if expert not in holdings[r]]
        if fitting:
            target = min(fitting, key=lambda r: (weight[r], r))
        else:
            target = _make_room(holdings, weight, share, expert=expert, open_rank=open_ranks[0])
        holdings[target].add(expert)
        weight[target] += share[expert]
    return holdings


def _make_room(
    holdings: list[set[int]], weight: Float64Array, share: Float64Array, *, expert: int, open_rank: int
) -> int:
    """Free a slot on a full rank without ``expert``: one of its experts moves to ``open_rank``, which has ``expert``.

    There is such a rank, since an expert has at most as many copies as there are ranks, and such an expert, since the
    full rank holds more different ones than ``open_rank``.
    """
    full = min((r for r in range(len(holdings)) if expert not in holdings[r]), key=lambda r: (weight[r], r))
    moved = min(holdings[full] - holdings[open_rank], key=lambda e: (share[e], e))
    holdings[full].remove(moved)
    holdings[open_rank].add(moved)
    weight[full] -= share[moved]
    weight[open_rank] += share[moved]
    return full


def _trade(holdings: list[set[int]], share: Float64Array) -> None:
    """Trade one copy of the busiest rank for a lighter one elsewhere while the busier of the two gets less to do."""
    for _ in range(64 * len(holdings)):
        weight = [sum(share[e] for e in sorted(held)) for held in holdings]
        busiest = max(range(len(holdings)), key=lambda r: (weight[r], -r))
        best = _best_trade(holdings, share, weight, busiest)
        if best is None:
            return
        other, given, taken = best
        holdings[busiest].symmetric_difference_update((given, taken))
        holdings[other].symmetric_difference_update((given, taken))


def _best_trade(
    holdings: Sequence[set[int]], share: Float64Array, weight: Sequence[float], busiest: int
) -> tuple[int, int, int] | None:
    """The trade after which the busier of both ranks has least, or None if none helps."""
    best: tuple[float, int, int, int] | None = None
    floor = weight[busiest] * (1 - 1e-9)  # gains below rounding would never end
    for other, held in enumerate(holdings):
        if other == busiest:
            continue
        for given in sorted(holdings[busiest] - held):
            for taken in sorted(held - holdings[busiest]):
                moved = share[given] - share[taken]
                after = max(weight[busiest] - moved, weight[other] + moved)
                if after < floor and (best is None or (after, other, given, taken) < best):
                    best = (after, other, given, taken)
    return None if best is None else best[1:]
