"""Quadratic forms in a terminal. `python -m hessinit.present.quadratic_table` shows some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.grid import Column, build_grid, fit, name_left_out, render, terminal_width
from hessinit.present.words import format_number, format_ratio, format_times, printable
from hessinit.results.estimates import Spread
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms

SHARES = (0.5, 1.0, 1.5)  # the columns of the paper's Table 2
GOOD = 0.01  # "agree": within 1 %

_ONE = {
    "random": "a random direction g of length 1",
    "gradient": "the loss gradient g",
    "given": "the given direction g",
}
_SEVERAL = {"random": "random directions g of length 1", "given": "given directions g"}


def render_forms(forms: QuadraticForms, width: int | None = None, color: bool = False) -> str:
    """Write the forms as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(form_renderables(forms, columns), columns, color=color)


def form_renderables(forms: QuadraticForms, width: int) -> Iterator[RenderableType]:
    """Give the parts to a rich console of that width: the table, then what it means."""
    columns, left_out = fit(_build_columns(forms), width)
    yield build_grid(columns, width)
    yield Text()
    yield Text(_explain(forms))
    yield Text(_conclude(forms))
    yield Text(_describe_cost(forms))
    for note in forms.notes:
        yield Text(f"Note: {printable(note)}")
    yield from name_left_out(left_out, width)


def _build_columns(forms: QuadraticForms) -> list[Column]:
    def cells(write: Callable[[QuadraticForm], str]) -> tuple[str, ...]:
        return tuple(map(write, forms))

    columns = [
        Column("layer", cells(_write_name), 9, is_number=False),
        Column("weight", cells(lambda row: str(row.shape)), 4, is_number=False),
        Column("exact", cells(lambda row: _write_mean(row.exact)), 9),
        Column("Theorem 1", cells(lambda row: _write_mean(row.theorem1)), 9),
        Column("ratio", cells(lambda row: format_ratio(row.ratio)), 8),
    ]
    if forms.draws > 1:
        for rtol in SHARES:
            shares = tuple(f"{100 * row.within(rtol):.0f} %" for row in forms)
            columns.append(Column(f"≤{rtol:g}", shares, 7))
    return columns


def _write_name(row: QuadraticForm) -> str:
    return " = ".join(printable(name) for name in (row.name, *row.aliases))


def _write_mean(values: tuple[float, ...]) -> str:
    spread = Spread(values)
    error = spread.standard_error
    mean = format_number(spread.mean)
    return mean if math.isnan(error) else f"{mean} ± {format_number(error, 2)}"


def _explain(forms: QuadraticForms) -> str:
    meaning = "exact, and by Theorem 1 (vᵀH_z v, v the first-order change of the output along g)"
    if forms.draws == 1:
        return f"gᵀHg in each layer along {_ONE[forms.directions]}: {meaning}."
    return (
        f"gᵀHg in each layer along {forms.draws} {_SEVERAL[forms.directions]}: {meaning}; mean ± standard "
        "error. ≤0.5: the share of directions on which the two differ by at most half of Theorem 1's value."
    )


def _conclude(forms: QuadraticForms) -> str:
    if all(row.within(GOOD) == 1 for row in forms):
        return "Theorem 1 and the exact form agree within 1 % on every layer."
    row = min(forms, key=lambda row: (row.within(SHARES[0]), row.within(SHARES[1]), -_farness(row)))
    name = printable(row.name)
    if math.isnan(row.ratio):
        return f"The numbers of {name} overflow; pass dtype=torch.float64."
    if math.isinf(row.ratio):
        return f"Theorem 1 gives 0 on {name}, and the exact form does not."
    factor = f"{format_times(row.ratio)} times it"
    if forms.draws == 1:
        return f"Theorem 1 is farthest off on {name}: the exact form is {factor}."
    share = f"{100 * row.within(SHARES[0]):.0f} %"
    return (
        f"Theorem 1 is farthest off on {name}: the exact form is within 50 % of it on {share} of the "
        f"directions, and on average {factor}."
    )


def _farness(row: QuadraticForm) -> float:
    """How far the ratio is from 1, where 2 and 1/2 are equally far and a wrong sign is farther."""
    return abs(math.log(row.ratio)) if 0 < row.ratio < math.inf else math.inf


def _describe_cost(forms: QuadraticForms) -> str:
    count = f"{len(forms)} layer{'' if len(forms) == 1 else 's'}"
    spent = f" in {format_number(forms.seconds, 2)} s" if forms.seconds is not None else ""
    examples = f"{forms.examples:,} example{'' if forms.examples == 1 else 's'}"
    batches = f" in {forms.batches} batches" if forms.batches > 1 else ""
    return f"{count}{spent} on {examples}{batches}; loss {format_number(forms.loss)}."


if __name__ == "__main__":
    made_up = (
        QuadraticForm(
            name="fc1", shape=(512, 784), exact=(0.0031, -0.0012), theorem1=(0.0012, 0.0009), length=(1, 1)
        ),
        QuadraticForm(name="fc2", shape=(10, 512), exact=(0.31, 0.25), theorem1=(0.31, 0.25), length=(1, 1)),
    )
    Console().print(
        QuadraticForms(layers=made_up, directions="random", draws=2, loss=2.31, examples=32, seed=0)
    )
