"""The site: it builds without a warning, holds every name, and asks nothing of any other host."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hessinit

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^::: (?P<path>[\w.]+)$", re.M)
ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.I)
IN_STYLES = re.compile(r"@import\s+[\"']?(?:url\()?[\"']?(?:https?:)?//|url\(\s*[\"']?(?:https?:)?//", re.I)
# Elements that load what they name as soon as a page opens; a link to follow (<a>) does not.
LOADING = {"script", "link", "img", "iframe", "source", "video", "audio", "embed", "object"}
NOT_LOADED = {"canonical", "prev", "next"}  # <link rel=…> that only names a page


class Loaded(HTMLParser):
    """Collects what a page loads from elsewhere, and the code inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []
        self.code: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self._inside = tag
        if tag in LOADING and values.get("rel") not in NOT_LOADED:
            named = [values.get(name, "") for name in ("src", "href", "data", "srcset")]
            self.elsewhere += [name for name in named if ELSEWHERE.match(name)]
        if IN_STYLES.search(values.get("style", "")):
            self.elsewhere.append(values["style"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style" and IN_STYLES.search(data):
            self.elsewhere.append(data[:200])
        if self._inside == "script" and re.search(r"\b(?:import|fetch)\b[^;]{0,80}https?://", data):
            self.elsewhere.append(data[:200])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; `--strict` makes every warning, a broken link or anchor among them, a failure."""
    pytest.importorskip("mkdocs", reason="needs hessinit[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation_and_opens(site: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    built = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages}
    assert {page for page in built if not (site / page).is_file()} == set()
    start = (site / "index.html").read_text(encoding="utf-8")
    assert {
        page for page in built - {Path("index.html")} if f'href="{page.as_posix()}"' not in start
    } == set()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {str(page.relative_to(site)): found for page in pages if (found := loads_elsewhere(page))} == {}
    styles = sorted(site.rglob("*.css"))
    assert styles != []
    assert [sheet.name for sheet in styles if IN_STYLES.search(sheet.read_text(encoding="utf-8"))] == []


def loads_elsewhere(page: Path) -> list[str]:
    reader = Loaded()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.elsewhere


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css';</style>",
        "<style>p { background: url(https://example.org/a.png) }</style>",
        '<script type="module">import x from "https://example.org/a.js";</script>',
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(element: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<a href="https://example.org">a link is no request</a>{element}', encoding="utf-8")
    assert len(loads_elsewhere(page)) == 1


def test_the_reference_has_every_public_name() -> None:
    paths = DIRECTIVE.findall((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))
    described = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        described.setdefault(name, []).append(getattr(importlib.import_module(module), name))
    missing = [name for name in hessinit.__all__ if getattr(hessinit, name) not in described.get(name, [])]
    assert missing == []


def test_the_reference_shows_signatures_and_examples(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    for name in hessinit.__all__:
        assert f"{name}</code>" in page or f">{name}<" in page, name
    text = re.sub(r"<[^>]+>", "", page)
    assert "tolerance" in text
    assert "&gt;&gt;&gt; " in text  # examples are code, not quotations
    assert "<blockquote>" not in page


def test_pictures_outside_the_documents_are_taken_along(site: Path) -> None:
    page = (site / "schemes.html").read_text(encoding="utf-8")
    (picture,) = re.findall(r'src="(outside/[^"]+)"', page)
    assert (site / picture).is_file()
