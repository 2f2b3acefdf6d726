"""Dispatch and combine: the two operations of an expert-parallel layer."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.errors import ArgumentError, StepOrderError
from nvep.exchange.arrivals import Arrivals
from nvep.exchange.inputs import StepInputs
from nvep.exchange.lane import Lane
from nvep.exchange.lifecycle import ExchangeState
from nvep.protocols import PROTOCOLS
from nvep.runtime.device import Stream


class Exchange(ExchangeState):
    """Moves tokens to the ranks that own their experts, and the experts' sums back.

    Construction is collective: every rank of the group calls it. Steps are not: each rank enqueues its own phases, with
    its own number of tokens, and the kernels meet on the devices.

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
        """End a step that needs no combine: peers may overwrite its arrivals once this ran everywhere.

        All ranks end a step alike: a rank that combines waits for rows that one that releases will not expose.
        """
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

    def _arrived(self, lane: int) -> Arrivals:
        return dataclasses.replace(self._arrivals[lane][self._lanes[lane].protocol], step=self._lanes[lane].step)

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
