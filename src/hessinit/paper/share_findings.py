"""What the restarts of Tables 2 and 3 say: shares within each relative error, as tables and in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from hessinit.paper.experiment import Setting
from hessinit.paper.printed import judged_cell
from hessinit.paper.quadratic_shares import (
    APPROXIMATION,
    CASES,
    EXACT,
    SharesTable,
    gather,
    relative_error,
    share_within,
)
from hessinit.results.reproduction import Cell, Findings, Table
from hessinit.results.result import Plain

Ratios = Mapping[str, Mapping[str, Sequence[float]]]  # by case and layer
OTHER = {APPROXIMATION: EXACT, EXACT: APPROXIMATION}
ADDED = ("relu", "gelu", "silu")
TITLES = {
    "tanh": "tanh, mini-batches of 32",
    "sgd": "SGD: tanh, batches of one",
    "added": "Other activations, mini-batches of 32",
}


def conclude(table: SharesTable, setting: Setting, results: Mapping[str, Plain]) -> Findings:
    """The paper's table first, then the other way to divide, SGD, and other activations both ways."""
    ratios = {case: gather(table, setting, case, results) for case in CASES}
    usual, other = table.relative_to, OTHER[table.relative_to]
    tables = [
        paper_table(table, setting, ratios["tanh"]),
        further_table(table, ratios, "tanh", other),
        *(further_table(table, ratios, "sgd", way) for way in (usual, other)),
        *(further_table(table, ratios, "added", way) for way in (usual, other)),
    ]
    return Findings(tables=tuple(tables), sentences=tuple(say(table, ratios, tables[0])))


def paper_table(table: SharesTable, setting: Setting, ratios: Mapping[str, Sequence[float]]) -> Table:
    cells = []
    for layer, row in table.rows.items():
        for tolerance in table.tolerances:
            share, error = share_within(ratios[layer], tolerance, table.relative_to)
            cells.append(
                judged_cell(
                    table.experiment,
                    setting.data,
                    row,
                    column(tolerance),
                    share,
                    error=error,
                    n=len(ratios[layer]),
                    unit="%",
                )
            )
    note = (
        "The share of restarts in which the quadratic form by Theorem 1 along a random direction is within "
        f"rtol of the exact one, |exact − approximation| / |{table.relative_to.split()[0]}| ≤ rtol; ± is the "
        "binomial standard error."
    )
    return make_table(table, "tanh", table.relative_to, tuple(table.rows.values()), cells, note)


def further_table(table: SharesTable, ratios: Ratios, kind: str, relative_to: str) -> Table:
    """Shares beside which nothing is printed; `kind` is a key of `TITLES`."""
    cells = []
    for case in ADDED if kind == "added" else (kind,):
        for layer, row in table.rows.items():
            name = f"{CASES[case].label}: {row}" if kind == "added" else row
            for tolerance in table.tolerances:
                share, error = share_within(ratios[case][layer], tolerance, relative_to)
                n = len(ratios[case][layer])
                cells.append(Cell(row=name, column=column(tolerance), ours=share, error=error, n=n, unit="%"))
    rows = tuple(dict.fromkeys(cell.row for cell in cells))
    return make_table(table, kind, relative_to, rows, cells)


def make_table(
    table: SharesTable, kind: str, relative_to: str, rows: tuple[str, ...], cells: Sequence[Cell],
    note: str = "",
) -> Table:  # fmt: skip
    return Table(
        title=f"{TITLES[kind]}; errors relative to the {relative_to}",
        corner="Layer",
        rows=rows,
        columns=tuple(map(column, table.tolerances)),
        cells=tuple(cells),
        note=note,
    )


def column(tolerance: float) -> str:
    return f"rtol ≤ {tolerance:g}"


def say(table: SharesTable, ratios: Ratios, first: Table) -> Iterator[str]:
    """The findings in whole sentences."""
    n = first.cells[0].n
    yield from say_fit(table, ratios, first)
    yield say_exactness(ratios["relu"], n)
    front = next(iter(table.rows))
    errors = {case: median_error(ratios[case][front]) for case in CASES}
    yield (
        f"In {table.rows[front]} the median of |exact − approximation| / |approximation| over {n} restarts "
        f"is {errors['tanh']:.2f} for tanh, {errors['gelu']:.2f} for GELU and {errors['silu']:.2f} for SiLU "
        f"with mini-batches of 32, and {errors['sgd']:.2f} for tanh with single images. Theorem 1 leaves out "
        "a term in f'' times the loss gradient: f''(0) is 0 for tanh and not for GELU and SiLU, and a "
        "mini-batch averages the loss gradient, whose sign changes with the label."
    )
    signs = statistics.fmean(ratio < 0 for ratio in ratios["tanh"][front])
    yield (
        f"In {100 * signs:.0f} % of the restarts the exact form of {table.rows[front]} is negative, which "
        "the approximation, a square, never is."
    )


def say_exactness(relu: Mapping[str, Sequence[float]], n: int) -> str:
    off = max(abs(ratio - 1) for ratios in relu.values() for ratio in ratios)
    if off > 1e-3:
        return f"With ReLU the two should be equal, and differ by up to {off:.1e} of the approximation."
    digits = "to seven digits" if off == 0 else f"up to {off:.0e} of it"
    return (
        f"With ReLU the approximation is the Hessian itself, as Theorem 1 says: over {n} restarts the two "
        f"are equal in all layers, {digits}."
    )


def say_fit(table: SharesTable, ratios: Ratios, first: Table) -> Iterator[str]:
    """Whether the printed numbers come out, and by which way to divide."""
    if first.cells[0].within is None:
        return  # the printed shares are of other data
    usual, other = table.relative_to, OTHER[table.relative_to]
    yield (
        "The paper does not say what its relative error is relative to. Our shares are on average "
        f"{mean_distance(table, ratios, first, usual):.0f} points from the printed ones when it is the "
        f"{usual}, and {mean_distance(table, ratios, first, other):.0f} when it is the {other}."
    )


def mean_distance(table: SharesTable, ratios: Ratios, first: Table, relative_to: str) -> float:
    """From the printed shares, in points."""
    shares = {
        (row, column(tolerance)): share_within(ratios["tanh"][layer], tolerance, relative_to)[0]
        for layer, row in table.rows.items()
        for tolerance in table.tolerances
    }
    return statistics.fmean(
        abs(shares[cell.row, cell.column] - cell.paper) for cell in first.cells if cell.paper is not None
    )


def median_error(ratios: Sequence[float]) -> float:
    return statistics.median(relative_error(ratio, APPROXIMATION) for ratio in ratios)
