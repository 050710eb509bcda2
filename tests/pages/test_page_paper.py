"""Pages on A4: tables that are wider than the sheet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium, opened, overflow, wait_until

from hessinit.present.page.content import Page, Section, Table, TableColumn
from hessinit.present.page.render import render_page

A4 = 688  # pixels between the margins


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def write_table(path: Path, columns: list[TableColumn]) -> Path:
    page = Page(
        title="t", verdict=[], sections=[Section(heading="s", blocks=[Table(caption="c", columns=columns)])]
    )
    path.write_text(render_page(page), encoding="utf-8")
    return path


def numbers(count: int, heading: str = "layer.{}", **changes: Any) -> list[TableColumn]:
    cells = ["0.4321 ± 0.0012", "12.3", "diverged 2/3"]
    return [TableColumn(heading=heading.format(at), cells=cells, **changes) for at in range(count)]


NAMES = TableColumn(heading="start", cells=["default", "orthogonal", "a much longer name"], is_number=False)


def on_paper(page: Any) -> None:
    page.emulate_media(media="print")
    wait_until(page, "document.querySelector('.on-paper') !== null")


def test_a_table_a_little_too_wide_is_printed_smaller_and_whole(browser, tmp_path):
    path = write_table(tmp_path / "p.html", [NAMES, *numbers(7, "lr 0.{}")])
    with opened(browser, path, width=A4) as page:
        on_paper(page)
        assert overflow(page) <= 0
        assert page.locator("th:visible, td:visible").count() == 8 * 4
        letters = page.locator("main table").evaluate("one => parseFloat(getComputedStyle(one).fontSize)")
        assert 7.5 <= letters < 12
        assert page.locator(".counted").count() == 0


def test_a_table_far_too_wide_keeps_its_ends_and_counts_the_rest(browser, tmp_path):
    path = write_table(tmp_path / "p.html", [NAMES, *numbers(200), *numbers(3, "end {}")])
    with opened(browser, path, width=A4) as page:
        on_paper(page)
        assert overflow(page) <= 0
        shown = page.locator("thead th:visible").all_inner_texts()
        assert shown[:3] == ["start", "layer.0", "layer.1"]
        assert shown[-3:] == ["end 0", "end 1", "end 2"]
        left = 204 - len(shown)
        assert page.locator(".table + p").inner_text() == (
            f"{left} columns are on the page only: this sheet is too narrow for them."
        )
        assert page.locator("tbody tr").first.locator("th:visible, td:visible").count() == len(shown)
        page.emulate_media(media="screen")
        wait_until(page, "document.querySelector('.on-paper') === null")
        assert page.locator("thead th:visible").count() == 204
        assert page.locator(".counted").count() == 0
        assert page.locator("main table").get_attribute("style") in (None, "")


def test_columns_under_common_headings_all_stay_on_paper(browser, tmp_path):
    groups = [column for at in range(6) for column in numbers(2, "column {}", group=f"table {at}")]
    path = write_table(tmp_path / "p.html", [NAMES, *groups])
    with opened(browser, path, width=A4) as page:
        on_paper(page)
        assert overflow(page) <= 0
        assert page.locator("td:visible").count() == 3 * 12


def test_a_table_that_fits_is_printed_as_it_is(browser, tmp_path):
    with opened(browser, write_table(tmp_path / "p.html", [NAMES, *numbers(2)]), width=A4) as page:
        on_paper(page)
        assert page.locator("main table").evaluate("one => getComputedStyle(one).fontSize") == "12px"
