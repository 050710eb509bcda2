from __future__ import annotations

from html.parser import HTMLParser

import pytest
from report_examples import make_layer, make_report, make_three_layers


class Reader(HTMLParser):
    """Collects the tags, the table cells and whatever a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.loaded: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag in ("td", "th"):
            self.inside = tag
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data


def test_a_notebook_shows_the_same_cells_as_the_terminal():
    cells = Reader(make_three_layers()._repr_html_()).cells
    assert cells[:4] == ["layer", "weight", "‖H‖", "verdict"]
    assert cells[-8:] == ["fc3", "(10, 256)", "64", "sharp", "network", "1,234", "64.5", "sharp"]
    assert len(cells) == 4 * 5


def test_html_in_names_notes_and_versions_is_escaped(tmp_path):
    attack = "<script>alert(1)</script>"
    layer = make_layer(attack, 99.0, aliases=(attack,), engine_reason=attack)
    report = make_report(
        layer,
        make_layer("b"),
        notes=(attack,),
        engine=attack,
        engine_reason=attack,
        versions={attack: attack},
    )
    report.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    for text in (report._repr_html_(), page):
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert f"{attack} = {attack}" in Reader(text).cells
    assert "<script" not in report._repr_html_()


def test_a_notebook_gets_no_script_and_little_text():
    text = make_three_layers()._repr_html_()
    assert "<script" not in text
    assert len(text) < 5000


def test_a_page_is_whole_loads_nothing_and_has_a_dark_side(tmp_path):
    make_three_layers().to_html(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert text.startswith("<!DOCTYPE html>")
    assert {"html", "head", "title", "body", "table"} <= set(page.tags)
    assert {address[0] for address in page.loaded if address != "data:,"} == {"#"}
    assert "prefers-color-scheme: dark" in text
    assert "fc3 is 206 times sharper than fc1." in text
    assert "Tolerance 0.001, seed 0, torch 2.13.0." in text


def test_a_page_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        make_three_layers().to_html(tmp_path / "nowhere" / "r.html")
