"""Documents of reproductions, and of the demo: our numbers beside the paper's, and which claims hold."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from hessinit.present import describe, draw, to_page, to_text
from hessinit.present.demo import Demonstration, describe_training
from hessinit.present.document import Document, Facts, Paragraph, Table
from hessinit.present.reproduction import describe_reproductions, figure_chart, in_order, summarize
from hessinit.results.reproduction import Curve, Reproduction
from result_examples import (
    example_comparison,
    example_reproduction,
    example_tracking,
    make_cell,
    make_initialization,
    make_reproduction,
    make_table,
)


def tables(document: Document, hidden: str) -> list[Table]:
    return [block for block in document.blocks if isinstance(block, Table) and not getattr(block, hidden)]


def texts(document: Document) -> list[str]:
    return [block.text for block in document.blocks if isinstance(block, Paragraph)]


def test_the_page_has_groups_of_paper_ours_and_verdict():
    first, second = tables(describe(example_reproduction()), "text_only")
    shown = [(column.group, column.heading, column.cells[0]) for column in first.columns]
    assert shown == [
        ("", "std", "1.000"),
        ("Hessian 1", "paper", "24.5"),
        ("Hessian 1", "ours", "33.2 ± 2.1"),
        ("Hessian 1", "within?", "✓ yes"),
        ("Training loss", "paper", "8.65"),
        ("Training loss", "ours", "0.985 ± 0.012"),
        ("Training loss", "within?", "✗ no"),
    ]
    assert first.columns[0].keys == [0.0, 1.0, 2.0, 3.0]  # "hessinit" is no number, so rows keep their order
    assert first.columns[1].keys == pytest.approx([24.48, 2.34, 0.005, math.nan], nan_ok=True)
    assert first.columns[5].marks == ["no", "", "", ""]
    assert [column.heading for column in second.columns] == ["layer", "rtol ≤ 1"]  # nothing to compare with
    blocks = describe(example_reproduction()).blocks
    configuration, record = (dict(block.pairs) for block in blocks if isinstance(block, Facts))
    assert configuration["widths"] == "[784, 64, 64, 10]"
    assert (record["seeds"], record["work"]) == ("0 to 4", "5 jobs, 187 s on one core each")


def test_a_wide_table_continues_below_in_a_terminal_and_no_number_is_lost():
    cells = [make_cell("a", f"column {n}", 1.0 + n / 100, error=0.001, paper=2.0) for n in range(9)]
    reproduction = make_reproduction(make_table(*cells))
    text = to_text(reproduction, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "(continued)" in text
    assert "Left out" not in text
    assert all(f"{1.0 + n / 100:.2f} ± 0.001 (2)" in text for n in range(9))
    assert len(tables(describe(reproduction), "text_only")) == 1


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"ours": math.inf, "paper": 8.65, "rule": "within 1", "within": False}, "inf (8.65) ✗"),
        ({"ours": math.nan}, "nan"),
        ({"ours": 10.0, "paper": 9.0}, "10 (9)"),
        ({"ours": 45.6, "error": 2.4, "unit": "%", "paper": 41}, "46 ± 2 % (41 %)"),
        ({"ours": 99.6, "error": 0.31, "unit": "%"}, "100 ± 0.3 %"),
        ({"ours": 1.0, "error": 0.0}, "1.00 ± 0"),
    ],
)
def test_cells_are_written_with_their_errors(changes, shown):
    text = to_text(make_reproduction(make_table(make_cell("1", "loss", **changes))), 100)
    assert f" {shown}\n" in text


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ((True,), "1 of 1 printed number with a claimed tolerance is within it."),
        (
            (True, False, None),
            "1 of 2 printed numbers with a claimed tolerance is within it. Outside: loss in row 1.",
        ),
        (
            (False,) * 3,
            "0 of 3 printed numbers with a claimed tolerance are within it. Outside: loss in rows 0 to 2.",
        ),
        ((None,), "No tolerance is claimed here: the paper's numbers are for other data."),
    ],
)
def test_the_verdict_counts_the_claims_that_hold_and_names_the_others(verdicts, said):
    cells = [make_cell(str(n), "loss", 1.0, paper=1.0, within=each) for n, each in enumerate(verdicts)]
    assert describe(make_reproduction(make_table(*cells))).verdict == [said]
    bare = describe(make_reproduction(make_table(make_cell("1", "loss", 0.5))))
    assert bare.verdict == ["No tolerance is claimed here: the paper prints no such numbers."]
    cells = [make_cell("a", f"c{n}", 1.0, paper=2.0, within=False) for n in range(9)]
    assert describe(make_reproduction(make_table(*cells))).verdict[0].endswith("c4 in row a; 4 more columns.")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({("a", "x"): 5, ("b", "x"): 5}, "A table: n = 5."),
        ({("a", "x"): 5, ("a", "y"): 20, ("b", "x"): 5, ("b", "y"): 20}, "A table: n = 20 for y, 5 for x."),
        ({("a", "x"): 5, ("a", "y"): 5, ("b", "x"): 1000}, "A table: n = 1,000 for b, 5 for a."),
        ({("a", "x"): 5, ("a", "y"): 6, ("b", "x"): 7, ("b", "y"): 8}, "A table: n = 5 to 8."),
    ],
)
def test_the_number_of_seeds_is_given_by_column_or_row(counts, said):
    cells = [make_cell(row, column, 1.0, n=n) for (row, column), n in counts.items()]
    assert said in texts(describe(make_reproduction(make_table(*cells))))


def several() -> list[Reproduction]:
    bad = make_table(make_cell("1", "loss", 1.0, paper=2.0, within=False))
    made = [make_reproduction(bad, name="table-4-mnist-clipped"), example_reproduction()]
    digits = example_reproduction("table-4-digits", data="digits")
    cells = [replace(cell, rule="", within=None) for cell in digits.findings.tables[0].cells]
    unjudged = replace(digits.findings, tables=(replace(digits.findings.tables[0], cells=tuple(cells)),))
    first = example_reproduction("table-1-mnist", experiment="table-1")
    return [replace(digits, findings=unjudged), *made, first]


def test_several_experiments_come_in_the_order_of_the_paper_with_links_to_each():
    names = [reproduction.name for reproduction in in_order(several())]
    assert names == ["table-1-mnist", "table-4-mnist", "table-4-mnist-clipped", "table-4-digits"]
    document = describe(several())
    overview = tables(document, "text_only")[0]
    assert [column.cells[3] for column in overview.columns[2:]] == ["digits", "two-hidden", "5", "–"]
    assert overview.columns[-1].cells == ["5 / 6", "5 / 6", "0 / 1", "–"]
    assert list(overview.columns[0].links) == [f"#{section.anchor}" for section in document.sections[1:]]
    assert to_page(several()) == to_page(several()[::-1])
    assert "Hessians and the training loss (digits, two-hidden) – As printed" in to_text(several(), 120)


def test_a_printed_number_counts_once_however_many_variants_aim_at_it():
    assert summarize(several()) == (
        "10 of 12 printed numbers with a claimed tolerance are within it. Of several variants of an "
        "experiment, the first one is counted."
    )
    assert summarize(several()[:1]).startswith("No tolerance is claimed for these numbers")
    with pytest.raises(ValueError, match="reproductions is empty; give at least one"):
        describe_reproductions([])


def test_a_line_that_diverges_ends_with_a_cross_and_points_have_theirs_at_the_edge():
    lines, points = example_reproduction().findings.figures
    chart = figure_chart(lines)
    line, cross = (series for series in chart.series if series.name == "1.000")
    assert (line.x, line.y) == (list(lines.curves[0].x[:40]), list(lines.curves[0].y[:40]))
    assert (line.low[0], line.high[0]) == pytest.approx((0.96 * line.y[0], 1.04 * line.y[0]))  # ± 4 %
    assert (cross.x, cross.y, cross.symbol) == (line.x[-1:], line.y[-1:], "cross")
    crosses = [series for series in figure_chart(points).series if series.symbol == "cross"]
    assert [series.y for series in crosses] == [[math.inf]] * 3
    assert len({series.symbol for series in figure_chart(points).series}) == 4


@pytest.mark.parametrize("style", ["lines", "points"])
@pytest.mark.parametrize("y", [(), (math.nan,), (math.inf, 1.0), (0.0, 2.0)])
def test_a_curve_of_few_or_no_numbers_is_drawn(style, y):
    curve = Curve(name="a\x1b", x=tuple(map(float, range(len(y)))), y=y)
    figure = replace(example_reproduction().findings.figures[0], curves=(curve,), style=style)
    reproduction = make_reproduction(figures=(figure,))
    picture = io.BytesIO()
    draw(reproduction, "figure-1")[0].figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")
    plt.close("all")


def test_the_demo_is_composed_of_its_results():
    runs = [("default", example_tracking(speed=0.2)), ("hessinit", example_tracking())]
    accuracy = {"default": 0.5, "hessinit": 0.97}
    demonstration = Demonstration(
        initialization=make_initialization(), runs=runs, comparison=example_comparison(), accuracy=accuracy
    )
    document = describe(demonstration)
    names = [chart.name for chart in document.charts]
    assert {"sharpness", "loss", "limit"} <= set(names)
    assert document.verdict[1:] == describe(example_comparison()).verdict
    assert [number.text for number in document.numbers[1:]] == ["50 %", "97 %"]
    assert "Two initializations of one network" in to_page(demonstration)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (2.0, 0.5, "it is 4 times as high from those of default."),
        (0.5, 2.0, "it is 4 times as high from those of hessinit."),
        (1.0, 1.1, "Training from the weights of default and of hessinit ends at about the same loss."),
        (math.inf, 1.0, "Training diverges from the weights of default, and not from those of hessinit."),
        (math.inf, math.nan, "Neither training ends at a finite loss: use a smaller lr."),
    ],
)
def test_the_demo_says_which_training_is_ahead(theirs, ours, said):
    runs = [
        (name, replace(example_tracking(), losses=tuple((step, loss) for step in range(50))))
        for name, loss in (("default", theirs), ("hessinit", ours))
    ]
    assert describe_training(runs, {"default": 0.1, "hessinit": 0.9}).verdict[0].endswith(said)
