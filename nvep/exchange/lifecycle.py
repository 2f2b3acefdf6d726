"""Construction, failure, recovery and end of an exchange."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError, ExchangeClosed, NvepError
from nvep.exchange.failures import Statistics
from nvep.exchange.inputs import InputChecker, checked_mask
from nvep.exchange.kernels import ExchangeKernels
from nvep.exchange.lane import Lane
from nvep.exchange.memory import ExchangeMemory
from nvep.exchange.network import NicChoice, open_network
from nvep.exchange.plan import Plan
from nvep.exchange.recovery import await_departure, common_epoch
from nvep.exchange.tuning import choose_protocol
from nvep.exchange.views import lane_arguments, view_arrivals
from nvep.group import RankGroup
from nvep.runtime.frees import Frees

_DRAIN_S = 10.0  # for messages that were posted; an adapter that is well needs microseconds


class ExchangeState:
    """Everything of an exchange but its phases; see `Exchange`."""

    def __init__(self, group: RankGroup, config: ExchangeConfig, *, nic: NicChoice | None = None) -> None:
        if not isinstance(group, RankGroup):
            raise ArgumentError("group", group, "a RankGroup")
        self.group = group
        self.config = config
        self.device = group.device
        self._closed = False
        self._failure: NvepError | None = None
        self._unseen: NvepError | None = None  # found by close
        group.together(lambda: _require_config(config, group))
        group.agree("placement", config.placement)  # which repr(config) leaves out
        group.agree("ExchangeConfig", config)
        self.plan = Plan(config, group.size, group.device.bulk)
        self._frees = _shared_frees(group)
        self.kernels = ExchangeKernels(group, self.plan)
        with ExitStack() as undo:  # what a construction that fails on some rank leaves, no exchange being open for it
            self.memory = ExchangeMemory(group, self.plan)
            undo.callback(self._frees.defer, self.memory.close)
            self.network = open_network(group, self.plan, self.memory, nic)
            if self.network is not None:
                undo.callback(self.network.close)
            self._inputs = group.together(lambda: InputChecker(config, group.size, self.device))
            undo.callback(self._frees.defer, self._inputs.close)
            self._processes = group.allgather(None if group.in_process else os.getpid())
            self._protocol = choose_protocol(config, group)
            self._frees.enter()  # before the last collective: no peer's step comes earlier
            undo.callback(self._frees.leave)
            group.together(self._prepare_lanes)
            undo.pop_all()

    def _prepare_lanes(self) -> None:
        config = self.config
        self._lanes = [Lane(i, self.device, config.protocols[0]) for i in range(config.lanes)]
        arguments = [lane_arguments(self.memory, i, self.group.rank) for i in range(config.lanes)]
        self._dispatch_arguments = [dispatch for dispatch, _ in arguments]
        self._combine_arguments = [combine for _, combine in arguments]
        self._lifetime = ArrayOwner(self.device)
        self._owners = [self._lifetime.sibling() for _ in range(config.lanes)]
        self._arrivals = [
            {protocol: view_arrivals(self.memory, i, protocol, owner) for protocol in config.protocols}
            for i, owner in enumerate(self._owners)
        ]
        # Held by self._arrivals, so no other object has the same identity.
        self._own_counts = {id(arrivals.counts) for lane in self._arrivals for arrivals in lane.values()}
        shape, dtype = (config.max_tokens, config.elements), partial_dtype(config.partial_format)
        self._outputs = [
            DeviceArray(self.memory.output(i), shape, dtype, owner=owner) for i, owner in enumerate(self._owners)
        ]
        self._mask = np.zeros(self.group.size, dtype=bool)

    @property
    def protocol(self) -> str:
        """Protocol of the steps to come: ``"fence"`` or ``"sentinel"``.

        With ``ExchangeConfig(protocol="auto")`` it may be assigned between steps, alike on all ranks: ranks that run a
        step with different protocols raise ProtocolMismatch. A captured graph keeps the protocol it was captured with.

        Raises
        ------
        ArgumentError
            On assignment, for a protocol that the configuration did not plan.
        """
        return self._protocol

    @protocol.setter
    def protocol(self, name: str) -> None:
        if name not in self.config.protocols:
            raise ArgumentError("protocol", name, " or ".join(self.config.protocols) + ", as the configuration planned")
        self._protocol = name

    def set_mask(self, masked: Any, *, stream: Any = None) -> None:
        """Leave ranks out from the next D.send on ``stream``; the same on every rank that stays, at the same step.

        Parameters
        ----------
        masked : sequence of bool
            One entry per rank. Masking is one-way: a rank once masked stays so; this rank cannot mask itself.

        Raises
        ------
        ArgumentError
            Wrong length or type, this rank masked, or a masked rank readmitted.
        """
        self._require_open()
        queue, wanted = self.device.as_stream(stream), checked_mask(masked, self.group.rank, self._mask)
        self._mask = wanted
        for lane in self._lanes:  # behind the phases before, and the next D.send of every lane behind the copy
            lane.follow(queue)
        self.device.copy_in(self.memory.mask.address, wanted.astype(np.uint32), queue)

    def recover(self, lost: Collection[int]) -> None:
        """Go on without ranks that are gone, after a PeerTimeout or PeerLeft. Collective over the ranks that remain.

        Waits for this rank's kernels, makes sure that none of a lost rank's can still write here, and starts every lane
        afresh with the lost ranks masked: captured graphs stay valid, steps in flight are forgotten, their outputs
        undefined. Experts of lost ranks are unreachable; tokens that needed one are dropped for it and counted.

        Parameters
        ----------
        lost : collection of int
            Ranks to go on without, equal on all ranks that remain. Ranks that are masked, or were lost before, stay out
            without being named.

        Raises
        ------
        ArgumentError
            This rank is among them, or there is no such rank.
        ConfigMismatch, GroupError
            The ranks that remain name different ranks.
        PeerTimeout
            A lost rank has neither closed its exchange nor ended within the deadline.
        """
        self.drain()
        if self.network is not None:
            self.network.drain(_DRAIN_S)  # no message of a step that is forgotten may arrive in a later one
        self.group.exclude([*lost, *np.flatnonzero(self._mask).tolist()])
        gone = [r for r in range(self.group.size) if r not in self.group.members]
        self.group.agree("lost", gone)
        self.group.together(lambda: await_departure(self.memory, gone, self._processes))
        epoch = common_epoch(self.group, self.memory)
        self._mask = np.isin(np.arange(self.group.size), gone)
        self.group.together(lambda: self.memory.restart(epoch, self._mask))
        self._failure = None
        for lane in self._lanes:
            lane.restart()

    def check(self) -> None:
        """Raise what kernels have reported so far, without waiting. Every phase does this first."""
        self._require_open()
        if self._failure is None and self.network is not None:
            self._failure = self.network.error()
        if self._failure is None:
            self._failure = self.memory.status.error()
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Before a graph is replayed that holds phases: have the network adapter ready for what they post.

        Phases that are called do this themselves; otherwise an adapter that has left is back after a moment. Without a
        network adapter there is nothing to do.
        """
        self._require_open()
        if self.network is not None:
            self.network.wake()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for ``stream``, then `check`. A step's failure is certain to be seen here."""
        self._require_open()
        self.device.as_stream(stream).synchronize()
        self.check()

    def statistics(self) -> Statistics:
        """Counts of ids and tokens that were not exchanged as given; up to date after `synchronize`."""
        self._require_open()
        return self.memory.status.statistics()

    def drain(self) -> None:
        """Wait for everything enqueued so far on this rank's device object and on the streams that phases named.

        A graph launched on a stream of another library is not known here: wait for it first.
        """
        self._require_open()
        self.device.synchronize()
        for lane in self._lanes:
            lane.synchronize()

    def close(self) -> None:
        """Free everything; idempotent. Waits as `drain` does, and for no peer.

        Peers keep the memory that they map. On GPUs, ranks of one process free when none of their group has an exchange
        open any more: freeing may wait for a peer's kernels, which may wait for launches that it holds off. The
        exchange's arrays raise ExchangeClosed. What reads them in place (NumPy, other libraries) keeps the memory on an
        emulated device until it is gone; on a GPU it must be gone before.

        Raises
        ------
        DeviceError
            The device failed. On the rank that closes last, also what another rank's memory could not be freed for.
        """
        if self._closed:
            return
        reported = self.memory.status.error()
        if self._failure is not None and (reported is None or isinstance(reported, ArgumentError)):
            self.memory.poison_peers()  # or they, who know nothing of it, would wait for this rank until their deadline
        try:
            self.drain()
            if self.network is not None:
                if self._failure is None and reported is None:
                    self.network.drain(_DRAIN_S)  # what peers still wait for
                self.network.detach()
            if self._failure is None:
                self._unseen = self.memory.status.error()
            self.memory.acknowledge()  # no kernel of this rank runs any more: survivors may recover
        finally:
            self._closed = True
            self._lanes.clear()  # what they keep for their kernels may be arrays of ours
            if self.network is not None:
                self._frees.defer(self.network.close)
            self._frees.defer(self._inputs.close)
            if self.device.emulated:
                self._lifetime.expire(then=partial(self._frees.defer, self.memory.close))
            else:
                self._lifetime.expire()
                self._frees.defer(self.memory.close)
            self._frees.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.note_failure(error)
        self.close()
        if error is None and self._unseen is not None:
            raise self._unseen  # a step failed and nobody looked: leaving quietly would hide it

    def note_failure(self, error: BaseException | None) -> None:
        """This rank is leaving because of ``error``: ``close`` will end the waits of its peers."""
        if error is not None and self._failure is None:
            self._failure = error if isinstance(error, NvepError) else NvepError(f"left after {error!r}")

    def _require_open(self) -> None:
        if self._closed:
            raise ExchangeClosed("the exchange is closed")


def _shared_frees(group: RankGroup) -> Frees:
    """What ranks of one process free together where freeing waits for kernels; elsewhere a rank frees by itself."""
    device = group.device
    if not (group.in_process and device.frees_wait_for_kernels):
        return Frees()
    device.frees = group.allgather(device.frees)[group.members[0]]
    device.frees.settle()  # every rank is here: nobody's kernels wait for a launch that is still to come
    return device.frees


def _require_config(config: object, group: RankGroup) -> None:
    if not isinstance(config, ExchangeConfig):
        raise ArgumentError("config", config, "an ExchangeConfig")
    config.expert_ranks(group.size)
