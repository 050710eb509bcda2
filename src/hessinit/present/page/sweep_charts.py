"""A sweep for a page: from the standard deviation over ‖H‖ to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present.comparison_curves import LOGARITHMIC_FROM, curves_at, heights_of
from hessinit.present.comparison_sentences import format_result
from hessinit.present.comparison_standing import Result
from hessinit.present.page.content import DepthChart, DepthSeries, LineChart, LineSeries, Rule
from hessinit.present.page.loss_charts import curve_series
from hessinit.present.page.start_charts import EDGE
from hessinit.present.page.strokes import NAMES, Look, ramp_of
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison

MOST_LINES = 6  # so many layers have lines of their own over the std; more are shown over depth


def sweep_curves(comparison: Comparison) -> LineChart | None:
    """The loss over the steps, a line for each std from dark (small) to light."""
    (rate,) = comparison.learning_rates
    curves = curves_at(comparison, rate)
    heights = heights_of([curves], comparison)
    if heights is None:
        return None
    colors = dict(zip(comparison.schemes, ramp_of(comparison.stds), strict=True))
    look: dict[str, Look] = {start: {"color": color, "dashed": False} for start, color in colors.items()}
    names = _names(comparison)
    return LineChart(
        caption=f"Loss over the steps at lr {format_number(rate)}, by std",
        description=f"Training loss over {comparison.steps:,} steps. {_tell_losses(comparison)}",
        series=curve_series(curves, names, look, heights),
        x_label="step",
        y_label="training loss",
        log_y=heights.logarithmic,
        x_range=(0.0, comparison.steps),
        y_range=(heights.low, heights.high),
    )


def norms_over_std(comparison: Comparison) -> LineChart | None:
    """‖H‖ at the start over the std: the network, and the layers where they are few."""
    (rate,) = comparison.learning_rates
    network = [comparison.norm(start, rate) for start in comparison.schemes]
    if all(map(math.isnan, network)):
        return None
    series = [_over_std(comparison, "network", network, "vermilion")]
    layers = comparison.layers if len(comparison.layers) <= MOST_LINES else ()
    for layer, color in zip(layers, NAMES.values(), strict=False):
        norms = [comparison.norm(start, rate, layer) for start in comparison.schemes]
        series.append(_over_std(comparison, printable(layer), norms, color))
    edge = Rule(value=EDGE / rate, label=f"2/lr = {format_number(EDGE / rate)}: stable below")
    known = [norm for norm in network if not math.isnan(norm)]
    return LineChart(
        caption="‖H‖ at the start, over the std",
        description=f"The network: ‖H‖ from {format_number(min(known))} to {format_number(max(known))}.",
        series=series,
        x_label="std of the weights",
        y_label="‖H‖ at the start",
        log_x=_is_logarithmic(comparison.stds),
        log_y=True,
        rules=[edge] if comparison.optimizer == "sgd" else (),
    )


def norms_by_std(comparison: Comparison) -> DepthChart | None:
    """‖H‖ of every layer over depth, a line for each std; where there are too many layers for the other."""
    (rate,) = comparison.learning_rates
    if len(comparison.layers) <= MOST_LINES:
        return None
    names = _names(comparison)
    return DepthChart(
        caption="‖H‖ of every layer at the start, by std",
        description=f"{len(comparison.layers)} layers for each of {len(comparison.stds)} stds.",
        layers=[printable(layer) for layer in comparison.layers],
        series=[
            DepthSeries(
                name=names[start],
                values=[comparison.norm(start, rate, layer) for layer in comparison.layers],
                color=color,
            )
            for start, color in zip(comparison.schemes, ramp_of(comparison.stds), strict=True)
        ],
        y_label="‖H‖ at the start",
    )


def losses_over_std(comparison: Comparison) -> LineChart:
    """The final loss over the std."""
    return _losses(
        comparison,
        comparison.stds,
        "Final loss, over the std",
        "std of the weights",
        is_logarithmic=_is_logarithmic(comparison.stds),
    )


def losses_over_sharpness(comparison: Comparison) -> LineChart | None:
    """The final loss over lr·‖H‖ at the start."""
    (rate,) = comparison.learning_rates
    products = [rate * comparison.norm(start, rate) for start in comparison.schemes]
    if all(map(math.isnan, products)):
        return None
    edge = Rule(value=EDGE, label="lr·‖H‖ = 2", upright=True)
    return _losses(
        comparison,
        products,
        "Final loss, over lr·‖H‖ at the start",
        "lr·‖H‖ at the start",
        is_logarithmic=True,
        rules=[edge] if comparison.optimizer == "sgd" else (),
    )


def _losses(
    comparison: Comparison,
    places: Sequence[float],
    caption: str,
    x_label: str,
    *,
    is_logarithmic: bool,
    rules: Sequence[Rule] = (),
) -> LineChart:
    """A point for each std, with its standard error; what diverged is at the upper edge."""
    (rate,) = comparison.learning_rates
    trained = [comparison.loss(start, rate) for start in comparison.schemes if comparison.trains(start, rate)]
    log_y = bool(trained) and 0 < LOGARITHMIC_FROM * min(trained) < max(trained)
    names = _names(comparison)
    series = []
    for start, place, color in zip(comparison.schemes, places, ramp_of(comparison.stds), strict=True):
        trains = comparison.trains(start, rate)
        loss, error = comparison.loss(start, rate), comparison.error(start, rate)
        has_bar = trains and not math.isnan(error)
        diverged = f"{comparison.diverged(start, rate)} of {len(comparison.seeds)} seeds diverged"
        series.append(
            LineSeries(
                name=names[start],
                x=[place],
                y=[loss if trains else math.inf],
                color=color,
                points=True,
                symbol="circle" if trains else "cross",
                low=[loss - error] if has_bar else None,
                high=[loss + error] if has_bar else None,
                details=[format_result(Result(loss, error)) if trains else diverged],
            )
        )
    return LineChart(
        caption=caption,
        description=_tell_losses(comparison),
        series=series,
        x_label=x_label,
        y_label="final loss",
        log_x=is_logarithmic,
        log_y=log_y,
        rules=rules,
    )


def _over_std(comparison: Comparison, name: str, norms: Sequence[float], color: str) -> LineSeries:
    pairs = sorted(zip(comparison.stds, norms, strict=True))
    return LineSeries(
        name=name,
        x=[std for std, _ in pairs],
        y=[None if math.isnan(norm) else norm for _, norm in pairs],
        color=color,
        dashed=name != "network",
        points=len(pairs) == 1,
    )


def _names(comparison: Comparison) -> dict[str, str]:
    return {start: f"std {std:g}" for start, std in zip(comparison.schemes, comparison.stds, strict=True)}


def _tell_losses(comparison: Comparison) -> str:
    (rate,) = comparison.learning_rates
    told = []
    for start, name in _names(comparison).items():
        loss = format_number(comparison.loss(start, rate)) if comparison.trains(start, rate) else "diverged"
        told.append(f"{name}: {loss}")
    return f"Final losses: {', '.join(told)}."


def _is_logarithmic(stds: Sequence[float]) -> bool:
    return bool(stds) and min(stds) > 0
