"""Make the pictures of the documents by running the pages' own code.

python benchmarks/document_pictures.py     # half a minute

It writes {jacobians,diagnostics,initialization,comparison-heatmap,comparison-losses}.png in docs/pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import matplotlib as mpl  # noqa: E402

mpl.use("Agg")
mpl.rcParams["savefig.dpi"] = 150

DOCS = HERE.parent / "docs"
PAGES = ("jacobians.md", "initializing.md", "comparing.md")


def main() -> None:
    for page in PAGES:
        _draw(DOCS / page)


def _draw(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec("\n".join(blocks), {"__name__": "page"})
        for picture in sorted(Path(folder).glob("*.png")):
            shutil.copy(picture, DOCS / "pictures" / picture.name)
            print(DOCS / "pictures" / picture.name)
        os.chdir(HERE)


if __name__ == "__main__":
    main()
