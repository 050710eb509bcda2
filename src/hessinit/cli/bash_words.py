"""Bash as it is: typer does not know that a colon ends a word there, nor that words are quoted.

Bash sends `net.py`, `:` and `pro` as three words and replaces only the last of them; the same at `=` and `@`.
Here they become the one word that was typed, and what is offered loses the part that is already there. Words
come as they were typed, `my\\ dir/` or `"my dir/`, and what is offered is put into the line as it is, so that
it must be quoted alike.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout

VARIABLE = "_HESSINIT_COMPLETE"
BREAKS = ":=@"  # those of COMP_WORDBREAKS that a name may have unquoted


def is_asked_by_bash() -> bool:
    """Whether bash, and nobody else, wants to know how a command line may go on."""
    return os.environ.get(VARIABLE) == "complete_bash" and "COMP_WORDS" in os.environ


def complete_for_bash(answer: Callable[[], object]) -> str:
    """What `answer` prints when it is asked with whole words, cut and quoted for bash to put in."""
    typed = _read_words(os.environ["COMP_WORDS"])
    position = int(os.environ.get("COMP_CWORD") or 0)
    in_quotes = position < len(typed) and unquote(typed[position])[1]
    words, position, taken = join_words([unquote(word)[0] for word in typed], position)
    os.environ["COMP_WORDS"] = "\n".join(map(shlex.quote, words))
    os.environ["COMP_CWORD"] = str(position)
    page = io.StringIO()
    try:
        with redirect_stdout(page):
            answer()
    except SystemExit:
        pass
    offered = [line[taken:] for line in page.getvalue().splitlines()]
    return "\n".join(offered if in_quotes else [line.replace(" ", "\\ ") for line in offered])


def join_words(words: list[str], position: int) -> tuple[list[str], int, int]:
    """The words as they were typed, where the word is now, and how much of it bash has already taken.

    >>> join_words(["hessinit", "measure", "net.py", ":", "pro"], 4)
    (['hessinit', 'measure', 'net.py:pro'], 2, 7)
    >>> join_words(["hessinit", "measure", "net.py", ":"], 3)
    (['hessinit', 'measure', 'net.py:'], 2, 7)
    >>> join_words(["hessinit", "measure", "--curvature", "=", "he"], 4)  # a word of its own, as click has it
    (['hessinit', 'measure', '--curvature', 'he'], 3, 0)
    """
    joined: list[str] = []
    where, taken = position, 0
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        starts_value = word == "=" and before.startswith("--")
        follows = bool(joined) and (_is_break(word) or _is_break(before)) and not starts_value
        if follows:
            joined[-1] += word
        else:
            joined.append("" if starts_value else word)
        if index == position:
            where = len(joined) - 1
            taken = len(joined[-1]) - (0 if _is_break(word) else len(word)) if follows else 0
    return joined, len(joined) if position >= len(words) else where, taken


def _is_break(word: str) -> bool:
    return bool(word) and not word.strip(BREAKS)


def unquote(word: str) -> tuple[str, bool]:
    r"""What a typed word says, and whether it ends within quotes.

    >>> unquote(r"my\ dir/"), unquote('"my dir/ne'), unquote("my' 'dir/")
    (('my dir/', False), ('my dir/ne', True), ('my dir/', False))
    """
    said, quote = "", ""
    letters = iter(word)
    for letter in letters:
        if letter == "\\" and quote != "'":
            said += next(letters, "")
        elif letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
        else:
            said += letter
    return said, bool(quote)


def _read_words(text: str) -> list[str]:
    # The script joins them by new lines; by hand, and in older scripts, there are spaces.
    return text.split("\n") if "\n" in text else text.split(" ")
