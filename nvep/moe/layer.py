"""A complete expert-parallel MoE layer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from nvep.arrays import DeviceArray
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals, Exchange
from nvep.formats import FORMATS, Quantiser, payload_format
from nvep.group import RankGroup
from nvep.inputs import InputSpec, as_input
from nvep.moe.grouped_gemm import ACTIVATIONS, BACKENDS, ExpertShape, choose
from nvep.moe.grouped_gemm.base import local_index
from nvep.moe.weights import CheckedWeights, LocalExperts, MoEWeights

ROW_FORMATS = tuple(name for name, made in FORMATS.items() if not made.tensor_scale)
_OPTIONS = {
    "chunk_bytes",
    "deadline",
    "lanes",
    "max_blocks",
    "partial_format",
    "placement",
    "protocol",
    "strict_ptx",
    "transport",
}


class MoELayer:
    """Dispatch, SwiGLU experts on the ranks that own them, combine.

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
        default ``"bf16"``. Further `ExchangeConfig` fields: ``partial_format``, ``placement``, ``lanes``,
        ``deadline``, ``max_blocks``, ``protocol``, ``transport``.

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

        activation = options.pop("activation", "swiglu")
        row_format = options.pop("row_format", "bf16")

        def check() -> tuple[ExchangeConfig, CheckedWeights]:
            if grouped_gemm not in (*BACKENDS, "auto"):
                raise ArgumentError("grouped_gemm", grouped_gemm, ", ".join((*BACKENDS, "auto")))
            if activation not in ACTIVATIONS:
                raise ArgumentError("activation", activation, ", ".join(ACTIVATIONS))
            if row_format not in ROW_FORMATS:
                raise ArgumentError("row_format", row_format, ", ".join(ROW_FORMATS))
            for name in options.keys() - _OPTIONS:
                raise ArgumentError(name, options[name], f"only the options {', '.join(sorted(_OPTIONS))}")
            if not isinstance(weights, MoEWeights):
                raise ArgumentError("weights", weights, "MoEWeights")
            parts = weights.checked(group.device)
            experts, _, hidden = parts.gate.shape
            sizes = {"num_experts": experts, "top_k": top_k, "max_tokens": max_tokens}
            return payload_format(row_format).exchange_config(hidden, **sizes, **options), parts

        config, parts = group.together(check)
        same = (parts.gate.shape, parts.format, grouped_gemm, activation, row_format)
        group.agree("weights and the choices of expert compute", same)
        try:
            self.exchange = Exchange(group, config)
            self._resources.callback(self.exchange.close)
            group.together(lambda: self._load(parts, grouped_gemm, activation, row_format))
        except BaseException:
            self.close()
            raise

    def _load(self, parts: CheckedWeights, grouped_gemm: str, activation: str, row_format: str) -> None:
        device, config = self.group.device, self.exchange.config
        experts, intermediate, hidden = parts.gate.shape
        self._rows = InputSpec("x", (partial_dtype("bf16"),), (("tokens", config.max_tokens), hidden), alignment=16)
        index = local_index(config.expert_ranks(self.group.size), self.group.rank)
        local = LocalExperts(device, parts, index)
        self._resources.callback(local.close)
        self.backend = choose(grouped_gemm, device)
        shape = ExpertShape(
            ranks=self.group.size,
            max_tokens=config.max_tokens,
            top_k=config.top_k,
            num_experts=experts,
            local_experts=local.count,
            hidden=hidden,
            intermediate=intermediate,
            partial_format=config.partial_format,
            lanes=config.lanes,
            activation=activation,
            row_format=row_format,
            weight_format=parts.format,
            biases=parts.biases is not None,
        )
        self.grouped_gemm = BACKENDS[self.backend.name](device, shape, local)
        self._resources.callback(self.grouped_gemm.close)
        self._quantise: Quantiser | None = None
        if row_format != "bf16":
            made = payload_format(row_format)
            self._quantise = Quantiser(device, made, hidden=hidden, max_tokens=config.max_tokens)
            self._resources.callback(self._quantise.close)
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
        rows = self._encoded(x, num_tokens, stream)
        arrivals = self.exchange.dispatch(rows, expert_ids, expert_weights, num_tokens=num_tokens, stream=stream)
        return self.exchange.combine(self.experts(arrivals, stream=stream), arrivals, stream=stream)

    def _encoded(self, x: Any, num_tokens: Any, stream: Any) -> Any:
        """What dispatch sends for ``x``."""
        as_input(x, self._rows, device=self.group.device)  # the exchange alone would take any bytes
        return x if self._quantise is None else self._quantise(x, num_tokens=num_tokens, stream=stream)

    def experts(self, arrivals: Arrivals, *, stream: Any = None) -> DeviceArray:
        """Enqueue this rank's experts on what arrived, after dispatch and before combine whatever their streams.

        Returns
        -------
        DeviceArray
            ``arrivals.partial_rows``, which ``combine`` takes without a copy.
        """
        self.grouped_gemm.run(arrivals, arrivals.partial_rows, self.exchange.work(arrivals, stream=stream))
        return arrivals.partial_rows

    def close(self) -> None:
        """Free everything, as `Exchange.close` does. Idempotent."""
        self._resources.close()

    def __enter__(self) -> MoELayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.exchange.note_failure(error)
        self.close()
