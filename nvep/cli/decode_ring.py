"""``nvep decode-ring``: the entries of send queues and descriptor rings, readably."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from nvep.errors import ArgumentError
from nvep.nic.decode import describe
from nvep.nic.dump import RingDump, read_dumps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="rings written by Nic.dump")
    parser.add_argument(
        "--live",
        nargs="?",
        const=0,
        type=int,
        metavar="PID",
        help="ask a process of this user whose adapter was made with live=True (default: all of them)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rings to this file")


def run(namespace: argparse.Namespace) -> int:
    """Print rings; 1 if there were none."""
    if (namespace.file is None) == (namespace.live is None):
        raise ArgumentError("FILE", namespace.file, "a file of rings, or --live")
    dumps = list(_live(namespace.live) if namespace.file is None else _from_file(namespace.file))
    if namespace.out is not None:
        with namespace.out.open("wb") as out:
            for dump in dumps:
                dump.write(out)
    for dump in dumps:
        for line in describe(dump):
            print(line)
    if not dumps:
        print("no rings")
    return 0 if dumps else 1


def _from_file(path: Path) -> Iterable[RingDump]:
    try:
        with path.open("rb") as file:
            yield from read_dumps(file, str(path))
    except OSError as error:
        raise ArgumentError("FILE", str(path), f"a readable file ({error.strerror})") from error


def _live(pid: int) -> Iterable[RingDump]:
    from nvep.nic.live import ask, processes

    for process in [pid] if pid else processes():
        yield from ask(process)
