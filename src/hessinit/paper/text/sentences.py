"""Text → sentences → clauses: lists of lower-case words, split at punctuation and nothing cleverer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby

# One word has no neighbours.
FEWEST_WORDS = 2
# Longer ones are cut into equal parts.
MOST_WORDS = 20

# A full stop after one of these, or after a single letter (initials, U.S., e.g.), does not end a sentence.
ABBREVIATIONS = [
    "adm", "al", "approx", "assn", "bros", "ca", "capt", "cf", "cmdr", "co", "col", "corp", "dept",
    "dr", "ed", "eds", "esp", "est", "fig", "figs", "fr", "ft", "gen", "gov", "hon", "inc", "jr",
    "lt", "ltd", "maj", "messrs", "mme", "mr", "mrs", "ms", "mt", "mts", "op", "pl", "pp", "pres",
    "prof", "rep", "rev", "sen", "sgt", "sr", "st", "ste", "supt", "univ", "viz", "vol", "vols",
    "vs",
]  # fmt: skip
LETTER = r"[^\W\d_¹²³¼½¾]"


def _not_after(words: Iterable[str]) -> str:
    # Python's look-behind needs one width, so there is one for each length.
    by_length = groupby(sorted(words, key=lambda word: (len(word), word)), key=len)
    return "".join(rf"(?<!\b(?:{'|'.join(group)})\.)" for _, group in by_length)


# "No. 5" and "Jan. 5" go on; "he said no." ends.
NUMBERED = r"(?!(?:(?<=\bno\.)|(?<=\bnos\.)|(?<=\b(?:jan|feb|aug|sep|oct|nov|dec)\.)|(?<=\bsept\.))\s*\d)"
# The full stop first and then the look-behinds: the other way round they are tried at every letter.
FULL_STOP = rf"\.(?=[\"'”)\]]*(?:\s|$))(?<!\b{LETTER}\.){_not_after(ABBREVIATIONS)}{NUMBERED}"
# Marks between digits (1,000 and 10:30) and dashes inside a word (Paris–Dakar) are no marks.
MARK = re.compile(rf"[;!?…—()\[\]{{}}|]|[,:](?!\d)|\s[-–]+\s|--+|{FULL_STOP}")
# Anything with a digit or an underscore in it (20th, mp3, read_file) is no word of English.
WORD = re.compile(rf"(?<!\w)(?:(?:{LETTER}\.)+{LETTER}(?!\w)|{LETTER}+(?:'{LETTER}+)*(?!\w))")
ADDRESS = re.compile(r"(?:https?://|ftp://|www\.)\S+")


def split_clauses(text: str) -> Iterator[list[str]]:
    """The clauses of a line of text: sentences, split again at `, ; :`, dashes and brackets.

    Those of one word are dropped; those of over 20 are cut into equal parts, so that text without punctuation
    becomes clauses too. (One in twenty of Wikipedia's is longer; the mean is 9.)

    >>> list(split_clauses("Dr. Smith's U.S. team won 1,000 games; it didn't lose. Why? No one knows."))
    [['dr', "smith's", 'u.s', 'team', 'won', 'games'], ['it', "didn't", 'lose'], ['no', 'one', 'knows']]
    """
    text = unicodedata.normalize("NFC", text.lower()).replace("’", "'")
    if "://" in text or "www." in text:
        text = ADDRESS.sub(" ", text)
    for part in MARK.split(text):
        words: list[str] = WORD.findall(part)
        many = len(words)
        if many > MOST_WORDS:
            parts = -(-many // MOST_WORDS)
            bounds = [many * index // parts for index in range(parts + 1)]
            yield from (words[start:end] for start, end in zip(bounds, bounds[1:], strict=False))
        elif many >= FEWEST_WORDS:
            yield words


def read_clauses(lines: Iterable[str]) -> Iterator[list[str]]:
    """The clauses of all lines, one after the other."""
    for line in lines:
        yield from split_clauses(line)
