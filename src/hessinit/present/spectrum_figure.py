"""The spectrum of one layer as a picture: its density, and the eigenvalues that are largest in size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hessinit.present.figure import BLUE, GREY, LABEL_POINTS, VERMILION, is_drawable
from hessinit.present.words import format_number, printable
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Density

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (3.3, 2.3)  # inches: a column of a two-column paper
NETWORK = "network"
DECADES = 6  # of the density that are shown; below are the tails of the smoothing kernel


def draw_spectrum(report: CurvatureReport, layer: str = NETWORK, ax: Axes | None = None) -> Axes:
    """Draw the density over the eigenvalues, logarithmically, those that were measured one by one as marks.

    Without a density the eigenvalues are drawn by rank, their sizes on a logarithmic axis.
    """
    row = _row(report, layer)
    if row.density is None and not row.eigenvalues:
        raise ValueError(
            f"the spectrum of {printable(layer)} was not measured; ask for it: measure(..., density=True), "
            "or top=10 for the ten largest eigenvalues."
        )
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=SIZE, layout="constrained")
    if row.density is not None:
        _draw_density(ax, row, row.density)
    else:
        _draw_ranks(ax, row)
    ax.set_title(_title(row), fontsize=LABEL_POINTS + 1, loc="left").set_parse_math(False)
    ax.tick_params(labelsize=LABEL_POINTS, which="both")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _row(report: CurvatureReport, layer: str) -> LayerCurvature:
    is_network = layer == NETWORK and layer not in report.names
    return report.network if is_network else report[layer]


def _title(row: LayerCurvature) -> str:
    matrix = "Gauss-Newton" if row.curvature == "gauss-newton" else "exact Hessian"
    return f"{printable(row.name)}, {matrix}"


def _draw_density(ax: Axes, row: LayerCurvature, density: Density) -> None:
    if density.values and is_drawable(max(density.values)):
        ax.set_yscale("log")
        top = max(density.values)
        floor = top / 10**DECADES
        shown = [max(value, floor) for value in density.values]
        ax.fill_between(density.grid, floor, shown, color=BLUE, alpha=0.18, linewidth=0)
        ax.plot(density.grid, shown, color=BLUE, linewidth=1.2, label="density")
        ax.set_ylim(floor, 4 * top)
    else:  # a point mass has no curve
        ax.vlines(density.nodes, 0.1, 1.0, color=BLUE, linewidth=1.2, label="all eigenvalues")
        ax.set_yticks([])
    values = [one.value for one in row.eigenvalues if math.isfinite(one.value)]
    if values:
        marks: dict[str, Any] = {"marker": "|", "markersize": 8, "linestyle": "none", "clip_on": False}
        ax.plot(values, [0.04] * len(values), color=VERMILION, transform=ax.get_xaxis_transform(),
                label=f"the {len(values)} largest in size" if len(values) > 1 else "the largest in size",
                **marks)  # fmt: skip
    ax.axvline(0.0, color=GREY, linewidth=0.6, linestyle=":")
    ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel("eigenvalue", fontsize=LABEL_POINTS + 1)
    ax.set_ylabel("density", fontsize=LABEL_POINTS + 1)
    ax.legend(fontsize=LABEL_POINTS, frameon=False, loc="upper right")


def _draw_ranks(ax: Axes, row: LayerCurvature) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.set_yscale("log")
    sizes = [abs(one.value) if is_drawable(abs(one.value)) else math.nan for one in row.eigenvalues]
    signs = [one.value < 0 for one in row.eigenvalues]
    kinds = ((False, "positive", BLUE, "o"), (True, "negative", VERMILION, "D"))
    for is_negative, label, color, marker in kinds:
        chosen = [rank for rank, sign in enumerate(signs) if sign is is_negative]
        if chosen:
            heights = [sizes[rank] for rank in chosen]
            bars = [min(row.eigenvalues[rank].error, 0.99 * sizes[rank]) for rank in chosen]
            look: dict[str, Any] = {"marker": marker, "markersize": 4, "linestyle": "none", "linewidth": 0.9}
            ax.errorbar([rank + 1 for rank in chosen], heights, bars, color=color, label=label, **look)
    if any(signs):
        ax.legend(fontsize=LABEL_POINTS, frameon=False)
    known = [size for size in sizes if not math.isnan(size)]
    if known and max(known) < 10 * min(known):  # within a decade its ticks would stand alone
        ax.set_yscale("linear")
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.set_xlabel("rank, by size", fontsize=LABEL_POINTS + 1)
    ax.set_ylabel("|eigenvalue|", fontsize=LABEL_POINTS + 1)
