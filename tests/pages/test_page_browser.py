"""Pages in a real Chromium, offline, from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browsing import (
    DESKTOP,
    PHONE,
    chromium,
    column,
    contrasts,
    hover_over,
    opened,
    overflow,
    sort_by,
    wait_until,
)
from page_examples import HOSTILE, every_block, hostile_report, make_layer, make_report, rich_report

from hessinit.present.initialization_example import example_initialization
from hessinit.present.page.content import (
    DepthChart,
    DepthSeries,
    HeatMap,
    LineChart,
    LineSeries,
    Page,
    RateLine,
    Section,
)
from hessinit.present.page.render import render_page
from hessinit.present.words import format_number


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in ("rich", "hostile", "initialization", "blocks")}
    rich_report().to_html(paths["rich"])
    hostile_report().to_html(paths["hostile"])
    example_initialization().to_html(paths["initialization"])
    paths["blocks"].write_text(render_page(every_block()), encoding="utf-8")
    return paths


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["rich", "hostile", "initialization", "blocks"])
def test_a_page_opens_offline_without_a_word_and_fits_its_window(browser, pages, name, width):
    with opened(browser, pages[name], width=width) as page:
        assert overflow(page) <= 0
        drawn = page.locator("figure .picture svg")
        assert drawn.count() == page.locator("figure").count() > 0
        for place in range(drawn.count()):
            assert drawn.nth(place).bounding_box()["width"] > 200
        page.set_viewport_size({"width": 360, "height": 800})
        assert overflow(page) <= 0


@pytest.mark.parametrize("name", ["rich", "hostile", "initialization", "blocks"])
@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_a_contrast_of_four_and_a_half(browser, pages, name, dark):
    with opened(browser, pages[name], dark=dark) as page:
        found = contrasts(page)
        assert len(found) > 30
        assert [text for ratio, text in found if ratio < 4.5] == []


def test_names_are_shown_and_never_run(browser, pages):
    with opened(browser, pages["hostile"]) as page:
        names = column(page, 0)
        assert names[:1] == [HOSTILE[0]]
        assert names[20] == HOSTILE[1]
        assert "a\\u2028b\\u202ec\\x1b[2J" in names
        assert page.locator("main script:not([type='application/json']), main img").count() == 0
    with opened(browser, pages["blocks"]) as page:
        assert page.title() == HOSTILE[1]
        assert page.locator("a[href^='javascript']").count() == 0
        assert page.locator("td a, th a").all_text_contents() == ["a"]


def test_a_script_that_got_in_would_not_run(browser, pages):
    with opened(browser, pages["rich"], quiet=False) as page:
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
        )
        page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.ran = 1\" id=evil>x</b>')"
        )
        page.locator("#evil").click()
        assert page.evaluate("window.ran") is None


def test_a_table_sorts_by_number_down_up_and_back(browser, tmp_path):
    norms = {"a": 9.0, "b": float("nan"), "c": 1234.0, "d": float("inf"), "e": 0.5}
    make_report(*(make_layer(name, norm) for name, norm in norms.items())).to_html(tmp_path / "r.html")
    with opened(browser, tmp_path / "r.html") as page:
        assert sort_by(page, "‖H‖") == "descending"
        assert column(page, 0) == ["d", "c", "a", "e", "b", "network"]
        assert sort_by(page, "‖H‖") == "ascending"
        assert column(page, 0) == ["e", "a", "c", "d", "b", "network"]
        assert sort_by(page, "‖H‖") is None
        assert column(page, 0) == ["a", "b", "c", "d", "e", "network"]
        assert sort_by(page, "verdict") == "ascending"
        assert column(page, 0) == ["a", "e", "b", "c", "d", "network"]
        page.get_by_role("button", name="layer").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Space")
        assert column(page, 0) == ["e", "d", "c", "b", "a", "network"]
        assert page.locator("th[aria-sort]").all_text_contents() == ["layer"]


def test_columns_under_a_common_heading_sort_by_their_own_cells(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        sort_by(page, "paper")
        assert column(page, 1) == ["inf", "~1,230", "9", "nan", "7"]
        sort_by(page, "ours")
        assert column(page, 2) == ["100", "20", "3", "", "7"]
        spans = page.locator("thead th").evaluate_all(
            "cells => cells.map((cell) => [cell.colSpan, cell.rowSpan])"
        )
        assert spans == [[1, 2], [2, 1], [1, 2], [1, 1], [1, 1]]


def test_hovering_shows_the_exact_value(browser, pages):
    with opened(browser, pages["rich"]) as page:
        dots = "svg g[aria-label=dot] circle"
        assert hover_over(page, "How sharp each layer is", dots, 2) == "fc3\nGauss-Newton: 64\n(4, 3), sharp"
        assert page.locator(".tip:visible").count() == 1
        assert hover_over(page, "How sharp each layer is", dots, 0) == "fc1\nGauss-Newton: 0.31\n(4, 3), ok"
        page.mouse.move(2, 2)
        assert page.locator(".tip:visible").count() == 0


def test_a_finger_shows_the_value_too(browser, pages):
    with opened(browser, pages["rich"], width=PHONE, has_touch=True) as page:
        figure = page.locator("figure").first
        figure.scroll_into_view_if_needed()
        dot = figure.locator("svg g[aria-label=dot] circle").nth(1).bounding_box()
        page.touchscreen.tap(dot["x"] + 4, dot["y"] + 4)
        assert figure.locator(".tip b").text_content() == "fc2"
        tip = figure.locator(".tip").bounding_box()
        assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= PHONE


def test_arrow_keys_read_a_chart(browser, pages):
    with opened(browser, pages["initialization"]) as page:
        figure = page.locator("figure").first
        figure.locator(".drawing").focus()
        said = []
        for key in ("ArrowRight", "End", "ArrowDown", "ArrowLeft", "Home", "ArrowUp"):
            page.keyboard.press(key)
            said.append(figure.locator(".readout").text_content())
        assert said == [
            "fc1 · before: 0.31 · (256, 784), ok",
            "fc3 · before: 64 · (10, 256), sharp",
            "fc3 · after: 12.8 · (10, 256), sharp",
            "fc2 · after: 11.04 · (256, 256), sharp",
            "fc1 · after: 12.4 · (256, 784), sharp",
            "fc1 · before: 0.31 · (256, 784), ok",
        ]
        assert figure.locator(".tip").is_visible()
        page.keyboard.press("Escape")
        assert not figure.locator(".tip").is_visible()
        assert page.locator(".drawing[tabindex='0']").count() == page.locator("figure").count()


def test_numbers_without_a_place_stand_at_the_edge_and_are_named(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        depth = page.locator("figure").first
        assert sorted(depth.locator("svg g.bad text").all_text_contents()) == ["0", "inf", "nan"]
        assert depth.locator("svg g[aria-label=dot] path").count() == 3  # the triangles
        rates = page.locator("figure", has=page.get_by_text("rates", exact=True))
        assert rates.locator("svg g.bad text").all_text_contents() == ["endless inf"]


def test_charts_of_nothing_are_drawn_without_a_word(browser, tmp_path):
    told = {"caption": "nothing", "description": "nothing"}
    labels = {"x_label": "x", "y_label": "y"}
    charts = [
        DepthChart(**told, layers=[], series=[], y_label="y"),
        DepthChart(**told, layers=["a"], series=[DepthSeries(name="n", values=[math.nan])], y_label="y"),
        LineChart(**told, **labels, series=[]),
        LineChart(**told, **labels, series=[LineSeries(name="n", x=[], y=[])], log_x=True, log_y=True),
        LineChart(**told, **labels, series=[LineSeries(name="n", x=[1], y=[-5.0])], log_y=True),
        HeatMap(
            **told, **labels, rows=["a"], columns=["b"], values=[[math.nan]], texts=[["–"]], value_label="v"
        ),
        RateLine(**told, best=math.inf, stable=math.inf),
        RateLine(**told, best=0.0, stable=0.0),
    ]
    page = Page(title="nothing", verdict=[], sections=[Section(heading="", blocks=charts)])
    (tmp_path / "nothing.html").write_text(render_page(page), encoding="utf-8")
    with opened(browser, tmp_path / "nothing.html") as found:
        assert found.locator("figure svg").count() == len(charts)
        assert "NaN" not in found.locator("main").inner_html()


def test_the_numbers_of_a_chart_are_there_as_text(browser, pages):
    with opened(browser, pages["rich"]) as page:
        figure = page.locator("figure").first
        figure.get_by_text("Numbers").click()
        rows = [row.split("\t") for row in figure.locator(".listing tr").all_inner_texts()]
        assert rows[0] == ["layer", "curvature ‖H‖", "more"]
        assert rows[3] == ["fc3", "Gauss-Newton: 64", "(4, 3), sharp"]
        assert len(rows) == 4
        assert figure.locator(".listing th[scope=col]").count() == 3


def test_a_heat_map_has_ink_that_can_be_read_on_its_cells(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        figure = page.locator("figure", has=page.get_by_text("heat", exact=True))
        inks = dict(
            figure.locator("svg g.cells text").evaluate_all(
                "all => all.map((one) => [one.textContent, one.getAttribute('fill')])"
            )
        )
        assert inks["0.1"] == "#ffffff"  # the smallest is the darkest
        assert inks["2"] == "#1a1a1a"
        assert inks["diverged"] == "var(--muted)"


def test_two_hundred_layers_have_room_for_their_labels(browser, pages):
    for width in (PHONE, DESKTOP):
        with opened(browser, pages["hostile"], width=width) as page:
            labels = page.locator("figure").first.locator("svg g[aria-label='x-axis tick label'] text")
            places = sorted(labels.evaluate_all("all => all.map((one) => one.getBoundingClientRect().x)"))
            assert 10 < len(places) < 90
            assert min(later - sooner for sooner, later in zip(places, places[1:], strict=False)) >= 12


def test_charts_are_drawn_again_when_the_window_changes(browser, pages):
    with opened(browser, pages["rich"]) as page:
        svg = page.locator("figure svg").first
        wide = svg.bounding_box()["width"]
        page.set_viewport_size({"width": PHONE, "height": 800})
        wait_until(page, "document.querySelector('figure svg').getBoundingClientRect().width < 400")
        assert svg.bounding_box()["width"] < 400 < wide
        assert overflow(page) <= 0


def test_the_button_turns_light_to_dark_and_back_for_this_page_alone(browser, pages):
    paper = "getComputedStyle(document.body).backgroundColor"
    for dark in (False, True):
        with opened(browser, pages["rich"], dark=dark) as page:
            first, button = page.evaluate(paper), page.locator("button.theme")
            assert (first == "rgb(18, 21, 25)") is dark
            assert button.get_attribute("aria-label") == f"Switch to {'light' if dark else 'dark'} colours"
            button.click()
            assert page.evaluate(paper) != first
            button.click()
            assert page.evaluate(paper) == first
            button.click()
            page.reload()
            assert page.evaluate(paper) == first


def test_charts_change_colour_with_the_page(browser, pages):
    with opened(browser, pages["rich"]) as page:
        stroke = "getComputedStyle(document.querySelector('figure svg g[aria-label=line]')).stroke"
        assert page.evaluate(stroke) == "rgb(0, 114, 178)"
        page.locator("button.theme").click()
        assert page.evaluate(stroke) == "rgb(88, 174, 230)"


def test_on_paper_a_page_is_light_whole_and_without_buttons(browser, pages):
    with opened(browser, pages["hostile"], dark=True) as page:
        page.emulate_media(media="print")
        wait_until(page, "document.querySelector('details.facts').open")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
        assert not page.locator("button.theme").is_visible()
        assert not page.locator(".listing").first.is_visible()
        frame = page.locator(".table.long").first
        assert frame.evaluate("one => one.scrollHeight <= one.clientHeight + 2")
        assert page.locator("figure svg").first.bounding_box()["width"] == 640
        page.emulate_media(media="screen")
        wait_until(page, "!document.querySelector('details.facts').open")
        assert page.locator("figure svg").first.bounding_box()["width"] > 900


def test_without_scripts_the_words_and_tables_are_all_there(browser, pages):
    with opened(browser, pages["rich"], java_script_enabled=False) as page:
        # This browser, told to run no scripts, still reads <noscript> as one that does: the text is checked.
        assert "The charts need JavaScript" in page.locator("noscript").inner_html()
        assert page.locator("button:visible").count() == 0
        assert page.locator("main table").first.locator("tbody tr").count() == 4
        assert page.locator("[tabindex='0'].drawing").count() == 0
        figure = page.locator("figure").first
        assert "norm ‖H‖ of 3 layers" in figure.locator(".description").inner_text()
        assert figure.locator(".description").bounding_box()["height"] > 15
    with opened(browser, pages["rich"]) as page:
        assert page.locator("figure .description").first.bounding_box()["height"] <= 1


@pytest.mark.parametrize("name", ["rich", "initialization", "blocks"])
def test_the_page_makes_sense_to_those_who_hear_it(browser, pages, name):
    with opened(browser, pages[name]) as page:
        levels = page.locator("h1, h2, h3, h4").evaluate_all(
            "all => all.map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(later <= sooner + 1 for sooner, later in zip(levels, levels[1:], strict=False))
        ids = page.locator("[id]").evaluate_all("all => all.map((one) => one.id)")
        assert len(ids) == len(set(ids))
        named = page.locator("[aria-labelledby], [aria-describedby]").evaluate_all(
            "all => all.flatMap((one) => ['aria-labelledby', 'aria-describedby']"
            ".flatMap((name) => (one.getAttribute(name) ?? '').split(' ').filter(Boolean)))"
        )
        assert set(named) <= set(ids)
        # One thing with the chart's name, which the arrow keys read; not a picture inside it as well.
        charts = "[role=application][aria-labelledby][aria-describedby]"
        assert page.locator(f"figure:not(:has(figcaption)), figure:not(:has({charts}))").count() == 0
        assert page.locator("[role=img]").count() == 0
        assert page.locator("html").get_attribute("lang") == "en"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(".skip").bounding_box()["x"] >= 0


def test_numbers_are_written_as_the_terminal_writes_them(browser):
    values = [
        0.0,
        1.0,
        -1.0,
        64.0,
        0.30649,
        1234.5,
        99999.0,
        1e5,
        0.0001,
        9.99e-5,
        1.234e-7,
        6.02e23,
        0.1 + 0.2,
    ]
    page = browser.new_page()
    script = (files("hessinit.present.page") / "assets" / "numbers.js").read_text(encoding="utf-8")
    written = page.evaluate(
        f"() => {{ {script}; return {json.dumps(values)}.map((x) => formatNumber(x, 3)); }}"
    )
    page.close()
    assert written == [format_number(value, 3) for value in values]
