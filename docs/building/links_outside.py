"""What the site does with links that leave docs/, and with scripts that would leave the site.

On a hosting site `../benchmarks/README.md` leads to the file. The site holds docs/ alone, so there a picture
is taken along and any other link becomes the file's name. The notebooks' template asks a server elsewhere for
its mathematics; ours are written in Unicode and need none.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
PICTURES = (".png", ".svg", ".jpg")
TAKEN_ALONG = "outside"
SCRIPT = re.compile(r"<script\b(?P<attributes>[^>]*)>(?P<code>.*?)</script>", re.S | re.I)
ELSEWHERE = re.compile(r"https?://")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures outside docs/ that a page shows."""
    pages = [file for file in files if file.src_uri.endswith(".md") and file.abs_src_path]
    found = {
        path
        for page in pages
        for link in LINK.finditer(Path(page.abs_src_path).read_text(encoding="utf-8"))
        if (path := outside(page.src_uri, link["target"])) and path.endswith(PICTURES)
    }
    for path in sorted(found):
        source = Path(config["docs_dir"]).parent / path
        files.append(File.generated(config, f"{TAKEN_ALONG}/{path}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point pictures at their copies, and turn other links that leave docs/ into the name of the file."""

    def replaced(link: re.Match[str]) -> str:
        path = outside(page.file.src_uri, link["target"])
        if path is None:
            return link[0]
        if path.endswith(PICTURES):
            here = posixpath.relpath(f"{TAKEN_ALONG}/{path}", posixpath.dirname(page.file.src_uri) or ".")
            return f"{link['image']}[{link['text']}]({here})"
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out scripts that load others from elsewhere."""

    def kept(script: re.Match[str]) -> str:
        loads = ELSEWHERE.search(script["attributes"]) or re.search(
            r"\bimport\b[^;]*https?://", script["code"]
        )
        return "" if loads else script[0]

    return SCRIPT.sub(kept, html)


def outside(page: str, target: str) -> str | None:
    """The path from the repository's root of what `target` means on `page`, or None when it is within docs/.

    >>> outside("errata.md", "../benchmarks/README.md"), outside("how-to/in-ci.md", "../tracking.md")
    ('benchmarks/README.md', None)
    """
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path
