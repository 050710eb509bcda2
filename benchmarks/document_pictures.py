"""Make the pictures of the documents: by running their own code, and as a browser shows hessinit's pages.

python benchmarks/document_pictures.py            # all: two minutes
python benchmarks/document_pictures.py browser    # one of: code, concepts, browser

`code` draws {jacobians,diagnostics,initialization,comparison-heatmap,comparison-losses}.png, `concepts` those
of concept_pictures.py, `browser` page-{demo,report}.png, which needs Chromium. All are in docs/pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import matplotlib as mpl  # noqa: E402

mpl.use("Agg")

DOCS = HERE.parent / "docs"
PICTURES = DOCS / "pictures"
PAGES = ("jacobians.md", "initializing.md", "comparing.md")
WIDTH = 1000  # of a screenshot, in CSS pixels


def main(wanted: list[str]) -> None:
    drawings = {"code": draw_by_code, "concepts": draw_concepts, "browser": draw_by_browser}
    for name in wanted or drawings:
        drawings[name]()


def draw_by_code() -> None:
    """Run the Python of a page, and keep the pictures that it saves."""
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        files = re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', text, re.M | re.S)
        with tempfile.TemporaryDirectory() as folder, mpl.rc_context({"savefig.dpi": 150}):
            os.chdir(folder)
            sys.path.insert(0, folder)
            for name, content in files:
                Path(folder, name).write_text(content, encoding="utf-8")
            exec("\n".join(blocks), {"__name__": "page"})
            for picture in sorted(Path(folder).glob("*.png")):
                keep(picture)
            os.chdir(HERE)
            sys.path.remove(folder)


def draw_concepts() -> None:
    import concept_pictures

    concept_pictures.main()


def draw_by_browser() -> None:
    """What the commands of the first page write, as a browser shows it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "demo")
        run(folder, "new", "problem.py")
        run(folder, "measure", "problem.py:problem", "--lr", "0.1", "--html", "report.html")
        for page, picture, height in (
            ("demo-output/demo.html", "page-demo", 1180),
            ("report.html", "page-report", 1250),
        ):
            photograph(folder / page, folder / f"{picture}.png", height)
            keep(folder / f"{picture}.png")


def run(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    subprocess.run([sys.executable, "-m", "hessinit", *words], cwd=folder, env=environment, check=True)


def photograph(page: Path, picture: Path, height: int) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
        view.goto(page.as_uri())
        view.wait_for_timeout(500)
        view.screenshot(path=str(picture))
        browser.close()


def keep(picture: Path) -> None:
    shutil.copy(picture, PICTURES / picture.name)
    print(PICTURES / picture.name)


if __name__ == "__main__":
    main(sys.argv[1:])
