"""Pictures of ``nvep bench --transport``: hold time by transport, exposed time by delay, and where curves cross."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from nvep.bench.network_targets import BASE, crossover_us
from nvep.cli.plot_figure import new_figure, png
from nvep.config import TRANSPORTS

_GROUP = ("ranks", "hidden", "experts", "top_k", "blocks", "ring_memory", "domain_size", "queue_depth")
Curves = dict[str, dict[int, float]]  # by transport; microseconds by tokens, delay or blocks
_PHASES = ("dispatch", "combine")
_COLUMNS = 3


@dataclass
class NetworkChart:
    """Figures of one shape of exchange.

    Attributes
    ----------
    title : str
        What was exchanged, on what, and who executed it.
    hold : dict
        Send hold time by phase, transport and tokens.
    exposed : dict
        By tokens, transport and delay: send and receive of both phases.
    """

    title: str
    hold: dict[str, Curves] = field(default_factory=lambda: {phase: {} for phase in _PHASES})
    exposed: dict[int, Curves] = field(default_factory=dict)

    def crossovers(self) -> Curves:
        """Work between send and receive from which each transport leaves less exposed than GDAKI, by tokens."""
        found: Curves = {}
        for tokens, curves in sorted(self.exposed.items()):
            for transport, curve in curves.items():
                if transport not in (BASE, "nvlink") and BASE in curves:
                    found.setdefault(transport, {})[tokens] = crossover_us(curves[BASE], curve)
        return found

    @property
    def drawable(self) -> bool:
        """Is there a curve of two points or more?"""
        curves = [*self.hold.values(), *self.exposed.values()]
        return any(len(points) > 1 for curve in curves for points in curve.values())


@dataclass
class BlocksChart:
    """Send hold time of dispatch by blocks, for one number of ranks, by transport."""

    title: str
    hold: Curves = field(default_factory=dict)

    @property
    def drawable(self) -> bool:
        return any(len(points) > 1 for points in self.hold.values())


Drawable = NetworkChart | BlocksChart


def network_charts(files: Iterable[Mapping[str, Any]]) -> list[Drawable]:
    """What the files hold of such sweeps, one chart for each shape of exchange, then one by blocks for each size."""
    shapes: dict[tuple[Any, ...], NetworkChart] = {}
    sizes: dict[tuple[Any, ...], BlocksChart] = {}
    for data in files:
        network = data.get("network", {"results": []})
        for result in network["results"]:
            case, timing = result["case"], result["timing"]
            if timing is None or case["accounted"]:
                continue
            title = _title(case) + f"\n{network['adapter']}, {', '.join(network['devices'])}"
            title += " (EMULATED on CPU cores)" if data["emulated"] else ""
            key = (*(case[name] for name in _GROUP), data["date"])
            blocks = f", {case['blocks']} blocks"
            _add(shapes.setdefault(key, NetworkChart(title.replace("\n", blocks + "\n"))), case, timing)
            size = (*(case[name] for name in (*_GROUP[:4], *_GROUP[5:], "tokens")), data["date"])
            chart = sizes.setdefault(size, BlocksChart(title.replace("\n", f", {case['tokens']} tokens a rank\n")))
            chart.hold.setdefault(case["transport"], {})[case["blocks"]] = timing["hold_us"]["dispatch"]
    found: list[Drawable] = [*shapes.values(), *sizes.values()]
    return [chart for chart in found if chart.drawable]


def _title(case: Mapping[str, Any]) -> str:
    title = f"{case['ranks']} ranks, hidden {case['hidden']} bf16, top-{case['top_k']} of {case['experts']}"
    title += f", rings: {case['ring_memory']}" if case["ring_memory"] != "default" else ""
    title += f", rings of {case['queue_depth']} entries" if case["queue_depth"] else ""
    return title + (f", domains of {case['domain_size']}" if case["domain_size"] > 1 else "")


def _add(chart: NetworkChart, case: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
    transport, tokens = case["transport"], case["tokens"]
    for phase in _PHASES:
        chart.hold[phase].setdefault(transport, {})[tokens] = timing["hold_us"][phase]
    if len(case["delays"]) > 1:
        both = {int(d): us + timing["exposed_us"]["combine"][d] for d, us in timing["exposed_us"]["dispatch"].items()}
        chart.exposed.setdefault(tokens, {})[transport] = both


def draw_network(chart: Drawable) -> bytes:
    """PNG.

    Raises
    ------
    PlotUnavailable
        matplotlib is not installed.
    """
    if isinstance(chart, BlocksChart):
        figure = new_figure(chart.title, 7, 5)
        _curves(figure.subplots(), chart.hold, "blocks of a kernel", "hold of D.send, us")
        return _finish(figure)
    sizes = sorted(chart.exposed)
    count = 2 + len(sizes) + bool(sizes)
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = new_figure(chart.title, 5 * columns, 4.5 * rows)
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for axes, phase in zip(panels, _PHASES):
        _curves(axes, chart.hold[phase], "tokens a rank", f"hold of {phase} send, us")
    for axes, tokens in zip(panels[2:], sizes):
        _curves(axes, chart.exposed[tokens], "work between send and receive, us", f"exposed at {tokens} tokens, us")
        axes.set_xscale("linear")
    if sizes:
        _crossovers(panels[-1], chart.crossovers(), sizes)
    return _finish(figure)


def _curves(axes: Any, curves: Curves, x: str, y: str) -> None:
    for transport, points in sorted(curves.items()):
        style = {"linestyle": "--" if transport == "nvlink" else "-", "color": f"C{TRANSPORTS.index(transport)}"}
        axes.plot(sorted(points), [points[at] for at in sorted(points)], "o", label=transport, markersize=4, **style)
    axes.set(xlabel=x, ylabel=y)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for formatted in (axes.xaxis.set_major_formatter, axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted("{x:g}")
    axes.grid(alpha=0.3)


def _crossovers(axes: Any, found: Curves, sizes: Sequence[int]) -> None:
    """Bars by transport and tokens; one that never crosses says so."""
    width = 0.8 / len(sizes)
    for number, tokens in enumerate(sizes):
        for index, points in enumerate(found.values()):
            at, x = points.get(tokens, math.nan), index + number * width
            if math.isnan(at):
                axes.text(x, 0, "never", rotation=90, ha="center", va="bottom", fontsize="small")
            else:
                axes.bar(x, at, width, color=f"C{number}")
                axes.text(x, at, f"{at:.0f}", ha="center", va="bottom", fontsize="small")
        axes.bar(0, 0, width, color=f"C{number}", label=f"{tokens} tokens")
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(found))], list(found))
    axes.set(ylabel="less exposed than GDAKI from, us of work", ylim=(0, None), xlim=(-0.5, len(found)))
    axes.legend(fontsize="small")


def _finish(figure: Any) -> bytes:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return png(figure)


def network_page(data: Mapping[str, Any]) -> str:
    """HTML of a file's sweep: targets, then every case. Empty without one."""
    network = data.get("network")
    if not network:
        return ""
    parts = [f"<p><b>{escape(network['adapter'])}</b> on {escape(', '.join(network['devices']))}</p>"]
    if network["targets"]:
        rows = [
            (t["transport"], t["what"], f"{t['limit']:.2f}", f"{t['found']:.2f}", met_text(t["met"]))
            for t in network["targets"]
        ]
        parts.append(_table(("transport", "target", "limit", "found", "met"), rows))
    head = ("case", "hold us, dispatch / combine", "receive", "in flight", "landing", "exposed by delay, both", "")
    parts.append(_table(head, [_cells(result) for result in network["results"]]))
    return "\n".join(parts)


def met_text(met: bool | None) -> str:
    """As tables say it; None is not judged."""
    return {None: "-", True: "yes", False: "no"}[met]


def _cells(result: Mapping[str, Any]) -> Sequence[str]:
    timing = result["timing"]
    if timing is None:
        return (result["name"], "", "", "", "", "", result["refused"] or result["failed"])
    names = ("hold_us", "receive_us", "in_flight_us", "landing_us")
    pairs = ["" if not timing[n] else " / ".join(f"{timing[n][p]:.2f}" for p in _PHASES) for n in names]
    dispatch, combine = (timing["exposed_us"][phase] for phase in _PHASES)
    return (result["name"], *pairs, ", ".join(f"{d}: {dispatch[d] + combine[d]:.1f}" for d in dispatch), "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
