from __future__ import annotations

from html.parser import HTMLParser

import pytest
from shown_examples import make_comparison, make_two_starts

from hessinit.present.comparison_example import example_comparison, example_sweep


class Reader(HTMLParser):
    """Collects the tags, the table cells with their classes, and whatever a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag in ("td", "th"):
            self.inside = tag
            self.cells.append(("", dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside:
            text, kind = self.cells[-1]
            self.cells[-1] = text + data, kind


def test_a_notebook_shows_the_cells_of_the_terminal_with_the_best_marked():
    cells = Reader(make_two_starts()._repr_html_()).cells
    assert [text for text, _ in cells[:5]] == ["start", "lr 0.1", "lr 1", "‖H‖", "best lr"]
    assert ("0.550 ± 0.050*", "number best") in cells
    assert ("diverged 1/2", "number diverged") in cells
    assert len(cells) == 15


@pytest.mark.parametrize("made_up", [example_comparison(), example_sweep()])
def test_a_page_is_whole_and_the_verdict_comes_before_the_charts_and_the_table(tmp_path, made_up):
    made_up.to_html(tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert text.startswith("<!DOCTYPE html>")
    assert all(link.startswith("#") or link == "data:," for link in page.loaded)
    assert text.index('class="verdict') < text.index("<figure") < text.index("<table")
    assert "Seeds 0, 1, 2, hessinit example." in text


def test_the_same_comparison_gives_the_same_page(tmp_path):
    for name in ("a.html", "b.html"):
        example_comparison().to_html(tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_html_in_names_notes_and_versions_is_escaped(tmp_path):
    attack = "<script>alert(1)</script>"
    comparison = make_comparison(
        {(attack, 0.1): (1.0,), ("b", 0.1): (2.0,)}, notes=(attack,), versions={attack: attack}
    )
    comparison.to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    fragment = comparison._repr_html_()
    assert "<script" not in fragment
    assert (attack, "name") in Reader(fragment).cells
    assert "<script>alert" not in page
    assert attack in [text for text, _ in Reader(page).cells]
