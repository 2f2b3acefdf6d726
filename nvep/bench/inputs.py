"""Inputs of a case: several sets that steps take in turn, on the device, and known to every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.bench.cases import Case
from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError
from nvep.group import RankGroup
from nvep.runtime.device import Device, Memory

SETS = 4
_POOL = 61  # distinct random rows; a row's first bytes then say whose it is

Ids = npt.NDArray[np.int32]


def route(case: Case, rank: int, which: int, recorded: Ids | None = None) -> Ids:
    """Expert ids of input set ``which`` of a rank: int32 ``[tokens, top_k]``, distinct within a token.

    Raises
    ------
    ArgumentError
        ``"recorded"`` without a router log, or with one of other experts.
    """
    rng = np.random.default_rng((rank, which))
    tokens, experts, k = case.tokens, case.experts, case.top_k
    if case.routing == "recorded":
        return _recorded(case, rank, which, recorded)
    if case.routing == "balanced":
        # Consecutive experts, from where the token before and the rank before left off.
        start = (rank * tokens + np.arange(tokens)) * k + which
        return ((start[:, None] + np.arange(k)) % experts).astype(np.int32)
    pool = np.arange(experts)
    if case.routing == "local":
        pool = np.flatnonzero(case.config().expert_ranks(case.ranks) == rank)
        if len(pool) < k:
            raise ArgumentError("routing", "local", f"at least top_k = {k} experts a rank, which has {len(pool)}")
    ids = pool[np.argpartition(rng.random((tokens, len(pool))), k - 1, axis=1)[:, :k]]
    if case.routing == "hot":
        cold = ~(ids == 0).any(axis=1)
        ids[cold & (rng.random(tokens) < 0.5), 0] = 0
    return ids.astype(np.int32)


def _recorded(case: Case, rank: int, which: int, recorded: Ids | None) -> Ids:
    if recorded is None:
        raise ArgumentError("routing", "recorded", "a router log to go with it")
    if recorded.shape[1] != case.top_k or int(recorded.max()) >= case.experts:
        shown = f"top_k {recorded.shape[1]}, experts up to {int(recorded.max())}"
        raise ArgumentError("trace", shown, f"top_k {case.top_k}, experts below {case.experts}")
    first = (which * case.ranks + rank) * case.tokens
    ids: Ids = recorded[(first + np.arange(case.tokens)) % len(recorded)]
    return ids


def payloads(config: ExchangeConfig, rank: int, which: int, tokens: int) -> list[npt.NDArray[np.uint8]]:
    """Rows, and scales if any: bf16 numbers of ordinary size, every row different from any other rank's or set's."""
    result = []
    for index, nbytes in enumerate(config.payload_bytes):
        rng = np.random.default_rng(index)
        bits = rng.integers(0, 1 << 16, (_POOL, nbytes // 2), dtype=np.uint16)
        pool = (bits & 0x83FF | 0x3C00).view(np.uint8)
        rows = pool[(np.arange(tokens) + which) % _POOL]
        rows[:, :8].view(np.uint32)[:] = np.stack([np.arange(tokens), np.full(tokens, rank << 8 | which)], axis=1)
        result.append(rows)
    return result


def weights(case: Case, rank: int, which: int) -> npt.NDArray[np.float32]:
    """Expert weights that go with `route`: float32 ``[tokens, top_k]``."""
    return np.random.default_rng((rank, which, 1)).random((case.tokens, case.top_k), dtype=np.float32)


class Inputs:
    """`SETS` input sets of this rank on its device, freed by ``close``.

    Attributes
    ----------
    ids : list of numpy.ndarray
        Of each set, on the host.
    """

    def __init__(self, group: RankGroup, case: Case, recorded: Ids | None = None) -> None:
        config = case.config()
        self.ids = [route(case, group.rank, which, recorded) for which in range(SETS)]
        self._memory: list[Memory] = []
        self._sets = [
            (
                tuple(self._put(group.device, a) for a in payloads(config, group.rank, which, case.tokens)),
                self._put(group.device, ids),
                self._put(group.device, weights(case, group.rank, which)),
            )
            for which, ids in enumerate(self.ids)
        ]

    def _put(self, device: Device, array: np.ndarray) -> DeviceArray:
        memory = device.allocate(array.nbytes)
        self._memory.append(memory)
        device.copy_in(memory.address, np.ascontiguousarray(array), device.default_stream)
        device.default_stream.synchronize()
        return DeviceArray(memory.address, array.shape, array.dtype, owner=ArrayOwner(device))

    def __getitem__(self, step: int) -> tuple[Any, DeviceArray, DeviceArray]:
        """Payloads, ids and weights of a step."""
        return self._sets[step % SETS]

    def close(self) -> None:
        """Free the memory; no step may be in flight."""
        for memory in self._memory:
            memory.free()
