"""Docstrings on the site: examples with `>>>` become blocks of code, which Markdown takes for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*| *\n(?P=indent)>>> .*)*", re.M)


class FencedDoctests(griffe.Extension):
    """Puts a fence around every example of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """`text` with a fence around each example.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return EXAMPLE.sub(
        lambda example: f"{example['indent']}```pycon\n{example[0]}\n{example['indent']}```", text
    )
