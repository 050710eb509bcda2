"""A real browser for the tests of pages: Chromium, driven by Playwright, without a network."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = 390, 1280
PATIENCE = 60  # seconds: what hangs fails the test; a loaded machine takes its time


@contextmanager
def chromium() -> Iterator[Any]:
    """Start one browser; for a fixture of module scope. Skips without one, unless it is required."""
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
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Any, path: Path, *, width: int = DESKTOP, dark: bool = False, quiet: bool = True, **options: Any
) -> Iterator[Any]:
    """Open a page offline, and fail at the end when it said, asked for or ran what it should not.

    `quiet=False` lets it write to the console. `options` are those of a browser context.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", **options
    )
    context.set_offline(True)
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    asked: list[str] = []
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


def column(page: Any, number: int, table: str = "main .table table") -> list[str]:
    """The texts of a column, counted from 0, of the first table."""
    return list(
        page.evaluate(
            "([table, number]) => [...document.querySelector(table).querySelectorAll('tbody tr')]"
            ".map((row) => row.cells[number].textContent)",
            [table, number],
        )
    )


def sort_by(page: Any, heading: str) -> str | None:
    """Click on a heading of the first table; what it says then about its order."""
    found = page.locator("main .table table").first.locator(
        "th", has=page.get_by_role("button", name=heading)
    )
    found.get_by_role("button").click()
    return found.get_attribute("aria-sort")


def hover_over(page: Any, caption: str, mark: str, number: int) -> str:
    """Put the pointer on a mark (a CSS selector) of a chart; what the tip says then, a line for each part."""
    figure = page.locator("figure", has=page.get_by_text(caption, exact=True))
    figure.scroll_into_view_if_needed()
    box = figure.locator(mark).nth(number).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return "\n".join(figure.locator(".tip > *").all_text_contents())


# For every text: its colour against the nearest background behind it, by WCAG's definition.
_CONTRASTS = """() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const light = ({ r, g, b }) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.a === 1) return color;
    }
    return { r: 255, g: 255, b: 255 };
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || node.closest("script, style, noscript, [hidden], .cells")) continue;
    const style = getComputedStyle(node), inSvg = node instanceof SVGElement;
    if (style.visibility === "hidden" || style.display === "none") continue;
    const [ink, paper] = [light(parse(inSvg ? style.fill : style.color)), light(behind(node))];
    found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), text]);
  }
  return found;
}"""


def contrasts(page: Any) -> list[tuple[float, str]]:
    """The contrast of every text with what is behind it, and the text."""
    return [(float(ratio), str(text)) for ratio, text in page.evaluate(_CONTRASTS)]
