"""The package imports names of hessinit that a document describes, and no others."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")


def imported_names() -> dict[str, set[str]]:
    """By module of hessinit, the names that the package takes from it, by import or as attributes."""
    names: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "hessinit_paper").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hessinit":
                names.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id == "reporting":
                names.setdefault("hessinit.reporting", set()).add(node.attr)
    return names


def test_every_name_that_is_imported_is_described() -> None:
    names = imported_names()
    assert {"hessinit", "hessinit.analysis", "hessinit.jobs", "hessinit.reporting"} <= names.keys()
    described = {name for module in names for name in names[module] if f"`{name}" in DOCUMENT}
    described |= {name for module in names for name in names[module] if f".{name}" in DOCUMENT}
    assert {name for module in names for name in names[module]} - described == set()


def test_the_public_modules_hold_nothing_that_is_not_described() -> None:
    module = importlib.import_module("hessinit.reporting")
    assert [name for name in module.__all__ if f"`{name}" not in DOCUMENT] == []
