"""Columns that do not fit are left out; a number is never broken."""

from __future__ import annotations

import pytest

from hessinit.present.grid import Column, build_grid, fit, render

NAMES = Column("layer", ("encoder.0", "network"), 9, is_number=False)
STEPS = Column("step", ("0", "12345"), 9)
NORMS = Column("‖H‖", ("0.478", "123.4"), 8)
EDGES = Column("of the edge", ("0.15", "1.01"), 8)
LOSSES = Column("loss", ("2.31", "0.01"), 7)


def shown(columns: list[Column], width: int) -> tuple[str, list[str]]:
    kept, left_out = fit(columns, width)
    return render([build_grid(kept, width)], width), [column.heading for column in left_out]


@pytest.mark.parametrize("width", [16, 20, 26, 32, 40])
@pytest.mark.parametrize("first", [NAMES, STEPS])
def test_numbers_stay_whole_at_any_width(first: Column, width: int) -> None:
    text, left_out = shown([first, LOSSES, NORMS, EDGES], width)
    assert max(map(len, text.splitlines())) <= width
    for column in (first, LOSSES, NORMS, EDGES):
        for cell in column.cells:
            assert (cell in text.split()) == (column.heading not in left_out) or column is NAMES
    assert first.heading not in left_out
    assert "‖H‖" not in left_out


def test_of_equals_the_last_goes_first() -> None:
    assert shown([STEPS, LOSSES, NORMS, EDGES], 20)[1] == ["loss", "of the edge"]
    assert shown([STEPS, LOSSES, NORMS, EDGES], 30)[1] == ["loss"]
    assert shown([STEPS, LOSSES, NORMS, EDGES], 40)[1] == []


def test_names_fold_before_what_matters_goes() -> None:
    text, left_out = shown([NAMES, NORMS, EDGES], 30)
    assert left_out == []
    assert "networ\n" in "\n".join(line[:7].strip() for line in text.splitlines())
