"""Dispatch and combine: the two operations of an expert-parallel layer."""

from __future__ import annotations

import ctypes
from typing import Any

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.errors import ArgumentError, StepOrderError
from nvep.exchange.arrivals import Arrivals, of_step
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
    nic : SoftNicModel or callable, optional
        Of transports over a network adapter: what the emulated one pretends to be, equal on all ranks, or what makes
        an adapter of the group.

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
        return self._arrived(self._send("dispatch", tokens, expert_ids, expert_weights, num_tokens, lane, stream))

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
        state = self._lane(lane)
        queue = self._open("dispatch_recv", state, stream)
        self._launch("dispatch_recv", state, self._dispatch_arguments[lane], queue)
        return self._arrived(state)

    def _send(self, phase: str, tokens: Any, ids: Any, weights: Any, count: Any, lane: int, stream: Any) -> Lane:
        state = self._lane(lane)
        queue = self._open(phase, state, stream)
        arguments = self._dispatch_arguments[lane]
        num_tokens, read, copied = self._inputs.step(lane, (tokens, ids, weights, count), queue, arguments)
        state.protocol = self._protocol
        if copied:
            state.interrupt()
        self._launch(phase, state, arguments, queue)
        state.tokens = num_tokens
        state.keep(read)
        return state

    # --- combine ----------------------------------------------------------------------------------------------------

    def combine(self, partial_rows: Any, arrivals: Arrivals, *, out: Any = None, stream: Any = None) -> DeviceArray:
        """Return partial rows to their sources and sum this rank's, in one kernel launch.

        Parameters
        ----------
        partial_rows : array
            ``[ranks, max_tokens, partial_elements]`` in the partial format: row ``[s, i]`` is this rank's weighted
            sum for arrival ``[s, i]``. Rows at and beyond the counts are not used. Passing ``arrivals.partial_rows``
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
        state, queue = self._reopen("combine", arrivals, stream)
        result = self._output(state, out, queue)
        self._give_back("combine", state, partial_rows, queue)
        state.finish(queue)
        return result

    def combine_send(self, partial_rows: Any, arrivals: Arrivals, *, stream: Any = None) -> None:
        """First half of `combine`: expose the partial rows. Parameters and errors as there."""
        state, queue = self._reopen("combine_send", arrivals, stream)
        self._give_back("combine_send", state, partial_rows, queue)

    def combine_recv(self, arrivals: Arrivals, *, out: Any = None, stream: Any = None) -> DeviceArray:
        """Second half of `combine`: wait, pull and sum. Parameters, result and errors as there."""
        state, queue = self._reopen("combine_recv", arrivals, stream)
        result = self._output(state, out, queue)
        self._launch("combine_recv", state, self._combine_arguments[state.index], queue)
        state.finish(queue)
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
        self._launch("release", state, self._combine_arguments[state.index], queue)
        state.finish(queue)

    def _give_back(self, phase: str, state: Lane, partial_rows: Any, queue: Stream) -> None:
        arguments = self._combine_arguments[state.index]
        own = self._arrivals[state.index][state.protocol].partial_rows
        address = exposed = own._address  # expired only once the exchange is closed
        if partial_rows is not own:
            view = self._inputs.partial_rows(partial_rows, exposed, queue)
            address = view.address
            if view.host:
                state.interrupt()
            state.keep((view,))
        arguments.partial_rows = address
        copies = address != exposed or not PROTOCOLS[state.protocol].exposes_partial_rows
        self._launch(phase, state, arguments, queue, copies=copies)

    def _output(self, state: Lane, out: Any, queue: Stream) -> DeviceArray:
        rows = self.config.max_tokens if state.tokens is None else state.tokens
        arguments = self._combine_arguments[state.index]
        if out is None:
            last = self._outputs[state.index]
            if last.shape[0] != rows:
                last = DeviceArray(last.address, (rows, self.config.elements), last.dtype, owner=last.owner)
                self._outputs[state.index] = last
            arguments.output = last.address
            return last
        view = self._inputs.output(out, rows, queue)
        arguments.output = view.address
        state.keep((view,))
        owner = ArrayOwner(self.device, stream=queue, keepalive=view)
        return DeviceArray(view.address, (rows, self.config.elements), view.dtype, owner=owner)

    # --- both -------------------------------------------------------------------------------------------------------

    def undo_capture(self, *, lane: int = 0) -> None:
        """After a failed capture of another library: the lane is again where it was before the capture.

        Nothing of what was captured may ever run. `Device.capture` does this by itself.
        """
        self._lane(lane).undo_capture()

    def _launch(
        self, phase: str, state: Lane, arguments: ctypes.Structure, queue: Stream, *, copies: bool = True
    ) -> None:
        if self.network is not None:
            self.network.wake()
        key = state.protocol, phase, copies, state.latest == (queue.handle, state.capture)
        launch = state.launches.get(key)
        if launch is None:
            launch = self.kernels.prepare(key[:2], arguments, copies=copies, dependent=key[3])
            state.launches[key] = launch
        launch(queue)
        state.advance(phase, queue)

    def _arrived(self, state: Lane) -> Arrivals:
        return of_step(self._arrivals[state.index][state.protocol], state.step)

    def _lane(self, lane: int) -> Lane:
        if isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < len(self._lanes):
            self._require_open()
            raise ArgumentError("lane", lane, f"0 to {len(self._lanes) - 1}")
        return self._lanes[lane]

    def _open(self, phase: str, state: Lane, stream: Any) -> Stream:
        """The stream to run ``phase`` on, if that comes next on the lane, ordered behind the phase before."""
        self.check()
        queue = self.device.as_stream(stream)
        state.open(phase, queue)
        self._owners[state.index].stream = queue
        return queue

    def _reopen(self, phase: str, arrivals: Arrivals, stream: Any) -> tuple[Lane, Stream]:
        if self._closed:
            self._require_open()
        if not isinstance(arrivals, Arrivals) or id(arrivals.counts) not in self._own_counts:
            raise ArgumentError("arrivals", type(arrivals).__name__, "what dispatch of this exchange returned")
        state = self._lanes[arrivals.lane]
        if arrivals.step != state.step:
            at = f"lane {state.index} is at step {state.step}"
            raise StepOrderError(f"{phase}: arrivals of step {arrivals.step}, {at}")
        return state, self._open(phase, state, stream)
