"""The arena's scores as tables on stdout. `python benchmarks/arena/report.py` shows made-up ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as `arena.report` it is found already
    sys.path.append(str(Path(__file__).parents[1]))

from arena.outcomes import Outcome, all_schemes
from arena.scores import (
    ZeroTuning,
    best_of_grid,
    best_rate_ranks,
    divergences,
    mean_ranks,
    rank_errors,
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
    table = _table(
        "\nAt our suggested rate, no tuning",
        ["task", "loss", "best of the grid", "excess", "by"],
    )
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
