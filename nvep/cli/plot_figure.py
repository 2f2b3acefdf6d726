"""Figures of ``nvep plot`` to PNG."""

from __future__ import annotations

import io
from typing import Any

from nvep.errors import NvepError


class PlotUnavailable(NvepError, ImportError):
    """Drawing needs a package that is not installed."""


def new_figure(title: str, width: float, height: float) -> Any:
    """An empty matplotlib figure.

    Raises
    ------
    PlotUnavailable
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(f"nvep plot needs matplotlib: pip install 'nvep[plot]' ({error})") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def png(figure: Any) -> bytes:
    """The figure as a file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
