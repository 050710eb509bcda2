"""Theorem 2 as a picture over depth: the two Jacobian products, and the bounds they give beside the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hessinit.present.figure import (
    BLUE,
    GREEN,
    GREY,
    LABEL_POINTS,
    VERMILION,
    draw_points,
    figure_size,
    is_drawable,
    label_axes,
    name_layers,
    place_legend,
)
from hessinit.results.curvature_report import CurvatureReport, JacobianBounds
from hessinit.results.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Two more of Okabe and Ito's, as the others stand for norms and bounds.
ORANGE, PURPLE = "#E69F00", "#CC79A7"


def draw_products(report: CurvatureReport, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
    """Draw the forward and backward products above, and below each layer's norm under its three bounds.

    `axes` are two to draw on, upper and lower; by default those of a new figure, one above the other. Means
    are drawn as lines, the largest over the examples as bars; what a logarithmic axis cannot hold is left
    out, a bound beyond it marked at the edge.
    """
    products = [layer.jacobians for layer in report]
    if not any(products):
        raise ValueError(
            "the report holds no Jacobian products to draw; ask for them: measure(..., jacobians=True)."
        )
    own_figure = axes is None
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(
            2,
            sharex=True,
            figsize=figure_size(report, 4.4),
            layout="constrained",
            gridspec_kw={"height_ratios": [2, 3]},
        )
    upper, lower = axes
    _draw_norms_of_products(upper, products)
    _draw_bounds(lower, report, products)
    lower.set_xlim(-0.6, max(len(report), 1) - 0.4)
    label_axes(lower, report)
    upper.set_xlim(lower.get_xlim())
    name_layers(upper, report)
    if own_figure:  # one above the other; elsewhere they may stand side by side
        upper.tick_params(labelbottom=False)
    upper.tick_params(labelsize=LABEL_POINTS, which="both")
    upper.set_ylabel("‖product‖", fontsize=LABEL_POINTS + 1)
    place_legend(upper, columns=3)
    return upper, lower


def _draw_norms_of_products(ax: Axes, products: Sequence[JacobianBounds | None]) -> None:
    ax.set_yscale("log")
    ax.axhline(1.0, color=GREY, linewidth=1, linestyle=":", label="1")
    kinds: tuple[tuple[str, str, str, Callable[[JacobianBounds], tuple[float, float]]], ...] = (
        ("forward", ORANGE, "s", lambda one: _mean_and_largest(one.forward, one.forward_largest)),
        ("backward", PURPLE, "D", lambda one: _mean_and_largest(one.backward, one.backward_largest)),
    )
    for label, color, marker, read in kinds:
        pairs = [(math.nan, math.nan) if one is None else read(one) for one in products]
        for position, (mean, largest) in enumerate(pairs):
            if is_drawable(mean) and is_drawable(largest):
                ax.vlines(position, mean, largest, color=color, alpha=0.45, linewidth=3)
        draw_points(ax, [mean for mean, _ in pairs], label, color, marker)
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.09), max(high, 11.0))  # a decade around 1, whatever the norms are


def _mean_and_largest(mean: Estimate | None, largest: float | None) -> tuple[float, float]:
    return math.nan if mean is None else mean.value, math.nan if largest is None else largest


def _draw_bounds(ax: Axes, report: CurvatureReport, products: Sequence[JacobianBounds | None]) -> None:
    ax.set_yscale("log")
    kinds: tuple[tuple[str, str, str, Callable[[JacobianBounds], float | None]], ...] = (
        ("Lipschitz product", GREY, "^", lambda one: one.lipschitz_bound),
        ("paper's bound", VERMILION, "D", lambda one: one.paper_bound),
        ("rigorous bound", GREEN, "s", lambda one: one.rigorous_bound),
    )
    for label, color, marker, read in kinds:
        values = [None if one is None else read(one) for one in products]
        if all(value is None for value in values):
            continue
        draw_points(ax, [math.nan if value is None else value for value in values], label, color, marker)
        for position, value in enumerate(values):
            if value is not None and not is_drawable(value) and value > 1:
                edge = ax.get_xaxis_transform()
                ax.plot(
                    position, 0.97, transform=edge, marker=marker, markersize=4, color=color, clip_on=False
                )
    # The bounds are on the Gauss-Newton norm; an exact one may lie above them.
    norms = [layer.norm for layer in report]
    if report.curvature != "gauss-newton":
        draw_points(ax, norms, "exact ‖H‖", BLUE, "o", hollow=True)
        norms = [math.nan if row.approximation is None else abs(row.approximation.value) for row in report]
    if report.curvature != "hessian":
        draw_points(ax, norms, "Gauss-Newton ‖H‖", BLUE, "o")
