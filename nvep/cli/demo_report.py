"""The demo's page: one HTML file with its pictures as inline SVG, nothing fetched from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from nvep import __version__
from nvep.cli.demo_display import figures
from nvep.cli.demo_results import DemoResult, percentile

MOST_POINTS = 2000  # of the step times; more are thinned evenly, the slowest kept
TICKS = (1, 2, 5)
WIDE_RANGE = 1000.0
WIDTH_OF_NUMBER = 38  # least width of a cell that its number fits in


def page(result: DemoResult) -> str:
    """The whole page.

    Parameters
    ----------
    result : DemoResult
        A run.

    Returns
    -------
    str
        HTML that needs no other file.
    """
    style = files("nvep.cli").joinpath("demo_report.css").read_text()
    sections = [
        _section("Rows from rank to rank", _traffic_note(result), _traffic(result)),
        _section("Load of the experts", _load_note(result), _load(result)),
        _section("Time of each layer's step", _times_note(result), _times(result)),
        _section("Text of each rank", "The prompt is grey; the model added the rest.", _texts(result)),
        _section("In numbers", "", _numbers(result)),
    ]
    title = f"nvep demo on {result.ranks} rank{'s' if result.ranks > 1 else ''}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>\n{style}</style></head>\n'
        f"<body><main>\n{_header(result, title)}\n{_tiles(result)}\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def _header(result: DemoResult, title: str) -> str:
    differences = result.differences()
    kind, word = ("bad", "DIFFERENT") if differences else ("good", "identical to the reference")
    config = result.config
    notes = [*([f"Sabotage: {result.sabotage}."] if result.sabotage else []), *differences]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<header><h1>{title}</h1><span class="verdict {kind}">{word}</span>'
        f"<p>A mixture-of-experts language model: {len(result.load)} layers of {config.num_experts} experts, of which "
        f"a byte uses {config.top_k}. Every rank attends to its own texts and owns a part of the experts; the exchange "
        f"takes rows to the experts and sums back. nvep {__version__}, {escape(result.device)}, {result.group}.</p>"
        + (f"<ul>{listed}</ul>" if listed else "")
        + "</header>"
    )


def _tiles(result: DemoResult) -> str:
    rows, pairs = int(result.rows.sum()), int(result.load.sum())
    tiles = [
        (f"{result.new_tokens:,}", "new bytes"),
        (f"{result.new_tokens / result.seconds:,.0f}", "new bytes a second"),
        (f"{rows:,}", "rows sent"),
        (f"{(pairs - rows) / max(1, pairs):.0%}", "of rows saved, sent once per target"),
        (f"{percentile(result.call_ms, 0.5):.2f} ms", "median step of a layer"),
    ]
    inner = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return f'<div class="tiles">{inner}</div>'


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{f'<p>{note}</p>' if note else ''}{body}</section>"


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    inner = "".join(parts)
    size = f'viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{inner}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


# --- traffic ----------------------------------------------------------------------------------------------------------


def _traffic_note(result: DemoResult) -> str:
    verdict = "differ from" if result.count_differences() else "equal"
    return (
        f"Over all layers and steps, as counted in the receive buffers; the counts {verdict} those that follow from "
        "routing. A token goes to a rank once, however many of its experts live there."
    )


def _traffic(result: DemoResult) -> str:
    rows, n = result.rows, result.ranks
    cell = min(72.0, 560 / n)
    left, top = 84.0, 46.0
    low, high = int(rows.min()), int(rows.max())
    end, bottom = left + n * cell, top + n * cell
    parts = [
        _text(left + n * cell / 2, 14, "to rank", kind="axis"),
        _text(left - 12, top - 10, "from rank", anchor="end", kind="axis"),
        _text(end + 44, top - 10, "sent", kind="axis"),
    ]
    if cell >= WIDTH_OF_NUMBER:
        parts.append(_text(left - 12, bottom + 24, "received", anchor="end", kind="axis"))
    for i in range(n):
        middle = (i + 0.5) * cell
        parts += [_text(left + middle, top - 10, f"{i}"), _text(left - 12, top + middle + 4, f"{i}", anchor="end")]
        parts.append(_text(end + 44, top + middle + 4, f"{int(rows[i].sum()):,}", kind="axis"))
        if cell >= WIDTH_OF_NUMBER:
            parts.append(_text(left + middle, bottom + 24, f"{int(rows[:, i].sum()):,}", kind="axis"))
    for (source, target), count in np.ndenumerate(rows):
        share = (int(count) - low) / (high - low) if high > low else 0.5
        label = f"rank {source} to rank {target}: {int(count):,} rows"
        number = f"{int(count):,}" if cell >= WIDTH_OF_NUMBER else ""
        parts += _cell(left + target * cell, top + source * cell, cell, share=share, label=label, number=number)
    parts += _scale(left, bottom + 46, low, high)
    return _svg(max(end + 100, left + 320), bottom + 64, parts, "rows from each rank to each rank")


def _cell(x: float, y: float, size: float, *, share: float, label: str, number: str) -> list[str]:
    parts = [
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{size - 2:.1f}" height="{size - 2:.1f}" rx="3" class="cell" '
        f'style="--share:{share:.3f}"><title>{label}</title></rect>'
    ]
    if number:
        kind = "on-strong" if share > 0.5 else "on-weak"
        parts.append(_text(x + size / 2, y + size / 2 + 4, number, kind=kind))
    return parts


def _scale(x: float, y: float, low: int, high: int) -> list[str]:
    """What the shades of the cells mean."""
    if low == high:
        return []
    shades = [
        f'<rect x="{x + 60 + 10 * i}" y="{y - 10}" width="10" height="12" class="cell" style="--share:{i / 9:.2f}"/>'
        for i in range(10)
    ]
    ends = [
        _text(x + 52, y, f"{low:,}", anchor="end", kind="axis"),
        _text(x + 168, y, f"{high:,} rows", anchor="start", kind="axis"),
    ]
    return shades + ends


# --- load -------------------------------------------------------------------------------------------------------------


def _load_note(result: DemoResult) -> str:
    total = max(1, sum(result.load_by_rank))
    busiest = max(result.load_by_rank) * result.ranks / total
    return (
        "Rows that each expert worked on, by the headers that arrived with them; one line of bars a layer, the dashed "
        f"line is the mean. The busiest rank has {busiest:.2f} times the mean of all ranks."
    )


def _load(result: DemoResult) -> str:
    load, owners = result.load, result.config.expert_ranks(result.ranks)
    left, width, height, gap = 64.0, 760.0, 62.0, 18.0
    groups = len(set(owners.tolist()))
    space = 10.0 if groups > 1 else 0.0
    bar = (width - space * (groups - 1)) / load.shape[1]
    starts = [left + e * bar + space * int(np.count_nonzero(np.diff(owners[: e + 1]))) for e in range(load.shape[1])]
    scale = height / max(1, int(load.max()))
    parts: list[str] = []
    for layer, counts in enumerate(load):
        base = 8 + (layer + 1) * height + layer * gap
        parts.append(_text(left - 10, base - height / 2 + 4, f"layer {layer}", anchor="end", kind="axis"))
        parts += [
            _bar(x, base, bar, int(c) * scale, f"expert {e}, layer {layer}: {int(c):,} rows")
            for e, (x, c) in enumerate(zip(starts, counts))
        ]
        mean = base - float(counts.mean()) * scale
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{mean:.1f}" y2="{mean:.1f}" class="mean"/>')
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{base}" y2="{base}" class="base"/>')
    bottom = 8 + len(load) * (height + gap)
    parts += _rank_labels(result, owners, starts=starts, bar=bar, y=bottom + 6)
    return _svg(left + width + 12, bottom + 34, parts, "rows by expert and layer")


def _bar(x: float, base: float, width: float, height: float, label: str) -> str:
    inner = max(1.0, width - 2)
    return (
        f'<rect x="{x + 1:.1f}" y="{base - height:.1f}" width="{inner:.1f}" height="{max(0.5, height):.1f}" rx="1.5" '
        f'class="bar"><title>{label}</title></rect>'
    )


def _rank_labels(
    result: DemoResult, owners: npt.NDArray[np.int32], *, starts: Sequence[float], bar: float, y: float
) -> list[str]:
    parts = []
    for rank, total in enumerate(result.load_by_rank):
        mine = np.flatnonzero(owners == rank)
        if len(mine):
            middle = (starts[mine[0]] + starts[mine[-1]] + bar) / 2
            parts += [_text(middle, y, f"rank {rank}", kind="axis"), _text(middle, y + 16, f"{total:,}")]
    return parts


# --- times ------------------------------------------------------------------------------------------------------------


def _times_note(result: DemoResult) -> str:
    return (
        "Dispatch, experts and combine of one layer, a dot each, on the rank that waits least for the others; the "
        f"scale is logarithmic. Median {percentile(result.call_ms, 0.5):.3f} ms (dashed), "
        f"99th percentile {percentile(result.call_ms, 0.99):.3f} ms."
    )


def _times(result: DemoResult) -> str:
    times, layers = np.maximum(result.call_ms, 1e-4), len(result.load)
    left, width, height, top = 64.0, 760.0, 220.0, 10.0
    low, high = math.log10(times.min()) - 0.05, math.log10(times.max()) + 0.05
    steps = max(1, (len(times) - 1) // layers)

    def x_of(call: float) -> float:
        return left + width * (call // layers) / steps

    def y_of(value: float) -> float:
        return top + height * (high - math.log10(value)) / (high - low)

    parts = []
    for tick in _ticks(10**low, 10**high):
        y = y_of(tick)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:g} ms", anchor="end", kind="axis"))
    for call in _thinned(times):
        label = f"<title>step {call // layers}, layer {call % layers}: {times[call]:.3f} ms</title>"
        parts.append(f'<circle cx="{x_of(call):.1f}" cy="{y_of(times[call]):.1f}" r="2.4" class="dot">{label}</circle>')
    median = y_of(percentile(times, 0.5))
    parts.append(f'<line x1="{left}" x2="{left + width}" y1="{median:.1f}" y2="{median:.1f}" class="mean"/>')
    bottom = top + height
    parts.append(f'<line x1="{left}" x2="{left + width}" y1="{bottom}" y2="{bottom}" class="base"/>')
    for step in sorted({0, steps // 4, steps // 2, steps * 3 // 4, steps}):
        parts.append(_text(x_of(step * layers), bottom + 18, str(step), kind="axis"))
    parts.append(_text(left + width / 2, bottom + 36, "step of the model (prompts first)", kind="axis"))
    return _svg(left + width + 16, bottom + 44, parts, "time of every layer's step")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two; the powers alone where the range is wide."""
    powers = [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    factors = TICKS if high / low < WIDE_RANGE else TICKS[:1]
    return [f * p for p in powers for f in factors if low <= f * p <= high]


def _thinned(times: npt.NDArray[np.float64]) -> list[int]:
    if len(times) <= MOST_POINTS:
        return list(range(len(times)))
    slowest = np.argsort(times)[-MOST_POINTS // 10 :].tolist()
    return sorted({*slowest, *np.linspace(0, len(times) - 1, MOST_POINTS).astype(int).tolist()})


# --- texts and numbers ------------------------------------------------------------------------------------------------


def _texts(result: DemoResult) -> str:
    cards = []
    for rank, (record, prompts) in enumerate(zip(result.records, result.prompts_by_rank, strict=True)):
        texts = "".join(
            f"<blockquote><i>{_html(prompt)}</i>{_html(text)}</blockquote>"
            for prompt, text in zip(prompts, record.generated.texts, strict=True)
        )
        cards.append(
            f"<article><h3>rank {rank}</h3>{texts or '<p>No text: there are more ranks than prompts.</p>'}</article>"
        )
    return f'<div class="texts">{"".join(cards)}</div>'


def _html(text: bytes) -> str:
    shown = "".join(chr(b) if b == 10 or 32 <= b < 127 else "\u00b7" for b in text)
    return escape(shown).replace("\n", "<br>")


def _numbers(result: DemoResult) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures(result).items()
    )
    return f"<table>{rows}</table>"
