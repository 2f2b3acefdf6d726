"""A complete expert-parallel MoE layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from nvep.arrays import ArrayOwner, DeviceArray
from nvep.config import partial_dtype
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals, Exchange
from nvep.formats import Quantiser, payload_format
from nvep.group import RankGroup
from nvep.inputs import InputSpec, as_input
from nvep.moe.grouped_gemm import BACKENDS, ExpertShape, choose
from nvep.moe.grouped_gemm.base import MemoryLine, local_index
from nvep.moe.layer_plan import CHOICES, LayerPlan, check_options, checked_weights, row_scale
from nvep.moe.shared import SharedExperts
from nvep.moe.weights import LocalExperts, MoEWeights
from nvep.runtime.device import Event, Stream


@dataclass
class _Lane:
    """The layer's own work of a lane, beside the exchange's phases."""

    count: int = 0  # address of the tokens that shared experts computed
    stream: Stream | None = None
    event: Event | None = None
    capture: int = 0


class MoELayer:
    """Dispatch, experts on the ranks that own them, combine; shared experts on every rank beside them.

    Parameters
    ----------
    group : RankGroup
        Who takes part. Construction is collective.
    weights : MoEWeights
        Weights of all experts; only this rank's are copied to its device.
    top_k : int
        Experts per token.
    max_tokens : int
        Most tokens of this rank in one step.
    grouped_gemm : str
        Backend of the expert compute: a key of ``nvep.moe.grouped_gemm.BACKENDS``, or ``"auto"``.
    **options
        ``activation``: ``"swiglu"`` (default), ``"geglu"`` (tanh form), ``"swiglu_clamped"`` (gpt-oss) or ``"plain"``
        (gate times up). ``row_format``: payload format in which rows travel, a key of ``nvep.formats.FORMATS``;
        default ``"bf16"``. ``row_scale``: the scale of all rows, where that format has one. ``shared``: `MoEWeights`
        of shared experts, which every token goes through with weight 1.
        On a GPU, other formats and shared experts need ``x`` on it. Further `ExchangeConfig` fields:
        ``partial_format``, ``placement``, ``lanes``, ``deadline``, ``max_blocks``, ``protocol``, ``transport``.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError, ConfigMismatch
        Before any step, on every rank.
    """

    def __init__(
        self,
        group: RankGroup,
        weights: MoEWeights,
        *,
        top_k: int,
        max_tokens: int,
        grouped_gemm: str = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(group, RankGroup):
            raise ArgumentError("group", group, "a RankGroup")
        self.group = group
        self._resources = ExitStack()
        chosen = {name: options.pop(name, default) for name, default in CHOICES.items()}

        def check() -> LayerPlan:
            check_options(grouped_gemm, chosen, options)
            parts = checked_weights("weights", weights, group)
            shared = None if chosen["shared"] is None else checked_weights("shared", chosen["shared"], group)
            experts, _, hidden = parts.gate.shape
            sizes = {"num_experts": experts, "top_k": top_k, "max_tokens": max_tokens}
            config = payload_format(chosen["row_format"]).exchange_config(hidden, **sizes, **options)
            scale = row_scale(chosen["row_format"], chosen["row_scale"])
            return LayerPlan(config, parts, shared, grouped_gemm, chosen["activation"], chosen["row_format"], scale)

        plan = group.together(check)
        group.agree("weights and the choices of expert compute", plan.agreed)
        try:
            self.exchange = Exchange(group, plan.config)
            self._resources.callback(self.exchange.close)
            group.together(lambda: self._load(plan))
        except BaseException:
            self.close()
            raise

    def _load(self, plan: LayerPlan) -> None:
        device, config, parts = self.group.device, self.exchange.config, plan.parts
        experts, intermediate, hidden = parts.gate.shape
        self._rows = InputSpec("x", (partial_dtype("bf16"),), (("tokens", config.max_tokens), hidden), alignment=16)
        index = local_index(config.expert_ranks(self.group.size), self.group.rank)
        self._experts = LocalExperts(device, parts, index)
        self._resources.callback(self._experts.close)
        self.backend = choose(plan.grouped_gemm, device)
        shape = ExpertShape(
            ranks=self.group.size,
            max_tokens=config.max_tokens,
            top_k=config.top_k,
            num_experts=experts,
            local_experts=self._experts.count,
            hidden=hidden,
            intermediate=intermediate,
            partial_format=config.partial_format,
            lanes=config.lanes,
            activation=plan.activation,
            row_format=plan.row_format,
            weight_format=parts.format,
            biases=parts.biases is not None,
            row_scale=plan.row_scale,
        )
        self.grouped_gemm = BACKENDS[self.backend.name](device, shape, self._experts)
        self._resources.callback(self.grouped_gemm.close)
        self._quantisers: list[Quantiser] = []
        self._scale: DeviceArray | None = None
        if payload_format(plan.row_format).tensor_scale:
            self._scale = self._put_scale(plan.row_scale)
        for _ in range(config.lanes if plan.row_format != "bf16" else 0):
            made = payload_format(plan.row_format)
            self._quantisers.append(Quantiser(device, made, hidden=hidden, max_tokens=config.max_tokens))
            self._resources.callback(self._quantisers[-1].close)
        self._lanes = [_Lane() for _ in range(config.lanes)]
        self._shared: SharedExperts | None = None
        if plan.shared is not None:
            self._shared = SharedExperts(device, shape, plan.shared)
            self._resources.callback(self._shared.close)
        self._resources.callback(self.exchange.drain)  # kernels may still read what is freed next

    def __call__(
        self, x: Any, expert_ids: Any, expert_weights: Any, *, num_tokens: Any = None, stream: Any = None
    ) -> DeviceArray:
        """Run the layer on this rank's tokens.

        Parameters
        ----------
        x : array
            bf16 ``[tokens, hidden]``.
        expert_ids : array
            int32 or int64 ``[tokens, top_k]``, distinct within a token; -1 means none.
        expert_weights : array
            float32 ``[tokens, top_k]``.
        num_tokens, stream
            As in `Exchange.dispatch`.

        Returns
        -------
        DeviceArray
            ``[tokens, hidden]`` in the partial format, valid until the next call.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError, StepOrderError, PeerTimeout
            As in `Exchange.dispatch`.
        """
        if self._shared is not None:
            self.dispatch_send(x, expert_ids, expert_weights, num_tokens=num_tokens, stream=stream)
            arrivals = self.dispatch_recv(stream=stream)
        else:
            rows = self._encoded(x, num_tokens, 0, stream)
            arrivals = self.exchange.dispatch(rows, expert_ids, expert_weights, num_tokens=num_tokens, stream=stream)
        output = self.exchange.combine(self.experts(arrivals, stream=stream), arrivals, stream=stream)
        return self._with_shared(output, arrivals.lane, stream)

    # --- phase by phase ---------------------------------------------------------------------------------------------

    def dispatch_send(
        self,
        x: Any,
        expert_ids: Any,
        expert_weights: Any,
        *,
        num_tokens: Any = None,
        lane: int = 0,
        stream: Any = None,
    ) -> None:
        """Encode and send this rank's tokens, then enqueue the shared experts, which so run while tokens travel.

        Parameters and errors as in `__call__`; ``lane`` as in `Exchange.dispatch_send`.
        """
        rows = self._encoded(x, num_tokens, lane, stream)
        self.exchange.dispatch_send(rows, expert_ids, expert_weights, num_tokens=num_tokens, lane=lane, stream=stream)
        if self._shared is not None:
            work = self._follow(lane, stream)
            self._lanes[lane].count = self._shared.run(x, num_tokens, lane, work)
            self._leave(lane, work)

    def dispatch_recv(self, *, lane: int = 0, stream: Any = None) -> Arrivals:
        """Wait for every peer's tokens, as `Exchange.dispatch_recv` does."""
        return self.exchange.dispatch_recv(lane=lane, stream=stream)

    def experts(self, arrivals: Arrivals, *, stream: Any = None) -> DeviceArray:
        """Enqueue this rank's experts on what arrived, after dispatch and before combine whatever their streams.

        Returns
        -------
        DeviceArray
            ``arrivals.partial_rows``, which ``combine`` takes without a copy.
        """
        self.grouped_gemm.run(arrivals, arrivals.partial_rows, self.exchange.work(arrivals, stream=stream))
        return arrivals.partial_rows

    def combine_send(self, arrivals: Arrivals, *, stream: Any = None) -> None:
        """Expose what `experts` computed, as `Exchange.combine_send` does."""
        self.exchange.combine_send(arrivals.partial_rows, arrivals, stream=stream)

    def combine_recv(self, arrivals: Arrivals, *, stream: Any = None) -> DeviceArray:
        """Wait, sum, and add the shared experts. Returns and raises as `__call__`."""
        output = self.exchange.combine_recv(arrivals, stream=stream)
        return self._with_shared(output, arrivals.lane, stream)

    def _encoded(self, x: Any, num_tokens: Any, lane: int, stream: Any) -> Any:
        """What dispatch sends for ``x``."""
        as_input(x, self._rows, device=self.group.device)  # the exchange alone would take any bytes
        if not self._quantisers or not 0 <= lane < len(self._quantisers):
            return x
        return self._quantisers[lane](x, tensor_scale=self._scale, num_tokens=num_tokens, stream=stream)

    def _put_scale(self, scale: float) -> DeviceArray:
        device = self.group.device
        memory, owner = device.allocate(16), ArrayOwner(device)
        self._resources.callback(memory.free)
        self._resources.callback(owner.expire)
        device.copy_in(memory.address, np.array([scale], np.float32), device.default_stream)
        device.default_stream.synchronize()
        return DeviceArray(memory.address, (1,), np.float32, owner=owner)

    def _with_shared(self, output: DeviceArray, lane: int, stream: Any) -> DeviceArray:
        if self._shared is not None:
            work = self._follow(lane, stream)
            self._shared.add(output, self._lanes[lane].count, lane, work)
            self._leave(lane, work)
        return output

    def _follow(self, lane: int, stream: Any) -> Stream:
        """The stream, behind the lane's last work of the layer's own."""
        device, last = self.group.device, self._lanes[lane]
        work = device.as_stream(stream)
        known = last.event is not None and last.capture == device.capture_of(work)
        if known and last.stream is not None and last.stream.handle != work.handle:
            work.wait(last.event)  # type: ignore[arg-type]
        return work

    def _leave(self, lane: int, work: Stream) -> None:
        last = self._lanes[lane]
        last.stream, last.event, last.capture = work, work.mark(), self.group.device.capture_of(work)

    # --- measurement ------------------------------------------------------------------------------------------------

    def profile(
        self, x: Any, expert_ids: Any, expert_weights: Any, *, steps: int = 10, stream: Any = None
    ) -> dict[str, float]:
        """Where the time of a step goes on this rank. Collective, in that every rank must run as many steps.

        Parameters
        ----------
        x, expert_ids, expert_weights, stream
            As in `__call__`.
        steps : int
            Steps to take the median of; one more comes first.

        Returns
        -------
        dict of str to float
            Microseconds by the device's clock, in order. Receiving includes waiting for the peers. Phases are launched
            one by one, so where kernels take less time than their launches, it is the host's that shows.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ArgumentError("steps", steps, "1 or more")
        work = self.group.device.as_stream(stream)
        times: dict[str, list[float]] = {}
        for step in range(steps + 1):
            marks = [("", work.record())]
            marks += [(name, work.record()) for name in self._step((x, expert_ids, expert_weights), work)]
            self.exchange.synchronize(work)
            for (_, start), (name, end) in pairwise(marks):
                if step:
                    times.setdefault(name, []).append(end.elapsed_ms(start) * 1e3)
        return {name: median(values) for name, values in times.items()}

    def _step(self, inputs: tuple[Any, Any, Any], work: Stream) -> Iterator[str]:
        """A step in lane 0, part by part; each name comes when that part was enqueued."""
        x, ids, weights = inputs
        rows = self._encoded(x, None, 0, work)
        if self._quantisers:
            yield "quantise"
        self.exchange.dispatch_send(rows, ids, weights, stream=work)
        yield "dispatch send"
        if self._shared is not None:
            self._lanes[0].count = self._shared.run(x, None, 0, self._follow(0, work))
            self._leave(0, work)
            yield "shared experts"
        arrivals = self.exchange.dispatch_recv(stream=work)
        yield "dispatch receive"
        queue = self.exchange.work(arrivals, stream=work)
        yield from self.grouped_gemm.stages(arrivals, arrivals.partial_rows, queue)
        self.combine_send(arrivals, stream=work)
        yield "combine send"
        output = self.exchange.combine_recv(arrivals, stream=work)
        yield "combine receive"
        if self._shared is not None:
            self._with_shared(output, 0, work)
            yield "add shared"

    def memory(self) -> list[MemoryLine]:
        """Device memory of this rank: weights, the exchange's heap, and work areas of the expert compute."""
        lines = [
            MemoryLine("weights", self._experts.nbytes),
            MemoryLine("heap", self.exchange.memory.heap.layout.nbytes),
        ]
        lines += self.grouped_gemm.memory()
        return lines if self._shared is None else [*lines, *self._shared.memory()]

    def close(self) -> None:
        """Free everything, as `Exchange.close` does. Idempotent."""
        self._resources.close()

    def __enter__(self) -> MoELayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.exchange.note_failure(error)
        self.close()
