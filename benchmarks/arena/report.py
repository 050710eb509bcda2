"""The arena's scores as tables on stdout. `python benchmarks/arena/report.py` shows made-up ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as `arena.report` it is found already
    sys.path.append(str(Path(__file__).parents[1]))

from arena.outcomes import Outcome, all_schemes
from arena.scores import (
    Reference,
    ZeroTuning,
    best_of_grid,
    best_rate_ranks,
    divergences,
    mean_ranks,
    rank_errors,
    rate_robustness,
    regret,
    share_within,
    zero_tuning,
)
from hessinit.present.words import format_number

_WIDTH = 118


def show(
    outcomes: Sequence[Outcome],
    ours: Collection[str],
    at_own_rate: Mapping[str, Sequence[float]] | None = None,
    console: Console | None = None,
) -> None:
    """Print every score; `ours` and `at_own_rate` are those of `scores.zero_tuning`."""
    console = console or Console(width=_WIDTH, highlight=False)
    console.print(start_table(outcomes, ours))
    console.print(best_rate_table(outcomes, ours))
    _print_failures(console, outcomes, ours)
    if at_own_rate:
        rows = zero_tuning(outcomes, at_own_rate, ours)
        console.print(zero_tuning_table(rows))
        console.print(
            f"\nWithin 5 % of the best of the grid on {100 * share_within(rows):.0f} % of {len(rows)} tasks."
        )


def show_records(folder: Path) -> None:
    """Print the requirements, then every score of the tasks on record and of the new ones."""
    from arena.records import Arena
    from arena.tasks import GPU, OURS, RACED, RECORDED
    from arena.wanted import NEW, ROWS

    arena, console = Arena.load(folder), Console(width=150, highlight=False)
    table = Table("requirement", "now", "wanted", "got", "without development tasks", title="What must hold")
    for row in ROWS:
        table.add_row(row.text, row.now, row.wanted, row.got(arena), row.got(arena, development=False))
    console.print(table)
    frozen = list(arena.frozen.values())
    console.print(robustness_table("On record (hessinit: the former)", frozen, arena.references))
    for title, tasks in (("On record", RECORDED), ("Normalized, new", NEW), ("GPU set", GPU)):
        for start in (OURS, RACED):
            if found := arena.outcomes(tasks, start):
                console.print(robustness_table(f"{title}, {start}", found, arena.references, start))
                show(found, {start}, console=console)
    console.print(long_table(arena.runs))


def long_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """How long a gain lasts: held-out accuracy along the longer trainings, its mean over rates and seeds."""
    from arena.tasks import LONG

    parts = [f"{10 * part} %" for part in range(1, 11)]
    title = "\nLonger trainings: accuracy on held-out data by part of the steps"
    table = _table(title, ["task", "start", *parts])
    for task in LONG:
        for start in task.starts:
            found = [run.get("accuracies") or [] for run in runs.get(task.name, ()) if run["start"] == start]
            # A run that ended early guesses from there on.
            whole = [each + [math.exp(-task.chance)] * (task.looks - len(each)) for each in found]
            if whole:
                table.add_row(task.name, start, *(f"{100 * value:.1f}" for value in np.mean(whole, 0)))
    return table


def robustness_table(
    title: str, outcomes: Sequence[Outcome], references: Mapping[str, Reference], ours: str = "hessinit"
) -> Table:
    """Rate robustness of every start, of the best of the others picked anew at every rate, and of all."""
    names = all_schemes(outcomes)
    rows = {name: {name} for name in names}
    rows |= {"best other, picked at every rate": set(names) - {ours}, "best of all, picked": set(names)}
    found = {name: rate_robustness(outcomes, references, each) for name, each in rows.items()}
    table = _table(f"\nRate robustness, {len(outcomes)} tasks. {title}", ["start", "loss / best − 1"])
    for name in sorted(found, key=found.__getitem__):
        table.add_row(_marked(name, {ours}), f"{found[name]:.3f}")
    return table


def start_table(outcomes: Sequence[Outcome], ours: Collection[str]) -> Table:
    """One row a scheme: mean rank, regret, divergences, rank at its own best rate."""
    cells = sum(int(outcome.trainable.sum()) for outcome in outcomes)
    title = f"{len(outcomes)} tasks, {cells} cells (task, rate) in which some run trains"
    table = _table(
        title,
        [
            "scheme",
            "rank ± error",
            "cells",
            "regret",
            "wins as 0",
            "worst",
            "at",
            "diverged",
            "rank, own best rate",
        ],
    )
    own_best, errors = best_rate_ranks(outcomes), rank_errors(outcomes)
    for scheme, mean in mean_ranks(outcomes).items():
        against = regret(outcomes, scheme, ours)
        task, rate = against.worst_cell if against.cells else ("–", float("nan"))
        failed = divergences(outcomes, scheme, ours)
        table.add_row(
            _marked(scheme, ours),
            f"{mean.rank:.2f} ± {errors[scheme]:.2f}",
            str(mean.cells),
            percent(against.mean),
            percent(against.mean_of_losses),
            percent(against.worst),
            f"{task}, {rate:g}",
            f"{len(failed)} ({sum(map(len, failed.values()))} runs)" if failed else "0",
            f"{own_best[scheme].rank:.2f}",
        )
    return table


def best_rate_table(outcomes: Sequence[Outcome], ours: Collection[str]) -> Table:
    """One row a task: each scheme's loss at its own best rate, the best marked."""
    schemes = all_schemes(outcomes)
    table = _table("\nLoss at the scheme's own best rate (* the lowest; – does not apply)", ["task"])
    for scheme in schemes:
        table.add_column(_marked(scheme, ours).replace("+", "\n+"), justify="right")
    for outcome in outcomes:
        best = best_of_grid(outcome)
        least = min(loss for loss, _ in best.values())
        texts = [
            _loss_text(best[scheme][0], least, outcome.chance) if scheme in best else "–"
            for scheme in schemes
        ]
        table.add_row(outcome.task, *texts)
    return table


def _loss_text(loss: float, least: float, chance: float) -> str:
    if loss >= chance:
        return "chance "
    return format_number(loss) + ("*" if loss == least else " ")


def _print_failures(console: Console, outcomes: Sequence[Outcome], ours: Collection[str]) -> None:
    for scheme in ours:
        for (task, rate), seeds in divergences(outcomes, scheme, ours).items():
            console.print(f"{scheme} fails where another trains: {task} at {rate:g}, {len(seeds)} seeds")


def zero_tuning_table(rows: Sequence[ZeroTuning]) -> Table:
    """One row a task: the loss at our suggested rate against the best of the grid."""
    table = _table("\nAt our suggested rate, no tuning", ["task", "loss", "best of the grid", "excess", "by"])
    for row in rows:
        by = f"{row.rival} at {row.rate:g}"
        table.add_row(row.task, format_number(row.loss), format_number(row.best), percent(row.excess), by)
    return table


def percent(share: float) -> str:
    """
    >>> percent(0.0312), percent(-0.2), percent(41.0)
    ('+3.1 %', '-20.0 %', '+4100 %')
    """
    return f"{100 * share:+.1f} %" if abs(share) < 10 else f"{100 * share:+.0f} %"


def _marked(scheme: str, ours: Collection[str]) -> str:
    return f"» {scheme}" if scheme in ours else scheme


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    return table


if __name__ == "__main__":
    from arena.example import made_up_outcomes

    print("Made-up outcomes: nothing here was measured.")
    show(*made_up_outcomes())
