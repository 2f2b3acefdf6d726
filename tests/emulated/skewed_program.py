"""Many steps on ranks of very different speed, on the emulated device, with no host synchronisation between them.

Run as a program it exits with 1 and says what went wrong. The concurrency rules of the protocols show here: whoever
reads before data is there, or lets a peer overwrite what is still being read, gets other bits than the reference.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig
from nvep.exchange import Exchange
from nvep.group import RankGroup, run_local
from nvep.runtime.emulated_stream import EmulatedStream
from nvep.testing.steps import Step, arrivals_of, device_copy, fill_unused, output_of, random_step, same

RANKS = 4
STEPS = 14
LONGEST_PAUSE = 0.012  # seconds; a phase takes well under a millisecond


def _pause(stream: Any, rng: np.random.Generator) -> None:
    """Keep this rank's stream back, now and then, so that its peers run ahead as far as they may."""
    assert isinstance(stream, EmulatedStream)
    seconds = float(rng.random() * LONGEST_PAUSE) if rng.random() < 0.5 else 0.0
    stream.enqueue(lambda: time.sleep(seconds))


class _SkewedRank:
    """One rank: enqueues all steps at once and keeps copies of what each of them showed."""

    def __init__(self, exchange: Exchange, steps: list[Step], seed: int) -> None:
        self._exchange = exchange
        self._steps = steps
        self._rng = np.random.default_rng((seed, exchange.group.rank))
        config = exchange.config
        rows = np.zeros((RANKS, config.max_tokens, config.row_bytes), dtype=np.uint8)
        outputs = np.zeros((config.max_tokens, config.partial_row_bytes), dtype=np.uint8)
        self._rows = [device_copy(exchange, rows) for _ in steps]
        self._outputs = [device_copy(exchange, outputs) for _ in steps]

    def enqueue(self) -> None:
        exchange, rank, config = self._exchange, self._exchange.group.rank, self._exchange.config
        stream = exchange.device.default_stream
        dtype = self._steps[0].partial_rows[0].dtype
        for step, rows, output in zip(self._steps, self._rows, self._outputs, strict=True):
            source = step.sources[rank]
            _pause(stream, self._rng)
            exchange.dispatch_send(source.payloads[0], source.expert_ids, source.expert_weights)
            _pause(stream, self._rng)
            arrivals = exchange.dispatch_recv()
            _pause(stream, self._rng)
            exchange.device.copy(rows.address, arrivals.rows.address, rows.nbytes, stream)
            partial = fill_unused(step, arrivals_of(step, config, rank), rank)
            exchange.combine_send(partial, arrivals)
            _pause(stream, self._rng)
            shape = (config.max_tokens, config.elements)
            out = DeviceArray(output.address, shape, dtype, owner=ArrayOwner(exchange.device, stream=stream))
            exchange.combine_recv(arrivals, out=out)

    def compare(self) -> None:
        rank, config = self._exchange.group.rank, self._exchange.config
        for index, (step, rows, output) in enumerate(zip(self._steps, self._rows, self._outputs, strict=True)):
            expected = arrivals_of(step, config, rank)
            got = rows.view(np.uint8, (RANKS, config.max_tokens, config.row_bytes))
            where = f"rank {rank}, step {index}"
            same(got[expected.valid], expected.payloads[0][expected.valid], f"{where}: rows")
            want = output_of(step, config, rank)
            result = output.view(np.uint8, (config.max_tokens, config.partial_row_bytes))[: len(want)].view(want.dtype)
            same(np.ascontiguousarray(result), want, f"{where}: output")


def run_skewed(config: ExchangeConfig, seed: int) -> None:
    """Run and compare; raises AssertionError, PeerTimeout or whatever else a broken protocol leads to."""
    counts = np.random.default_rng(seed).integers(0, config.max_tokens + 1, (STEPS, RANKS))
    counts[np.random.default_rng(seed + 1).random(counts.shape) < 0.2] = 0
    steps = [random_step((seed, i), config, RANKS, counts=row.tolist()) for i, row in enumerate(counts)]

    def main(group: RankGroup) -> None:
        with Exchange(group, config) as exchange:
            rank = _SkewedRank(exchange, steps, seed)
            group.barrier()
            rank.enqueue()
            exchange.synchronize()
            rank.compare()

    run_local(main, RANKS, device="emulated", timeout=60.0)


def main() -> int:
    """Exit status for a few seeds; what failed goes to stderr."""
    config = ExchangeConfig(num_experts=8, top_k=2, max_tokens=9, row_bytes=192, deadline=1.0)
    for seed in range(3):
        try:
            run_skewed(config, seed)
        except Exception as error:
            sys.stderr.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
