"""What the demo shows while it runs and when it has run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nvep.cli.demo_results import DemoResult, percentile, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

LINE_WIDTH = 64  # characters of text after which a line ends at the next word
BAR_WIDTH = 30
BAR_LINES = 10  # lines that a progress bar takes where the terminal cannot redraw one


class Display(Protocol):
    """Streams texts. Used by all ranks of a process; the first byte starts it."""

    def token(self, text: int, byte: int) -> None:
        """Byte ``byte`` was added to the ``text``-th text of this process."""

    def close(self) -> None:
        """Show what is still held back. Idempotent."""


class LineDisplay:
    """For pipes, and so for mpirun: a line of text as soon as it is full, and a progress bar that takes several lines.

    Parameters
    ----------
    labels, prompts : sequence
        Name and prompt of each text of this process.
    new_tokens : int
        Bytes to come for each.
    bar : bool
        This process shows the progress.
    """

    def __init__(self, labels: Sequence[str], prompts: Sequence[bytes], *, new_tokens: int, bar: bool) -> None:
        self._labels = labels
        self._lines = [f"[{printable(p)}] " for p in prompts]
        self._total = new_tokens * len(prompts)
        self._new_tokens = new_tokens
        self._bar = bar
        self._done = 0
        self._lock = threading.Lock()

    def token(self, text: int, byte: int) -> None:
        with self._lock:
            self._lines[text] += printable(bytes([byte]))
            if len(self._lines[text]) >= LINE_WIDTH and self._lines[text].endswith(" "):
                self._print(text)
            self._done += 1
            before, now = (BAR_LINES * done // self._total for done in (self._done - 1, self._done))
            if self._bar and now > before:
                filled = BAR_WIDTH * now // BAR_LINES
                bar = "\u2588" * filled + "\u2591" * (BAR_WIDTH - filled)
                steps = self._new_tokens * self._done // self._total
                text_of_bar = f"{bar} {100 * now // BAR_LINES:3d} %, byte {steps} of {self._new_tokens}"
                print(text_of_bar, file=sys.stderr, flush=True)

    def _print(self, text: int) -> None:
        print(f"{self._labels[text]}: {self._lines[text].rstrip()}", flush=True)
        self._lines[text] = ""

    def close(self) -> None:
        with self._lock:
            for text, line in enumerate(self._lines):
                if line.strip() and self._done:
                    self._print(text)


class LiveDisplay:
    """For a terminal and ranks in this process: every text grows in place above a progress bar. Parameters as above."""

    def __init__(self, labels: Sequence[str], prompts: Sequence[bytes], *, new_tokens: int, console: Console) -> None:
        from rich.live import Live
        from rich.progress import Progress

        self._labels = labels
        self._prompts = prompts
        self._texts = [bytearray() for _ in prompts]
        self._progress = Progress(console=console, auto_refresh=False)
        self._task = self._progress.add_task("bytes", total=new_tokens * len(prompts))
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)
        self._lock = threading.Lock()
        self._started = False

    def token(self, text: int, byte: int) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                self._live.start()
            self._texts[text].append(byte)
            self._progress.advance(self._task)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(style="bold cyan", no_wrap=True)
        for label, prompt, text in zip(self._labels, self._prompts, self._texts, strict=True):
            table.add_row(label, _styled(prompt, bytes(text)))
        return Group(table, self._progress)

    def close(self) -> None:
        with self._lock:
            if self._started:
                self._started = False
                self._live.stop()


def _styled(prompt: bytes, text: bytes) -> Text:
    from rich.text import Text

    return Text.assemble((printable(prompt), "dim"), printable(text))


def make_display(prompts_by_rank: Sequence[Sequence[bytes]], *, rank: int | None, new_tokens: int) -> Display:
    """Display of this process.

    Parameters
    ----------
    prompts_by_rank : sequence of sequences of bytes
        Of all ranks.
    rank : int or None
        The one rank of this process; None where all are in it.
    new_tokens : int
        Bytes to come for each text.
    """
    from rich.console import Console

    owners = [(r, p) for r, prompts in enumerate(prompts_by_rank) for p in prompts]
    shown = [(r, i, p) for i, (r, p) in enumerate(owners) if rank in (None, r)]
    labels, prompts = [f"rank {r}, text {i}" for r, i, _ in shown], [p for _, _, p in shown]
    console = Console(highlight=False)
    if rank is None and console.is_terminal:
        return LiveDisplay(labels, prompts, new_tokens=new_tokens, console=console)
    return LineDisplay(labels, prompts, new_tokens=new_tokens, bar=rank in (None, 0))


def figures(result: DemoResult) -> dict[str, str]:
    """The run in words and numbers, for the terminal and the page."""
    rows, pairs = int(result.rows.sum()), int(result.load.sum())
    local = int(np.trace(result.rows)) / max(1, rows)
    load = result.load_by_rank
    busiest = max(load) * result.ranks / max(1, pairs)
    config = result.config
    call_ms = result.call_ms
    return {
        "device": f"{result.device}, {result.ranks} ranks ({result.group}), {config.transport}, {config.protocol}",
        "model": f"{len(result.load)} layers of {config.num_experts} experts, top-{config.top_k}, "
        f"rows of {config.row_bytes} bytes",
        "tokens": f"{result.new_tokens:,} new, {result.new_tokens / result.seconds:,.0f} a second; with the prompts, "
        f"{result.row_calls:,} were routed by the layers",
        "rows sent": f"{rows:,}, {local:.0%} of them local; counts in the receive buffers "
        + ("DIFFER from those from routing" if result.count_differences() else "equal those from routing"),
        "bytes sent": f"{result.dispatch_bytes:,} in dispatch with headers, {result.combine_bytes:,} in combine",
        "rows saved": f"{pairs - rows:,} of {pairs:,} by sending a token once per target rank",
        "experts' load": f"{', '.join(f'{n:,}' for n in load)} by rank (busiest {busiest:.2f} x the mean)",
        "step of a layer": f"median {percentile(call_ms, 0.5):.3f} ms, p99 {percentile(call_ms, 0.99):.3f} ms "
        "(dispatch, experts and combine, on the rank that waits least)",
        "closest choice": f"{result.logit_margin:.4f} between the logits of the two likeliest bytes",
    }


def show(result: DemoResult) -> None:
    """Print the figures and, last, whether all was as in the reference."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in figures(result).items():
        table.add_row(name, value)
    Console(highlight=False).print(table)
    if result.sabotage:
        print(f"sabotage: {result.sabotage}")
    differences = result.differences()
    for difference in differences:
        print(f"different: {difference}")
    print(verdict(result), flush=True)


def verdict(result: DemoResult) -> str:
    """The demo's last line."""
    same = "DIFFERENT" if result.differences() else "identical to the reference"
    return f"demo: {result.ranks} ranks, {result.new_tokens} tokens, {same}"
