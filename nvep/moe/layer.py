"""A complete expert-parallel MoE layer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from nvep.arrays import DeviceArray
from nvep.config import ExchangeConfig, partial_dtype
from nvep.errors import ArgumentError
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup
from nvep.inputs import InputSpec, as_input
from nvep.moe.grouped_gemm import BACKENDS, ExpertShape
from nvep.moe.grouped_gemm.base import local_index
from nvep.moe.weights import LocalExperts, MoEWeights

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
        Backend of the expert compute, a key of ``nvep.moe.grouped_gemm.BACKENDS``.
    **options
        Further `ExchangeConfig` fields: ``partial_format``, ``placement``, ``lanes``, ``deadline``, ``max_blocks``,
        ``protocol``, ``transport``.

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
        grouped_gemm: str = "plain",
        **options: Any,
    ) -> None:
        if not isinstance(group, RankGroup):
            raise ArgumentError("group", group, "a RankGroup")
        self.group = group
        self._resources = ExitStack()

        def check() -> tuple[ExchangeConfig, Any]:
            if grouped_gemm not in BACKENDS:
                raise ArgumentError("grouped_gemm", grouped_gemm, ", ".join(BACKENDS))
            for name in options.keys() - _OPTIONS:
                raise ArgumentError(name, options[name], f"only the options {', '.join(sorted(_OPTIONS))}")
            if not isinstance(weights, MoEWeights):
                raise ArgumentError("weights", weights, "MoEWeights")
            arrays = weights.checked(group.device)
            experts, _, hidden = arrays[0].shape
            sizes: dict[str, Any] = {"num_experts": experts, "row_bytes": hidden * 2, "partial_elements": hidden}
            return ExchangeConfig(top_k=top_k, max_tokens=max_tokens, **sizes, **options), arrays

        config, arrays = group.together(check)
        group.agree("weights and grouped_gemm", (arrays[0].shape, grouped_gemm))
        try:
            self.exchange = Exchange(group, config)
            self._resources.callback(self.exchange.close)
            group.together(lambda: self._load(arrays, grouped_gemm))
        except BaseException:
            self.close()
            raise

    def _load(self, arrays: Any, grouped_gemm: str) -> None:
        device, config = self.group.device, self.exchange.config
        _, intermediate, hidden = arrays[0].shape
        self._rows = InputSpec("x", (partial_dtype("bf16"),), (("tokens", config.max_tokens), hidden), alignment=16)
        rows = self.group.size * config.max_tokens
        shape = ExpertShape(rows, config.top_k, hidden, intermediate, config.partial_format, config.lanes)
        ranks = config.expert_ranks(self.group.size)
        local = LocalExperts(device, arrays, local_index(ranks, self.group.rank))
        self._resources.callback(local.close)
        self.grouped_gemm = BACKENDS[grouped_gemm](device, shape, local)
        self._resources.callback(self.grouped_gemm.close)
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
        as_input(x, self._rows, device=self.group.device)  # the exchange alone would take any bytes
        arrivals = self.exchange.dispatch(x, expert_ids, expert_weights, num_tokens=num_tokens, stream=stream)
        return self.exchange.combine(self.experts(arrivals, stream=stream), arrivals, stream=stream)

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
