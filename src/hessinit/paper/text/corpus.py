"""The lines of a corpus: plain text, or what WikiExtractor writes (`<doc>` blocks, or JSON lines)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.paper.text.archive import read_blocks

# A corpus may be one line of gigabytes (text8 is one of 100 MB); it comes in pieces, cut between words.
LONGEST_LINE = 1 << 16
# A JSON line is a whole article and cannot be cut; Wikipedia allows 2 MiB of wikitext.
LONGEST_ARTICLE = 1 << 24
BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
TITLE = re.compile(r'title="(.*)">$')
WAY_OUT = "Turn a dump into text with WikiExtractor (python -m wikiextractor.WikiExtractor DUMP)"


def read_lines(path: Path) -> Iterator[str]:
    """The text of a corpus file, line by line, without article titles, tags and entities.

    A line end also ends a sentence: WikiExtractor writes a paragraph to a line.
    """
    blocks = read_blocks(path)
    first = next(blocks)
    _refuse_markup(path, first)
    blocks = chain([first], blocks)
    if first.lstrip().startswith('{"'):
        lines = _read_articles(path, split_lines(blocks, LONGEST_ARTICLE))
    else:
        lines = _read_documents(path, split_lines(blocks, LONGEST_LINE))
    return map(_clean, lines)


def split_lines(blocks: Iterable[str], longest: int) -> Iterator[str]:
    """Lines of a text that comes in blocks; a line past `longest` comes in pieces, cut at white space.

    >>> list(split_lines(["one tw", "o three\\nfo", "ur"], longest=100))
    ['one two three', 'four']
    >>> list(split_lines(["one two ", "three ", "four"], longest=9))
    ['one two', ' three', ' four']
    """
    rest = ""
    for block in blocks:
        rest += block
        end = rest.rfind("\n")
        if end < 0 and len(rest) > longest:
            end = max(rest.rstrip().rfind(" "), 0) or len(rest)
        if end >= 0:
            yield from rest[:end].splitlines()
            rest = rest[end:].removeprefix("\n")
    yield from rest.splitlines()


def _read_documents(path: Path, lines: Iterable[str]) -> Iterator[str]:
    title: str | None = None
    inside = False
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("<doc id=") and stripped.endswith(">"):
            found = TITLE.search(stripped)
            title = html.unescape(found[1]) if found else None
            inside = True
        elif stripped == "</doc>":
            inside = False
        elif stripped:
            if title is None or html.unescape(stripped) != title:
                yield line
            title = None
    if inside:
        raise ProblemError(
            f"{path} is cut off: it ends inside a <doc> block, without </doc>. Copy or make it again."
        )


def _read_articles(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            article = json.loads(line)
            title, text = article.get("title"), article["text"].splitlines()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            raise ProblemError(
                f"{path}, line {number}, is not a JSON object with a 'text', as WikiExtractor --json writes "
                "them, though the file begins like one. Make it again if it is cut off, or pass plain text."
            ) from failure
        yield from text[1:] if text and text[0] == title else text


def _refuse_markup(path: Path, first: str) -> None:
    start = first.lstrip()[:2000].lower()
    if start.startswith(("<mediawiki", "<?xml")):
        raise ProblemError(f"{path} is XML, such as a raw dump of Wikipedia; a corpus is text. {WAY_OUT}.")
    if start.startswith(("<!doctype", "<html")):
        raise ProblemError(f"{path} is a web page, not a corpus. {WAY_OUT}.")


def _clean(line: str) -> str:
    if "&" in line:
        line = html.unescape(line)
    if "<" in line:
        line = TAG.sub(" ", BREAK.sub("; ", line))
    return line
