"""The columns of a comparison's table, as plain text: what the terminal and the page both show."""

from __future__ import annotations

import math

from hessinit.present.comparison_sentences import format_result
from hessinit.present.comparison_standing import Result, best_start, ordered_starts
from hessinit.present.grid import Column
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison

BEST = "bold green"
DIVERGED = "red"
NOTHING = "–"


def comparison_columns(comparison: Comparison, *, short: bool = False) -> list[Column]:
    """A column for each rate, then ‖H‖ at the start and the best rate; for a sweep, the layers' norms.

    A `short` one leaves out standard errors and writes ✗ for "diverged".
    """
    if comparison.kind == "sweep":
        return _sweep_columns(comparison)
    starts = ordered_starts(comparison)
    columns = [Column("start", tuple(map(printable, starts)), 9, is_number=False)]
    for rate, importance in zip(comparison.learning_rates, _importances(comparison), strict=True):
        heading = f"lr {format_number(rate)}"
        columns.append(_loss_column(comparison, starts, rate, heading, importance, short))
    norms = tuple(_write_norms(comparison, start) for start in starts)
    if any(norms):
        columns.append(Column("‖H‖", norms, 4))
    best = tuple(_write_best_rate(comparison, start) for start in starts)
    columns.append(Column("best lr", best, 8))
    return columns


def _sweep_columns(comparison: Comparison) -> list[Column]:
    (rate,) = comparison.learning_rates
    starts = comparison.schemes
    columns = [Column("std", tuple(f"{std:g}" for std in comparison.stds), 9)]
    for layer in comparison.layers:
        norms = tuple(_write(comparison.norm(start, rate, layer)) for start in starts)
        columns.append(Column(printable(layer), norms, 4))
    network = [comparison.norm(start, rate) for start in starts]
    if not all(map(math.isnan, network)):
        columns.append(Column("network", tuple(map(_write, network)), 6))
        columns.append(Column("lr·‖H‖", tuple(_write(rate * norm) for norm in network), 7))
    heading = f"loss after {comparison.steps:,} steps"
    columns.append(_loss_column(comparison, starts, rate, heading, 8))
    return columns


def _loss_column(
    comparison: Comparison,
    starts: tuple[str, ...],
    rate: float,
    heading: str,
    importance: int,
    short: bool = False,
) -> Column:
    best = best_start(comparison, rate)
    cells, styles = [], {}
    for start in starts:
        cell = write_cell(comparison, start, rate, short=short)
        if start == best:
            cell += "*"
            styles[cell] = BEST
        elif comparison.diverged(start, rate):
            styles[cell] = DIVERGED
        cells.append(cell)
    return Column(heading, tuple(cells), importance, styles=styles)


def write_cell(comparison: Comparison, start: str, rate: float, *, short: bool = False) -> str:
    """The final loss of a start at a rate, or that it diverged, and how often."""
    runs = [run for run in comparison.runs_of(start, rate) if run.applies]
    if not runs:
        return NOTHING
    diverged = comparison.diverged(start, rate)
    if diverged:
        word = "✗" if short else "diverged"
        return word if len(runs) == 1 else f"{word} {diverged}/{len(runs)}"
    error = math.nan if short else comparison.error(start, rate)
    return format_result(Result(comparison.loss(start, rate), error))


def _importances(comparison: Comparison) -> list[int]:
    """A narrow terminal leaves out the rates farthest from the best one, and never that."""
    rates = [comparison.best_rate(start) for start in ordered_starts(comparison)[:1]]
    best = comparison.learning_rates.index(rates[0]) if rates and not math.isnan(rates[0]) else 0
    return [8 if at == best else max(1, 7 - abs(at - best)) for at in range(len(comparison.learning_rates))]


def _write_norms(comparison: Comparison, start: str) -> str:
    if start not in comparison.rate_dependent:
        return _write(comparison.norm(start))
    norms = [comparison.norm(start, rate) for rate in comparison.learning_rates]
    known = [norm for norm in norms if not math.isnan(norm)]
    if not known:
        return ""
    low, high = _write(min(known)), _write(max(known))
    return low if low == high else f"{low} … {high}"


def _write_best_rate(comparison: Comparison, start: str) -> str:
    rate = comparison.best_rate(start)
    return NOTHING if math.isnan(rate) else format_number(rate)


def _write(number: float) -> str:
    return "" if math.isnan(number) else format_number(number)
