"""Pages in a real Chromium, offline: safe, readable, printable, on any screen and by keyboard."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from hessinit.present import document as doc
from hessinit.present import to_page
from hessinit.present.page import render_page
from hessinit.present.words import format_number, shorten
from result_examples import (
    HOSTILE,
    LONG,
    every_block,
    example_comparison,
    example_reproduction,
    hostile_report,
    make_compared,
    make_initialization,
    make_layer,
    make_report,
    make_symmetric,
    make_trial,
    rich_report,
)

PHONE, DESKTOP, A4 = 390, 1280, 688  # pixels; of a sheet those between the margins
PATIENCE = 60  # seconds: what hangs fails the test; a loaded machine takes its time
DOTS, CURVE_DOTS = "svg g[aria-label=dot] circle", "svg g[aria-label=dot] path"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium, driven by Playwright. Skips without one, unless it is required."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        why = "needs playwright and a chromium on PATH (Debian: apt install chromium)"
        if os.environ.get("HESSINIT_BROWSER_REQUIRED") == "1":
            pytest.fail(f"HESSINIT_BROWSER_REQUIRED=1, and the test {why}")
        pytest.skip(why)
    with sync_playwright() as playwright:
        # No sandbox: it needs rights that a container does not give. The pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any, path: Path, *, width: int = DESKTOP, dark: bool = False, quiet: bool = True, **options: Any
) -> Iterator[Any]:
    """Open a page offline, and fail at the end when it said, asked for or ran what it should not."""
    size, scheme = {"width": width, "height": 900}, "dark" if dark else "light"
    context = browser.new_context(viewport=size, color_scheme=scheme, **options)
    context.set_offline(True)
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    messages: list[str] = []
    dialogs: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: messages.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(path.resolve().as_uri())
        yield page
        assert dialogs == [], "a name was run as a script"
        assert {url for url in asked if not url.startswith("data:")} == {path.resolve().as_uri()}
        assert not quiet or messages == []
    finally:
        context.close()


def overflow(page: Any) -> int:
    """By how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def wait_until(page: Any, expression: str) -> None:
    """Wait for an expression to be true. Playwright's own way needs `eval`, which our pages forbid."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(20)


def column(page: Any, number: int) -> list[str]:
    """The texts of a column, counted from 0, of the first table."""
    rows = "[...document.querySelector('main .table table').querySelectorAll('tbody tr')]"
    return list(page.evaluate(f"(at) => {rows}.map((row) => row.cells[at].textContent)", number))


def sort_by(page: Any, heading: str) -> str | None:
    """Click on a heading of the first table; what it says then about its order."""
    button = page.get_by_role("button", name=heading)
    found = page.locator("main .table table").first.locator("th", has=button)
    found.get_by_role("button").click()
    return found.get_attribute("aria-sort")


def hover_over(page: Any, caption: str, mark: str, number: int) -> str:
    """Put the pointer on a mark (a CSS selector) of a chart; what the tip says then, a line for each part."""
    figure = page.locator("figure", has=page.get_by_text(caption, exact=True))
    figure.scroll_into_view_if_needed()
    box = figure.locator(mark).nth(number).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return "\n".join(figure.locator(".tip > *").all_text_contents())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "rich": to_page(rich_report()),
        "hostile": to_page(hostile_report()),
        "initialization": to_page(make_initialization()),
        "trials": to_page(
            make_compared(searched=(0.05, 0.2), survival=make_trial("present weights", 24, 0.3))
        ),
        "symmetries": to_page(make_symmetric()),
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
def test_a_page_opens_offline_without_a_message_and_fits_its_window(browser, pages, name):
    for width, dark in ((PHONE, False), (DESKTOP, True)):
        with opened(browser, pages[name], width=width, dark=dark) as page:
            assert overflow(page) <= 0
            drawn = page.locator("figure .picture svg")
            assert drawn.count() == page.locator("figure").count() > 0
            assert min(drawn.nth(place).bounding_box()["width"] for place in range(drawn.count())) > 200


def test_a_table_wider_than_a_phone_has_a_shade_at_its_edge_until_the_end(browser, pages):
    def edge(page: Any) -> float:
        """The brightness of the last pixels of the table's second row."""
        box = page.locator(".table").first.bounding_box()
        clip = {"x": box["x"] + box["width"] - 5, "y": box["y"] + 50, "width": 2, "height": 12}
        return float(imread(io.BytesIO(page.screenshot(full_page=True, clip=clip)))[..., :3].mean())

    with opened(browser, pages["comparison"], width=PHONE) as page:
        shaded = edge(page)
        page.evaluate("const t = document.querySelector('.table'); t.scrollLeft = t.scrollWidth")
        assert shaded < edge(page) - 0.05
    with opened(browser, pages["comparison"]) as page:
        assert edge(page) > 0.99  # all of it fits


def test_a_table_sorts_by_number_down_up_and_back(browser, tmp_path):
    norms = {"a": 9.0, "b": math.nan, "c": 1234.0, "d": math.inf, "e": 0.5}
    report = make_report(*(make_layer(name, norm) for name, norm in norms.items()))
    (tmp_path / "r.html").write_text(to_page(report), encoding="utf-8")
    with opened(browser, tmp_path / "r.html") as page:
        for order, names in (("descending", "dcaeb"), ("ascending", "eacdb"), (None, "abcde")):
            assert sort_by(page, "‖H‖") == order
            assert column(page, 0) == [*names, "network"]
        page.get_by_role("button", name="layer").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Space")
        assert column(page, 0) == [*"edcba", "network"]


def test_hovering_touching_and_the_listing_show_the_exact_value(browser, pages):
    with opened(browser, pages["rich"]) as page:
        said = hover_over(page, "Curvature ‖H‖ of each layer", DOTS, 2)
        assert said == "fc3\nGauss-Newton: 64\n(4, 3)"
        assert page.locator(".tip:visible").count() == 1
        page.mouse.move(2, 2)
        assert page.locator(".tip:visible").count() == 0
        figure = page.locator("figure").first
        figure.get_by_text("Numbers").click()
        figure.locator(".listing tr").nth(3).wait_for()
        rows = [row.split("\t") for row in figure.locator(".listing tr").all_inner_texts()]
        assert rows[3] == ["fc3", "Gauss-Newton: 64", "(4, 3)"]
    with opened(browser, pages["rich"], width=PHONE, has_touch=True) as page:
        figure = page.locator("figure").first
        figure.scroll_into_view_if_needed()
        dot = figure.locator(DOTS).nth(1).bounding_box()
        page.touchscreen.tap(dot["x"] + 4, dot["y"] + 4)
        assert figure.locator(".tip b").text_content() == "fc2"
        tip = figure.locator(".tip").bounding_box()
        assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= PHONE


def test_the_keyboard_reads_a_chart_which_takes_one_tab_stop(browser, pages):
    with opened(browser, pages["initialization"]) as page:
        figure = page.locator("figure").first
        figure.locator(".drawing").focus()
        said = []
        for key in ("ArrowRight", "End", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(key)
            said.append(figure.locator(".readout").text_content())
        assert said == [
            "fc1 · before: 0.31 · (256, 784)",
            "fc3 · before: 64 · (10, 256)",
            "fc3 · after: 12.8 · (10, 256)",
            "fc2 · after: 11.04 · (256, 256)",
        ]
        assert figure.locator(".tip").is_visible()
        page.keyboard.press("Escape")
        assert not figure.locator(".tip").is_visible()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        assert not figure.locator(".tip").is_visible()
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"  # its numbers, the next thing


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


def test_a_table_wider_than_the_sheet_keeps_its_ends(browser, tmp_path):
    cells = ["0.4321 ± 0.0012", "12.3", "diverged 2/3"]
    names = doc.Column("scheme", ["default", "orthogonal", "a much longer name"], is_number=False)
    table = doc.Table("c", [names, *(doc.Column(f"layer.{place}", cells) for place in range(200))])
    with opened(browser, write(tmp_path / "p.html", table), width=A4) as page:
        page.emulate_media(media="print")
        wait_until(page, "document.querySelector('.on-paper') !== null")
        assert overflow(page) <= 0
        shown = page.locator("thead th:visible").all_inner_texts()
        assert shown[:2] + shown[-2:] == ["scheme", "layer.0", "layer.198", "layer.199"]
        left_out = page.locator(".table + p").inner_text()
        assert left_out.startswith(f"{201 - len(shown)} columns are on the page only: this sheet is too")


def test_without_scripts_the_words_and_tables_are_all_there(browser, pages):
    with opened(browser, pages["rich"], java_script_enabled=False) as page:
        # This browser, told to run no scripts, still reads <noscript> as one that does: the text is checked.
        assert "The charts need JavaScript" in page.locator("noscript").inner_html()
        assert page.locator("button:visible").count() == 0
        assert page.locator("main table").first.locator("tbody tr").count() == 4
        figure = page.locator("figure").first
        assert "norm ‖H‖ of 3 layers" in figure.locator(".description").inner_text()
        assert figure.locator(".description").bounding_box()["height"] > 15


def test_the_page_makes_sense_to_screen_readers(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        assert page.locator("h1").count() == 1
        # One thing with the chart's name, which the arrow keys read; not a picture inside it as well.
        charts = "[role=application][aria-labelledby][aria-describedby]"
        assert page.locator(f"figure:not(:has(figcaption)), figure:not(:has({charts}))").count() == 0
        assert page.locator("[role=img]").count() == 0
        assert page.locator("html").get_attribute("lang") == "en"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_a_page_with_names_of_ten_thousand_letters_stays_short(browser, tmp_path):
    report = make_report(make_layer(LONG, 1.0), make_layer("b", 20.0, aliases=(LONG,)))
    (tmp_path / "r.html").write_text(to_page(report), encoding="utf-8")
    with opened(browser, tmp_path / "r.html") as page:
        assert overflow(page) <= 0
        assert page.evaluate("document.documentElement.scrollHeight") < 5000
        said = hover_over(page, "Curvature ‖H‖ of each layer", DOTS, 0)
        assert said.splitlines()[0] == shorten(LONG, 240)


def test_names_are_shown_and_never_run_and_a_script_that_got_in_would_not_run(browser, pages):
    with opened(browser, pages["hostile"]) as page:
        names = column(page, 0)
        assert (names[0], names[20]) == HOSTILE[:2]
        assert "a\\u2028b\\u202ec\\x1b[2J" in names
        assert page.locator("main script:not([type='application/json']), main img").count() == 0
    with opened(browser, pages["blocks"], quiet=False) as page:
        assert page.title() == HOSTILE[1]
        run = "Object.assign(document.createElement('script'), {text: 'window.ran = 1'})"
        page.evaluate(f"document.body.append({run})")
        evil = "'beforeend', '<b onclick=\"window.ran = 1\" id=evil>x</b>'"
        page.evaluate(f"document.body.insertAdjacentHTML({evil})")
        page.locator("#evil").click()
        assert page.evaluate("window.ran") is None


def test_numbers_off_the_axis_are_marked_at_its_edge_and_heat_maps_can_be_read(browser, pages):
    with opened(browser, pages["blocks"]) as page:
        depth = page.locator("figure").first
        assert sorted(depth.locator("svg g.bad text").all_text_contents()) == ["0", "inf", "nan"]
        figure = page.locator("figure", has=page.get_by_text("heat", exact=True))
        read = "all => all.map((one) => [one.textContent, one.getAttribute('fill')])"
        inks = dict(figure.locator("svg g.cells text").evaluate_all(read))
        assert (inks["0.1"], inks["2"], inks["diverged"]) == ("#ffffff", "#1a1a1a", "var(--muted)")


def test_charts_of_nothing_or_with_gaps_are_drawn_without_a_message(browser, tmp_path):
    labels = "n", "nothing", "nothing"
    curve = doc.Series("n", [1.0 if at < 20 else math.inf for at in range(40)], range(40))
    gaps = doc.Series("n", [None if at in (9, 11) else 1.0 for at in range(20)], range(20))
    charts = [
        line_chart(curve, caption="from 20", log_y=True),
        line_chart(gaps, rules=[doc.ReferenceLine(1.0, "limit")]),
        line_chart(doc.Series("n", [math.nan]), layers=["a"], log_y=True),
        line_chart(),
        line_chart(doc.Series("n", [], []), log_x=True, log_y=True),
        doc.HeatMap(*labels, ["a"], ["b"], [[math.nan]], [["–"]], "x", "y", "v"),
        doc.RateLine(*labels, best=math.inf, stable=math.inf),
    ]
    with opened(browser, write(tmp_path / "p.html", *charts), dark=True) as page:
        assert page.locator("figure svg").count() == len(charts)
        assert "NaN" not in page.locator("main").inner_html()
        figure, second = page.locator("figure").first, page.locator("figure").nth(1)
        assert figure.locator("svg g.bad text").all_text_contents() == ["inf"]  # named once
        assert figure.locator(CURVE_DOTS).count() == 20
        assert hover_over(page, "from 20", CURVE_DOTS, 5) == "step 25\nn: inf"
        assert second.locator("svg g[aria-label=line] path").get_attribute("d").count("M") == 3
        values = [0.0, -1.0, 64.0, 0.30649, 1234.5, 99999.0, 1e5, 1e-4, 9.99e-5, 6e23, 0.1 + 0.2]
        script = (files("hessinit.present") / "assets" / "numbers.js").read_text(encoding="utf-8")
        write_all = f"{json.dumps(values)}.map((x) => formatNumber(x, 3))"
        written = page.evaluate(f"() => {{ {script}; return {write_all}; }}")
        assert written == [format_number(value, 3) for value in values]  # as the terminal writes them
