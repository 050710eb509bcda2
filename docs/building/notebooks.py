"""Execute the notebooks and keep their outputs: python docs/building/notebooks.py [NAME.ipynb …]

What would change from run to run without a reason (execution times, kernels, versions) is taken out. Tests
execute them in the same way, and compare.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def executed(path: Path, patience: int = 120) -> Any:
    """The notebook of `path`, run in a new kernel and an empty folder; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    source = os.pathsep.join(filter(None, [str(NOTEBOOKS.parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    # One thread, so that sums run in one order; nothing about the terminal that started it.
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
        "COLUMNS": "100",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # whatever the caller draws with
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, where ipywidgets is missing
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=patience, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env={**os.environ, **settings})
    return tidied(notebook)


def tidied(notebook: Any) -> Any:
    """The same without what differs between two runs of the same code."""
    notebook.metadata = nbformat.from_dict(KERNEL)
    for position, cell in enumerate(notebook.cells):
        cell.id = f"cell-{position}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/svg+xml", None)
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = ADDRESS.sub("", output.data["text/plain"])
    return notebook


def main(names: list[str]) -> None:
    for path in [NOTEBOOKS / name for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
