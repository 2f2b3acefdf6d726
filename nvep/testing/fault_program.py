"""A rank of a job in which one rank is killed or stopped: ``python -m nvep.testing.fault_program`` under mpirun.

Every survivor writes ``rank<N>.json`` into ``--folder``: what it raised, when, and how long closing took. The victim
writes ``fault.json`` with the moment of the fault. Moments are readings of the host's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

PLACES = ("between", "sent", "arrived", "returned", "anywhere")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_STEPS = 1_000_000
_PATIENCE = 60.0  # seconds that the last duties of a survivor may take
_TOKENS, _HIDDEN, _EXPERTS, _TOP_K = 8, 32, 16, 4


class Fault:
    """What happens to one rank, and where.

    Parameters
    ----------
    arguments : argparse.Namespace
        The command line.
    rank : int
        This rank; all but the victim pass every place unharmed.
    """

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self._mine = rank == arguments.victim
        self._place, self._step = arguments.place, arguments.step
        self._signal = SIGNALS[arguments.signal]
        self._file = Path(arguments.folder) / "fault.json"
        self._delay = arguments.delay

    def at(self, place: str, step: int) -> None:
        """Strike here if this is the place."""
        if not self._mine or step != self._step:
            return
        if place == self._place:
            self._strike()
        elif place == "between" and self._place == "anywhere":
            threading.Timer(self._delay, self._strike).start()

    def _strike(self) -> None:
        write(self._file, {"moment": time.monotonic()})
        os.kill(os.getpid(), self._signal)


def write(path: Path, content: dict[str, Any]) -> None:
    """So that a reader finds all of it or no file."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def shared_files() -> list[str]:
    """Files in /dev/shm that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return sorted(path.removesuffix(" (deleted)") for path in paths)


def run_steps(exchange: Any, fault: Fault, steps: int) -> None:
    """Split phases, each waited for by the host, so that a fault falls between two of them."""
    rank, ranks = exchange.group.rank, exchange.group.size
    rng = np.random.default_rng(rank)
    rows = rng.integers(0, 1 << 16, (_TOKENS, _HIDDEN), dtype=np.uint16)
    weights = np.ones((_TOKENS, _TOP_K), dtype=np.float32)
    partial = np.zeros((ranks, exchange.config.max_tokens, _HIDDEN), dtype=np.float32)
    for step in range(steps):
        ids = np.stack([rng.permutation(_EXPERTS)[:_TOP_K] for _ in range(_TOKENS)]).astype(np.int32)
        fault.at("between", step)
        exchange.dispatch_send(rows, ids, weights)
        exchange.synchronize()
        fault.at("sent", step)
        arrivals = exchange.dispatch_recv()
        exchange.synchronize()
        fault.at("arrived", step)
        exchange.combine_send(partial, arrivals)
        exchange.synchronize()
        fault.at("returned", step)
        exchange.combine_recv(arrivals)
        exchange.synchronize()


def report(error: Exception) -> dict[str, Any]:
    """An error as the test reads it."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, (int, str))}
    return {"moment": time.monotonic(), "error": type(error).__name__, "text": str(error), **fields}


def timed(what: Any) -> float:
    """Seconds that ``what()`` took."""
    start = time.monotonic()
    what()
    return time.monotonic() - start


def end_victim(folder: Path, survivors: list[int], pid: int) -> None:
    """The lowest survivor ends a stopped victim once every survivor has reported: nothing else would."""
    end = time.monotonic() + _PATIENCE
    while not all((folder / f"rank{r}.json").exists() for r in survivors) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run steps until the fault shows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--victim", type=int, required=True)
    parser.add_argument("--signal", choices=SIGNALS, required=True)
    parser.add_argument("--place", choices=PLACES, required=True)
    parser.add_argument("--step", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds after the start of the step, with 'anywhere'")
    arguments = parser.parse_args()

    from mpi4py import MPI

    import nvep

    files = shared_files()
    group = nvep.RankGroup.from_mpi(MPI.COMM_WORLD)
    rank = group.rank
    pids = group.allgather(os.getpid())
    files += shared_files()
    write(arguments.folder / f"start{rank}.json", {"pid": os.getpid(), "files": files})
    config = nvep.ExchangeConfig(
        num_experts=_EXPERTS, top_k=_TOP_K, max_tokens=_TOKENS, row_bytes=2 * _HIDDEN, partial_format="fp32"
    )
    exchange = nvep.Exchange(group, config)
    try:
        run_steps(exchange, Fault(arguments, rank), _STEPS)
    except nvep.errors.NvepError as error:
        content = report(error)
    content["close_exchange"] = timed(exchange.close)
    content["close_group"] = timed(group.close)
    write(arguments.folder / f"rank{rank}.json", content)
    survivors = [r for r in range(len(pids)) if r != arguments.victim]
    if rank == survivors[0] and arguments.signal == "stop":
        end_victim(arguments.folder, survivors, pids[arguments.victim])
    sys.stdout.flush()
    os._exit(0)  # MPI's own shutdown at exit would wait for the victim


if __name__ == "__main__":
    main()
