"""Routing: from router logits to expert ids and weights, one launch, ready for ``Exchange.dispatch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvep.arrays import DeviceArray
from nvep.config import MAX_TOKENS_LIMIT, partial_dtype
from nvep.errors import ArgumentError
from nvep.inputs import InputSpec
from nvep.moe.placement import Replicas
from nvep.runtime.arguments import ArgumentStruct, Field
from nvep.runtime.device import Device
from nvep.runtime.operation import DeviceOperation
from nvep.runtime.source import KernelSource

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 4096, 64, 32  # up to here a lane's share of a token stays in registers, or nearly
_BLOCK_THREADS = 64  # two tokens a block: few tokens spread over many multiprocessors
ROUTE_ARGUMENTS = ArgumentStruct(
    "RouteArguments",
    [
        Field("logits", "u64"),
        Field("bias", "const float*"),
        Field("expert_ids", "int*"),
        Field("expert_weights", "float*"),
        Field("replica_starts", "const unsigned int*"),
        Field("replicas", "const int*"),
        Field("num_tokens_device", "const unsigned int*"),
        Field("num_tokens", "u32"),
        Field("turn", "u32"),
    ],
)
_LOGITS = {"fp32": "float", "bf16": "u16"}


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and weights.

    Experts are chosen by their logits, or with a ``bias`` or ``group_score="top2"`` by score (plus bias); of equal
    values the lower expert id comes first, everywhere. Weights are always scores without bias. An expert whose logit is
    NaN or -infinity, or whose bias is, is not available; if fewer than ``top_k`` are, the remaining ids are -1 with
    weight 0. A logit of infinity counts as the largest float32.

    Attributes
    ----------
    num_experts : int
        Logits per token, up to 4096.
    top_k : int
        Experts per token, up to 64.
    scores : str
        ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit.
    renormalise : bool
        Divide the chosen scores by their sum (plus 1e-20, so that no sum is zero). Softmax over the chosen logits
        alone, as in gpt-oss, is ``"softmax"`` renormalised.
    bias : bool
        There is a correction bias for each expert: added to scores where experts are chosen, and nowhere else.
    groups, top_groups : int
        Experts form ``groups`` of neighbours; only experts of the best ``top_groups`` can be chosen.
    group_score : str
        Value of a group: its ``"max"``, or the sum of its ``"top2"``.
    scale : float
        Factor of all weights, last.

    Raises
    ------
    ArgumentError
        A value is not allowed.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"
    renormalise: bool = False
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_int("num_experts", self.num_experts, MAX_EXPERTS)
        _check_int("top_k", self.top_k, min(MAX_TOP_K, self.num_experts))
        _check_int("groups", self.groups, min(MAX_GROUPS, self.num_experts))
        _check_int("top_groups", self.top_groups, self.groups)
        for name, allowed in (("scores", ("softmax", "sigmoid")), ("group_score", ("max", "top2"))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), " or ".join(allowed))
        if self.num_experts % self.groups:
            raise ArgumentError("groups", self.groups, f"a divisor of the {self.num_experts} experts")
        reachable = self.num_experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ArgumentError("top_k", self.top_k, f"at most the {reachable} experts of {self.top_groups} groups")
        numeric = isinstance(self.scale, (int, float, np.number)) and not isinstance(self.scale, bool)
        if not numeric or not 0.0 < self.scale < 1e30:
            raise ArgumentError("scale", self.scale, "a number above 0 and below 1e30")

    @property
    def chosen_by_score(self) -> bool:
        """Scores decide, not logits: they are the same order only up to rounding."""
        return self.bias or (self.groups > 1 and self.group_score == "top2")


def _check_int(name: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= int(value) <= high:
        raise ArgumentError(name, value, f"an integer from 1 to {high}")


ROUTINGS = {
    "mixtral": Routing(8, 2, renormalise=True),
    "qwen3-30b-a3b": Routing(128, 8, renormalise=True),
    "qwen3-235b-a22b": Routing(128, 8, renormalise=True),
    "olmoe": Routing(64, 8),
    "gpt-oss-20b": Routing(32, 4, renormalise=True),
    "gpt-oss-120b": Routing(128, 4, renormalise=True),
    "llama4-scout": Routing(16, 1, "sigmoid"),
    "llama4-maverick": Routing(128, 1, "sigmoid"),
    "deepseek-v2": Routing(160, 6, groups=8, top_groups=3, scale=16.0),
    "deepseek-v3": Routing(
        256, 8, "sigmoid", renormalise=True, bias=True, groups=8, top_groups=4, group_score="top2", scale=2.5
    ),
    "kimi-k2": Routing(384, 8, "sigmoid", renormalise=True, bias=True, scale=2.827),
}


def route_source(routing: Routing, logits: str = "fp32", *, replicas: bool = False) -> KernelSource:
    """The kernel of :class:`Router` for one routing function; ``logits`` is ``"fp32"`` or ``"bf16"``."""
    constants = [
        ("u32", "kExperts", routing.num_experts),
        ("u32", "kTopK", routing.top_k),
        ("u32", "kGroups", routing.groups),
        ("u32", "kTopGroups", routing.top_groups),
        ("bool", "kSigmoid", routing.scores == "sigmoid"),
        ("bool", "kRenormalise", routing.renormalise),
        ("bool", "kBias", routing.bias),
        ("bool", "kGroupTopTwo", routing.group_score == "top2"),
        ("bool", "kReplicas", replicas),
    ]
    lines = [f"constexpr {kind} {name} = {str(value).lower()};" for kind, name, value in constants]
    scale = float(np.float32(routing.scale)).hex()
    prelude = f"""#include "primitives/types.cuh"
namespace nvep {{
namespace routing {{
using Logit = {_LOGITS[logits]};
constexpr float kScale = {scale}f;
{chr(10).join(lines)}
}}  // namespace routing
}}  // namespace nvep
"""
    return KernelSource("route", ROUTE_ARGUMENTS, prelude)


class Router(DeviceOperation):
    """A routing function on a device.

    Parameters
    ----------
    device : Device
        Where logits are and choices will be, for example ``group.device``.
    routing : Routing
        The function.
    max_tokens : int
        Most tokens in a call.
    logits : str
        Element type of the logits: ``"fp32"`` or ``"bf16"``.
    bias : array, optional
        float32 ``[num_experts]`` in host memory, for a routing with ``bias``; copied.
    replicas : Replicas, optional
        What `Placement.replicas` gives: ids then name physical experts.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError
        A value is not allowed.
    CompilationError
        The kernel does not compile.
    """

    def __init__(
        self,
        device: Device,
        routing: Routing,
        *,
        max_tokens: int,
        logits: str = "fp32",
        bias: Any = None,
        replicas: Replicas | None = None,
    ) -> None:
        if not isinstance(routing, Routing):
            raise ArgumentError("routing", routing, "a Routing")
        _check_int("max_tokens", max_tokens, MAX_TOKENS_LIMIT)
        if logits not in _LOGITS:
            raise ArgumentError("logits", logits, ", ".join(_LOGITS))
        if replicas is not None and replicas.num_logical != routing.num_experts:
            raise ArgumentError("replicas", replicas.num_logical, f"replicas of the {routing.num_experts} experts")
        super().__init__(device)
        self.routing = routing
        self._logits = InputSpec("logits", (partial_dtype(logits),), (("tokens", max_tokens), routing.num_experts))
        self._arguments = ROUTE_ARGUMENTS.new()
        try:
            self._load(max_tokens, logits, bias, replicas)
        except BaseException:
            self.close()
            raise

    def _load(self, max_tokens: int, logits: str, bias: Any, replicas: Replicas | None) -> None:
        routing, arguments = self.routing, self._arguments
        self._kernel = self.device.load(route_source(routing, logits, replicas=replicas is not None))
        self._ids = self._output((max_tokens, routing.top_k), np.int32)
        self._weights = self._output((max_tokens, routing.top_k), np.float32)
        arguments.expert_ids, arguments.expert_weights = self._ids.address, self._weights.address
        if routing.bias:
            arguments.bias = self._put(_checked_bias(bias, routing.num_experts))
        elif bias is not None:
            raise ArgumentError("bias", "an array", "None: this routing has no bias")
        if replicas is not None:
            arguments.replica_starts = self._put(replicas.starts)
            arguments.replicas = self._put(replicas.physical)
            arguments.turn = replicas.turn

    def __call__(self, logits: Any, *, num_tokens: Any = None, stream: Any = None) -> tuple[DeviceArray, DeviceArray]:
        """Enqueue the routing of ``logits``.

        Parameters
        ----------
        logits : array
            ``[tokens, num_experts]``, on the device.
        num_tokens : array or int, optional
            Tokens that count; int32 or uint32 ``[1]`` on the device if the host does not know. Default: all.
        stream : stream, optional
            Default: the device's own.

        Returns
        -------
        ids : DeviceArray
            int32 ``[tokens, top_k]``, the best choice first, -1 for none.
        weights : DeviceArray
            float32 ``[tokens, top_k]``. Their relative error is at most 2**-23 times (8 + num_experts / 64 + top_k / 2
            + d), where d is how far the logit is below the largest one (0 for sigmoid), as long as d and the sigmoid's
            logits stay within 80. Both arrays are valid
            until the next call; rows beyond ``num_tokens`` are left as they are.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError
            Naming the argument.
        """
        work = self.device.as_stream(stream)
        view = self._input(logits, self._logits, work)
        given = view.shape[0]
        tokens, count = self._count(num_tokens, given, work)
        arguments = self._arguments
        arguments.logits, arguments.num_tokens = view.address, tokens
        arguments.num_tokens_device = count.address if count else 0
        if tokens:
            self.device.launch(self._kernel, self._shape(tokens * 32, block=_BLOCK_THREADS), arguments, work)
        self._finish(work, view, count)
        return self._ids[:given], self._weights[:given]


def _checked_bias(bias: Any, experts: int) -> np.ndarray:
    if not isinstance(bias, np.ndarray) or bias.dtype != np.float32 or bias.shape != (experts,):
        given = f"{bias.dtype} {bias.shape}" if isinstance(bias, np.ndarray) else bias
        raise ArgumentError("bias", given, f"a NumPy array float32 ({experts},)")
    return bias
