"""Exchange kernels: loaded before the first step, with launch shapes that cannot deadlock."""

from __future__ import annotations

import ctypes

from nvep.errors import ArgumentError
from nvep.exchange.bulk import BulkPlan
from nvep.exchange.plan import Plan
from nvep.group import RankGroup
from nvep.runtime.device import Kernel, LaunchShape, Stream

_HEADER_ONLY_BLOCKS = 8  # D.recv alone touches headers under Fence, never rows


def _share(resident: int, multiprocessors: int, sharers: int) -> int:
    """Blocks for each of ``sharers`` kernels that may wait at once on a device.

    Where there are several, they leave one multiprocessor alone, however full they are: the kernel that one rank needs
    before it can send (an expert GEMM, say) must find room while all the others wait for it.
    """
    return resident if sharers == 1 else min(resident, multiprocessors - 1) // sharers


class ExchangeKernels:
    """Every kernel of a plan on this rank's device.

    Blocks that wait for peers must all be resident at once, together with those of the other ranks and lanes that
    share the device: the number of blocks is cut to that, or refused where the configuration asks for more.
    Construction is collective.
    """

    def __init__(self, group: RankGroup, plan: Plan) -> None:
        self._device = group.device
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._launches: list[dict[tuple[str, str], tuple[Kernel, LaunchShape, LaunchShape]]] = []
        self._dependent = plan.config.dependent_launch
        group.together(lambda: self._load(group, plan))

    def _load(self, group: RankGroup, plan: Plan) -> None:
        device, config = self._device, plan.config
        threads = device.default_threads
        shared = BulkPlan(config, device.bulk).shared_bytes
        for protocol in config.protocols:
            loaded = device.load_all(plan.kernels(protocol))
            self._kernels |= {(protocol, name): kernel for name, kernel in loaded.items()}
        resident = min(
            device.resident_blocks(kernel, threads, shared_bytes=shared(*key)) for key, kernel in self._kernels.items()
        )
        if not device.emulated:  # emulated launches never wait for one another's room
            sharers = config.lanes * group.ranks_on_device
            if sharers > 1 and config.dependent_launch:
                sharers *= 2  # beside a kernel that waits for a peer, the next one of its lane waits for it
            resident = _share(resident, device.multiprocessors, sharers)
        if resident < 1:
            allowed = "fewer lanes, or fewer ranks on one device: a block of each must be resident at once"
            raise ArgumentError("lanes", config.lanes, allowed)
        if config.max_blocks is not None and config.max_blocks > resident:
            allowed = f"at most {resident}, what is resident at once on {device.name}"
            raise ArgumentError("max_blocks", config.max_blocks, allowed)
        blocks = config.max_blocks or min(device.default_blocks, resident)
        announce_only = LaunchShape(1, threads)
        shapes = {key: LaunchShape(blocks, threads, shared_bytes=shared(*key)) for key in self._kernels}
        for protocol in config.protocols:
            shapes[protocol, "release"] = announce_only
        if "fence" in config.protocols:
            shapes["fence", "dispatch_recv"] = LaunchShape(min(blocks, _HEADER_ONLY_BLOCKS), threads)
        for dependent in (False, True):
            self._launches.append({})
            for key, shape in shapes.items():
                announcing = announce_only if key[1] == "combine_send" else shape
                pair = shape._replace(dependent=dependent), announcing._replace(dependent=dependent)
                self._launches[-1][key] = self._kernels[key], *pair

    def launch(
        self,
        phase: tuple[str, str],
        arguments: ctypes.Structure,
        stream: Stream,
        *,
        copies: bool = True,
        dependent: bool = False,
    ) -> None:
        """Enqueue a phase (protocol, name).

        Parameters
        ----------
        copies : bool
            False: C.send has no rows to move, so one block announces.
        dependent : bool
            The latest work on ``stream`` is a phase of the same lane: this one may start before it ends.
        """
        kernel, shape, announcing = self._launches[dependent and self._dependent][phase]
        self._device.launch(kernel, shape if copies else announcing, arguments, stream)
