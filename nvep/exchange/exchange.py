"""Dispatch and combine: the two operations of an expert-parallel layer."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError, ExchangeClosed, NvepError, StepOrderError
from nvep.exchange.arrivals import Arrivals
from nvep.exchange.failures import Statistics
from nvep.exchange.inputs import InputChecker, StepInputs, checked_mask
from nvep.exchange.kernels import ExchangeKernels
from nvep.exchange.lane import Lane
from nvep.exchange.memory import ExchangeMemory
from nvep.exchange.plan import Plan
from nvep.exchange.tuning import choose_protocol
from nvep.exchange.views import lane_arguments, view_arrivals
from nvep.group import RankGroup
from nvep.protocols import PROTOCOLS
from nvep.runtime.device import Stream


class Exchange:
    """Moves tokens to the ranks that own their experts, and the experts' sums back.

    Construction, and ``close`` of a healthy exchange, are collective: every rank of the group calls them. Steps are
    not: each rank enqueues its own phases, with its own number of tokens, and the kernels meet on the devices.

    Parameters
    ----------
    group : RankGroup
        Who takes part. The group outlives the exchange.
    config : ExchangeConfig
        Equal on all ranks.

    Raises
    ------
    ArgumentError, ConfigMismatch, HeapTooLarge, CompilationError
        With the same text on every rank, before any step.
    """

    def __init__(self, group: RankGroup, config: ExchangeConfig) -> None:
        if not isinstance(group, RankGroup):
            raise ArgumentError("group", group, "a RankGroup")
        self.group = group
        self.config = config
        self.device = group.device
        self._closed = False
        self._failure: NvepError | None = None
        group.together(lambda: _require_config(config, group))
        group.agree("placement", config.placement)  # which repr(config) leaves out
        group.agree("ExchangeConfig", config)
        self.plan = Plan(config, group.size)
        self.kernels = ExchangeKernels(group, self.plan)
        self.memory = ExchangeMemory(group, self.plan)
        try:
            self._inputs = group.together(lambda: InputChecker(config, group.size, self.device))
        except BaseException:
            self.memory.close()
            raise
        self._lanes = [Lane(i, self.device, config.protocols[0]) for i in range(config.lanes)]
        arguments = [lane_arguments(self.memory, i, group.rank) for i in range(config.lanes)]
        self._dispatch_arguments = [dispatch for dispatch, _ in arguments]
        self._combine_arguments = [combine for _, combine in arguments]
        self._lifetime = ArrayOwner(self.device)
        self._owners = [self._lifetime.sibling() for _ in range(config.lanes)]
        self._arrivals = [
            {protocol: view_arrivals(self.memory, i, protocol, owner) for protocol in config.protocols}
            for i, owner in enumerate(self._owners)
        ]
        self._protocol = choose_protocol(config, group)
        self._mask = np.zeros(group.size, dtype=bool)

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: Any,
        expert_ids: Any,
        expert_weights: Any,
        *,
        num_tokens: Any = None,
        lane: int = 0,
        stream: Any = None,
    ) -> Arrivals:
        """Send this rank's tokens and receive those that other ranks send here, in one kernel launch.

        Parameters
        ----------
        tokens : array or tuple of arrays
            One array per payload, ``[tokens, ...]`` with ``row_bytes`` (``extra_payload_bytes``) bytes a token, any
            dtype, C-contiguous, 16-byte aligned. NumPy, DLPack, CUDA array interface or DeviceArray. On a GPU, host
            arrays are copied; everything else is read in place, in stream order, and must not change until the step
            ran.
        expert_ids : array
            int32 or int64 ``[tokens, top_k]``, distinct within a token; -1 means none.
        expert_weights : array
            float32 ``[tokens, top_k]``.
        num_tokens : int or array, optional
            Tokens of this step where the arrays are longer: a number, or an int32 ``[1]`` device array read by the
            kernel, so that replays of a graph can change it. Default: all.
        lane : int
            Lane of the step.
        stream : stream, optional
            A Stream, an int handle, anything with ``__cuda_stream__``; default: the device's own.

        Returns
        -------
        Arrivals
            Views of the receive buffers.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError
            Before any device work.
        StepOrderError
            The lane's previous step was not combined or released.
        PeerTimeout, ProtocolMismatch
            An earlier step failed.
        """
        self._send("dispatch", tokens, expert_ids, expert_weights, num_tokens, lane, stream)
        return self._arrived(lane)

    def dispatch_send(
        self,
        tokens: Any,
        expert_ids: Any,
        expert_weights: Any,
        *,
        num_tokens: Any = None,
        lane: int = 0,
        stream: Any = None,
    ) -> None:
        """First half of `dispatch`: occupies the device only while it sends. Parameters and errors as there."""
        self._send("dispatch_send", tokens, expert_ids, expert_weights, num_tokens, lane, stream)

    def dispatch_recv(self, *, lane: int = 0, stream: Any = None) -> Arrivals:
        """Second half of `dispatch`: wait for every peer. Returns and raises as `dispatch`."""
        state, queue = self._open("dispatch_recv", lane, stream)
        self.kernels.launch(state.protocol, "dispatch_recv", self._dispatch_arguments[lane], queue)
        state.advance("dispatch_recv")
        return self._arrived(lane)

    def _send(self, phase: str, tokens: Any, ids: Any, weights: Any, count: Any, lane: int, stream: Any) -> None:
        state, queue = self._open(phase, lane, stream)
        step = self._inputs.step(lane, (tokens, ids, weights, count), queue)
        state.protocol = self._protocol
        self._set_dispatch(self._dispatch_arguments[lane], step)
        self.kernels.launch(state.protocol, phase, self._dispatch_arguments[lane], queue)
        state.tokens = None if step.num_tokens_device else step.num_tokens
        state.keep(queue, step.keepalive)
        state.advance(phase)

    @staticmethod
    def _set_dispatch(arguments: ctypes.Structure, step: StepInputs) -> None:
        for index, address in enumerate(step.payloads):
            arguments.payloads[index] = address
        arguments.expert_ids = step.expert_ids
        arguments.ids_are_64_bit = int(step.ids_are_64_bit)
        arguments.expert_weights = step.expert_weights
        arguments.num_tokens = step.num_tokens
        arguments.num_tokens_device = step.num_tokens_device

    # --- combine ----------------------------------------------------------------------------------------------------

    def combine(self, partial_rows: Any, arrivals: Arrivals, *, out: Any = None, stream: Any = None) -> DeviceArray:
        """Return partial rows to their sources and sum this rank's, in one kernel launch.

        Parameters
        ----------
        partial_rows : array
            ``[ranks, max_tokens, partial_elements]`` in the partial format: row ``[s, i]`` is this rank's weighted
            sum for arrival ``[s, i]``. Rows at and beyond the counts are not read. Passing ``arrivals.partial_rows``
            saves a copy.
        arrivals : Arrivals
            What `dispatch` returned in this step.
        out : array, optional
            ``[at least tokens, partial_elements]`` to write; default: a buffer of the exchange, valid until the next
            combine of this lane.
        stream : stream, optional
            As in `dispatch`.

        Returns
        -------
        DeviceArray
            ``[tokens, partial_elements]``: for each token the sum of its partial rows, in float32, over target ranks
            ascending, rounded once. Where the number of tokens is known to the device alone, all ``max_tokens`` rows.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError, StepOrderError, PeerTimeout
            As in `dispatch`.
        """
        return self._combine("combine", arrivals, partial_rows, out, stream)

    def combine_send(self, partial_rows: Any, arrivals: Arrivals, *, stream: Any = None) -> None:
        """First half of `combine`: expose the partial rows. Parameters and errors as there."""
        state, queue = self._reopen("combine_send", arrivals, stream)
        self._give_back("combine_send", state, (partial_rows,), queue)
        state.advance("combine_send")

    def combine_recv(self, arrivals: Arrivals, *, out: Any = None, stream: Any = None) -> DeviceArray:
        """Second half of `combine`: wait, pull and sum. Parameters, result and errors as there."""
        state, queue = self._reopen("combine_recv", arrivals, stream)
        result = self._output(state, out, queue)
        self.kernels.launch(state.protocol, "combine_recv", self._combine_arguments[state.index], queue)
        state.keep(queue, result)
        state.advance("combine_recv")
        return result

    def work(self, arrivals: Arrivals, *, stream: Any = None) -> Stream:
        """Stream for the caller's own work between dispatch and combine of a step, ordered as a phase of it.

        What is enqueued there runs after dispatch and before combine, whatever streams those use.

        Raises
        ------
        StepOrderError, ArgumentError, PeerTimeout
            As in `combine`.
        """
        return self._reopen("work", arrivals, stream)[1]

    def release(self, arrivals: Arrivals, *, stream: Any = None) -> None:
        """End a step that needs no combine: peers may overwrite its arrivals once this ran everywhere."""
        state, queue = self._reopen("release", arrivals, stream)
        self.kernels.launch(state.protocol, "release", self._combine_arguments[state.index], queue)
        state.advance("release")

    def _combine(self, phase: str, arrivals: Arrivals, partial_rows: Any, out: Any, stream: Any) -> DeviceArray:
        state, queue = self._reopen(phase, arrivals, stream)
        result = self._output(state, out, queue)
        self._give_back(phase, state, (partial_rows, result), queue)
        state.advance(phase)
        return result

    def _give_back(self, phase: str, state: Lane, arrays: tuple[Any, ...], queue: Stream) -> None:
        arguments = self._combine_arguments[state.index]
        exposed = self._arrivals[state.index][state.protocol].partial_rows.address
        arguments.partial_rows, view = self._inputs.partial_rows(arrays[0], exposed, queue)
        copies = arguments.partial_rows != exposed or not PROTOCOLS[state.protocol].exposes_partial_rows
        self.kernels.launch(state.protocol, phase, arguments, queue, copies=copies)
        state.keep(queue, view, *arrays[1:])

    def _output(self, state: Lane, out: Any, queue: Stream) -> DeviceArray:
        rows = self.config.max_tokens if state.tokens is None else state.tokens
        elements = self.config.elements
        dtype = partial_dtype(self.config.partial_format)
        arguments = self._combine_arguments[state.index]
        if out is None:
            arguments.output = self.memory.output(state.index)
            return DeviceArray(arguments.output, (rows, elements), dtype, owner=self._owners[state.index])
        view = self._inputs.output(out, rows, queue)
        arguments.output = view.address
        owner = ArrayOwner(self.device, stream=queue, keepalive=view)
        return DeviceArray(view.address, (rows, elements), dtype, owner=owner)

    # --- state ------------------------------------------------------------------------------------------------------

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
        self.device.copy_in(self.memory.mask.address, wanted.astype(np.uint32), queue)

    def check(self) -> None:
        """Raise what kernels have reported so far, without waiting. Every phase does this first."""
        self._require_open()
        if self._failure is None:
            self._failure = self.memory.status.error()
        if self._failure is not None:
            raise self._failure

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
        """Wait for everything enqueued so far, on whatever stream; what kernels report is left to `check`."""
        self._require_open()
        self.device.default_stream.synchronize()
        for lane in self._lanes:
            lane.synchronize()

    def close(self) -> None:
        """Free everything; idempotent. Collective while healthy; after a failure, each rank for itself.

        Its arrays then raise ExchangeClosed. What reads them in place (NumPy, other libraries) keeps the memory on an
        emulated device until it is gone; on a GPU it must be gone before.
        """
        if self._closed:
            return
        reported = self.memory.status.error()
        if self._failure is not None and (reported is None or isinstance(reported, ArgumentError)):
            self.memory.poison_peers()  # or they, who know nothing of it, would wait for this rank until their deadline
        try:
            self.drain()
        finally:
            self._closed = True
            self._lanes.clear()  # what they keep for their kernels may be arrays of ours
            try:
                if self._failure is None and self.memory.status.error() is None:
                    self.group.barrier()  # nobody unmaps what a peer's last kernel may still read
            finally:
                self._inputs.close()
                if self.device.emulated:
                    self._lifetime.expire(then=self.memory.close)
                else:
                    self._lifetime.expire()
                    self.memory.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.note_failure(error)
        self.close()

    def note_failure(self, error: BaseException | None) -> None:
        """This rank is leaving because of ``error``: ``close`` will not wait for the others."""
        if error is not None and self._failure is None:
            self._failure = error if isinstance(error, NvepError) else NvepError(f"left after {error!r}")

    def _arrived(self, lane: int) -> Arrivals:
        return dataclasses.replace(self._arrivals[lane][self._lanes[lane].protocol], step=self._lanes[lane].step)

    def _require_open(self) -> None:
        if self._closed:
            raise ExchangeClosed("the exchange is closed")

    def _open(self, phase: str, lane: int, stream: Any) -> tuple[Lane, Stream]:
        """The lane, if ``phase`` comes next, and the stream to run it on, ordered behind the phase before."""
        self.check()
        if isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < len(self._lanes):
            raise ArgumentError("lane", lane, f"0 to {len(self._lanes) - 1}")
        state = self._lanes[lane]
        state.require(phase)
        queue = self.device.as_stream(stream)
        state.follow(queue)
        self._owners[lane].stream = queue
        return state, queue

    def _reopen(self, phase: str, arrivals: Arrivals, stream: Any) -> tuple[Lane, Stream]:
        self._require_open()
        own = [a.counts for lane in self._arrivals for a in lane.values()]
        if not isinstance(arrivals, Arrivals) or all(arrivals.counts is not counts for counts in own):
            raise ArgumentError("arrivals", type(arrivals).__name__, "what dispatch of this exchange returned")
        step = self._lanes[arrivals.lane].step
        if arrivals.step != step:
            raise StepOrderError(f"{phase}: arrivals of step {arrivals.step}, lane {arrivals.lane} is at step {step}")
        return self._open(phase, arrivals.lane, stream)


def _require_config(config: object, group: RankGroup) -> None:
    if not isinstance(config, ExchangeConfig):
        raise ArgumentError("config", config, "an ExchangeConfig")
    config.expert_ranks(group.size)
