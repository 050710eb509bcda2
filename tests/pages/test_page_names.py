"""Names of ten thousand letters: cut where they are shown, whole where the pointer asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from browsing import chromium, hover_over, opened, overflow
from page_examples import make_layer, make_report

from hessinit.present.comparison_example import example_comparison
from hessinit.present.page.brief import brief
from hessinit.present.page.comparison import comparison_page
from hessinit.present.page.content import Page, Table, TableColumn
from hessinit.present.page.islands import LegendItem
from hessinit.present.page.render import render_page
from hessinit.present.page.tables import headings, rows
from hessinit.present.table import render_text
from hessinit.present.words import join_names, shorten

LONG = "encoder" * 1400 + ".end"
SPACED = "my start " * 1200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def test_a_name_keeps_its_beginning_and_its_end():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde…hijk"
    assert len(shorten(LONG)) == 80
    assert shorten(LONG).endswith("encoder.end")


def test_a_verdict_has_short_names():
    report = make_report(make_layer(LONG, 1.0), make_layer("7" + LONG, 1e5), make_layer("c", 1e6))
    assert len(report.verdict) < 800
    assert len(join_names([LONG, SPACED])) < 200


def test_the_table_of_a_terminal_has_short_names():
    text = render_text(make_report(make_layer(LONG, 1.0, aliases=(SPACED,)), make_layer("b", 1.0)), 80)
    assert len(text.splitlines()) < 20


def test_a_cell_and_a_heading_are_cut_and_know_the_whole():
    columns = [TableColumn(heading="name", cells=[SPACED, "b"]), TableColumn(heading=LONG, cells=["1", "2"])]
    table = Table(caption="t", columns=columns)
    first, second = rows(table)
    assert (first[0].text, first[0].whole) == (shorten(SPACED), SPACED)
    assert (second[0].text, second[0].whole) == ("b", "")
    assert first[0].key == ""  # no number; names sort by the whole of them
    assert [(one.text, one.whole) for one in headings(table)[0]] == [("name", ""), (shorten(LONG), LONG)]


def test_unbroken_words_are_cut_in_any_text_and_escaped():
    text = str(brief(f"Note: <b>{'x' * 200}</b> & more"))
    assert text.startswith('Note: <span title="&lt;b&gt;xxx')
    assert text.endswith("&lt;/b&gt;</span> &amp; more")
    assert brief("short " * 100) == "short " * 100


def test_legends_and_titles_are_short():
    assert len(LegendItem(LONG, "line", "").shown) == 48
    text = render_page(Page(title=SPACED, verdict=[LONG], sections=[]))
    assert f"<title>{shorten(SPACED, 140)}</title>" in text
    assert text.count(SPACED) == 1  # what the pointer shows


def test_pages_with_names_of_ten_thousand_letters_stay_short(browser, tmp_path):
    make_report(make_layer(LONG, 1.0), make_layer("b", 20.0, aliases=(LONG,))).to_html(tmp_path / "r.html")
    comparison = example_comparison()
    run = comparison.runs[0].scheme
    runs = tuple(replace(one, scheme=LONG) if one.scheme == run else one for one in comparison.runs)
    starts = tuple(LONG if start == run else start for start in comparison.schemes)
    page = comparison_page(replace(comparison, runs=runs, schemes=starts))
    (tmp_path / "c.html").write_text(render_page(page), encoding="utf-8")
    for name in ("r", "c"):
        with opened(browser, tmp_path / f"{name}.html") as found:
            assert overflow(found) <= 0
            # Twice what it is with short names, not ten times.
            assert found.evaluate("document.documentElement.scrollHeight") < 5000
            whole = found.locator("[title]").evaluate_all("all => all.map((one) => one.title)")
            assert any(LONG in title for title in whole)
    with opened(browser, tmp_path / "r.html") as found:
        said = hover_over(found, "How sharp each layer is", "svg g[aria-label=dot] circle", 0)
        assert said.splitlines()[0] == shorten(LONG, 240)
