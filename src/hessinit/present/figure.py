"""The report as a picture: curvature over depth. `python -m hessinit.present.figure [FILE]` draws one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hessinit.present.words import format_number, printable
from hessinit.results.curvature_report import FLAT_BELOW, SHARP_ABOVE, CurvatureReport, LayerCurvature

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito (2008): told apart by every common kind of colour vision. Markers differ too, for print in grey.
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
DRAWABLE = (1e-100, 1e100)  # far beyond this the ticks and margins of a logarithmic axis overflow
LABEL_POINTS = 7
LONGEST_LABEL = 36
LETTER = 0.6 * LABEL_POINTS / 72  # inches: how wide a letter is, about


def draw_norms(report: CurvatureReport, ax: Axes | None = None) -> Axes:
    """Draw every layer's norm over depth, the band that counts as ok, and the network's norm as a line.

    Norms that a logarithmic axis cannot hold (0, inf, nan) are drawn at its edge and named.
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=figure_size(report, 2.9), layout="constrained")
    ax.set_yscale("log")
    band = f"ok: {format_number(FLAT_BELOW)} to {format_number(SHARP_ABOVE)}"
    ax.axhspan(FLAT_BELOW, SHARP_ABOVE, color=GREEN, alpha=0.13, linewidth=0, label=band)
    if is_drawable(report.network.norm):
        label = "network" if report.network_measured else "network, at least"
        ax.axhline(report.network.norm, color=GREY, linestyle="--", linewidth=1, label=label)
    _draw_bars(ax, report.layers)
    main = "Gauss-Newton" if report.curvature == "gauss-newton" else "exact Hessian"
    draw_points(ax, [layer.norm for layer in report], main, BLUE, "o")
    if any(layer.approximation is not None for layer in report):
        values = [math.nan if row.approximation is None else abs(row.approximation.value) for row in report]
        draw_points(ax, values, "Gauss-Newton", VERMILION, "D", hollow=True)
    _include_band(ax, report)
    _draw_edges(ax, report.layers)
    label_axes(ax, report)
    return ax


def figure_size(
    report: CurvatureReport, height: float, inches_a_layer: float = 0.175, margins: float = 0.7
) -> tuple[float, float]:
    """From 3.5 inches, a column of a two-column paper, to 7, a page; names on end need more height."""
    width = min(max(3.5, inches_a_layer * len(report)), 7.0)
    names = shorten([printable(name) for name in report.names])
    on_end = 0.0 if fit_side_by_side(names, width - margins) else LETTER * max(map(len, names))
    return width, height + on_end


def draw_points(
    ax: Axes, values: Sequence[float], label: str, color: str, marker: str, hollow: bool = False
) -> None:
    drawn = [value if is_drawable(value) else math.nan for value in values]
    ax.plot(
        range(len(drawn)),
        drawn,
        color=color,
        marker=marker,
        markersize=6 if hollow else 4,
        markerfacecolor="none" if hollow else color,
        linestyle="none" if hollow else "-",
        linewidth=0.6,
        label=label,
    )


def _draw_bars(ax: Axes, layers: Sequence[LayerCurvature]) -> None:
    """From the smallest to the largest batch where there are several, else as far as the error reaches."""
    labelled = False
    for position, layer in enumerate(layers):
        if layer.spread is not None and len(layer.spread.norms) > 1:
            low, high, label = layer.spread.smallest, layer.spread.largest, "range over batches"
        else:
            low, high, label = layer.norm - layer.error, layer.norm + layer.error, "error"
        if not is_drawable(high) or high <= low:
            continue
        low = max(low, high * 1e-3, DRAWABLE[0])
        visible = high / low > 1.05
        ax.vlines(
            position,
            low,
            high,
            color=BLUE,
            alpha=0.45,
            linewidth=3,
            label=label if visible and not labelled else "_nolegend_",
        )
        labelled = labelled or visible


def _draw_edges(ax: Axes, layers: Sequence[LayerCurvature]) -> None:
    beyond = [(at, layer) for at, layer in enumerate(layers) if not is_drawable(layer.norm)]
    for at, layer in beyond:
        low = layer.norm < DRAWABLE[0]
        ax.plot(
            at,
            0.03 if low else 0.97,
            transform=ax.get_xaxis_transform(),
            marker="v" if low else "^",
            color=VERMILION,
            linestyle="none",
            clip_on=False,
        )
        ax.annotate(
            format_number(layer.norm),
            (at, 0.03 if low else 0.97),
            xycoords=ax.get_xaxis_transform(),
            xytext=(0, 6 if low else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if low else "top",
            fontsize=LABEL_POINTS,
            color=VERMILION,
        )


def _include_band(ax: Axes, report: CurvatureReport) -> None:
    """Keep the whole band in view, and some room around it, whatever the norms are."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, FLAT_BELOW / 3), max(high, SHARP_ABOVE * 3))
    ax.set_xlim(-0.6, max(len(report), 1) - 0.4)


def label_axes(ax: Axes, report: CurvatureReport) -> None:
    ax.set_ylabel("curvature ‖H‖", fontsize=LABEL_POINTS + 1)
    ax.set_xlabel("layer, in the order they run", fontsize=LABEL_POINTS + 1)
    name_layers(ax, report)
    place_legend(ax)


def name_layers(ax: Axes, report: CurvatureReport) -> None:
    inches = inches_wide(ax)
    room = max(1, int(inches * 72 / (LABEL_POINTS * 1.15)))
    step = max(1, math.ceil(len(report) / room))
    names = shorten([printable(name) for name in report.names])[::step]
    rotation = 0 if fit_side_by_side(names, inches) else 90
    ax.set_xticks(range(0, len(report), step), names, rotation=rotation)
    ax.tick_params(labelsize=LABEL_POINTS)
    for tick in ax.get_xticklabels():
        tick.set_parse_math(False)  # a "$" in a name is a "$"


def place_legend(ax: Axes, columns: int | None = None) -> None:
    """Above the axes, where it hides nothing; one line of it is as wide as they are."""
    above: dict[str, Any] = {"bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2, "frameon": False}
    columns = columns or max(2, int(inches_wide(ax) / 1.2))
    ax.legend(loc="lower left", ncols=columns, fontsize=LABEL_POINTS, **above)


def inches_wide(ax: Axes) -> float:
    return float(ax.get_window_extent().width / ax.figure.dpi)


def fit_side_by_side(names: Sequence[str], inches: float) -> bool:
    return not names or (max(map(len, names)) + 1) * LETTER * len(names) <= inches


def shorten(names: Sequence[str]) -> list[str]:
    """Cut the middle out of long names, unless that makes two of them look the same."""
    half = LONGEST_LABEL // 2
    short = [name if len(name) <= LONGEST_LABEL else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def is_drawable(norm: float) -> bool:
    return DRAWABLE[0] <= norm <= DRAWABLE[1]


if __name__ == "__main__":
    import sys

    import matplotlib

    from hessinit.present.example import example_report

    matplotlib.use("Agg")
    path = sys.argv[1] if len(sys.argv) > 1 else "curvature.png"
    figure = example_report().plot().figure
    figure.savefig(path, dpi=200)  # type: ignore[union-attr]
    sys.stdout.write(f"{path}\n")
