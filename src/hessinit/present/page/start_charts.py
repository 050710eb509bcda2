"""How sharp each start of a comparison is before the first step, for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present.comparison_colours import WARMUP
from hessinit.present.comparison_standing import ordered_starts
from hessinit.present.page.content import DepthChart, DepthSeries, LineChart, LineSeries
from hessinit.present.page.strokes import looks
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison

EDGE = 2.0  # lr·‖H‖, above which gradient descent leaves a quadratic bowl; other optimizers have other edges


def norms_over_rates(comparison: Comparison) -> LineChart | None:
    """The network's ‖H‖ of each start over the rates, and where gradient descent becomes unstable."""
    rates, look = comparison.learning_rates, looks(comparison.schemes)
    single = len(rates) == 1
    series, told = [], []
    for start in _measured(comparison):
        norms = [comparison.norm(start, rate) for rate in rates]
        products = [rate * norm for rate, norm in zip(rates, norms, strict=True)]
        series.append(
            LineSeries(
                name=printable(start),
                x=rates,
                y=[None if math.isnan(norm) else norm for norm in norms],
                points=single,
                details=[f"lr·‖H‖ = {format_number(product)}" for product in products],
                **look[start],
            )
        )
        told.append(f"{printable(start)} {_range(norms)}")
    if not series:
        return None
    if comparison.optimizer == "sgd":
        series.append(
            LineSeries(
                name="stable below this: 2/lr",
                x=rates,
                y=[EDGE / rate for rate in rates],
                color="grey",
                dashed=True,
                points=single,
            )
        )
    return LineChart(
        caption="‖H‖ of the network at the start, over the learning rate",
        description=f"‖H‖ at the start: {'; '.join(told)}.",
        series=series,
        x_label="learning rate",
        y_label="‖H‖ of the network",
        log_x=not single,
        log_y=True,
    )


def norms_over_depth(comparison: Comparison) -> DepthChart | None:
    """‖H‖ of every layer for each start, at its best rate where it depends on the rate."""
    look = looks(comparison.schemes)
    series = [
        DepthSeries(
            name=printable(start),
            values=[comparison.norm(start, layer=layer) for layer in comparison.layers],
            color=look[start]["color"],
        )
        for start in _measured(comparison)
    ]
    if not series or not comparison.layers:
        return None
    told = [f"{one.name} {_range(one.values)}" for one in series]
    return DepthChart(
        caption="‖H‖ of every layer at the start",
        description=f"From the flattest to the sharpest layer: {'; '.join(told)}.",
        layers=[printable(layer) for layer in comparison.layers],
        series=series,
        y_label="‖H‖ at the start",
    )


def _measured(comparison: Comparison) -> list[str]:
    """Warmup changes no weights: what has a twin without it is left out."""
    return [
        start
        for start in ordered_starts(comparison)
        if not math.isnan(comparison.norm(start))
        and not (start.endswith(WARMUP) and start.removesuffix(WARMUP) in comparison.schemes)
    ]


def _range(numbers: Sequence[float | None]) -> str:
    known = [number for number in numbers if number is not None and not math.isnan(number)]
    if not known:
        return "not measured"
    low, high = format_number(min(known)), format_number(max(known))
    return low if low == high else f"{low} to {high}"
