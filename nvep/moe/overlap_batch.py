"""Micro-batches: what they hold, how tokens are split into them, and receives that an engine may call for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

from nvep.arrays import DeviceArray
from nvep.config import ExchangeConfig
from nvep.errors import ArgumentError, StepOrderError
from nvep.exchange import Arrivals, Exchange
from nvep.group import RankGroup
from nvep.moe.layer import MoELayer
from nvep.runtime.device import Stream

T = TypeVar("T")


class ReceiveHook(Generic[T]):
    """A receive that waits to be called for. Calling it again gives the same result and enqueues nothing.

    May be called from any thread.

    Parameters
    ----------
    receive : callable
        Enqueues the receive and returns what it brings.
    """

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive: Callable[[], T] | None = receive
        self._lock = threading.Lock()
        self._result: T | None = None

    def __call__(self) -> T:
        """Enqueue the receive if nobody has yet; return its Arrivals, or combine's output.

        Raises
        ------
        StepOrderError, PeerTimeout, ArgumentError
            As `Exchange.dispatch_recv` and `Exchange.combine_recv`; a later call then tries again.
        """
        with self._lock:
            if self._receive is not None:
                self._result = self._receive()
                self._receive = None
            return self._result  # type: ignore[return-value]

    @property
    def done(self) -> bool:
        """Was it enqueued?"""
        return self._receive is None


@dataclass(eq=False)
class MicroBatch:
    """Tokens of one micro-batch on their way through a step.

    Callables that compute get it, enqueue on `stream`, and assign what the next phase takes.

    Attributes
    ----------
    tokens, expert_ids, expert_weights, num_tokens : array
        What dispatch sends, as in `Exchange.dispatch`. Given before the step, or assigned before ``dispatch_send``.
    out : array, optional
        What combine writes to, as in `Exchange.combine`.
    data : object
        The caller's.
    index, layer : int
        Which micro-batch this is, and the layer of the phase under way.
    stream : Stream
        Where the phase under way runs.
    multiprocessors : int
        How many this rank's computation should use, beside its exchange kernels.
    arrivals : Arrivals
        Of this layer, from ``dispatch_recv`` on.
    partial_rows : array
        What ``combine_send`` gives back. ``dispatch_recv`` sets it to ``arrivals.partial_rows``, which needs no copy.
    output : DeviceArray
        Combine's result of the latest layer that ended.
    """

    tokens: Any = None
    expert_ids: Any = None
    expert_weights: Any = None
    num_tokens: Any = None
    out: Any = None
    data: Any = None
    index: int = field(default=0, init=False)
    layer: int = field(default=0, init=False)
    stream: Stream = field(init=False, repr=False)
    multiprocessors: int = field(default=1, init=False)
    arrivals: Arrivals | None = field(default=None, init=False, repr=False)
    partial_rows: Any = field(default=None, init=False, repr=False)
    output: DeviceArray | None = field(default=None, init=False, repr=False)
    hook: ReceiveHook[Any] | None = field(default=None, init=False, repr=False)

    def receive(self) -> Any:
        """Enqueue the receive that belongs to the latest send, if nobody has yet; return what it brings.

        An engine may call it earlier than the schedule does, alike on all ranks: the phase of the schedule then
        enqueues nothing.

        Raises
        ------
        StepOrderError
            Nothing was sent.
        """
        if self.hook is None:
            raise StepOrderError(f"receive of micro-batch {self.index}: it has sent nothing")
        return self.hook()


def exchange_of(target: Exchange | MoELayer) -> Exchange:
    """What carries the phases of ``target``."""
    return target.exchange if isinstance(target, MoELayer) else target


def send_dispatch(
    target: Exchange | MoELayer, batch: MicroBatch, *, lane: int = 0, stream: Any = None
) -> ReceiveHook[Arrivals]:
    """Enqueue dispatch's sending half; the hook returned enqueues the receiving half on the same stream.

    For engines that drive the phases themselves, of an exchange or of a layer. Also assigns ``batch.hook``, and, once
    received, ``batch.arrivals`` and ``batch.partial_rows``.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError, StepOrderError, PeerTimeout
        As `Exchange.dispatch_send`.
    """
    target.dispatch_send(
        batch.tokens, batch.expert_ids, batch.expert_weights, num_tokens=batch.num_tokens, lane=lane, stream=stream
    )

    def receive() -> Arrivals:
        arrivals = target.dispatch_recv(lane=lane, stream=stream)
        batch.arrivals, batch.partial_rows = arrivals, arrivals.partial_rows
        return arrivals

    batch.hook = hook = ReceiveHook(receive)
    return hook


def send_combine(target: Exchange | MoELayer, batch: MicroBatch, *, stream: Any = None) -> ReceiveHook[DeviceArray]:
    """Enqueue combine's sending half; the hook returned enqueues the receiving half on the same stream.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError, StepOrderError, PeerTimeout
        As `Exchange.combine_send`; StepOrderError also where dispatch was not received, and ArgumentError where a
        layer is given ``batch.out`` or other partial rows than those that its experts write.
    """
    arrivals = batch.arrivals
    if arrivals is None:
        raise StepOrderError(f"combine_send of micro-batch {batch.index}: dispatch was not received")
    if isinstance(target, MoELayer):
        if batch.out is not None or batch.partial_rows is not arrivals.partial_rows:
            raise ArgumentError("batch", "out or partial_rows assigned", "neither: a layer's experts know where to")
        target.combine_send(arrivals, stream=stream)
    else:
        target.combine_send(batch.partial_rows, arrivals, stream=stream)

    def receive() -> DeviceArray:
        if isinstance(target, MoELayer):
            batch.output = target.combine_recv(arrivals, stream=stream)
        else:
            batch.output = target.combine_recv(arrivals, out=batch.out, stream=stream)
        batch.arrivals = None
        return batch.output

    batch.hook = hook = ReceiveHook(receive)
    return hook


# --- how many, and who gets what --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How this rank's tokens are split.

    Attributes
    ----------
    micro_batches : int
        Equal on all ranks.
    slices : tuple of slice
        This rank's tokens of each; a rank with few tokens takes part with none in some.
    """

    micro_batches: int
    slices: tuple[slice, ...]


def split_tokens(tokens: int, *, most: int, config: ExchangeConfig, smallest: int = 1) -> Split:
    """Split ``tokens`` evenly over as many micro-batches as the rank with most tokens can fill.

    The number follows from ``most`` alone, so ranks that name the same ``most`` agree without asking one another.

    Parameters
    ----------
    tokens : int
        Of this rank, 0 to ``most``.
    most : int
        Of the rank with most tokens; equal on all ranks, from the scheduler or `agree_split`.
    config : ExchangeConfig
        ``lanes`` is the most micro-batches, ``max_tokens`` the most tokens of each.
    smallest : int
        No micro-batch of that rank is smaller: below ``2 * smallest`` tokens there is only one.

    Raises
    ------
    ArgumentError
        A number is out of range, or ``most`` tokens do not fit.
    """
    if smallest < 1:
        raise ArgumentError("smallest", smallest, "1 or more")
    if not 0 <= tokens <= most:
        raise ArgumentError("tokens", tokens, f"0 to most = {most}")
    count = max(1, min(config.lanes, most // smallest))
    if most > count * config.max_tokens:
        raise ArgumentError("most", most, f"at most {count} micro-batches of max_tokens = {config.max_tokens}")
    bounds = [-(-tokens * i // count) for i in range(count + 1)]
    return Split(count, tuple(slice(start, stop) for start, stop in pairwise(bounds)))


def agree_split(group: RankGroup, tokens: int, *, config: ExchangeConfig, smallest: int = 1) -> Split:
    """`split_tokens` with ``most`` asked of all ranks: a host exchange, for when the shape of the batch changes.

    Collective. Keep the result, and whatever graph was captured for it, until some rank's number of tokens changes.
    """
    counts = group.allgather(tokens)
    most = max(int(counts[rank]) for rank in group.members)
    return group.together(lambda: split_tokens(tokens, most=most, config=config, smallest=smallest))


def compute_multiprocessors(exchange: Exchange) -> int:
    """Multiprocessors that computation may use beside exchange kernels of all lanes.

    Ranks that share a GPU get equal parts of it. What exchange kernels take is ``ExchangeConfig.max_blocks`` for each
    lane, a block to a multiprocessor; where that is left open, nothing is set aside for them.
    """
    device, config = exchange.device, exchange.config
    share = device.multiprocessors // exchange.group.ranks_on_device
    return max(1, share - (config.max_blocks or 0) * config.lanes)
