"""Charts as inline SVG, drawn by matplotlib: colours are variables of the page's style, text is text, and the
same numbers give the same bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from megagspo.observe.report.catalogue import Panel
from megagspo.observe.report.series import Metrics
from megagspo.observe.report.text import time_unit

COLOURS = 6
"""How many series colours the page's style defines: --s1 and following. Further series begin again."""

# matplotlib knows colours, not variables: each of these stands for one and is replaced in what it draws.
_INK, _GRID = "#fe0001", "#fe0002"
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--line)"} | {
    f"#fd000{i}": f"var(--s{i})" for i in range(1, COLOURS + 1)
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megagspo",
    "font.size": 11,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _GRID,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "axes.xmargin": 0.02,
    "grid.color": _GRID,
    "grid.linewidth": 1,
    "xtick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_joinstyle": "round",
}
# A filled area has a corner for each step at least; more of them than this are not to be seen.
_AREA_STEPS = 400
_FEW, _MANY = 24, 600  # so few points are shown one by one; so many make a thinner line


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a chart, in the units of its viewBox: CSS pixels where it is shown at its own size."""

    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A single value beside the curve, at a step. colour: that of which series of the panel, from 0."""

    step: int
    value: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """An `<svg>` element, and where a point (step, value) lies in it: x = x[0] step + x[1], and y likewise of
    the value, or of its log10 where logarithmic. box: left, top, right and bottom of the axes."""

    svg: str
    x: tuple[float, float]
    y: tuple[float, float]
    logarithmic: bool
    box: tuple[float, float, float, float]


def draw(
    panel: Panel, *, metrics: Metrics, size: Size, name: str, marks: Sequence[Mark] = (), clock: bool = False
) -> Drawing:
    """Draws a panel. name: prefix of the ids in the SVG, unique on the page; clock: show the time since the
    start on top."""
    with style.context(["default", _STYLE], after_reset=True):
        figure = Figure(figsize=(size.width / 72, size.height / 72), dpi=72)
        canvas = FigureCanvasSVG(figure)
        bottom, top = 24, 30 if clock else 14
        edges = (46 / size.width, bottom / size.height)
        area = (*edges, 1 - edges[0] - 10 / size.width, 1 - edges[1] - top / size.height)
        axes = figure.add_axes(area)
        if panel.kind == "stack":
            _stack(axes, panel, metrics)
        else:
            _lines(axes, panel, metrics)
        for mark in marks:
            colour = _colour(mark.colour)
            axes.axhline(mark.value, color=colour, linewidth=1, linestyle=(0, (2, 4)))
            axes.plot([mark.step], [mark.value], color=colour, marker="D", markersize=7, clip_on=False)
        logarithmic = _axes(axes, panel, metrics, marks, most=size.height // 45)
        if clock:
            _clock(axes, metrics, most=max(2, size.width // 130))
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.print_svg(file, metadata=nothing)
        (x0, y0), (x1, y1) = axes.transAxes.transform([(0, 0), (1, 1)])
        left, right = axes.get_xlim()
        low, high = (math.log10(v) if logarithmic else v for v in axes.get_ylim())
    x, y = _line(left, x0, right, x1), _line(low, size.height - y0, high, size.height - y1)
    box = (x0, size.height - y1, x1, size.height - y0)
    return Drawing(
        svg=_for_the_page(file.getvalue(), name=name, size=size),
        x=x,
        y=y,
        logarithmic=logarithmic,
        box=tuple(round(float(edge), 2) for edge in box),  # type: ignore[arg-type]
    )


def area_width(steps: int) -> int:
    """How many neighbouring steps a filled area shows as their mean."""
    return math.ceil(steps / _AREA_STEPS)


def _colour(position: int) -> str:
    return f"#fd000{position % COLOURS + 1}"


def _lines(axes: Axes, panel: Panel, metrics: Metrics) -> None:
    for position, series in enumerate(panel.series):
        points = metrics.points(series.metric)
        if not points:
            continue
        steps, values = _arrays(points)
        drawn = np.isfinite(values)
        # A point without neighbours has no line: it is seen by its marker alone.
        alone = drawn & ~np.r_[False, drawn[:-1]] & ~np.r_[drawn[1:], False]
        shown = drawn if len(points) <= _FEW else alone
        axes.plot(
            steps,
            np.where(drawn, values, np.nan),
            color=_colour(position),
            marker="o",
            markersize=4,
            markevery=list(np.flatnonzero(shown)),
            markeredgewidth=0,
            linewidth=1.6 if len(points) <= _MANY else 1,
        )
        if position == 0 and panel.spread:
            _band(axes, points, dict(metrics.points(panel.spread)))


def _band(axes: Axes, points: Sequence[tuple[int, float]], spread: Mapping[int, float]) -> None:
    steps, values = _arrays(points)
    widths = np.array([spread.get(step, math.nan) for step, _ in points])
    low, high = values - widths, values + widths
    edges, low, high = _thinned(steps, [low, high])
    colour = _colour(0)
    axes.stairs(high, edges, baseline=low, fill=True, facecolor=colour, alpha=0.16, edgecolor="none")


def _stack(axes: Axes, panel: Panel, metrics: Metrics) -> None:
    """The parts, and on top what is left of the whole. A part that a step does not have adds nothing."""
    steps = np.array(metrics.steps, dtype=float)
    parts = [_filled(metrics.values[series.metric]) for series in panel.series]
    if panel.whole:
        parts.append(np.maximum(_filled(metrics.values[panel.whole]) - np.sum(parts, axis=0), 0.0))
    edges, *parts = _thinned(steps, parts)
    tops = np.cumsum(parts, axis=0)
    for position, top in enumerate(tops):
        below = tops[position - 1] if position else np.zeros_like(top)
        axes.stairs(
            top, edges, baseline=below, fill=True, facecolor=_colour(position), edgecolor="none", linewidth=0
        )


def _filled(values: Sequence[float | None]) -> np.ndarray:
    return np.array([0.0 if value is None else value if math.isfinite(value) else np.nan for value in values])


def _arrays(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = zip(*points, strict=True)
    numbers = np.array(values, dtype=float)
    return np.array(steps, dtype=float), np.where(np.isfinite(numbers), numbers, np.nan)


def _thinned(steps: np.ndarray, areas: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Edges around the steps and the values between them; means of neighbouring steps where there are too
    many."""
    edges = np.r_[steps[0] - 0.5, (steps[1:] + steps[:-1]) / 2, steps[-1] + 0.5]
    size = area_width(len(steps))
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.r_[starts, len(steps)])
    return [np.r_[edges[starts], edges[-1]], *(np.add.reduceat(area, starts) / counts for area in areas)]


def _axes(axes: Axes, panel: Panel, metrics: Metrics, marks: Sequence[Mark], *, most: int) -> bool:
    """Scales and ticks, at most so many of values; returns whether their axis is logarithmic."""
    values = [value for series in panel.series for value in metrics.finite(series.metric)]
    values += [mark.value for mark in marks]
    if panel.kind == "stack" and panel.whole:
        values += metrics.finite(panel.whole)
    logarithmic = panel.logarithmic and bool(values) and min(values) > 0 and max(values) / min(values) > 10
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))
        if panel.from_zero and panel.spread is None and min(values, default=0) >= 0:
            axes.set_ylim(0, max(values, default=0) * 1.06 or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}" if value % 1 == 0 else ""))
    first, last = min(metrics.steps), max(metrics.steps)
    pad = max(0.5, (last - first) * 0.01)
    axes.set_xlim(min([first, *(mark.step for mark in marks)]) - pad, last + pad)
    return logarithmic


def _tick(value: float) -> str:
    """At most seven characters: what the margin has room for."""
    text = f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:g}"
    return re.sub(r"(?:\.0)?e([+-])0?", lambda exponent: "e" + exponent[1].strip("+"), text)


def _clock(axes: Axes, metrics: Metrics, *, most: int) -> None:
    """Time since the start on top of the axes: where in the run each moment was."""
    elapsed = metrics.elapsed()
    if elapsed is None:
        return
    length, unit = time_unit(elapsed[-1])
    locator = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
    ticks = [t for t in locator.tick_values(0, elapsed[-1] / length) if 0 < t * length <= elapsed[-1]]
    # A step's record stands at its end; the first recorded one began its own length earlier.
    times, steps = [0.0, *elapsed], [metrics.steps[0] - 1, *metrics.steps]
    top = axes.twiny()
    first, last = axes.get_xlim()
    top.set_xlim(first, last)
    places: list[float] = []
    labels: list[str] = []
    for tick, place in zip(ticks, np.interp([t * length for t in ticks], times, steps), strict=True):
        # Where a step took long, say over a pause of the machine, the label that fits comes first.
        if not places or place - places[-1] > (last - first) / (2 * most):
            places.append(float(place))
            labels.append(f"{tick:g} {unit}")
    top.set_xticks(places, labels=labels)
    top.grid(False)
    top.tick_params(length=3, pad=3)


def _line(a: float, at_a: float, b: float, at_b: float) -> tuple[float, float]:
    slope = (at_b - at_a) / (b - a)
    return float(slope), float(at_a - slope * a)


def _for_the_page(svg: str, *, name: str, size: Size) -> str:
    """The element alone, with variables for colours, its own ids, and the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<svg[^>]*>", f'<svg viewBox="0 0 {size.width} {size.height}" aria-hidden="true">', svg, count=1
    )
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"\n\s*", " ", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
