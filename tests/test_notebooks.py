"""The notebooks run, and print what their stored outputs show."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from running_documents import differences

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(?:home|root|tmp|work|Users|usr)/|[A-Z]:\\\\|site-packages|ipykernel_\d")
TIME = re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:(zmq|jupyter_client|nbclient|tornado)")


RUN = [
    pytest.param(path, id=path.stem, marks=() if path.stem == "first-look" else pytest.mark.sweep)
    for path in NOTEBOOKS
]


@pytest.mark.parametrize("path", RUN)
def test_a_notebook_runs_and_prints_what_is_stored(path: Path) -> None:
    """`python docs/building/notebooks.py` stores new outputs."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    pytest.importorskip("nbclient", reason="needs hessinit[test]")
    execute = runpy.run_path(str(ROOT / "docs" / "building" / "notebooks.py"))["executed"]
    found = execute(path)  # an error in a cell, a failed assert too, is raised
    for position, (old, new) in enumerate(zip(stored["cells"], found.cells, strict=True)):
        if new.cell_type == "code" and new.metadata.get("hessinit", {}).get("compare", True):
            assert differences(printed(old), printed(new)) == [], f"{path.name}, cell {position}"


def printed(cell: Any) -> str:
    """What a cell shows as text; a picture or a page is known by its plain name."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "\n".join(map("".join, shown))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs_and_nothing_of_the_machine(path: Path) -> None:
    assert len(NOTEBOOKS) == 3
    assert path.stat().st_size < 500_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("assert " in "".join(cell["source"]) for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "stderr" not in [output.get("name") for output in outputs], "a warning was stored"
    shown = [output.get("data", {}) for output in outputs]
    assert any(picture for picture in [data.pop("image/png", None) for data in shown])
    text = json.dumps(notebook, ensure_ascii=False)
    assert MACHINE.findall(text) + TIME.findall(text) == []
