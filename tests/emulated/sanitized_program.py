"""Kernels built with a sanitizer, in a process that has its library preloaded: `sanitized_program.py TOOL WHAT`.

``phases`` and ``joined`` are steps of exchanges, ``fence`` joined steps of one protocol; the rest is the kernel
``planted``, on memory of its own or, for ``outside-region``, on a peer's heap.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from functools import partial
from typing import Any

from nvep.exchange import Exchange, memory
from nvep.group import RankGroup, run_local
from nvep.runtime import emulated
from nvep.runtime.host_jit import HostJit
from nvep.symmetric import heap_shared
from nvep.symmetric.layout import Layout, Region
from nvep.symmetric.slices import Slice
from nvep.testing.backend import Backend
from nvep.testing.phase_by_phase import SMALL, STRICT, WIDE, run_phase_by_phase
from nvep.testing.steps import random_step
from tests.emulated import planted

_COMMON = ("-O1", "-g1", "-fno-omit-frame-pointer", "-DNVEP_STACK_BYTES=262144")  # instrumented frames are larger
FLAGS = {
    "address": (*_COMMON, "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
    # The emulator tells the tool what its fences order; the warning says that the tool does not know by itself.
    "thread": (*_COMMON, "-fsanitize=thread", "-Wno-tsan"),
}
GAP = 256

_libc = ctypes.CDLL(None)
_libc.free.argtypes = [ctypes.c_void_p]


def _allocate(nbytes: int, alignment: int) -> int:
    """Zeroed memory that the tool knows the end of."""
    pointer = ctypes.c_void_p()
    assert _libc.posix_memalign(ctypes.byref(pointer), ctypes.c_size_t(alignment), ctypes.c_size_t(nbytes)) == 0
    assert pointer.value is not None
    ctypes.memset(pointer.value, 0, nbytes)
    return pointer.value


class _BoundedMemory(emulated.EmulatedMemory):
    """Device memory, of pages otherwise, as an allocation of its own."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = _allocate(max(nbytes, 1), 256)
        self._pages: Any = (ctypes.c_char * max(nbytes, 1)).from_address(self.address)

    def free(self) -> None:
        if self._pages is not None:
            self._pages = None
            _libc.free(self.address)


def _bounded_slice(nbytes: int, flags: int, fd: int) -> Slice:
    address = _allocate(nbytes, 4096)
    return Slice(address, lambda: _libc.free(address))


def _bound_memory() -> None:
    """Let the tool see the end of every allocation and of every region of a layout."""
    emulated.EmulatedMemory = _BoundedMemory  # type: ignore[misc]
    heap_shared._map = _bounded_slice
    plain_layout, plain_memory = Layout.__init__, memory.ExchangeMemory.__init__

    def layout_with_gaps(self: Layout, regions: list[Region], lanes: int = 1) -> None:
        spaced = [part for i, region in enumerate(regions) for part in (region, Region(f"Gap{i}", GAP))]
        plain_layout(self, spaced, lanes)

    def memory_with_poisoned_gaps(self: memory.ExchangeMemory, group: RankGroup, plan: Any) -> None:
        plain_memory(self, group, plan)
        for base, layout in ((self.heap.base, self.heap.layout), (self.local.address, plan.local)):
            for lane in range(layout.lanes):
                _poison_gaps(base + lane * layout.lane_bytes, layout)

    Layout.__init__ = layout_with_gaps  # type: ignore[method-assign]
    memory.ExchangeMemory.__init__ = memory_with_poisoned_gaps  # type: ignore[method-assign]


def _poison_gaps(start: int, layout: Layout) -> None:
    """Everything between the end of a region and the next one."""
    ends = [placed.offset for placed in layout.regions[2::2]] + [layout.lane_bytes]
    for placed, end in zip(layout.regions[::2], ends, strict=True):
        used = placed.offset + placed.nbytes
        _libc.__asan_poison_memory_region(ctypes.c_void_p(start + used), ctypes.c_size_t(end - used))


def plant(mode: str) -> None:
    """Run the kernel ``planted`` on memory of its own."""
    device = emulated.EmulatedDevice()
    words, flag = device.allocate(planted.THREADS * 4), device.allocate(4)
    planted.run(device, mode, words=words.address, flag=flag.address)
    device.close()


def plant_in_heap() -> None:
    """Store one word beyond a region of a peer's slice."""

    def main(group: RankGroup) -> None:
        with Exchange(group, SMALL.config) as exchange:
            region = exchange.memory.heap.layout.region("ExpertIds")
            address = exchange.memory.heap.address("ExpertIds", rank=1 - group.rank)
            planted.run(group.device, "outside", words=address, count=region.nbytes // 4)

    run_local(main, 2)


def joined_steps(protocol: str) -> None:
    """Steps whose kernels meet while they run, so that nothing but the protocol orders them."""
    config = dataclasses.replace(SMALL.config, protocol=protocol)

    def main(group: RankGroup) -> None:
        with Exchange(group, config) as exchange:
            for index in range(3):
                for protocol in config.protocols:
                    exchange.protocol = protocol
                    step = random_step((5, index), config, group.size)
                    Backend().verified_step(exchange, step, f"{protocol}, step {index}")

    run_local(main, 2)


def main(tool: str, what: str, *overlay: str) -> None:
    """Build with ``tool``, with the headers of folder ``overlay`` in front, and run ``what``: names between commas."""
    os.environ.pop("LD_PRELOAD", None)  # the compiler needs no sanitizer
    flags = [*FLAGS[tool], *(f"-I{folder}" for folder in overlay)]
    emulated.HostJit = partial(HostJit, extra_flags=flags)  # type: ignore[attr-defined,assignment]
    if tool == "address":
        _bound_memory()
    for name in what.split(","):
        if name == "phases":
            run_phase_by_phase((SMALL, WIDE) if tool == "address" else (SMALL, STRICT), device="emulated")
        elif name == "joined":
            joined_steps("auto")
        elif name == "fence":
            joined_steps("fence")
        elif name == "outside-region":
            plant_in_heap()
        else:
            plant(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
