"""Make the pictures of docs/jacobians.md by running the page's own code.

python benchmarks/document_pictures.py     # seconds; writes docs/pictures/{jacobians,diagnostics}.png
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


def main() -> None:
    docs = HERE.parent / "docs"
    page = (docs / "jacobians.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec("\n".join(blocks), {"__name__": "page"})
        for picture in sorted(Path(folder).glob("*.png")):
            shutil.copy(picture, docs / "pictures" / picture.name)
            print(docs / "pictures" / picture.name)
        os.chdir(HERE)


if __name__ == "__main__":
    main()
