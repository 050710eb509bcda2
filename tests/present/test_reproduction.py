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


def test_the_table_keeps_the_order_of_its_rows_and_the_record_is_below_it():
    first, second = tables(describe(example_reproduction()), "text_only")
    assert [(one.heading, one.cells[0]) for one in first.columns] == [
        ("std", "1.000"), ("Hessian 1", "33.2 ± 2.1 (24.5)"), ("Training loss", "0.985 ± 0.012 (8.65) ✗"),
    ]  # fmt: skip
    assert first.columns[0].keys == [0.0, 1.0, 2.0, 3.0]  # "hessinit" is no number
    assert first.columns[2].marks == ["no", "", "", ""]
    assert [column.heading for column in second.columns] == ["layer", "rtol ≤ 1"]
    blocks = describe(example_reproduction()).blocks
    configuration, record = (dict(block.pairs) for block in blocks if isinstance(block, Facts))
    assert configuration["widths"] == "[784, 64, 64, 10]"
    assert (record["seeds"], record["work"]) == ("0, 1, 2, 3, 4", "5 jobs, 187 s on one core each")


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
        ((True, False, None),
         "1 of 2 printed numbers with a claimed tolerance is within it. Outside: c in row 1."),
        ((None,), "No tolerance is claimed here: the paper's numbers are for other data."),
    ],
)  # fmt: skip
def test_the_verdict_counts_the_claims_that_hold_and_names_the_others(verdicts, said):
    cells = [make_cell(str(n), "c", 1.0, paper=1.0, within=each) for n, each in enumerate(verdicts)]
    assert describe(make_reproduction(make_table(*cells))).verdict == [said]
    bare = describe(make_reproduction(make_table(make_cell("1", "loss", 0.5))))
    assert bare.verdict == ["No tolerance is claimed here: the paper prints no such numbers."]
    cells = [make_cell("a", f"c{n}", 1.0, paper=2.0, within=False, n=5 + n) for n in range(9)]
    document = describe(make_reproduction(make_table(*cells)))
    assert document.verdict[0].endswith("c4 in row a and 4 more.")
    assert any("A table: n = 5 to 13." in text for text in texts(document))


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
    anchors = [section.anchor for section in document.sections[1:]]
    assert all(f'<a href="#{anchor}">' in to_page(several()) for anchor in anchors)
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


def test_a_curve_that_diverges_has_a_cross_at_the_edge():
    lines, points = example_reproduction().findings.figures
    chart = figure_chart(lines)
    line, cross = (series for series in chart.series if series.name == "1.000")
    assert (line.x, line.y) == (list(lines.curves[0].x[:40]), list(lines.curves[0].y[:40]))
    assert (line.low[0], line.high[0]) == pytest.approx((0.96 * line.y[0], 1.04 * line.y[0]))  # ± 4 %
    assert (cross.x, cross.y, cross.symbol) == ([lines.curves[0].x[40]], [math.inf], "cross")
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
