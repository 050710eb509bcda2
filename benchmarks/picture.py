"""The results as one picture. `python benchmarks/picture.py` draws the recorded run again."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from problems import ACCURACY
from reading import (
    RACES,
    RIGHT,
    count_text,
    fitted_exponent,
    gradient_seconds,
    growth,
    race_contestants,
    race_problems,
)

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

# cividis reads the same with and without colour-blindness; what is wrong is marked by shape as well.
_ERRORS = LogNorm(1e-6, 1, clip=True)
_COLOURS = matplotlib.colormaps["cividis_r"]
_LEAST_ERROR = 1e-9


def draw(results: dict, path: Path) -> None:
    cells = results["cells"]
    columns = 5
    figure = pyplot.figure(figsize=(19, 14), layout="constrained")
    grid = figure.add_gridspec(3, columns, height_ratios=[9, 7, 8])
    for row, (curvature, activation, title) in enumerate(RACES):
        first = None
        for column, problem in enumerate(race_problems(cells, activation)):
            axes = figure.add_subplot(grid[row, column], sharex=first, sharey=first)
            first = first or axes
            _draw_race(axes, cells, curvature, problem, title, column == 0)
    _draw_accuracy(figure.add_subplot(grid[2, :3]), cells)
    for offset, kind in enumerate(("depth", "batch")):
        _draw_growth(figure.add_subplot(grid[2, 3 + offset]), cells, kind)
    run = results["run"]
    figure.suptitle(
        "Cost and error of every layer's curvature norm, all layers, tolerance 1e-3.   "
        f"{run['hardware']['processor']}, {run['threads']} threads, torch {run['versions']['torch']}, "
        f"seed {run['seed']}\n"
        "1 gradient = forward + backward of the batch.   filled circle: right, by fp64 reference; "
        f"cross: some layer off by more than {RIGHT:g}; triangle: stopped at the time cap, "
        "so a lower bound; dotted line: 10 gradients"
    )
    mappable = matplotlib.cm.ScalarMappable(_ERRORS, _COLOURS)
    figure.colorbar(mappable, ax=figure.axes, label="largest relative error", pad=0.01, aspect=60)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_race(axes: Axes, cells: dict, curvature: str, problem: str, title: str, labelled: bool) -> None:
    names = race_contestants(cells, curvature)
    for height, name in enumerate(names):
        cell = cells.get(f"{problem}/{curvature}/{name}", {"status": "missing"})
        if cell["status"] in ("missing", "error") or "gradients" not in cell:
            text = {"missing": "not run", "error": "fails"}.get(cell["status"], "not ready")
            axes.annotate(text, (1.3, height), va="center", fontsize=9, color="0.4", style="italic")
            continue
        error, capped = cell.get("max_error"), cell["status"] == "capped"
        wrong = error is not None and not error <= RIGHT
        marker = ">" if capped else "X" if wrong else "o"
        colour = "0.6" if error is None else _COLOURS(_ERRORS(max(error, _LEAST_ERROR)))
        axes.plot(cell["gradients"], height, marker, color=colour, markeredgecolor="black", markersize=10)
        text = f"{'> ' if capped else ''}{count_text(cell['gradients'])}"
        text += "" if error is None else f"  err {error:.0e}"
        left = cell["gradients"] > 200
        axes.annotate(
            text,
            (cell["gradients"], height),
            xytext=(-9 if left else 9, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
        )
    axes.set(xscale="log", xlim=(1, 2e4), xlabel="gradients", ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelleft=labelled, length=0)
    axes.grid(axis="x", color="0.9")
    axes.axvline(10, color="0.5", linestyle=":")
    milliseconds = gradient_seconds(cells, problem) * 1e3
    axes.set_title(f"{title}\n{problem.rsplit('-', 1)[0]} (gradient {milliseconds:.3g} ms)", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_accuracy(axes: Axes, cells: dict) -> None:
    names = race_contestants(cells, "gauss-newton")
    columns = [(problem, curvature) for curvature in ("gauss-newton", "hessian") for problem in ACCURACY]
    for x, (problem, curvature) in enumerate(columns):
        for y, name in enumerate(names):
            cell = cells.get(f"{problem}/{curvature}/{name}")
            text, colour, ink = "–", "white", "0.4"
            if cell is not None and cell["status"] == "error":
                text = "fails"
            elif cell is not None and "max_error" in cell:
                shade = _ERRORS(max(cell["max_error"], _LEAST_ERROR))
                colour, ink = _COLOURS(shade), "white" if shade > 0.5 else "black"
                text = f"{cell['max_error']:.0e}"
                text = text if cell["max_error"] <= RIGHT else f"× {text}"
            axes.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=8)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(names) - 0.5, -0.5))
    short = {"gauss-newton": "GN", "hessian": "Hessian"}
    labels = [f"{problem}\n{short[curvature]}" for problem, curvature in columns]
    axes.set_xticks(range(len(columns)), labels, fontsize=8, rotation=30)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = f"hard cases: largest relative error of a layer (× above {RIGHT:g}; – not offered)"
    axes.set_title(title, fontsize=10)


def _draw_growth(axes: Axes, cells: dict, kind: str) -> None:
    styles = [("hessinit", "#0072b2"), ("PyHessian", "#d55e00")]
    for name, colour in styles:
        for curvature, marker in [("gauss-newton", "o"), ("hessian", "s")]:
            rows = growth(cells, kind, curvature, name)
            if len(rows) < 2:
                continue
            sizes, seconds, _ = zip(*rows, strict=True)
            power = fitted_exponent(sizes, seconds)
            axes.set_xscale("log")
            label = f"{name}, {curvature}: {kind}^{power:.2f}"
            line = "-" if curvature == "gauss-newton" else "--"
            axes.plot(sizes, seconds, marker=marker, linestyle=line, color=colour, label=label)
            axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(yscale="log", xlabel=kind, ylabel="seconds")
    axes.set_title(f"growth with {kind} (MLP, width 128)", fontsize=10)
    axes.minorticks_off()
    axes.grid(color="0.9")
    if axes.lines:
        axes.set_ylim(top=6 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    folder = Path(__file__).parent / "results"
    draw(json.loads((folder / "curvature_cost.json").read_text()), folder / "curvature_cost.png")
