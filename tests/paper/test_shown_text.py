from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from hessinit.present.reproduction_cells import cell_text
from hessinit.present.reproduction_example import example_reproduction
from hessinit.present.reproduction_sentences import conclude_claims, describe_claims, describe_counts
from hessinit.present.reproduction_table import render_reproduction
from hessinit.results.reproduction import Cell, Reproduction, Table

AT_100 = """\
Table 4: the std of the weights, their Hessians and the training loss
On mnist, 5 seeds. Variant two-hidden: 784–64–64–10 with ReLU; the two hidden weights carry the std,
the last is Glorot's.

As printed
            Hessian 1                     Hessian 2                     Training loss
 std        paper             ours  ok?   paper             ours  ok?   paper           ours  ok?
──────────────────────────────────────────────────────────────────────────────────────────────────
 1.000       24.5      33 ± 2       yes    10.1      31 ± 2       yes    8.65   0.99 ± 0.01   NO
 0.500       12.9    15.1 ± 0.7     yes    10.1    19.3 ± 0.9     yes    1.15  0.523 ± 0.004  yes
 0.100       2.34    1.85 ± 0.06    yes    2.76    2.39 ± 0.09    yes    0.32  0.305 ± 0.002  yes
 0.050       0.49    0.43 ± 0.01    yes    0.65    0.56 ± 0.02    yes    0.33  0.317 ± 0.002  yes
 0.005      0.005  0.0042 ± 0.0001  yes   0.006  0.0056 ± 0.0002  yes    0.42  0.481 ± 0.003  NO
 hessinit              61 ± 4                        88 ± 5                    0.291 ± 0.002
n = 5. Claimed: within a factor of 10 in rows 1.000 and 0.500; within 50 % for Hessian 1 and Hessian
2 in rows 0.100 to 0.005; within 0.05 for Training loss in rows 0.100 to 0.005.

Beyond the paper: the same with GELU
 layer     rtol ≤ 0.5    rtol ≤ 1   rtol ≤ 1.5
───────────────────────────────────────────────
 Dense 1     46 ± 2 %    78 ± 2 %     90 ± 2 %
 Dense 2     73 ± 2 %    97 ± 1 %    100 ± 0 %
 Dense 5    100 ± 0 %   100 ± 0 %    100 ± 0 %
n = 400. Errors are relative to the approximation.

The loss is lowest at 0.100, where both norms (largest |eigenvalue|) are near 2.
At std 1.000 no variant that we tried comes near the printed loss of 8.65.

± is the standard error; n is how many seeds or restarts a number is taken over; ok?: whether our
number is as near to the paper's as claimed.
13 of the 15 printed numbers for which a tolerance is claimed are within it. Outside: Training loss
in rows 1.000 and 0.005."""

TABLE_AT_60 = """\
            Hessian 1
 std        paper             ours  ok?
────────────────────────────────────────
 1.000       24.5      33 ± 2       yes
 0.500       12.9    15.1 ± 0.7     yes
 0.100       2.34    1.85 ± 0.06    yes
 0.050       0.49    0.43 ± 0.01    yes
 0.005      0.005  0.0042 ± 0.0001  yes
 hessinit              61 ± 4

            Hessian 2
 std        paper             ours  ok?
"""


def make_cell(row: str, column: str, ours: float, **changes: Any) -> Cell:
    return Cell(**{"row": row, "column": column, "ours": ours, "n": 5, **changes})


def make_table(*cells: Cell, **changes: Any) -> Table:
    given: dict[str, Any] = {
        "title": "A table",
        "corner": "std",
        "rows": tuple(dict.fromkeys(cell.row for cell in cells)),
        "columns": tuple(dict.fromkeys(cell.column for cell in cells)),
    }
    return Table(cells=cells, **{**given, **changes})


def with_tables(*tables: Table, **changes: Any) -> Reproduction:
    example = example_reproduction()
    return replace(example, findings=replace(example.findings, tables=tables), **changes)


def test_the_whole_text_at_100_columns_is_what_print_gives():
    assert render_reproduction(example_reproduction(), width=100) == AT_100
    assert str(example_reproduction()) == AT_100


def test_columns_that_do_not_fit_follow_below_with_the_names_of_the_rows():
    assert TABLE_AT_60 in render_reproduction(example_reproduction(), width=60)


@pytest.mark.parametrize(("width", "blocks"), [(120, 1), (100, 1), (80, 2), (60, 3), (40, 3)])
def test_every_width_is_kept_and_no_number_is_lost(width, blocks):
    text = render_reproduction(example_reproduction(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert len(re.findall(r"^ std ", text, flags=re.MULTILINE)) == blocks
    assert text.count(" yes") == 13
    assert text.count(" NO") == 2
    for number in ("24.5", "0.0042 ± 0.0001", "0.291 ± 0.002", "100 ± 0 %"):
        assert number in text


def test_long_names_of_rows_fold_so_that_the_numbers_stay():
    table = make_table(make_cell("loss by output, " * 6, "dependent", 9.0, paper=9, within=True, rule="all"))
    text = render_reproduction(with_tables(table), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert re.search(r"9 +9 +yes", text)


@pytest.mark.parametrize(
    ("ours", "error", "shown"),
    [
        (33.2, 2.13, ("33", "2")),
        (0.9854, 0.012, ("0.99", "0.01")),  # not 0.98, by way of 0.985
        (9.996, 0.004, ("10.0", "0.004")),
        (0.305, 0.00021, ("0.305", "0.0002")),
        (1234.5, 23.4, ("1230", "23")),
        (0.0012, 0.5, ("0.001", "0.5")),
        (1.0, 0.0, ("1.00", "0")),
        (0.0, 0.0, ("0", "0")),
        (1.23e-7, 2.1e-8, ("1.2e-07", "2.1e-08")),
        (10.0, None, ("10", "")),
        (math.inf, None, ("inf", "")),
        (math.nan, math.nan, ("nan", "nan")),
    ],
)
def test_numbers_have_three_figures_at_most_and_the_decimals_of_their_error(ours, error, shown):
    text = cell_text(make_cell("a", "b", ours, error=error))
    assert (text.ours, text.error) == shown


@pytest.mark.parametrize(
    ("ours", "error", "shown"),
    [(45.6, 2.4, ("46", "2")), (99.6, 0.31, ("100", "0.3")), (math.nan, None, ("nan", ""))],
)
def test_percentages_are_whole_and_a_small_error_is_not_shown_as_none(ours, error, shown):
    text = cell_text(make_cell("a", "b", ours, error=error, paper=41, unit="%"))
    assert (text.paper, text.ours, text.error, text.unit) == ("41 %", *shown, "%")


def test_cells_that_are_no_number_or_not_there_are_shown_as_such():
    table = make_table(
        make_cell("1", "loss", math.inf, paper=8.65, rule="within 0.05", within=False),
        make_cell("2", "loss", math.nan),
        make_cell("2", "norm", 2.0, error=0.25),
    )
    rows = [line.split() for line in render_reproduction(with_tables(table), width=80).splitlines()]
    assert ["1", "8.65", "inf", "NO"] in rows
    assert ["2", "nan", "2.0", "±", "0.2"] in rows


def test_numbers_of_the_paper_that_are_not_judged_have_no_verdict_and_the_reader_is_told_why():
    reproduction = with_tables(make_table(make_cell("1", "loss", 0.5, paper=0.4)))
    text = render_reproduction(reproduction, width=80)
    assert "ok?" not in text
    assert "Claimed" not in text
    assert text.endswith("No tolerance is claimed here: the paper's numbers are for other data.")
    bare = with_tables(make_table(make_cell("1", "loss", 0.5)))
    assert conclude_claims(bare) == "No tolerance is claimed here: the paper prints no such numbers."
    assert "paper" not in render_reproduction(bare, width=80).split("A table")[1].split("n = 5")[0]


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        ((True,), "The one printed number for which a tolerance is claimed is within it."),
        ((True, True), "All 2 printed numbers for which a tolerance is claimed are within it."),
        ((True, False, None), "1 of the 2 printed numbers CLAIMED is within it. Outside: loss in row 1."),
        ((False,) * 3, "0 of the 3 printed numbers CLAIMED are within it. Outside: loss in rows 0 to 2."),
    ],
)
def test_the_last_line_counts_the_claims_that_hold_and_names_those_that_do_not(verdicts, sentence):
    cells = [
        make_cell(str(row), "loss", 1.0, paper=1.0, within=within) for row, within in enumerate(verdicts)
    ]
    expected = sentence.replace("CLAIMED", "for which a tolerance is claimed")
    assert conclude_claims(with_tables(make_table(*cells))) == expected


def test_many_columns_outside_are_counted():
    cells = [make_cell("a", f"c{column}", 1.0, paper=2.0, within=False) for column in range(9)]
    assert conclude_claims(with_tables(make_table(*cells))).endswith("c4 in row a; and 4 more columns.")


def test_a_claim_about_all_is_said_without_names_and_one_about_some_with_them():
    def cell(row: str, column: str, rule: str) -> Cell:
        return make_cell(row, column, 1.0, paper=1.0, rule=rule, within=True)

    alike = [cell(row, column, "within 10 points") for row in "abc" for column in "xy"]
    assert describe_claims(make_table(*alike)) == "Claimed: within 10 points."
    beside = [*alike, make_cell("a", "z", 1.0)]
    assert describe_claims(make_table(*beside)) == "Claimed: within 10 points for x and y."
    apart = [cell("a", "x", "within 1"), cell("b", "x", "within 2"), cell("c", "x", "within 1")]
    assert describe_claims(make_table(*apart)) == "Claimed: within 1 in rows a and c; within 2 in row b."
    assert describe_claims(make_table(make_cell("a", "x", 1.0))) == ""


def test_how_many_seeds_is_said_by_column_or_by_row_where_it_differs():
    def table(*counts: tuple[str, str, int]) -> Table:
        return make_table(*(make_cell(row, column, 1.0, n=n) for row, column, n in counts))

    assert describe_counts(table(("a", "x", 5), ("b", "x", 5))) == "n = 5."
    by_column = table(("a", "x", 5), ("a", "y", 20), ("b", "x", 5), ("b", "y", 20))
    assert describe_counts(by_column) == "n = 20 for y, 5 for x."
    by_row = table(("a", "x", 5), ("a", "y", 5), ("b", "x", 1000), ("b", "y", 1000))
    assert describe_counts(by_row) == "n = 1,000 for b, 5 for a."
    assert describe_counts(table(("a", "x", 5), ("a", "y", 6), ("b", "x", 7), ("b", "y", 8))) == "n = 5 to 8."
    assert describe_counts(make_table()) == ""


def test_a_terminal_gets_colours_and_a_pipe_gets_none():
    def shown(**options: Any) -> str:
        page = io.StringIO()
        Console(file=page, width=100, **options).print(example_reproduction())
        return page.getvalue()

    coloured = shown(force_terminal=True, color_system="standard")
    assert "\x1b[32myes\x1b[0m" in coloured
    assert "\x1b[1;31mNO\x1b[0m" in coloured
    plain = "\n".join(line.rstrip() for line in shown().splitlines())
    assert plain == AT_100
    uncoloured = shown(force_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[32m" not in uncoloured
    assert "\x1b[31m" not in uncoloured
    assert re.search(r"0\.01   (\x1b\[1m)?NO", uncoloured)


def test_a_terminal_without_unicode_still_tells_yes_from_no(tmp_path):
    path = tmp_path / "record.json"
    example_reproduction().save(path)
    result = subprocess.run(
        [sys.executable, "-m", "hessinit", "show", str(path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" yes") == 13
    assert result.stdout.count(" NO") == 2


def test_markup_and_control_characters_are_shown_and_not_obeyed():
    attack = "[red]\x1b[2J"
    table = make_table(
        make_cell(attack, attack, 1.0, paper=2.0, rule=attack, within=False, unit=attack),
        title=attack,
        corner=attack,
        note=attack,
    )
    hostile = with_tables(table, title=attack, data=attack, variant=attack, about_variant=attack)
    hostile = replace(hostile, findings=replace(hostile.findings, sentences=(attack,)))
    text = render_reproduction(hostile, width=100)
    assert "\x1b" not in text
    assert text.count(r"[red]\x1b[2J") >= 12


def test_an_experiment_without_tables_and_sentences_still_prints():
    example = example_reproduction()
    empty = replace(example, findings=replace(example.findings, tables=(), sentences=()), seeds=(7,))
    assert render_reproduction(empty, width=100).splitlines()[1].startswith("On mnist, 1 seed. Variant")
