"""Greedy generation of several texts at once, in steps that all ranks of a group can take together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nvep.cli.demo_model.model import DecoderModel, Experts, Rows, TextState
from nvep.errors import ArgumentError


@dataclass(frozen=True)
class StepPlan:
    """Steps that every rank takes, so that none waits for a rank that has finished (a step may have no rows).

    Attributes
    ----------
    max_tokens : int
        Rows a step at most.
    prompt_steps : int
        Steps that feed the prompts.
    steps_per_token : int
        Steps for each byte after the first.
    """

    max_tokens: int
    prompt_steps: int
    steps_per_token: int


@dataclass(frozen=True)
class Generated:
    """What one rank generated.

    Attributes
    ----------
    texts : tuple of bytes
        Per prompt the new bytes, without the prompt.
    logit_margin : float
        Smallest distance between the two largest logits over all bytes chosen; infinite without prompts. A numerical
        difference below it cannot have changed the text.
    router_margin : float
        Smallest distance between the router logits of the last expert chosen and the first one not.
    """

    texts: tuple[bytes, ...]
    logit_margin: float
    router_margin: float


def split_prompts(prompts: Sequence[bytes], num_ranks: int) -> list[list[bytes]]:
    """Contiguous parts, one per rank, whose lengths differ by at most one; the first ranks get the longer ones."""
    if num_ranks < 1:
        raise ArgumentError("num_ranks", num_ranks, "at least 1")
    size, longer = divmod(len(prompts), num_ranks)
    ends = [rank * size + min(rank, longer) for rank in range(num_ranks + 1)]
    return [list(prompts[a:b]) for a, b in pairwise(ends)]


def plan_steps(prompts_by_rank: Sequence[Sequence[bytes]], max_tokens: int) -> StepPlan:
    """Steps of the rank that needs most.

    Parameters
    ----------
    prompts_by_rank : sequence of sequences of bytes
        From :func:`split_prompts`.
    max_tokens : int
        Rows a step at most, at least 1.
    """
    if max_tokens < 1:
        raise ArgumentError("max_tokens", max_tokens, "at least 1")
    prompt_rows = max(sum(map(len, prompts)) for prompts in prompts_by_rank)
    texts = max(map(len, prompts_by_rank))
    return StepPlan(max_tokens, -(-prompt_rows // max_tokens), -(-texts // max_tokens))


def feed_order(prompts: Sequence[bytes], new_tokens: int) -> list[tuple[int, int]]:
    """Text and position of every row that :func:`generate` feeds, in order (the last new byte is not fed)."""
    order = [(text, position) for text, prompt in enumerate(prompts) for position in range(len(prompt))]
    for step in range(new_tokens - 1):
        order += [(text, len(prompt) + step) for text, prompt in enumerate(prompts)]
    return order


def generate(
    model: DecoderModel,
    prompts: Sequence[bytes],
    *,
    new_tokens: int,
    plan: StepPlan,
    experts: Experts,
    on_token: Callable[[int, int], None] | None = None,
) -> Generated:
    """Continue each prompt by its most likely bytes.

    Parameters
    ----------
    model : DecoderModel
        The model.
    prompts : sequence of bytes
        This rank's, possibly none; each at least one byte.
    new_tokens : int
        Bytes to add to each, at least 1.
    plan : StepPlan
        Equal on all ranks.
    experts : Experts
        Called ``layers`` times a step.
    on_token : callable, optional
        ``on_token(text, byte)`` as each byte is chosen.

    Raises
    ------
    ArgumentError
        No new bytes asked for, or an empty prompt.
    """
    if new_tokens < 1:
        raise ArgumentError("new_tokens", new_tokens, "at least 1")
    if not all(prompts):
        raise ArgumentError("prompts", list(prompts), "prompts of at least one byte")
    run = _Run(model, experts, [TextState(model.shape, len(p) + new_tokens) for p in prompts], plan.max_tokens)
    feeds = [(text, position, byte) for text, prompt in enumerate(prompts) for position, byte in enumerate(prompt)]
    last = run.feed(feeds, plan.prompt_steps)
    texts = [bytearray() for _ in prompts]
    for step in range(new_tokens):
        for text, byte in enumerate(run.choose(last)):
            texts[text].append(byte)
            if on_token is not None:
                on_token(text, byte)
        if step + 1 < new_tokens:
            feeds = [(i, len(prompt) + step, texts[i][-1]) for i, prompt in enumerate(prompts)]
            last = run.feed(feeds, plan.steps_per_token)
    return Generated(tuple(map(bytes, texts)), run.logit_margin, run.router_margin)


class _Run:
    """State of one call of :func:`generate`."""

    def __init__(self, model: DecoderModel, experts: Experts, states: list[TextState], max_tokens: int) -> None:
        self.model, self.experts, self.states, self.max_tokens = model, experts, states, max_tokens
        self.logit_margin = self.router_margin = float("inf")

    def feed(self, feeds: list[tuple[int, int, int]], steps: int) -> np.ndarray:
        """Feed (text, position, byte) in ``steps`` steps; the residual stream of each text's last byte."""
        last = np.zeros((len(self.states), self.model.shape.hidden), np.float32)
        for step in range(steps):
            part = feeds[step * self.max_tokens : (step + 1) * self.max_tokens]
            rows = Rows(
                [self.states[text] for text, _, _ in part],
                np.array([position for _, position, _ in part], np.int64),
                np.array([byte for _, _, byte in part], np.uint8),
            )
            x, margin = self.model.forward(rows, self.experts)
            self.router_margin = min(self.router_margin, margin)
            for row, (text, _, _) in enumerate(part):
                last[text] = x[row]
        return last

    def choose(self, last: np.ndarray) -> list[int]:
        logits = self.model.logits(last)
        two = np.sort(logits, axis=1)[:, -2:]
        self.logit_margin = min(self.logit_margin, float((two[:, 1] - two[:, 0]).min(initial=np.inf)))
        return [int(byte) for byte in logits.argmax(axis=1)]
