"""Pages in a real Chromium, offline: safe, readable, printable, on any screen and by keyboard."""

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

from hessinit.present import document as doc
from hessinit.present import to_page
from hessinit.present.page import render_page
from hessinit.present.words import format_number, shorten
from result_examples import (
    HOSTILE,
    every_block,
    example_comparison,
    example_reproduction,
    hostile_report,
    make_initialization,
    make_layer,
    make_report,
    rich_report,
)

A4 = 688  # pixels between the margins
LONG = "encoder" * 1400 + ".end"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "rich": to_page(rich_report()),
        "hostile": to_page(hostile_report()),
        "initialization": to_page(make_initialization()),
        "comparison": to_page(example_comparison()),
        "reproductions": to_page([example_reproduction(), example_reproduction("table-4-again")]),
        "blocks": render_page(every_block()),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def write(path: Path, *blocks: Any) -> Path:
    document = doc.Document(title="t", verdict=["v"], sections=[doc.Section("s", blocks)])
    path.write_text(render_page(document), encoding="utf-8")
    return path


def line_chart(*series: doc.Series, **changes: Any) -> doc.LineChart:
    usual = {"name": "n", "caption": "c", "description": "d", "x_label": "step", "y_label": "loss"}
    return doc.LineChart(series=series, **{**usual, **changes})


PAGES = ["rich", "hostile", "initialization", "comparison", "reproductions", "blocks"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_offline_without_a_message_fits_its_window_and_can_be_read(browser, pages, name):
    for width, dark in ((PHONE, False), (DESKTOP, True)):
        with opened(browser, pages[name], width=width, dark=dark) as page:
            assert overflow(page) <= 0
            drawn = page.locator("figure .picture svg")
            assert drawn.count() == page.locator("figure").count() > 0
            assert min(drawn.nth(place).bounding_box()["width"] for place in range(drawn.count())) > 200
            found = contrasts(page)
            assert len(found) > 30
            assert [text for ratio, text in found if ratio < 4.5] == []
            page.set_viewport_size({"width": 360, "height": 800})
            assert overflow(page) <= 0


def test_names_are_shown_and_never_run(browser, pages):
    with opened(browser, pages["hostile"]) as page:
        names = column(page, 0)
        assert (names[0], names[20]) == HOSTILE[:2]
        assert "a\\u2028b\\u202ec\\x1b[2J" in names
        assert page.locator("main script:not([type='application/json']), main img").count() == 0
    with opened(browser, pages["blocks"]) as page:
        assert page.title() == HOSTILE[1]
        assert page.locator("td a, th a").all_text_contents() == ["a"]  # and no javascript: link


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


def test_a_table_sorts_by_number_down_up_and_back(browser, pages, tmp_path):
    norms = {"a": 9.0, "b": math.nan, "c": 1234.0, "d": math.inf, "e": 0.5}
    report = make_report(*(make_layer(name, norm) for name, norm in norms.items()))
    (tmp_path / "r.html").write_text(to_page(report), encoding="utf-8")
    with opened(browser, tmp_path / "r.html") as page:
        for order, names in (("descending", "dcaeb"), ("ascending", "eacdb"), (None, "abcde")):
            assert sort_by(page, "‖H‖") == order
            assert column(page, 0) == [*names, "network"]
        assert sort_by(page, "verdict") == "ascending"
        assert column(page, 0) == [*"aebcd", "network"]
        page.get_by_role("button", name="layer").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Space")
        assert column(page, 0) == [*"edcba", "network"]
        assert page.locator("th[aria-sort]").all_text_contents() == ["layer"]
    with opened(browser, pages["blocks"]) as page:  # columns with a common heading
        sort_by(page, "paper")
        assert column(page, 1) == ["inf", "~1,230", "9", "nan", "7"]
        sort_by(page, "ours")
        assert column(page, 2) == ["100", "20", "3", "", "7"]


def test_names_that_every_javascript_object_has_sort_as_words(browser, tmp_path):
    names = ["constructor", "5", "inf", "2", "valueOf"]
    table = doc.Table("t", [doc.Column("name", names, is_number=False)])
    with opened(browser, write(tmp_path / "p.html", table)) as page:
        sort_by(page, "name")
        assert column(page, 0) == sorted(names)


def test_hovering_touching_and_the_listing_show_the_exact_value(browser, pages):
    with opened(browser, pages["rich"]) as page:
        caption, dots = "Curvature ‖H‖ of each layer", "svg g[aria-label=dot] circle"
        assert hover_over(page, caption, dots, 2) == "fc3\nGauss-Newton: 64\n(4, 3), sharp"
        assert page.locator(".tip:visible").count() == 1
        page.mouse.move(2, 2)
        assert page.locator(".tip:visible").count() == 0
        figure = page.locator("figure").first
        figure.get_by_text("Numbers").click()
        rows = [row.split("\t") for row in figure.locator(".listing tr").all_inner_texts()]
        assert (rows[0], rows[3]) == (
            ["layer", "curvature ‖H‖", "more"],
            ["fc3", "Gauss-Newton: 64", "(4, 3), sharp"],
        )
    with opened(browser, pages["rich"], width=PHONE, has_touch=True) as page:
        figure = page.locator("figure").first
        figure.scroll_into_view_if_needed()
        dot = figure.locator(dots).nth(1).bounding_box()
        page.touchscreen.tap(dot["x"] + 4, dot["y"] + 4)
        assert figure.locator(".tip b").text_content() == "fc2"
        tip = figure.locator(".tip").bounding_box()
        assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= PHONE


def test_the_keyboard_reads_a_chart_which_takes_one_tab_stop(browser, pages):
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
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        assert not figure.locator(".tip").is_visible()
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"  # its numbers, the next thing


def test_numbers_off_the_axis_are_marked_at_its_edge_and_named_once_in_a_curve(browser, pages, tmp_path):
    with opened(browser, pages["blocks"]) as page:
        depth = page.locator("figure").first
        assert sorted(depth.locator("svg g.bad text").all_text_contents()) == ["0", "inf", "nan"]
        rates = page.locator("figure", has=page.get_by_text("rates", exact=True))
        assert rates.locator("svg g.bad text").all_text_contents() == ["endless inf"]
    curve = doc.Series(name="n", x=list(range(40)), y=[1.0 if at < 20 else math.inf for at in range(40)])
    gaps = doc.Series(name="n", x=list(range(20)), y=[None if at in (9, 11) else 1.0 for at in range(20)])
    charts = line_chart(curve, caption="from 20", log_y=True), line_chart(gaps, caption="gaps")
    with opened(browser, write(tmp_path / "p.html", *charts)) as page:
        figure = page.locator("figure").first
        assert figure.locator("svg g.bad text").all_text_contents() == ["inf"]
        assert figure.locator("svg g[aria-label=dot] path").count() == 20
        assert hover_over(page, "from 20", "svg g[aria-label=dot] path", 5) == "step 25\nn: inf"
        line = page.locator("figure").nth(1).locator("svg g[aria-label=line] path").get_attribute("d")
        assert line.count("M") == 3


def test_charts_of_nothing_are_drawn_without_a_message(browser, tmp_path):
    usual = {"name": "n", "caption": "nothing", "description": "nothing"}
    series = {"nan": doc.Series(name="n", y=[math.nan]), "none": doc.Series(name="n", x=[], y=[])}
    labels = {"x_label": "x", "y_label": "y"}
    charts = [
        line_chart(layers=[]),
        line_chart(series["nan"], layers=["a"], log_y=True),
        line_chart(),
        line_chart(series["none"], log_x=True, log_y=True),
        line_chart(doc.Series(name="n", x=[1], y=[-5.0]), log_y=True),
        doc.HeatMap(**usual, **labels, rows=["a"], columns=["b"], values=[[math.nan]], texts=[["–"]],
                    value_label="v"),
        doc.RateLine(**usual, best=math.inf, stable=math.inf),
        doc.RateLine(**usual, best=0.0, stable=0.0),
    ]  # fmt: skip
    with opened(browser, write(tmp_path / "p.html", *charts)) as page:
        assert page.locator("figure svg").count() == len(charts)
        assert "NaN" not in page.locator("main").inner_html()


def test_a_heat_map_has_ink_that_can_be_read_on_its_cells(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        figure = page.locator("figure", has=page.get_by_text("heat", exact=True))
        inks = dict(
            figure.locator("svg g.cells text").evaluate_all(
                "all => all.map((one) => [one.textContent, one.getAttribute('fill')])"
            )
        )
        assert (inks["0.1"], inks["2"], inks["diverged"]) == ("#ffffff", "#1a1a1a", "var(--muted)")


def test_two_hundred_layers_have_room_for_their_labels(browser, pages):
    for width in (PHONE, DESKTOP):
        with opened(browser, pages["hostile"], width=width) as page:
            labels = page.locator("figure").first.locator("svg g[aria-label='x-axis tick label'] text")
            places = sorted(labels.evaluate_all("all => all.map((one) => one.getBoundingClientRect().x)"))
            assert 10 < len(places) < 90
            assert min(later - sooner for sooner, later in zip(places, places[1:], strict=False)) >= 12


def test_charts_follow_the_window_and_the_theme(browser, pages):
    paper = "getComputedStyle(document.body).backgroundColor"
    stroke = "getComputedStyle(document.querySelector('figure svg g[aria-label=line]')).stroke"
    with opened(browser, pages["rich"]) as page:
        first, button = page.evaluate(paper), page.locator("button.theme")
        assert page.evaluate(stroke) == "rgb(0, 114, 178)"
        assert button.get_attribute("aria-label") == "Switch to dark colours"
        button.click()
        assert (page.evaluate(paper), page.evaluate(stroke)) == ("rgb(18, 21, 25)", "rgb(88, 174, 230)")
        page.reload()
        assert page.evaluate(paper) == first
        page.set_viewport_size({"width": PHONE, "height": 800})
        wait_until(page, "document.querySelector('figure svg').getBoundingClientRect().width < 400")
        assert overflow(page) <= 0


def test_colours_that_mean_something_stay_where_others_are_forced(browser, pages):
    with opened(browser, pages["rich"], forced_colors="active") as page:
        seen = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        assert len(set(page.locator("td .dot").evaluate_all(seen))) == 2
        assert page.locator(".swatch.band").evaluate_all(seen) == ["rgb(0, 158, 115)"]


def test_on_paper_a_page_is_light_whole_and_without_buttons(browser, pages):
    with opened(browser, pages["hostile"], dark=True) as page:
        page.emulate_media(media="print")
        wait_until(page, "document.querySelector('details.facts').open")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
        assert not page.locator("button.theme").is_visible()
        assert not page.locator(".listing").first.is_visible()
        assert page.locator(".table.long").first.evaluate("one => one.scrollHeight <= one.clientHeight + 2")
        assert page.locator("figure svg").first.bounding_box()["width"] == 640
        page.emulate_media(media="screen")
        wait_until(page, "!document.querySelector('details.facts').open")
        assert page.locator("figure svg").first.bounding_box()["width"] > 900


@pytest.mark.parametrize(("count", "is_whole"), [(7, True), (200, False)])
def test_a_table_wider_than_the_sheet_is_printed_smaller_or_keeps_its_ends(
    browser, tmp_path, count, is_whole
):
    cells = ["0.4321 ± 0.0012", "12.3", "diverged 2/3"]
    names = doc.Column("scheme", ["default", "orthogonal", "a much longer name"], is_number=False)
    table = doc.Table("c", [names, *(doc.Column(f"layer.{place}", cells) for place in range(count))])
    with opened(browser, write(tmp_path / "p.html", table), width=A4) as page:
        page.emulate_media(media="print")
        wait_until(page, "document.querySelector('.on-paper') !== null")
        assert overflow(page) <= 0
        shown = page.locator("thead th:visible").all_inner_texts()
        assert (len(shown) == count + 1) == is_whole
        assert shown[:2] + shown[-3:] == [
            "scheme",
            "layer.0",
            *(f"layer.{count - place}" for place in (3, 2, 1)),
        ]
        if not is_whole:
            assert page.locator(".table + p").inner_text() == (
                f"{count + 1 - len(shown)} columns are on the page only: this sheet is too narrow for them."
            )


def test_without_scripts_the_words_and_tables_are_all_there(browser, pages):
    with opened(browser, pages["rich"], java_script_enabled=False) as page:
        # This browser, told to run no scripts, still reads <noscript> as one that does: the text is checked.
        assert "The charts need JavaScript" in page.locator("noscript").inner_html()
        assert page.locator("button:visible").count() == 0
        assert page.locator("main table").first.locator("tbody tr").count() == 4
        figure = page.locator("figure").first
        assert "norm ‖H‖ of 3 layers" in figure.locator(".description").inner_text()
        assert figure.locator(".description").bounding_box()["height"] > 15
    with opened(browser, pages["rich"]) as page:
        assert page.locator("figure .description").first.bounding_box()["height"] <= 1


@pytest.mark.parametrize("name", ["rich", "initialization", "blocks"])
def test_the_page_makes_sense_to_screen_readers(browser, pages, name):
    with opened(browser, pages[name]) as page:
        levels = page.locator("h1, h2, h3, h4").evaluate_all(
            "all => all.map((one) => Number(one.tagName[1]))"
        )
        assert (levels[0], levels.count(1)) == (1, 1)
        assert all(later <= sooner + 1 for sooner, later in zip(levels, levels[1:], strict=False))
        # One thing with the chart's name, which the arrow keys read; not a picture inside it as well.
        charts = "[role=application][aria-labelledby][aria-describedby]"
        assert page.locator(f"figure:not(:has(figcaption)), figure:not(:has({charts}))").count() == 0
        assert page.locator("[role=img]").count() == 0
        assert page.locator("html").get_attribute("lang") == "en"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(".skip").bounding_box()["x"] >= 0


def test_the_label_of_a_rule_is_above_the_curves_with_a_halo(browser, tmp_path):
    flat = doc.Series(name="n", x=list(range(11)), y=[1.0] * 11)
    path = write(tmp_path / "p.html", line_chart(flat, rules=[doc.ReferenceLine(1.0, "stability limit")]))
    with opened(browser, path, dark=True) as page:
        look = "one => [getComputedStyle(one).paintOrder.split(' ')[0], getComputedStyle(one).stroke]"
        assert page.locator("svg .rule-label").evaluate(look) == ["stroke", "rgb(26, 30, 36)"]
        order = page.locator("svg > *").evaluate_all(
            "all => all.map((one) => one.classList.contains('rule-label') ? 'label' : one.ariaLabel)"
        )
        assert order.index("label") > order.index("line")


def test_a_page_with_names_of_ten_thousand_letters_stays_short(browser, tmp_path):
    report = make_report(make_layer(LONG, 1.0), make_layer("b", 20.0, aliases=(LONG,)))
    (tmp_path / "r.html").write_text(to_page(report), encoding="utf-8")
    with opened(browser, tmp_path / "r.html") as page:
        assert overflow(page) <= 0
        assert page.evaluate("document.documentElement.scrollHeight") < 5000
        assert any(
            LONG in one for one in page.locator("[title]").evaluate_all("all => all.map((one) => one.title)")
        )
        said = hover_over(page, "Curvature ‖H‖ of each layer", "svg g[aria-label=dot] circle", 0)
        assert said.splitlines()[0] == shorten(LONG, 240)


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
        1e-4,
        9.99e-5,
        1.234e-7,
        6.02e23,
        0.1 + 0.2,
    ]
    page = browser.new_page()
    script = (files("hessinit.present") / "assets" / "numbers.js").read_text(encoding="utf-8")
    written = page.evaluate(
        f"() => {{ {script}; return {json.dumps(values)}.map((x) => formatNumber(x, 3)); }}"
    )
    page.close()
    assert written == [format_number(value, 3) for value in values]
