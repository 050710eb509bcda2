"""Pages as text: what is in the file, before any browser has seen it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from page_examples import HOSTILE, every_block, hostile_report, rich_report

from hessinit.present import figure
from hessinit.present.page.content import DepthChart, DepthSeries, Page, RateLine, Section, Table, TableColumn
from hessinit.present.page.curvature import curvature_page
from hessinit.present.page.islands import legend, write_island
from hessinit.present.page.palette import COLORS, DARK_COLORS, DARK_SURFACES, SURFACES, css_color
from hessinit.present.page.render import render_page
from hessinit.present.page.tables import headings, rows

VENDOR = files("hessinit.present.page") / "vendor"


class Elements(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def rate_line(**changes: object) -> RateLine:
    return RateLine(**{"caption": "c", "description": "d", "best": 1.0, "stable": 2.0, **changes})  # type: ignore[arg-type]


def test_a_page_is_under_a_megabyte_with_two_hundred_layers():
    assert len(render_page(curvature_page(hostile_report())).encode()) < 1_000_000


def test_a_page_loads_nothing_and_runs_only_its_own_scripts():
    text = render_page(every_block())
    elements = Elements(text).found
    addresses = [
        value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(address.startswith("#") or address == "data:," for address in addresses if address)
    assert "src" not in [name for _, attributes in elements for name in attributes]
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    policy = next(a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert policy.count("unsafe-inline") == 1  # of the styles
    scripts = [attributes for tag, attributes in elements if tag == "script" and "type" not in attributes]
    assert len(scripts) == 2


def test_a_page_carries_the_notices_of_the_libraries_in_it():
    text = render_page(every_block())
    for licence in ("d3.LICENSE.txt", "plot.LICENSE.txt"):
        assert (VENDOR / licence).read_text(encoding="utf-8") in text


def test_the_libraries_are_the_ones_that_the_readme_names():
    readme = (VENDOR / "README.md").read_text(encoding="utf-8")
    for name in ("d3.min.js", "plot.umd.min.js"):
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() in row


def test_a_chart_cannot_leave_its_island():
    text = render_page(every_block())
    islands = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(islands) == 5
    for island in islands:
        assert "<" not in island
        json.loads(island)
    assert json.loads(islands[0])["layers"][1] == HOSTILE[1]


def test_an_island_has_words_for_the_numbers_that_json_has_none_for():
    series = DepthSeries(name="n", values=[math.nan, math.inf, -math.inf, None, 1.0], color="sky")
    chart = DepthChart(caption="c", description="d", layers=list("abcde"), series=[series], y_label="y")
    island = json.loads(write_island(chart))
    assert island["series"][0]["values"] == ["nan", "inf", "-inf", None, 1.0]
    assert island["series"][0]["color"] == "var(--sky)"


def test_control_characters_are_shown_everywhere():
    hostile = "a\x1b[2J\u2028\u202e"
    page = Page(
        title=hostile,
        verdict=[hostile],
        sections=[Section(heading=hostile, blocks=[rate_line(caption=hostile)])],
    )
    text = render_page(page)
    own = text[text.index("<title>") :].split("<script>")[0] + text[: text.index("<style>")]
    assert not re.search("[\x1b\u2028\u202e]", own)
    assert "a\\x1b[2J\\u2028\\u202e" in own


def test_an_unknown_colour_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"color='pink' is unknown; choose from 'blue', .*'grey', or 'ramp:0'"
    ):
        css_color("pink")
    with pytest.raises(ValueError, match="color='red; background: url'"):
        css_color("red; background: url")


def test_columns_of_a_group_stand_under_one_heading():
    cells = ["1", "2"]
    table = Table(
        caption="t",
        columns=[
            TableColumn(heading="name", cells=["a", "b"], is_number=False),
            TableColumn(heading="paper", cells=cells, group="G"),
            TableColumn(heading="ours", cells=cells, group="G"),
            TableColumn(heading="alone", cells=cells),
        ],
    )
    upper, lower = headings(table)
    assert [(one.text, one.across, one.down, one.column) for one in upper] == [
        ("name", 1, 2, 0), ("G", 2, 1, None), ("alone", 1, 2, 3),
    ]  # fmt: skip
    assert [(one.text, one.classes, one.column) for one in lower] == [
        ("paper", "number begins", 1),
        ("ours", "number", 2),
    ]
    assert [cell.classes for cell in rows(table)[0]] == ["", "number begins", "number", "number"]


def test_a_column_with_too_few_cells_is_refused():
    table = Table(
        caption="t", columns=[TableColumn(heading="a", cells=["1"]), TableColumn(heading="b", cells=[])]
    )
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        rows(table)


def test_cells_sort_by_what_they_are_worth():
    column = TableColumn(heading="x", cells=["~1,230", "× 0.21", "1.2e-07 ± 3", "inf", "–", "nan", "-3"])
    keys = [row[0].key for row in rows(Table(caption="t", columns=[column]))]
    assert keys == ["1230.0", "0.21", "1.2e-07", "inf", "", "", "-3.0"]


def test_one_series_needs_no_legend():
    series = DepthSeries(name="norms", values=[1.0])
    one = DepthChart(caption="c", description="d", layers=["a"], series=[series], y_label="y")
    two = DepthChart(caption="c", description="d", layers=["a"], series=[series, series], y_label="y")
    assert legend(one) == []
    assert [(item.name, item.shape) for item in legend(two)] == [("norms", "line")] * 2


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("surfaces", [SURFACES, DARK_SURFACES], ids=["light", "dark"])
def test_inks_can_be_read_on_every_surface(surfaces):
    for ink in ("ink", "muted", "link", "good", "fair", "bad"):
        for paper in ("page", "card", "tint"):
            assert contrast(surfaces[ink], surfaces[paper]) >= 4.5, (ink, paper)


def test_lines_stand_out_on_dark_cards_and_have_the_colours_of_the_pictures_on_light_ones():
    assert all(contrast(color, DARK_SURFACES["card"]) >= 4.5 for color in DARK_COLORS.values())
    assert list(COLORS) == list(DARK_COLORS)
    pictures = {"blue": figure.BLUE, "vermilion": figure.VERMILION, "green": figure.GREEN}
    assert {name: COLORS[name] for name in pictures} == {name: hex.lower() for name, hex in pictures.items()}


def test_the_list_of_contents_gives_way_to_a_table_with_links():
    sections = [Section(heading=name, anchor=name, blocks=[rate_line()]) for name in ("one", "two")]
    page = Page(title="t", verdict=[], sections=sections)
    assert '<nav aria-label="On this page">' in render_page(page)
    column = TableColumn(heading="name", cells=["one"], is_number=False, links=["#one"])
    linked = Section(heading="", blocks=[Table(caption="overview", columns=[column])])
    assert "<nav" not in render_page(Page(title="t", verdict=[], sections=[linked, *sections]))


def test_a_report_page_names_what_was_measured():
    text = render_page(curvature_page(rich_report()))
    for heading in ("Curvature by layer", "Learning rate", "Spectrum", "Jacobian products and bounds"):
        assert f">{heading}<" in text
