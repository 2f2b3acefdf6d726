"""Exchange kernels: loaded before the first step, with launch shapes that cannot deadlock."""

from __future__ import annotations

import ctypes

from nvep.exchange.bulk import BulkPlan
from nvep.exchange.plan import Plan
from nvep.exchange.shapes import launch_shapes
from nvep.group import RankGroup
from nvep.runtime.device import Kernel, Launch, LaunchShape


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
        shared = BulkPlan(config, device.bulk).shared_bytes
        for protocol in config.protocols:
            loaded = device.load_all(plan.kernels(protocol))
            self._kernels |= {(protocol, name): kernel for name, kernel in loaded.items()}
        shapes = launch_shapes(device, plan, self._kernels, shared, group.ranks_on_device)
        announce_only = LaunchShape(1, device.default_threads)
        for dependent in (False, True):
            self._launches.append({})
            for key, shape in shapes.items():
                announcing = announce_only if key[1] == "combine_send" else shape
                pair = shape._replace(dependent=dependent), announcing._replace(dependent=dependent)
                self._launches[-1][key] = self._kernels[key], *pair

    def prepare(
        self, phase: tuple[str, str], arguments: ctypes.Structure, *, copies: bool = True, dependent: bool = False
    ) -> Launch:
        """A launch of a phase (protocol, name), to repeat; each takes what ``arguments`` holds then.

        Parameters
        ----------
        copies : bool
            False: C.send has no rows to move, so one block announces.
        dependent : bool
            The latest work on the stream is a phase of the same lane: this one may start before it ends.
        """
        kernel, shape, announcing = self._launches[dependent and self._dependent][phase]
        return self._device.prepare(kernel, shape if copies else announcing, arguments)
