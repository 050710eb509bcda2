"""The English every machine has: the docstrings of Python's standard library, read and never run."""

from __future__ import annotations

import ast
import inspect
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hessinit.errors import ProblemError

# Tests, other people's packages, programs, and a copy of pip.
SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "site-packages",
        "dist-packages",
        "lib2to3",
        "turtledemo",
        "_bundled",
        "__pycache__",
    }
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WAY_OUT = "Pass a corpus instead (--data-dir), or run with a Python that has its library's .py files"


@dataclass(frozen=True)
class Docstrings:
    """The paragraphs of all docstrings, code examples left out, in order of file name."""

    paragraphs: tuple[str, ...]
    files: int

    @property
    def source(self) -> str:
        version = platform.python_version()
        return f"Python {version} standard library docstrings, {self.files} files"


def find_sources(library: Path | None = None) -> tuple[Path, ...]:
    """The library's .py files, sorted, so that the same Python gives the same text."""
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    found = sorted(_walk(library)) if library.is_dir() else []
    if not found:
        raise ProblemError(
            f"this Python ({platform.python_version()}) has no source files in {library}, so there are no "
            f"docstrings to read. {WAY_OUT}."
        )
    return tuple(library / name for name in found)


def read_docstrings(library: Path | None = None) -> Docstrings:
    """Read them all (some 2 MB); files that are not Python of this version are skipped."""
    paragraphs: list[str] = []
    files = 0
    for path in find_sources(library):
        tree = _parse(path)
        if tree is not None:
            files += 1
            paragraphs += (part for text in _docstrings(tree) for part in split_paragraphs(text))
    return Docstrings(tuple(paragraphs), files)


def split_paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs, each on one line; a paragraph that is a doctest is left out.

    >>> list(split_paragraphs("Add two\\n    numbers.\\n\\n    >>> add(1, 2)\\n    3\\n\\n    That is all."))
    ['Add two numbers.', 'That is all.']
    """
    for paragraph in "\n".join(line.rstrip() for line in inspect.cleandoc(docstring).splitlines()).split(
        "\n\n"
    ):
        text, *_ = paragraph.split(">>>", 1)
        if words := " ".join(text.split()):
            yield words


def _walk(library: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(library):
        # In place: os.walk then does not go down there, where most of the files are.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        inside = Path(folder).relative_to(library)
        yield from ((inside / name).as_posix() for name in names if name.endswith(".py"))


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's code
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return None


def _docstrings(tree: ast.Module) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield text
        # Definitions stand in statements: to look into expressions takes three times as long.
        waiting += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
