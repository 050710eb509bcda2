from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from hessinit.present.page.reproduction_charts import figure_chart
from hessinit.present.reproduction_example import example_reproduction
from hessinit.present.reproduction_html import render_reproductions_page
from hessinit.present.reproduction_summary import anchors, in_order, summarize
from hessinit.results.reproduction import Curve, Reproduction, Table


class Reader(HTMLParser):
    """Collects the tags, the ids, the rows of cells with their classes, and whatever a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[tuple[str, str]]] = []
        self.spans: list[int] = []  # how many columns each row is wide
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("src", "href", "xlink:href", "srcset") if name in given]
        if tag == "tr":
            self.rows.append([])
            self.spans.append(0)
        if tag in ("td", "th"):
            self.inside = tag
            self.rows[-1].append(("", given.get("class", "")))
            self.spans[-1] += int(given.get("colspan", 1))

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside:
            text, kind = self.rows[-1][-1]
            self.rows[-1][-1] = text + data, kind

    def texts(self) -> list[list[str]]:
        return [[text for text, _ in row] for row in self.rows]


def make(name: str, experiment: str, data: str, variant: str = "default", **changes: Any) -> Reproduction:
    """The example under another name; on data that are not the paper's nothing is judged."""
    made = replace(example_reproduction(name), experiment=experiment, data=data, variant=variant, **changes)
    return made if data in ("mnist", "cifar-10") else unjudged(made)


def unjudged(made: Reproduction) -> Reproduction:
    def strip(table: Table) -> Table:
        return replace(table, cells=tuple(replace(cell, rule="", within=None) for cell in table.cells))

    return replace(made, findings=replace(made.findings, tables=tuple(map(strip, made.findings.tables))))


def make_all() -> list[Reproduction]:
    return [
        make("word2vec-wikipedia", "word2vec", "wikipedia"),
        make("table-4-digits", "table-4", "digits"),
        make("table-5-cifar-10", "table-5", "cifar-10"),
        make("table-4-mnist-clipped", "table-4", "mnist", "clipped"),
        make("table-4-mnist", "table-4", "mnist", "two-hidden"),
        make("table-1-mnist", "table-1", "mnist"),
    ]


def test_the_page_shows_the_cells_in_groups_of_paper_ours_and_verdict():
    page = Reader(render_reproductions_page([example_reproduction()]))
    rows = page.texts()
    assert rows[0] == ["std", "Hessian 1", "Hessian 2", "Training loss"]
    assert rows[1] == ["paper", "ours", "within?"] * 3
    yes, no = "✓ yes", "✗ no"
    assert rows[2] == ["1.000", "24.5", "33 ± 2", yes, "10.1", "31 ± 2", yes, "8.65", "0.99 ± 0.01", no]
    assert rows[7] == ["hessinit", "", "61 ± 4", "", "", "88 ± 5", "", "", "0.291 ± 0.002", ""]
    assert page.spans[0] == page.spans[1] + 1 == page.spans[2] == 10  # the corner reaches over two rows
    assert rows[8] == ["layer", "rtol ≤ 0.5", "rtol ≤ 1", "rtol ≤ 1.5"]
    assert rows[9] == ["Dense 1", "46 ± 2 %", "78 ± 2 %", "90 ± 2 %"]
    outside = [text for row in page.rows for text, kind in row if "no" in kind.split()]
    assert outside == ["0.99 ± 0.01", "✗ no", "0.481 ± 0.003", "✗ no"]


def test_numbers_of_the_paper_without_a_claim_have_two_columns():
    page = Reader(render_reproductions_page([make("table-4-digits", "table-4", "digits")]))
    assert page.texts()[1] == ["paper", "ours"] * 3
    assert page.spans[0] == page.spans[1] + 1 == page.spans[2] == 7


def test_the_page_is_whole_loads_nothing_and_has_a_dark_side_and_a_printed_one(tmp_path):
    example_reproduction().to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.tags.count("figure") == 2
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert not {"img", "iframe", "object"} & set(page.tags)
    for part in ("prefers-color-scheme: dark", "@media print", 'name="viewport"', "Loss per batch, by std"):
        assert part in text
    for value in ("[784, 64, 64, 10]", "0 to 4", "30 jobs, 187 s on one core each", "2.13.0", "made up"):
        assert f"<dd>{value}</dd>" in text


def test_experiments_come_in_the_order_of_the_paper_and_its_data_first():
    names = [reproduction.name for reproduction in in_order(make_all())]
    assert names == [
        "table-1-mnist",
        "table-4-mnist",
        "table-4-mnist-clipped",
        "table-4-digits",
        "table-5-cifar-10",
        "word2vec-wikipedia",
    ]
    page = Reader(render_reproductions_page(make_all()))
    assert [link[1:] for link in page.links if link[1:] in names] == names
    assert [name for name in page.ids if name in names] == names
    assert page.texts()[0] == ["experiment", "about", "data", "variant", "seeds", "within / claimed"]
    about = "the std of the weights, their Hessians and the training loss"
    assert page.texts()[2] == ["Table 4", about, "mnist", "two-hidden", "5", "13 / 15"]
    assert page.texts()[4][2:] == ["digits", "default", "5", "–"]


def test_the_summary_counts_a_printed_number_once_whatever_the_readings():
    one = example_reproduction()
    assert summarize([one]) == "Of 15 printed numbers for which a tolerance is claimed, 13 are within it."
    assert summarize(make_all()) == (
        "Of 45 printed numbers for which a tolerance is claimed, 39 are within it. "
        "Where the paper is read in several ways, the one listed first is counted."
    )
    assert summarize([unjudged(one)]).startswith("None of these numbers has a tolerance")


def test_no_id_is_given_twice_though_two_records_have_the_same_name():
    ids = Reader(render_reproductions_page([example_reproduction(), example_reproduction()])).ids
    assert len(ids) == len(set(ids))
    assert {"table-4-mnist", "table-4-mnist-2"} <= set(ids)


def test_a_line_that_diverges_ends_with_a_cross_at_its_last_number():
    figure = example_reproduction().findings.figures[0]
    chart = figure_chart(figure)
    line, cross = (series for series in chart.series if series.name == "1.000")
    assert (list(line.x), list(line.y)) == (list(figure.curves[0].x[:40]), list(figure.curves[0].y[:40]))
    assert line.high[0] == pytest.approx(1.04 * line.y[0])  # one standard error, of 4 %
    assert line.low[0] == pytest.approx(0.96 * line.y[0])
    assert (cross.x, cross.y, cross.symbol, cross.details) == (
        [line.x[-1]],
        [line.y[-1]],
        "cross",
        ["diverged"],
    )
    assert (chart.x_label, chart.y_label, chart.log_y) == ("step", "training loss", True)


def test_points_that_diverged_are_crosses_at_the_edge_and_symbols_differ():
    chart = figure_chart(example_reproduction().findings.figures[1])
    crosses = [series for series in chart.series if series.symbol == "cross"]
    assert [series.y for series in crosses] == [[math.inf]] * 3
    assert len({series.symbol for series in chart.series}) == 4
    assert all(series.points for series in chart.series)
    assert [len(series.x) for series in chart.series if series.symbol != "cross"] == [6, 6, 6]


@pytest.mark.parametrize("style", ["lines", "points"])
@pytest.mark.parametrize("y", [(), (math.nan,), (math.inf, 1.0), (0.0, 2.0)])
def test_a_curve_of_few_or_no_numbers_reaches_the_page(style, y):
    curve = Curve(name="a", x=tuple(map(float, range(len(y)))), y=y)
    example = example_reproduction()
    figure = replace(example.findings.figures[0], curves=(curve,), style=style)
    bare = replace(example, findings=replace(example.findings, figures=(figure,)))
    assert Reader(render_reproductions_page([bare])).tags.count("figure") == 1


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a.json"], "a.json is left out: not a whole record of this version. Run the experiment again."),
        (["a.json", "b.json"], "a.json and b.json are left out: not whole records of this version."),
    ],
)
def test_records_that_cannot_be_read_are_named_on_the_page(names, sentence):
    assert sentence in render_reproductions_page([example_reproduction()], names)


def test_the_same_reproductions_give_the_same_page_in_whatever_order_they_come():
    made = [example_reproduction(), make("table-1-mnist", "table-1", "mnist")]
    assert render_reproductions_page(made) == render_reproductions_page(made[::-1])


def test_a_notebook_shows_tables_and_sentences_and_no_pictures():
    text = example_reproduction()._repr_html_()
    page = Reader(text)
    assert page.texts()[2][:4] == ["1.000", "24.5", "33 ± 2", "✓"]
    assert "At std 1.000 no variant that we tried comes near the printed loss of 8.65." in text
    assert not {"svg", "html", "body", "script"} & set(page.tags)


@pytest.mark.parametrize(
    "attack", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style>"]
)
def test_html_in_every_word_of_a_record_is_escaped(attack):
    example = example_reproduction()
    table = example.findings.tables[0]
    cell = replace(table.cells[0], row=attack, column=attack, rule=attack, unit=attack)
    figure = example.findings.figures[0]
    hostile = replace(
        example,
        **dict.fromkeys(("name", "experiment", "title", "data", "variant", "about_variant"), attack),
        source=attack,
        revision=attack,
        configuration={attack: [attack]},
        versions={attack: attack},
        hardware={attack: attack},
        findings=replace(
            example.findings,
            tables=(
                replace(table, title=attack, corner=attack, note=attack, rows=(attack,), columns=(attack,),
                        cells=(cell,)),
            ),
            figures=(
                replace(figure, name=attack, title=attack, x_label=attack, y_label=attack,
                        curves=tuple(replace(curve, name=attack) for curve in figure.curves)),
            ),
            sentences=(attack,),
        ),
    )  # fmt: skip
    harmless = render_reproductions_page([example, example])
    for text in (render_reproductions_page([hostile, hostile], [attack]), hostile._repr_html_()):
        assert "<script>alert" not in text
        assert "<img" not in text
        assert text.count("</style>") <= harmless.count("</style>")
        assert set(Reader(text).tags) <= set(Reader(harmless).tags) | {"h2"}
        assert any(attack in row for row in Reader(text).texts())
    assert "<script" not in hostile._repr_html_()


def test_cells_that_are_no_number_reach_the_page():
    example = example_reproduction()
    table = example.findings.tables[0]
    cells = (replace(table.cells[0], ours=math.inf, error=None, within=False), *table.cells[1:])
    broken = replace(example, findings=replace(example.findings, tables=(replace(table, cells=cells),)))
    assert Reader(render_reproductions_page([broken])).texts()[2][:4] == ["1.000", "24.5", "inf", "✗ no"]


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ValueError, match="reproductions is empty; give at least one to show"):
        render_reproductions_page([])


def test_names_become_anchors_of_letters_digits_and_hyphens_that_differ():
    made = [replace(example_reproduction(), name=name) for name in ("a b", "a-b", "<>", "", "table-4")]
    assert anchors(made) == ["a-b", "a-b-2", "reproduction", "reproduction-2", "table-4"]
