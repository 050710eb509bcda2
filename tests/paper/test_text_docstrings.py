"""Docstrings of the standard library: read, never run, the same every time."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from hessinit.errors import ProblemError
from hessinit.paper.text.docstrings import find_sources, read_docstrings, split_paragraphs

MODULE = '''"""Of the module."""
raise SystemExit("it was run")

class One:
    """Of the class."""

    def two(self):
        """Of the method

        in two paragraphs.
        """
        def three():
            "Of the inner function."
        text = """no docstring"""

if True:
    async def four():
        """Of a function
        in an if."""
'''


def make_library(folder: Path) -> Path:
    files = {
        "b.py": MODULE,
        "a.py": '"""First \\d."""',  # an invalid escape, of which the compiler warns
        "broken.py": "def (",
        "nul.py": "'''x'''\0",
        "latin.py": "# -*- coding: latin-1 -*-\n'''Caf\u00e9 here.'''",
        "package/inner.py": '"""Inner text."""',
        "notes.txt": '"""no Python"""',
        **{f"{skipped}/x.py": '"""Skipped."""' for skipped in ("test", "idlelib", "site-packages")},
        "package/tests/x.py": '"""Skipped."""',
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    return folder


def test_every_docstring_is_read_in_order_and_nothing_is_run(tmp_path: Path) -> None:
    found = read_docstrings(make_library(tmp_path))
    assert found.paragraphs == (
        "First \\d.", "Of the module.", "Of the class.", "Of the method", "in two paragraphs.",
        "Of the inner function.", "Of a function in an if.", "Café here.", "Inner text.",
    )  # fmt: skip
    assert found.files == 4
    version = platform.python_version()
    assert found.source == f"Python {version} standard library docstrings, 4 files"


def test_examples_of_code_are_left_out() -> None:
    text = "Add.\n\n    Two\n    lines.\n\n    >>> add(1)\n    2\n    \n    End:\n    >>> 3\n    3\n"
    assert list(split_paragraphs(text)) == ["Add.", "Two lines.", "End:"]


@pytest.mark.parametrize("library", ["empty", "missing"])
def test_a_python_without_sources_is_refused_with_the_way_out(tmp_path: Path, library: str) -> None:
    (tmp_path / "empty" / "test").mkdir(parents=True)
    (tmp_path / "empty" / "test" / "x.py").write_text("'''Skipped.'''")
    with pytest.raises(ProblemError, match=r"has no source files in .*Pass a corpus instead \(--data-dir\)"):
        find_sources(tmp_path / library)


def test_this_python_has_enough_english() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    found = read_docstrings()
    assert sum(len(text.split()) for text in found.paragraphs) > 100_000
    # What Python itself says of a module that is safe to import.
    first = (textwrap.__doc__ or "").split("\n\n")[0]
    assert " ".join(first.split()) in found.paragraphs
    assert not any(
        {"test", "tests", "site-packages"} & set(path.relative_to(library).parts) for path in find_sources()
    )


def test_nothing_of_the_library_is_imported() -> None:
    program = (
        "import sys; from hessinit.paper.text.docstrings import read_docstrings; before = set(sys.modules);"
        "read_docstrings(); new = set(sys.modules) - before;"
        "assert not {'antigravity', 'this', 'turtle'} & new, new"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
