"""The site builds without a warning, documents every public name, and loads nothing from other hosts."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hessinit

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^::: (?P<path>[\w.]+)$", re.M)
# What a page loads as soon as it opens; <a>, and <link> that only names a page, do not load anything.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|embed|object)\b(?![^>]*\brel=.?(?:canonical|prev|next))"
    r"[^>]*?\b(?:src|href|data|srcset)\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)",
    re.I,
)
IN_STYLES = re.compile(r"(?:@import\s+[\"']?(?:url\()?|\burl\()\s*[\"']?(?:https?:)?//", re.I)
IN_SCRIPTS = re.compile(r"\b(?:import|fetch)\b[^;]{0,80}https?://")


def loaded_from_other_hosts(html: str) -> list[str]:
    scripts = "".join(re.findall(r"<script\b[^>]*>(.*?)</script>", html, re.S | re.I))
    return [*LOADED.findall(html), *IN_STYLES.findall(html), *IN_SCRIPTS.findall(scripts)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; `--strict` makes every warning, a broken link or anchor among them, a failure."""
    pytest.importorskip("mkdocs", reason="needs hessinit[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    settings = {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation_and_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    built = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages}
    assert {page for page in built if not (site / page).is_file()} == set()
    first = (site / "index.html").read_text(encoding="utf-8")
    assert {
        page for page in built - {Path("index.html")} if f'href="{page.as_posix()}"' not in first
    } == set()
    for page in site.rglob("*.html"):
        assert loaded_from_other_hosts(page.read_text(encoding="utf-8")) == [], page
    styles = sorted(site.rglob("*.css"))
    assert styles != []
    assert [sheet.name for sheet in styles if IN_STYLES.search(sheet.read_text(encoding="utf-8"))] == []


def test_the_reference_shows_every_public_name_with_signature_and_examples(site: Path) -> None:
    described: dict[str, list[object]] = {}
    for path in DIRECTIVE.findall((ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")):
        name = path.rpartition(".")[2]
        described.setdefault(name, []).append(pkgutil.resolve_name(path))
    assert [name for name in hessinit.__all__ if getattr(hessinit, name) not in described.get(name, [])] == []
    page = (site / "python-api.html").read_text(encoding="utf-8")
    assert [name for name in described if f"{name}</code>" not in page and f">{name}<" not in page] == []
    assert "&gt;&gt;&gt; " in re.sub(r"<[^>]+>", "", page)  # examples are code, not quotations
    assert "<blockquote>" not in page
    assert ":::" not in page


def test_pictures_outside_of_docs_are_copied(site: Path) -> None:
    (picture,) = re.findall(r'src="(outside/[^"]+)"', (site / "schemes.html").read_text(encoding="utf-8"))
    assert (site / picture).is_file()
