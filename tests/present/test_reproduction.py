"""Documents of reproductions, and of the demo: our numbers beside the paper's, and which claims hold."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from hessinit.present import describe, draw, to_page, to_text
from hessinit.present.demo import Demonstration
from hessinit.present.document import Facts, Table
from hessinit.present.words import format_number
from hessinit.results.comparison import Comparison
from hessinit_paper.reproduction import Curve, Reproduction
from hessinit_paper.reproduction_page import figure_chart, in_order, summarize
from result_examples import (
    example_reproduction,
    make_cell,
    make_comparison,
    make_initialization,
    make_reproduction,
    make_table,
)


def test_the_table_keeps_the_order_of_its_rows_and_the_record_is_below_it():
    blocks = describe(example_reproduction()).blocks
    first, second = (one for one in blocks if isinstance(one, Table) and not one.text_only)
    assert first.columns[0].keys == [0.0, 1.0, 2.0, 3.0]  # "hessinit" is no number
    assert first.columns[2].cells[0] == "0.985 ± 0.012 (8.65) ✗"
    assert first.columns[2].marks == ["no", "", "", ""]
    assert [column.heading for column in second.columns] == ["layer", "rtol ≤ 1"]
    configuration, record = (dict(block.pairs) for block in blocks if isinstance(block, Facts))
    assert configuration["widths"] == "[784, 64, 64, 10]"
    assert (record["seeds"], record["work"]) == ("0, 1, 2, 3, 4", "5 jobs, 187 s on one core each")


def test_a_wide_table_continues_below_in_a_terminal_and_no_number_is_lost():
    cells = [make_cell("a", f"column {n}", 1.0 + n / 100, error=0.001, paper=2.0) for n in range(9)]
    text = to_text(make_reproduction(make_table(*cells)), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "(continued)" in text
    assert all(f"{1.0 + n / 100:.2f} ± 0.001 (2)" in text for n in range(9))


def test_cells_are_written_with_their_errors():
    for changes, shown in (
        ({"ours": math.inf, "paper": 8.65, "rule": "within 1", "within": False}, "inf (8.65) ✗"),
        ({"ours": 10.0, "paper": 9.0}, "10 (9)"),
        ({"ours": 45.6, "error": 2.4, "unit": "%", "paper": 41}, "46 ± 2 % (41 %)"),
        ({"ours": 1.0, "error": 0.0}, "1.00 ± 0"),
    ):
        assert f" {shown}\n" in to_text(make_reproduction(make_table(make_cell("1", "loss", **changes))), 100)


def test_the_verdict_counts_the_claims_that_hold_and_names_the_others():
    claimed = "with a claimed tolerance is within it."
    for verdicts, said in (
        ((True,), f"1 of 1 printed number {claimed}"),
        ((True, False, None), f"1 of 2 printed numbers {claimed} Outside: c in row 1."),
        ((None,), "No tolerance is claimed here: the paper's numbers are for other data."),
    ):
        cells = [make_cell(str(n), "c", 1.0, paper=1.0, within=each) for n, each in enumerate(verdicts)]
        assert describe(make_reproduction(make_table(*cells))).verdict == [said]
    cells = [make_cell("a", f"c{n}", 1.0, paper=2.0, within=False, n=5 + n) for n in range(9)]
    many = make_reproduction(make_table(*cells))
    assert describe(many).verdict[0].endswith("c4 in row a and 4 more.")
    assert "A table: n = 5 to 13." in to_text(many, 100)


def several() -> list[Reproduction]:
    bad = make_table(make_cell("1", "loss", 1.0, paper=2.0, within=False))
    digits = make_reproduction(make_table(make_cell("1", "loss", 1.0)), name="table-4-digits", data="digits")
    made = [make_reproduction(bad, name="table-4-mnist-clipped"), example_reproduction()]
    return [digits, *made, example_reproduction("table-1-mnist", experiment="table-1")]


def test_several_experiments_come_in_the_order_of_the_paper_with_links_to_each():
    names = [reproduction.name for reproduction in in_order(several())]
    assert names == ["table-1-mnist", "table-4-mnist", "table-4-mnist-clipped", "table-4-digits"]
    overview = next(block for block in describe(several()).blocks if isinstance(block, Table))
    assert overview.columns[-1].cells == ["5 / 6", "5 / 6", "0 / 1", "–"]
    page = to_page(several())
    assert all(f'<a href="#{section.anchor}">' in page for section in describe(several()).sections[1:])
    counted = "Of several variants of an experiment, the first one is counted."
    claimed = "10 of 12 printed numbers with a claimed tolerance are within it."
    assert summarize(several()) == f"{claimed} {counted}"  # a printed number counts once
    with pytest.raises(ValueError, match="reproductions is empty; give at least one"):
        Reproduction.describe_several([])


def test_a_curve_that_diverges_has_a_cross_at_the_edge():
    lines, points = example_reproduction().findings.figures
    line, cross = (series for series in figure_chart(lines).series if series.name == "1.000")
    assert (line.x, line.y) == (list(lines.curves[0].x[:40]), list(lines.curves[0].y[:40]))
    assert (line.low[0], line.high[0]) == pytest.approx((0.96 * line.y[0], 1.04 * line.y[0]))  # ± 4 %
    assert (cross.x, cross.y, cross.symbol) == ([lines.curves[0].x[40]], [math.inf], "cross")
    assert len({series.symbol for series in figure_chart(points).series}) == 4
    for y in ((), (math.nan,), (math.inf, 1.0), (0.0, 2.0)):
        curve = Curve(name="a\x1b", x=tuple(map(float, range(len(y)))), y=y)
        draw(make_reproduction(figures=(replace(lines, curves=(curve,)),)))[0].figure.canvas.draw()
        plt.close("all")


def test_the_demo_says_how_far_each_start_is_from_the_best_and_where_ours_loses():
    guessing = math.log(10)
    plain = make_comparison(
        {
            ("he", 0.1): (0.5, 0.7), ("he", 1.0): (1.0, math.inf),
            ("hessinit", 0.1): (0.3, 0.5), ("hessinit", 1.0): (0.9, math.inf),
            ("lsuv", 0.1): (0.2, 0.4), ("lsuv", 1.0): (1.5, 1.7),
        }
    )  # fmt: skip
    best = {("hessinit", 0.1): (0.1, 0.1), ("hessinit", 1.0): (0.2, 0.2)}
    normalized = make_comparison({**dict.fromkeys(plain_keys(plain), (1.0, 1.0)), **best})
    found = Demonstration(initialization=make_initialization(), plain=plain, normalized=normalized)
    document = describe(found)
    excess = {
        "lsuv": ((0.3 + 1.6) / 2 - 0.3, 0.9),
        "hessinit": ((0.4 + guessing) / 2 - 0.3, 0.05),
        "he": ((0.6 + guessing) / 2 - 0.3, 0.9),
    }
    shown = {name: [format_number(number, 2) for number in pair] for name, pair in excess.items()}
    assert {one.label: one.text.split(" · ") for one in document.numbers} == shown
    assert [one.label for one in document.numbers] == list(shown)
    headline, *lost = document.verdict
    assert headline.endswith("; ".join(f"{name} {' and '.join(two)}" for name, two in shown.items()) + ".")
    assert lost == [
        "Plain network: hessinit is behind at lr 0.1 (0.4; lsuv 0.3) and lr 1 (diverges; lsuv 1.6).",
        "Normalized network: no other start ends lower than hessinit at any rate.",
    ]
    lines = {series.name: series for series in document.chart("plain").series if series.in_legend}
    assert list(lines["lsuv 0.65"].y) == pytest.approx([0.3, 1.6])
    assert list(lines[f"he {shown['he'][0]}"].y) == pytest.approx([0.6, guessing])
    assert [one.x for one in document.chart("plain").series if one.symbol == "cross"] == [[1.0], [1.0]]
    assert document.picture == ["plain", "normalized"]
    assert {"norms"} <= {chart.name for chart in document.charts}
    assert "lsuv 0.65" in to_page(found)


def plain_keys(comparison: Comparison) -> list[tuple[str, float]]:
    return [(scheme, rate) for scheme in comparison.schemes for rate in comparison.learning_rates]
