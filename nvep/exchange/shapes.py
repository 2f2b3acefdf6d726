"""Launch shapes of exchange kernels: wide enough for the work, and never so many blocks that waiting could deadlock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nvep.errors import ArgumentError
from nvep.exchange.plan import Plan
from nvep.exchange.tuning import choose_blocks
from nvep.nic.soft.model import ENGINE_SHAPES
from nvep.protocols import PROTOCOLS
from nvep.runtime.device import Device, Kernel, LaunchShape

_HEADER_ONLY_BLOCKS = 8  # D.recv alone touches headers under Fence, never rows
_COPYING_BLOCKS = 64  # more do not move rows faster
_FEWEST_THREADS = 64
_WARP = 32


def launch_shapes(
    device: Device,
    plan: Plan,
    kernels: Mapping[tuple[str, str], Kernel],
    shared_bytes: Callable[[str, str], int],
    ranks_on_device: int,
) -> dict[tuple[str, str], LaunchShape]:
    """Shape of every kernel, by protocol and name.

    Blocks that wait for peers must all be resident at once, together with those of the other ranks and lanes that share
    the device, and of its emulated network adapter: their number is cut to that.

    Raises
    ------
    ArgumentError
        The configuration asks for more blocks than that, or not even one fits.
    """
    config, threads = plan.config, device.default_threads
    resident = min(
        device.resident_blocks(kernel, threads, shared_bytes=shared_bytes(*key)) for key, kernel in kernels.items()
    )
    if not device.emulated:  # emulated launches never wait for one another's room
        sharers = config.lanes * ranks_on_device
        if sharers > 1 and config.dependent_launch:
            sharers *= 2  # beside a kernel that waits for a peer, the next one of its lane waits for it
        multiprocessors = device.multiprocessors - (ENGINE_SHAPES[device.kind].blocks if config.networked else 0)
        resident = _share(resident * multiprocessors // device.multiprocessors, multiprocessors, sharers)
    if resident < 1:
        allowed = "fewer lanes, or fewer ranks on one device: a block of each must be resident at once"
        raise ArgumentError("lanes", config.lanes, allowed)
    if config.max_blocks is not None and config.max_blocks > resident:
        raise ArgumentError("max_blocks", config.max_blocks, f"at most {resident}, resident at once on {device.name}")
    shapes = {}
    for protocol, name in kernels:
        blocks, width = _shape(device, plan, (protocol, name), resident)
        shapes[protocol, name] = LaunchShape(blocks, width, shared_bytes=shared_bytes(protocol, name))
    return shapes


def _share(resident: int, multiprocessors: int, sharers: int) -> int:
    """Blocks for each of ``sharers`` kernels that may wait at once on a device.

    Where there are several, they leave one multiprocessor alone, however full they are: the kernel that one rank needs
    before it can send (an expert GEMM, say) must find room while all the others wait for it.
    """
    return resident if sharers == 1 else min(resident, multiprocessors - 1) // sharers


def _shape(device: Device, plan: Plan, phase: tuple[str, str], resident: int) -> tuple[int, int]:
    """Blocks and threads of a phase (protocol, name)."""
    protocol, name = phase
    config, threads = plan.config, device.default_threads
    if name == "release":
        return 1, threads
    if device.emulated:
        most = min(config.max_blocks or device.default_blocks, resident)
    else:
        chosen = choose_blocks(config, protocol, device.name)
        most = min(chosen or device.multiprocessors, device.multiprocessors, resident)
        warps = PROTOCOLS[protocol].busy_warps(config, plan.num_ranks, name)
        if warps is not None:
            return _spread(warps, most, threads)
        most = min(most, chosen or _COPYING_BLOCKS)
    if (protocol, name) == ("fence", "dispatch_recv"):
        most = min(most, _HEADER_ONLY_BLOCKS)
    return most, threads


def _spread(warps: int, most_blocks: int, most_threads: int) -> tuple[int, int]:
    """As many blocks as allowed, each with no more warps than have work: a warp alone on its multiprocessor is fast."""
    blocks = min(most_blocks, warps)
    threads = _FEWEST_THREADS
    while threads < most_threads and blocks * threads < warps * _WARP:
        threads *= 2
    return blocks, min(threads, most_threads)
