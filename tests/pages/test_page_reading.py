"""Reading a page in Chromium: by keyboard, in forced colours, labels on curves, numbers off the axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import PHONE, chromium, column, hover_over, opened, sort_by
from page_examples import make_layer, make_report, rich_report

from hessinit.present.page.content import LineChart, LineSeries, Page, Rule, Section, Table, TableColumn
from hessinit.present.page.render import render_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def write(path: Path, *blocks: Any) -> Path:
    page = Page(title="t", verdict=["v"], sections=[Section(heading="s", blocks=blocks)])
    path.write_text(render_page(page), encoding="utf-8")
    return path


def line_chart(*series: LineSeries, **changes: Any) -> LineChart:
    told = {"caption": "c", "description": "d", "x_label": "step", "y_label": "loss"}
    return LineChart(series=series, **{**told, **changes})


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    rich_report().to_html(tmp_path / "rich.html")
    return tmp_path / "rich.html"


@pytest.mark.parametrize("width", [1280, PHONE])
def test_a_chart_takes_one_tab_stop(browser, rich, width):
    with opened(browser, rich, width=width) as page:
        page.locator("figure .drawing").first.focus()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"  # its numbers, the next thing


def test_a_tip_goes_when_the_focus_leaves_also_after_a_click(browser, rich):
    with opened(browser, rich) as page:
        figure = page.locator("figure").first
        figure.locator(".picture").click()
        for key in ("Escape", "ArrowRight"):
            page.keyboard.press(key)
        assert figure.locator(".tip").is_visible()
        page.mouse.move(2, 2)
        page.keyboard.press("ArrowRight")
        assert figure.locator(".tip").is_visible()
        page.keyboard.press("Tab")
        assert not figure.locator(".tip").is_visible()


def test_swatches_and_dots_keep_their_colours_where_others_are_forced(browser, tmp_path):
    path = tmp_path / "r.html"
    make_report(make_layer("a", 0.01), make_layer("b", 1.0), make_layer("c", 100.0)).to_html(path)
    with opened(browser, path, forced_colors="active") as page:
        seen = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        dots = page.locator("td .dot").evaluate_all(seen)
        assert len(set(dots[:3])) == 3
        assert page.locator(".swatch.band").evaluate_all(seen) == ["rgb(0, 158, 115)"]


def ink_through(page: Any) -> int:
    """How many points of the drawn lines lie inside the label of a rule."""
    return int(
        page.evaluate(
            """() => {
  const box = document.querySelector("svg .rule-label text").getBoundingClientRect();
  let found = 0;
  for (const path of document.querySelectorAll("svg g[aria-label=line] path")) {
    const length = path.getTotalLength(), matrix = path.getScreenCTM();
    for (let at = 0; at <= length; at += 1) {
      const { x, y } = path.getPointAtLength(at).matrixTransform(matrix);
      found += x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
    }
  }
  return found;
}"""
        )
    )


@pytest.mark.parametrize(
    "heights",
    [
        [0.1 * step for step in range(11)],  # comes up to the line at the right
        [1 - 0.1 * step for step in range(11)],
        [1 + 0.04 * (step - 5) ** 2 for step in range(11)],  # lies above it at both ends
    ],
)
def test_the_label_of_a_rule_is_not_on_the_curve_where_there_is_another_place(browser, tmp_path, heights):
    curve = LineSeries(name="n", x=list(range(11)), y=heights)
    path = write(tmp_path / "p.html", line_chart(curve, rules=[Rule(value=1.0, label="edge of stability")]))
    with opened(browser, path) as page:
        assert ink_through(page) == 0


def test_a_curve_that_hugs_the_rule_is_not_broken_by_the_halo(browser, tmp_path):
    curve = LineSeries(name="n", x=list(range(11)), y=[min(0.2 + 0.2 * step, 1.0) for step in range(11)])
    path = write(tmp_path / "p.html", line_chart(curve, rules=[Rule(value=1.0, label="edge of stability")]))
    with opened(browser, path) as page:
        label = page.locator("svg .rule-label text").bounding_box()
        svg = page.locator("figure svg").bounding_box()
        assert label["x"] + label["width"] < svg["x"] + svg["width"] / 2  # at the left, far above the curve


def test_marks_at_the_edge_have_the_colour_of_their_series(browser, tmp_path):
    colors = ("blue", "vermilion")
    series = [LineSeries(name=one, x=[at], y=[math.inf], color=one) for at, one in enumerate(colors)]
    with opened(browser, write(tmp_path / "p.html", line_chart(*series))) as page:
        fills = page.locator("svg g[aria-label=dot] path").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).fill)"
        )
        assert fills == ["rgb(0, 114, 178)", "rgb(213, 94, 0)"]


def test_the_label_of_a_rule_has_a_halo_and_is_above_the_curves(browser, tmp_path):
    flat = LineSeries(name="n", x=list(range(11)), y=[1.0] * 11)
    path = write(tmp_path / "p.html", line_chart(flat, rules=[Rule(value=1.0, label="edge of stability")]))
    for dark, card in ((False, "rgb(255, 255, 255)"), (True, "rgb(26, 30, 36)")):
        with opened(browser, path, dark=dark) as page:
            label = page.locator("svg .rule-label")
            look = "one => [getComputedStyle(one).paintOrder.split(' ')[0], getComputedStyle(one).stroke]"
            assert label.evaluate(look) == ["stroke", card]
            order = page.locator("svg > *").evaluate_all(
                "all => all.map((one) => one.classList.contains('rule-label') ? 'label' : one.ariaLabel)"
            )
            assert order.index("label") > order.index("line")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_marked_each_and_named_in_a_curve(browser, tmp_path, value, log):
    only = line_chart(LineSeries(name="n", x=list(range(13)), y=[value] * 13), caption="all", log_y=log)
    mixed = line_chart(
        LineSeries(name="n", x=list(range(40)), y=[1.0 if at < 20 else value for at in range(40)]),
        caption="from 20", log_y=log,
    )  # fmt: skip
    with opened(browser, write(tmp_path / "p.html", only, mixed)) as page:
        for number, count in ((0, 13), (1, 20)):
            figure = page.locator("figure").nth(number)
            assert figure.locator("svg g.bad text").all_text_contents() == [str(value)]
            assert figure.locator("svg g[aria-label=dot] path").count() == count
        assert hover_over(page, "from 20", "svg g[aria-label=dot] path", 5) == f"step 25\nn: {value}"


def test_a_number_that_is_not_there_is_a_gap(browser, tmp_path):
    curve = LineSeries(name="n", x=list(range(20)), y=[None if at in (9, 11) else 1.0 for at in range(20)])
    with opened(browser, write(tmp_path / "p.html", line_chart(curve))) as page:
        line = page.locator("svg g[aria-label=line] path").get_attribute("d")
        assert line.count("M") == 3
        assert page.locator("svg g.bad text").count() == 0
        assert page.locator("svg g[aria-label=line]").get_attribute("stroke-linecap") == "round"


def test_names_that_every_object_has_sort_as_words(browser, tmp_path):
    names = ["constructor", "5", "inf", "2", "valueOf"]
    table = Table(caption="t", columns=[TableColumn(heading="name", cells=names, is_number=False)])
    with opened(browser, write(tmp_path / "p.html", table)) as page:
        sort_by(page, "name")
        assert column(page, 0) == sorted(names)
        sort_by(page, "name")
        assert column(page, 0) == sorted(names, reverse=True)
