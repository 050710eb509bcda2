"""Pages and notebook fragments as text: safe whatever the names are, and with nothing to load."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from hessinit.present import document as doc
from hessinit.present import page, to_notebook, to_page
from hessinit.present.words import shorten
from result_examples import HOSTILE, LONG, every_block, hostile_report, make_initialization, rich_report

PRESENT = files("hessinit.present")
VENDOR, ASSETS = PRESENT / "vendor", PRESENT / "assets"


class Elements(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_loads_nothing_and_runs_only_its_own_scripts() -> None:
    elements = Elements(page.render_page(every_block())).found
    pairs = [(name, value) for _, attributes in elements for name, value in attributes.items()]
    links = [value or "" for name, value in pairs if name == "href"]
    assert all(value.startswith("#") or value == "data:," for value in links)
    assert not any(name == "src" or name.startswith("on") for name, _ in pairs)
    policy = next(a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert policy.count("unsafe-inline") == 1  # of the styles
    assert sum(tag == "script" and "type" not in attributes for tag, attributes in elements) == 2


def test_a_page_carries_the_licences_of_its_libraries_which_are_those_of_the_readme() -> None:
    text, readme = page.render_page(every_block()), (VENDOR / "README.md").read_text(encoding="utf-8")
    for licence in ("d3.LICENSE.txt", "plot.LICENSE.txt"):
        assert (VENDOR / licence).read_text(encoding="utf-8") in text
    for name in ("d3.min.js", "plot.umd.min.js"):
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() in row


def test_a_chart_cannot_leave_its_island() -> None:
    text = page.render_page(every_block())
    islands = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(islands) == 5
    assert not any("<" in island for island in islands)
    assert [json.loads(island)["kind"] for island in islands] == ["depth", "lines", "lines", "heat", "rates"]
    assert json.loads(islands[0])["layers"][1] == HOSTILE[1]


def test_the_dark_theme_is_one_and_the_light_one_has_the_colours_of_the_figures() -> None:
    css = (ASSETS / "colors.css").read_text(encoding="utf-8")
    blocks = re.findall(r"\{[^{}]*\}", css)
    light, dark, dark_by_button = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks)
    assert dark == dark_by_button
    assert list(light) == list(dark)
    assert {name: light[name] for name in doc.COLORS} == doc.COLORS
    for theme in (light, dark):  # text can be read: a contrast of 4.5 by WCAG's definition
        for ink in ("ink", "muted", "link", "good", "fair", "bad"):
            for paper in ("page", "card", "tint"):
                low, high = sorted((luminance(theme[ink]), luminance(theme[paper])))
                assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(x * weight for x, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_names_of_ten_thousand_letters_are_cut_and_whole_in_the_title() -> None:
    table = doc.Table("t", [doc.Column("name", [LONG, "b"], is_number=False)])
    text = page.render_page(doc.Document(title="t", verdict=[], sections=[doc.Section("", [table])]))
    assert f' title="{LONG}"' in text
    assert text.count(LONG) == 2  # the title and what sorting goes by
    assert (shorten(LONG)[-11:], len(shorten(LONG))) == ("encoder.end", 80)
    text = str(page.brief(f"Note: <b>{'x' * 200}</b> & more"))
    assert text.startswith("Note: &lt;b&gt;xxx")
    assert (text.endswith("&lt;/b&gt; &amp; more"), len(text) < 120) == (True, True)


def test_a_page_has_a_text_alternative_for_each_chart() -> None:
    for text in (to_page(rich_report()), to_page(make_initialization())):
        elements = Elements(text).found
        ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
        drawings = [a for _, a in elements if a.get("class") == "drawing"]
        assert len(drawings) == sum(tag == "figure" for tag, _ in elements) > 0
        assert {a[f"aria-{how}by"] for a in drawings for how in ("labelled", "described")} <= set(ids)
        assert len(ids) == len(set(ids))
        assert all(re.findall(r'<p class="description" id="[^"]*">(.+)</p>', text))


@pytest.mark.parametrize("text", [to_notebook(hostile_report()), page.render_fragment(every_block())])
def test_a_fragment_runs_nothing_loads_nothing_and_styles_only_itself(text: str) -> None:
    elements = Elements(text).found
    assert {tag for tag, _ in elements} <= {
        "div", "style", "table", "thead", "tbody", "tr", "th", "td", "p", "span", "wbr",
    }  # fmt: skip
    assert {name for _, attributes in elements for name in attributes} <= {"class", "scope", "title"}
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    rules = [line for line in style.split("\n") if "{" in line and not line.startswith("@media")]
    selectors = [part.strip() for rule in rules for part in rule.split("{")[0].split(",")]
    assert all(one.startswith(".hessinit-result ") for one in selectors)
    assert not re.search("[\x1b\u2028\u202e]", text)


def test_charts_are_written_for_the_script() -> None:
    series = doc.Series("n", [math.nan, math.inf, -math.inf, None, 1.0], color="sky")
    chart = doc.LineChart("", "c", "d", [series], "y", layers=list("abcde"))
    (found,) = json.loads(page.write_island(chart))["series"]
    assert (found["y"], found["color"]) == (["nan", "inf", "-inf", None, 1.0], "var(--sky)")
    assert page.css_color("ramp:0.25") == "color-mix(in oklab, var(--ramp-1) 50%, var(--ramp-0))"
    assert [item[:2] for item in page.legend(replace(chart, series=[series] * 2))] == [("n", "line")] * 2
    column = doc.Column("x", ["~1,230", "× 0.21", "1.2e-07 ± 3", "inf", "–", "nan", "-3"])
    keys = [row[0].key for row in page.rows(doc.Table("t", [column]))]
    assert keys == ["1230.0", "0.21", "1.2e-07", "inf", "", "", "-3.0"]


def test_a_page_is_small_shows_control_characters_and_lists_its_sections() -> None:
    text = to_page(hostile_report())
    assert len(text.encode()) < 1_000_000  # with 200 layers
    own = text[text.index("<title>") :].split("<script>")[0] + text[: text.index("<style>")]
    assert not re.search("[\x1b\u2028\u202e]", own)
    assert "a\\u2028b\\u202ec\\x1b[2J" in own
    assert '<nav aria-label="On this page">' in text
