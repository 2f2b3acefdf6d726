"""``nvep plot``: curves of latency and bandwidth against the floor, and against other libraries' saved figures."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from nvep.cli.bench import JSON_VERSION
from nvep.cli.plot_figure import new_figure, png
from nvep.cli.plot_network import Drawable, draw_network, network_charts, network_page
from nvep.errors import ArgumentError

PEERS_VERSION = 1
_MODEL = ("hidden", "experts", "top_k", "format")
Points = dict[int, float]  # by tokens a rank


@dataclass
class Chart:
    """Curves of one model and one number of ranks.

    Attributes
    ----------
    title : str
        What was exchanged, on what.
    figures : dict of str to dict
        Microseconds by tokens, by name of the curve.
    floors : dict
        The same for floors, which are drawn dashed.
    link_bytes : dict
        Bytes behind a pair, by tokens: what turns microseconds into bandwidth.
    """

    title: str
    figures: dict[str, Points] = field(default_factory=dict)
    floors: dict[str, Points] = field(default_factory=dict)
    link_bytes: Points = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nvep plot``."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="what nvep bench --json wrote")
    parser.add_argument("--peers", nargs="+", default=[], metavar="FILE", help="figures of others (perf/peers)")
    parser.add_argument("--out", default=".", metavar="DIR", help="where bench-N.png and bench.html go (default .)")


def run(options: argparse.Namespace) -> int:
    """Draw and say what was written."""
    results = [_read(path, JSON_VERSION, "results") for path in options.files]
    peers = [_read(path, PEERS_VERSION, "curves") for path in options.peers]
    curves, networks = charts(results, peers), network_charts(results)
    found: list[Chart | Drawable] = [*curves, *networks]
    if not found:
        raise ArgumentError("FILE", options.files, "results of one case at two or more numbers of tokens")
    pictures = [draw(chart) for chart in curves] + [draw_network(chart) for chart in networks]
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures, 1):
            (folder / f"bench-{number}.png").write_bytes(picture)
        (folder / "bench.html").write_text(page(results, peers, list(zip(found, pictures))))
    except OSError as error:
        raise ArgumentError("--out", options.out, f"a folder to write to ({error.strerror})") from error
    print(f"{len(pictures)} pictures and bench.html in {folder}")
    return 0


def _read(path: str, version: int, key: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError("FILE", path, f"a readable JSON file ({error})") from error
    if not isinstance(data, dict) or data.get("version") != version or not isinstance(data.get(key), list):
        raise ArgumentError("FILE", path, f"a JSON object with version {version} and a list of {key}")
    return data


def charts(results: Iterable[Mapping[str, Any]], peers: Iterable[Mapping[str, Any]] = ()) -> list[Chart]:
    """One for each model, routing and number of ranks that was timed at several numbers of tokens."""
    found: dict[tuple[Any, ...], Chart] = {}
    for data in results:
        mark = " (EMULATED on CPU cores)" if data["emulated"] else ""
        for result in data["results"]:
            case = result["case"]
            if "median_us" not in result or case["max_blocks"] or case["spans"] == "split":
                continue
            model = tuple(case[name] for name in _MODEL)
            apart = result["floor"]["link_bytes"] > 0
            key = (case["ranks"], model, case["routing"], case["flush_l2"], data["emulated"], apart)
            title = f"{case['ranks']} ranks, hidden {model[0]}, top-{model[2]} of {model[1]}, {model[3]}"
            title += f", {case['routing']} routing" + (", L2 flushed" if case["flush_l2"] else "")
            title += "" if apart else ", nothing crosses a link"
            chart = found.setdefault(key, Chart(title + mark))
            tokens = case["tokens"]
            chart.figures.setdefault(f"nvep {case['protocol']}", {})[tokens] = result["median_us"]
            chart.floors.setdefault("floor of this machine", {})[tokens] = result["floor_us"]
            chart.link_bytes[tokens] = result["floor"]["link_bytes"] or result["floor"]["remote_bytes"]
    for key, chart in found.items():
        if key[2:] == ("uniform", False, False, True):  # as the peers were measured
            _add_peers(chart, key[0], key[1], peers)
    return [chart for chart in found.values() if any(len(points) > 1 for points in chart.figures.values())]


def _add_peers(chart: Chart, ranks: int, model: tuple[Any, ...], peers: Iterable[Mapping[str, Any]]) -> None:
    for data in peers:
        for curve in data["curves"]:
            if data["ranks"] == ranks and tuple(curve[name] for name in _MODEL) == model:
                points = {int(tokens): float(us) for tokens, us in curve["pair_us"].items()}
                (chart.floors if curve.get("floor") else chart.figures)[
                    f"{curve['name']}, {data['hardware'].split(',')[0]}"
                ] = points


def draw(chart: Chart) -> bytes:
    """PNG: microseconds on the left, GB/s on the right.

    Raises
    ------
    PlotUnavailable
        matplotlib is not installed.
    """
    figure = new_figure(chart.title, 13, 6)
    latency, bandwidth = figure.subplots(1, 2)
    for curves, style in ((chart.figures, "o-"), (chart.floors, "--")):
        for name, points in curves.items():
            tokens = sorted(points)
            latency.plot(tokens, [points[t] for t in tokens], style, label=name, markersize=4)
            known = [t for t in tokens if t in chart.link_bytes]
            bandwidth.plot(known, [chart.link_bytes[t] / points[t] / 1e3 for t in known], style, markersize=4)
    for axes, label in ((latency, "dispatch + combine, us"), (bandwidth, "GB/s between ranks")):
        axes.set(xlabel="tokens a rank", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    latency.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return png(figure)


def page(
    results: Iterable[Mapping[str, Any]],
    peers: Iterable[Mapping[str, Any]],
    drawn: Iterable[tuple[Chart | Drawable, bytes]],
) -> str:
    """HTML with everything inside: pictures, tables, floors, and where the peers' figures come from."""
    parts = [
        f'<img alt="{escape(c.title)}" src="data:image/png;base64,{base64.b64encode(p).decode()}">' for c, p in drawn
    ]
    for data in results:
        parts.append(f"<h2>{escape(data['date'])}, nvep {escape(data['nvep'])}</h2>")
        if data["emulated"]:
            parts.append("<p><b>EMULATED on CPU cores: says nothing about a GPU.</b></p>")
        for floors in data["floors"]:
            shown = ", ".join(
                f"{name} {value:.4g}" for name, value in floors.items() if isinstance(value, (int, float))
            )
            parts.append(f"<p>{len(floors['gpus'])} ranks on {escape(floors['device'])}: {escape(shown)}</p>")
        parts += [_table(data["results"])] if data["results"] else []
        parts.append(network_page(data))
    for data in peers:
        notes = [f"{c['name']}: {c['note']}" for c in data["curves"] if "note" in c]
        text = f"Peers: {data['hardware']}; {data['source']}; {data['date']}. " + "; ".join(notes)
        parts.append(f"<p>{escape(text)}</p>")
    style = "body{font:14px sans-serif;max-width:1100px;margin:2em auto}img{max-width:100%}td{padding:1px 8px}"
    return f'<!doctype html><meta charset="utf-8"><title>nvep bench</title><style>{style}</style>' + "\n".join(parts)


def _table(results: Iterable[Mapping[str, Any]]) -> str:
    names = ("median_us", "p99_us", "floor_us", "ratio", "gbs", "target_us")
    rows = ["".join(f"<th>{name}</th>" for name in ("case", "protocol", *names, ""))]
    for result in results:
        figures = ["" if result.get(name) is None else f"{result[name]:.2f}" for name in names]
        cells = [result["label"], result["protocol"], *figures, result["refused"] or result["failed"]]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return "<table>" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
