"""Norms before and after an initialization. `python -m hessinit.present.initialization_figure [FILE]`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hessinit.present.figure import (
    BLUE,
    GREEN,
    GREY,
    LABEL_POINTS,
    LETTER,
    VERMILION,
    draw_points,
    fit_side_by_side,
    inches_wide,
    is_drawable,
    place_legend,
    shorten,
)
from hessinit.present.initialization_table import names_in_order, row_of
from hessinit.present.words import format_number, printable
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES_SHOWN = 40


def draw_initialization(result: Initialization, ax: Axes | None = None) -> Axes:
    """Draw every layer's norm before and after over depth, the networks' at the right, and the target.

    Norms that a logarithmic axis cannot hold (0, inf, nan) are left out.
    """
    names = [*names_in_order(result), "network"]
    measured = [name for name in names if name == "network" or _is_measured(result, name)]
    labels = shorten([printable(name) for name in measured])
    if ax is None:
        from matplotlib import pyplot

        width = min(max(3.5, 0.2 * len(measured)), 7.0)
        on_end = 0.0 if fit_side_by_side(labels, width - 0.7) else LETTER * max(map(len, labels))
        _, ax = pyplot.subplots(figsize=(width, 2.9 + on_end), layout="constrained")
    ax.set_yscale("log")
    low, high = result.target * (1 - result.tolerance), result.target * (1 + result.tolerance)
    ax.axhspan(low, high, color=GREEN, alpha=0.3, linewidth=0)
    ax.axhline(result.target, color=GREEN, linewidth=0.8, label=f"target {format_number(result.target)}")
    for report, label, color, marker in (
        (result.before, "before", VERMILION, "D"),
        (result.after, "after", BLUE, "o"),
    ):
        values = [_norm(report, name) for name in measured]
        if any(map(is_drawable, values)):
            draw_points(ax, [*values[:-1], math.nan], label, color, marker, hollow=label == "before")
            whole = values[-1] if is_drawable(values[-1]) else math.nan
            ax.plot(len(values) - 1, whole, color=color, marker="s", markersize=5, linestyle="none",
                    markerfacecolor="none" if label == "before" else color)  # fmt: skip
    if len(measured) > 1:
        ax.axvline(len(measured) - 1.5, color=GREY, linewidth=0.6, linestyle=":")
    _label(ax, labels)
    return ax


def _label(ax: Axes, labels: list[str]) -> None:
    ax.set_ylabel("curvature ‖H‖", fontsize=LABEL_POINTS + 1)
    ax.set_xlabel("layer, in the order they run; the network last", fontsize=LABEL_POINTS + 1)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    step = max(1, math.ceil(len(labels) / _NAMES_SHOWN))
    inches = inches_wide(ax)
    places = sorted({*range(0, len(labels), step), len(labels) - 1})
    names = [labels[place] for place in places]
    ax.set_xticks(places, names, rotation=0 if fit_side_by_side(names, inches) else 90)
    ax.tick_params(labelsize=LABEL_POINTS)
    for tick in ax.get_xticklabels():
        tick.set_parse_math(False)  # a "$" in a name is a "$"
    place_legend(ax, columns=3)


def _is_measured(result: Initialization, name: str) -> bool:
    return any(row_of(report, name) is not None for report in (result.before, result.after))


def _norm(report: CurvatureReport | None, name: str) -> float:
    row = row_of(report, name)
    return math.nan if row is None else row.norm


if __name__ == "__main__":
    import sys

    import matplotlib

    from hessinit.present.initialization_example import example_initialization

    matplotlib.use("Agg")
    path = sys.argv[1] if len(sys.argv) > 1 else "initialization.png"
    figure = example_initialization().plot().figure
    figure.savefig(path, dpi=200)  # type: ignore[union-attr]
    sys.stdout.write(f"{path}\n")
