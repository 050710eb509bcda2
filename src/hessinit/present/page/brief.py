"""Long names on a page: cut in the middle, and whole when the pointer rests on them."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from hessinit.present.words import LONGEST_NAME, printable, shorten

_UNBROKEN = re.compile(rf"\S{{{LONGEST_NAME + 1},}}")


def brief(text: str) -> Markup:
    """The text as HTML, with every unbroken run of letters shortened that is longer than a name should be.

    >>> brief("<b> is sharp")
    Markup('&lt;b&gt; is sharp')
    >>> print(brief("x" * 100).replace("x" * 39, "…"))
    <span title="……xxxxxxxxxxxxxxxxxxxxxx">…x……</span>
    """
    shown = printable(text)
    parts, end = [], 0
    for run in _UNBROKEN.finditer(shown):
        parts += [escape(shown[end : run.start()]), _shortened(run[0])]
        end = run.end()
    return Markup("").join([*parts, escape(shown[end:])])


def breakable(text: str) -> Markup:
    """Let long names break after their dots, so that their parts stay whole."""
    return escape(printable(text)).replace(".", Markup(".<wbr>"))


def _shortened(run: str) -> Markup:
    return Markup('<span title="{}">{}</span>').format(run, shorten(run))
