"""The notebooks run, and show what they showed when they were kept."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from running_documents import differences

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(?:home|root|tmp|work|Users|usr)/|[A-Z]:\\\\|site-packages|ipykernel_\d")
WHEN = re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:(zmq|jupyter_client|nbclient|tornado)")


def name_of(path: Path) -> str:
    return path.stem


def load_runner() -> Any:
    pytest.importorskip("nbclient", reason="needs hessinit[test]")
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "building" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_three() -> None:
    assert list(map(name_of, NOTEBOOKS)) == ["edge-of-stability", "first-look", "transformer"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_and_prints_what_was_kept(path: Path) -> None:
    """Refresh what is kept with `python docs/building/notebooks.py`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    found = load_runner().executed(path)  # an error in a cell, a failed assert too, is raised
    for position, (old, new) in enumerate(zip(kept["cells"], found.cells, strict=True)):
        if new.cell_type == "code" and new.metadata.get("hessinit", {}).get("compare", True):
            different = differences(printed(old), printed(new))
            assert different == [], f"{path.name}, cell {position}:\n{printed(new)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_kept_with_its_outputs_and_nothing_of_the_machine(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("assert " in "".join(cell["source"]) for cell in code)
    assert sum(len(cell["outputs"]) for cell in code) >= 4
    streams = [output.get("name") for cell in code for output in cell["outputs"]]
    assert "stderr" not in streams, "a warning was kept"
    pictures = [
        output for cell in code for output in cell["outputs"] if "image/png" in output.get("data", {})
    ]
    assert pictures != []
    for output in pictures:
        del output["data"]["image/png"]  # base64 may spell anything
    text = json.dumps(notebook, ensure_ascii=False)
    assert MACHINE.findall(text) == []
    assert WHEN.findall(text) == []


def test_the_notebooks_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_500_000


def printed(cell: Any) -> str:
    """What a cell shows as text; a picture or a page is known by its plain name."""
    parts = []
    for output in cell["outputs"]:
        shown = output.get("text") or output.get("data", {}).get("text/plain", "")
        parts.append("".join(shown))
    return "\n".join(parts)
