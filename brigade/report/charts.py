"""Figures as Vega-Lite charts: one description of each, for the page and for its picture."""

import json
import math
import statistics
from typing import Any

import numpy as np

from ..errors.tables import Fields
from .figures import MEAN, Figure, Line

# Colour-blind readers can tell them apart. Contrast is 3:1 or more against white and against the page's dark background.
COLOURS = ["#2f7ec7", "#d9722b", "#2a9d76", "#c2589a", "#8a6fd1", "#a58a1f", "#4b9fb0", "#8b8f98"]
INK, QUIET, GRID = "#1d1f24", "#5f636e", "#dfe1e6"  # for pictures; a page has its own, light or dark
POINTS = 1_600  # in a figure, over all its curves
FEWEST = 150  # points in a curve, however many curves there are
DOTS = 40  # values up to which each point has a dot
LOGARITHMIC = 50  # a spike of more medians than this would flatten the rest of a curve
STARTS_AT_ZERO = {"throughput", "step-time", "learning-rate", "peak-memory", "slowest-rank"}
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {"labelColor": QUIET, "titleColor": QUIET, "gridColor": GRID, "domain": False, "ticks": False,
             "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelPadding": 6},
    "legend": {"orient": "top", "direction": "horizontal", "title": None, "labelColor": INK, "labelFontSize": 12,
               "symbolStrokeWidth": 3, "symbolOpacity": 1, "symbolType": "stroke", "labelLimit": 260, "columns": 4},
    "line": {"strokeWidth": 1.8, "strokeJoin": "round", "invalid": "break-paths-show-path-domains"},
}  # fmt: skip


def chart(figure: Figure) -> Fields:
    """The figure in Vega-Lite, with thinned data. It takes the width of its container."""
    drawn = _bars(figure) if figure.bars else _curves(figure)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "config": CONFIG,
        **drawn,
    }


def text_of(spec: object) -> str:
    """JSON that may stand inside a script element of HTML, whatever texts it holds. Raises ValueError for NaN."""
    text = json.dumps(spec, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---- curves ------------------------------------------------------------------------------------------------------
def _curves(figure: Figure) -> Fields:
    names = list(dict.fromkeys(line.name.removesuffix(MEAN) for line in figure.lines))
    unit, seconds = _unit_of_time(figure.lines)
    most = max(FEWEST, POINTS // max(1, len(figure.lines)))
    values = [row for line in figure.lines for row in _rows(line, most, seconds)]
    finite = [value for line in figure.lines for value in line.values if math.isfinite(value)]
    scale: dict[str, Any] = {"zero": figure.name in STARTS_AT_ZERO}
    if finite and min(finite) > 0 and max(finite) > LOGARITHMIC * statistics.median(finite):
        scale = {"type": "log"}
    title = figure.unit + (" (logarithmic)" if "type" in scale else "")
    y = {"field": "value", "type": "quantitative", "title": title or None, "scale": scale, "axis": {"tickCount": 5}}
    colour = {"field": "line", "type": "nominal", "scale": {"domain": names, "range": COLOURS}}
    colour["legend"] = {} if len(names) > 1 else None  # type: ignore[assignment]
    few = max((len(line.values) for line in figure.lines), default=0) <= DOTS
    layers: list[dict[str, Any]] = []
    if any(line.low for line in figure.lines):
        ends = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
        layers.append({"mark": {"type": "area", "opacity": 0.2}, "encoding": ends | {"color": colour}})
    for faint in sorted({line.faint for line in figure.lines}, reverse=True):
        mark = {"type": "line"} | ({"opacity": 0.3, "strokeWidth": 1} if faint else {"point": few and {"size": 28}})
        these = {"filter": f"datum.faint === {json.dumps(faint)}"}
        layers.append({"transform": [these], "mark": mark, "encoding": {"y": y, "color": colour}})
    if figure.broken:
        these = {"filter": "datum.value === null"}
        layers.append({"transform": [these], "mark": {"type": "rule", "color": "#d03b3b", "strokeDash": [3, 3]}})
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "step",
        "scale": {"nice": False},
        "axis": {"grid": False, "tickCount": 6},
    }
    return {
        "height": 220,
        "data": {"values": values},
        "encoding": {"x": x},
        "layer": layers,
        "usermeta": {"time": unit},
    }


def _rows(line: Line, most: int, seconds: float) -> list[Fields]:
    places = {*kept(line.values, most), *kept(line.low, most // 2), *kept(line.high, most // 2)}
    name, rows = line.name.removesuffix(MEAN), []
    for place in sorted(places):
        step, tokens, since = line.points[place]
        row = {"line": name, "step": step, "value": _finite(line.values[place]), "faint": line.faint}
        row |= {} if tokens is None else {"tokens": _finite(tokens)}
        row |= {} if since is None else {"time": _finite(since / seconds)}
        if line.low:
            row |= {"low": _finite(line.low[place]), "high": _finite(line.high[place])}
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _unit_of_time(lines: list[Line]) -> tuple[str, float]:
    """(unit, its seconds) in which the length of the longest run is easy to read."""
    longest = max((point[2] or 0.0 for line in lines for point in line.points), default=0.0)
    if longest > 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if longest > 2 * 60 else ("seconds", 1.0)


# ---- bars --------------------------------------------------------------------------------------------------------
def _bars(figure: Figure) -> Fields:
    parts = list(dict.fromkeys(name for bar in figure.bars for name, value in bar.parts.items() if value))
    values = [
        {"bar": bar.name, "part": name, "value": _finite(value), "order": parts.index(name)}
        for bar in figure.bars
        for name, value in bar.parts.items()
        if value
    ]
    order = {"field": "order", "type": "quantitative"}
    shown = [
        {"field": "bar", "title": "of"},
        {"field": "part"},
        {"field": "value", "title": figure.unit, "format": ".3~g"},
    ]
    return {
        "height": 30 + 38 * len(figure.bars),
        "data": {"values": values},
        "mark": {"type": "bar", "height": 22},
        "encoding": {
            "y": {"field": "bar", "type": "nominal", "sort": [bar.name for bar in figure.bars], "title": None},
            "x": {"field": "value", "type": "quantitative", "title": figure.unit, "axis": {"tickCount": 6}},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": parts, "range": COLOURS},
                "legend": {"symbolType": "square"},
            },
            "order": order,
            "tooltip": shown,
        },
    }


def kept(values: list[float], most: int) -> list[int]:
    """The places of about `most` values: the lowest and the highest of each stretch, the first in it that is not finite, and the
    very first and last of all."""
    count = len(values)
    if count <= most:
        return list(range(count))
    places = {0, count - 1}
    array = np.asarray(values, dtype=float)
    for stretch in np.array_split(np.arange(count), max(1, most // 2)):
        part = array[stretch]
        finite = np.isfinite(part)
        if finite.any():
            places |= {int(stretch[finite][part[finite].argmin()]), int(stretch[finite][part[finite].argmax()])}
        if not finite.all():
            places.add(int(stretch[~finite][0]))
    return sorted(places)
