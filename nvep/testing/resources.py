"""What a process holds: to find what a run leaves behind, and what grows."""

from __future__ import annotations

import gc
import mmap
import os
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """A reading of this process.

    Attributes
    ----------
    descriptors, threads, mappings : int
        Open files, threads known to Python, lines of /proc/self/maps.
    writable_bytes : int
        Private and shared memory mapped for writing, touched or not; address space that is only reserved is left out.
    resident_bytes : int
        Pages in memory. Allocators keep and scatter what they once had, so it settles slowly.
    python_blocks, python_arenas : int
        Memory blocks that Python objects hold, and the mappings of 1 MiB that Python's allocator takes them from.
    """

    descriptors: int
    threads: int
    mappings: int
    writable_bytes: int
    resident_bytes: int
    python_blocks: int
    python_arenas: int

    @staticmethod
    def now() -> Resources:
        """Read them, after collecting garbage."""
        gc.collect()
        arenas = _python_arenas()  # before the many strings below, which may take arenas of their own
        lines = Path("/proc/self/maps").read_text().splitlines()
        writable = 0
        for line in lines:
            span, rights = line.split(maxsplit=2)[:2]
            if "w" in rights:
                start, end = (int(part, 16) for part in span.split("-"))
                writable += end - start
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        return Resources(
            descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's own
            threads=threading.active_count(),
            mappings=len(lines),
            writable_bytes=writable,
            resident_bytes=resident,
            python_blocks=sys.getallocatedblocks(),
            python_arenas=arenas,
        )


def _python_arenas() -> int:
    """CPython tells this on its standard error alone, which is turned into a file for as long as that takes."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = re.search(rb"# arenas allocated current += +([\d,]+)", file.read())
    if found is None:
        raise RuntimeError("this Python does not say how many arenas its allocator has")
    return int(found[1].replace(b",", b""))


def require_nothing_left(before: Resources, *, writable: int, patience: float = 5.0) -> None:
    """Raise AssertionError unless this process is back to ``before`` within ``patience`` seconds.

    Threads end a moment after they are told to. ``writable`` is how many bytes more may stay mapped: allocators and
    thread stacks are kept for reuse, so choose what is looked for much larger.
    """
    end = time.monotonic() + patience
    while True:
        now = Resources.now()
        grown = now.writable_bytes - before.writable_bytes
        if now.descriptors <= before.descriptors and now.threads <= before.threads and grown <= writable:
            return
        if time.monotonic() > end:
            raise AssertionError(f"left behind: {now}, before: {before}")
        time.sleep(0.01)
