"""Bash takes a colon for the end of a word; typer does not know, so that file.py:function would not complete.

Bash sends `net.py`, `:` and `pro` as three words and replaces only the last of them. Here they become the one
word that was typed, and what is offered loses the part that is already there.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout

VARIABLE = "_HESSINIT_COMPLETE"


def is_asked_by_bash() -> bool:
    """Whether bash, and nobody else, wants to know how a command line may go on."""
    return os.environ.get(VARIABLE) == "complete_bash" and "COMP_WORDS" in os.environ


def complete_for_bash(answer: Callable[[], object]) -> str:
    """What `answer` prints when it is asked with whole words, cut to what bash will put in."""
    words = _read_words(os.environ["COMP_WORDS"])
    words, position, taken = join_colons(words, int(os.environ.get("COMP_CWORD") or 0))
    os.environ["COMP_WORDS"] = "\n".join(words)
    os.environ["COMP_CWORD"] = str(position)
    page = io.StringIO()
    try:
        with redirect_stdout(page):
            answer()
    except SystemExit:
        pass
    return "\n".join(line[taken:] for line in page.getvalue().splitlines())


def join_colons(words: list[str], position: int) -> tuple[list[str], int, int]:
    """The words with colons in them, where the word is now, and how much of it bash has already taken.

    >>> join_colons(["hessinit", "measure", "net.py", ":", "pro"], 4)
    (['hessinit', 'measure', 'net.py:pro'], 2, 7)
    >>> join_colons(["hessinit", "measure", "net.py", ":"], 3)
    (['hessinit', 'measure', 'net.py:'], 2, 7)
    >>> join_colons(["hessinit", "measure", "ne"], 2)
    (['hessinit', 'measure', 'ne'], 2, 0)
    """
    joined: list[str] = []
    where, taken = position, 0
    for index, word in enumerate(words):
        follows = bool(joined) and ":" in (word, words[index - 1])
        if follows:
            joined[-1] += word
        else:
            joined.append(word)
        if index == position:
            where, taken = len(joined) - 1, joined[-1].rfind(":") + 1 if follows else 0
    return joined, len(joined) if position >= len(words) else where, taken


def _read_words(text: str) -> list[str]:
    # The script joins them by new lines; by hand, and in older scripts, there are spaces.
    return text.split("\n") if "\n" in text else text.split(" ")
