"""The arena's scores as pictures. `python benchmarks/arena/figures.py FOLDER` draws made-up ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if __name__ == "__main__":  # as `arena.figures` it is found already
    sys.path.append(str(Path(__file__).parents[1]))

from arena.outcomes import Outcome
from arena.scores import divergences, mean_ranks, rank_errors, regret
from hessinit.present.document import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREY = COLORS["blue"], COLORS["grey"]
_LARGEST = 0.3  # regret at which the colours end


def draw_regret(
    outcomes: Sequence[Outcome], scheme: str, ours: Collection[str], ax: Axes | None = None
) -> Axes:
    """Tasks × rates: how far `scheme` is behind the best competitor (red) or ahead (blue), in percent.

    A cell in which nothing trains is grey; a cross marks where `scheme` fails and a competitor trains.
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(6.5, 0.9 + 0.27 * len(outcomes)), layout="constrained")
    columns = max(len(outcome.rates) for outcome in outcomes)
    cells = regret(outcomes, scheme, ours).cells
    failed = divergences(outcomes, scheme, ours)
    values = np.full((len(outcomes), columns), np.nan)
    for row, outcome in enumerate(outcomes):
        for column, rate in enumerate(outcome.rates):
            value = cells.get((outcome.task, rate), np.nan)
            values[row, column] = value
            cross = "✕ " if (outcome.task, rate) in failed else ""
            text = "nothing trains" if np.isnan(value) else f"{cross}{100 * value:+.0f} %"
            dark = abs(value) > 0.5 * _LARGEST
            ax.text(
                column, row - 0.13, text, ha="center", va="center", fontsize=7, color="w" if dark else "k"
            )
            ax.text(
                column,
                row + 0.28,
                f"{rate:g}",
                ha="center",
                va="center",
                fontsize=5,
                color="w" if dark else GREY,
            )
    ax.set_facecolor("#dddddd")
    ax.imshow(values, cmap="RdBu_r", vmin=-_LARGEST, vmax=_LARGEST, aspect="auto")
    ax.set_yticks(range(len(outcomes)), [outcome.task for outcome in outcomes], fontsize=8)
    ax.set_xticks([0, columns - 1], ["lowest rate", "highest rate"], fontsize=8)
    ax.tick_params(length=0)
    ax.set_title(f"{scheme}: loss against the best competitor at the same rate", fontsize=9)
    return ax


def draw_ranks(outcomes: Sequence[Outcome], ours: Collection[str], ax: Axes | None = None) -> Axes:
    """Mean rank of every scheme, the best on top, with its standard error over seeds."""
    ranks = mean_ranks(outcomes)
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(5, 0.8 + 0.24 * len(ranks)), layout="constrained")
    places = range(len(ranks))
    found = rank_errors(outcomes)
    errors = [found[scheme] for scheme in ranks]
    ax.barh(
        places,
        [each.rank for each in ranks.values()],
        xerr=None if np.isnan(errors).any() else errors,
        color=[BLUE if scheme in ours else "#bbbbbb" for scheme in ranks],
        error_kw={"linewidth": 0.8, "ecolor": GREY},
    )
    most = max(each.cells for each in ranks.values())
    names = [
        scheme if each.cells == most else f"{scheme} ({each.cells} cells)" for scheme, each in ranks.items()
    ]
    ax.set_yticks(places, names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel(f"mean rank over {most} cells (task, rate); 1 is best", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


LINES = {  # in the colours of the demo
    "default": ("PyTorch's own weights", BLUE),
    "he": ("He", COLORS["orange"]),
    "lsuv": ("LSUV", COLORS["green"]),
}


def draw_rates(
    outcomes: Sequence[Outcome], ours: str, file: Path, titles: Mapping[str, str], columns: int = 3
) -> None:
    """Loss against learning rate, a panel for each task; a cross marks where a start learns nothing."""
    from matplotlib.figure import Figure

    rows = -(-len(outcomes) // columns)
    figure = Figure(figsize=(3.2 * columns, 0.5 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels[len(outcomes) :]:
        panel.axis("off")
    for panel, outcome in zip(panels, outcomes, strict=False):
        lines = {**LINES, ours: ("hessinit", COLORS["vermilion"])}
        for scheme in (scheme for scheme in lines if scheme in outcome.schemes):
            label, color = lines[scheme]
            losses, wide = outcome.means[outcome.row(scheme)], 2.2 if scheme == ours else 1.2
            panel.plot(outcome.rates, losses, color=color, label=label, linewidth=wide, marker=".")
            failed = outcome.fails[outcome.row(scheme)].any(1)
            panel.plot(np.array(outcome.rates)[failed], losses[failed], "x", color=color)
        lowest, top = outcome.means.min(), min(1.2 * outcome.chance, 1.2 * outcome.means.max())
        if outcome.chance < top:
            panel.axhline(outcome.chance, color="k", linewidth=0.5, linestyle=":")
        panel.set(xscale="log", yscale="log", ylim=(0.9 * lowest, top))
        panel.set_title(titles.get(outcome.task, outcome.task), fontsize=9)
        ticks = [tick for tick in (0.2, 0.3, 0.4, 0.5, 0.7, 1, 2) if 0.9 * lowest <= tick <= top]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_xticks(outcome.rates, [f"{rate:g}" for rate in outcome.rates])
        panel.minorticks_off()
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("learning rate", fontsize=9)
    figure.supylabel("training loss at the end", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)


def draw(outcomes: Sequence[Outcome], ours: str, file: Path) -> None:
    """Both pictures side by side, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 0.32 * len(outcomes)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_regret(outcomes, ours, {ours}, left)
    draw_ranks(outcomes, {ours}, right)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    from arena.example import made_up_outcomes

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    outcomes, ours, _ = made_up_outcomes()
    draw_regret(outcomes, ours[0], ours).figure.savefig(folder / "regret.png", dpi=130)
    draw_ranks(outcomes, ours).figure.savefig(folder / "ranks.png", dpi=130)
