"""A figure of a reproduction as a chart of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present.page.content import LineChart, LineSeries
from hessinit.present.page.strokes import Look, looks
from hessinit.present.words import format_number, printable
from hessinit.results.reproduction import Curve, Figure

SYMBOLS = ("circle", "square", "diamond", "triangle")


def figure_chart(figure: Figure) -> LineChart:
    """The curves with a band, or the points with bars, of one standard error; a cross ends what diverged."""
    look = looks([curve.name for curve in figure.curves])
    is_points = figure.style == "points"
    series: list[LineSeries] = []
    for place, curve in enumerate(figure.curves):
        one = look[curve.name]
        series += _points(curve, one, SYMBOLS[place % len(SYMBOLS)]) if is_points else _line(curve, one)
    return LineChart(
        caption=printable(figure.title),
        description=_describe(figure),
        series=series,
        x_label=printable(figure.x_label),
        y_label=printable(figure.y_label),
        log_x=figure.log_x,
        log_y=figure.log_y,
    )


def _line(curve: Curve, look: Look) -> list[LineSeries]:
    """As far as it has numbers, and a cross where they end."""
    finite = [place for place, y in enumerate(curve.y) if math.isfinite(y)]
    end = finite[-1] + 1 if finite else 0
    low, high = _errors(curve, end)
    name = printable(curve.name)
    line = LineSeries(
        name=name,
        x=curve.x[:end],
        y=[y if math.isfinite(y) else None for y in curve.y[:end]],
        low=low,
        high=high,
        **look,
    )
    if end == len(curve.y):
        return [line]
    at = (curve.x[end - 1], curve.y[end - 1]) if finite else (curve.x[0], math.inf)
    return [line, _cross(name, [at], look)]


def _points(curve: Curve, look: Look, symbol: str) -> list[LineSeries]:
    whole = [place for place, y in enumerate(curve.y) if math.isfinite(y)]
    low, high = _errors(curve, len(curve.y))
    name = printable(curve.name)
    drawn = LineSeries(
        name=name,
        x=[curve.x[place] for place in whole],
        y=[curve.y[place] for place in whole],
        color=look["color"],
        points=True,
        symbol=symbol,
        low=None if low is None else [low[place] for place in whole],
        high=None if high is None else [high[place] for place in whole],
    )
    broken = [(x, math.inf) for x, y in zip(curve.x, curve.y, strict=True) if not math.isfinite(y)]
    return [drawn, _cross(name, broken, look)] if broken else [drawn]


def _cross(name: str, places: Sequence[tuple[float, float]], look: Look) -> LineSeries:
    return LineSeries(
        name=name,
        x=[x for x, _ in places],
        y=[y for _, y in places],
        color=look["color"],
        points=True,
        symbol="cross",
        in_legend=False,
        details=["diverged"] * len(places),
    )


def _errors(curve: Curve, end: int) -> tuple[list[float] | None, list[float] | None]:
    if curve.error is None:
        return None, None
    pairs = [
        (y, error if math.isfinite(error) else 0.0)
        for y, error in zip(curve.y[:end], curve.error[:end], strict=True)
    ]
    return [y - error for y, error in pairs], [y + error for y, error in pairs]


def _describe(figure: Figure) -> str:
    """Where each curve begins and ends."""
    told = []
    for curve in figure.curves:
        known = [y for y in curve.y if math.isfinite(y)]
        if figure.style == "points":
            words = f"{format_number(min(known))} to {format_number(max(known))}" if known else "no number"
        else:
            words = f"from {format_number(known[0])} to {format_number(known[-1])}" if known else "no number"
        broken = ", diverged" if len(known) < len(curve.y) else ""
        told.append(f"{printable(curve.name)} {words}{broken}")
    what = f"{printable(figure.y_label)} over {printable(figure.x_label)}"
    return f"{what[:1].upper()}{what[1:]}: {'; '.join(told) or 'nothing was measured'}."
