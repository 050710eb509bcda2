"""Which files of a data folder are the corpus."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.paper.places import at_home
from hessinit.present.words import printable

# What may lie beside a corpus and is none: checksums, notes, programs, other archives.
OTHER = r"\.(md5|sha\d*|asc|sig|md|html?|py|sql|npz|npy|pdf|zip|7z|tar|tgz|log|part|tmp)"
PACKED = r"(\.(xz|bz2|gz))?"
WIKIPEDIA_NAME = re.compile(rf"(en)?wiki(?!.*({OTHER}|\.xml){PACKED}$).*", re.IGNORECASE)
PLAIN_NAME = re.compile(rf"(?!readme|licen[cs]e|notice|copying|\.).*\.txt{PACKED}", re.IGNORECASE)
# A raw dump is found only to be refused with the reason; WikiExtractor's output beside it wins.
DUMP_NAME = re.compile(rf"(en)?wiki.*\.xml{PACKED}", re.IGNORECASE)
PACKING = re.compile(r"\.(xz|bz2|gz)$", re.IGNORECASE)
# Where they may lie: in the folder, beside the other data sets, or as WikiExtractor leaves them (AA/wiki_00).
PLACES = ("", "wikipedia", "text", "wikipedia/text", "[A-Z][A-Z]", "text/[A-Z][A-Z]", "wikipedia/[A-Z][A-Z]")
FILES_TAKEN = (
    "wiki* or enwiki*, else *.txt, each plain or packed (.xz, .bz2, .gz), with text or WikiExtractor's <doc> "
    "blocks in them"
)
HOW_TO_GET = (
    "To make one: download a dump (enwiki-latest-pages-articles.xml.bz2 from dumps.wikimedia.org) and run "
    "python -m wikiextractor.WikiExtractor on it. Without one, --data digits takes Python's own docstrings"
)


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus and the name a record may give it: no absolute path."""

    name: str
    path: Path


def find_corpus(data_dir: str | os.PathLike[str] | None) -> tuple[CorpusFile, ...]:
    """The corpus in `data_dir`, in order of name; `data_dir` may be the file itself.

    Files named for Wikipedia win over other texts; of `a.txt` and `a.txt.xz`, the plain one is taken.
    """
    if data_dir is None:
        raise ProblemError(
            "Wikipedia is not downloaded; pass data_dir, the folder with the corpus: "
            f"{FILES_TAKEN}. {HOW_TO_GET}."
        )
    folder = at_home("data_dir", data_dir)
    try:
        if folder.is_file():
            return (CorpusFile(folder.name, folder),)
        if not folder.is_dir():
            is_what = "is neither a folder nor a file" if folder.exists() else "does not exist"
            raise ProblemError(
                f"data_dir={str(folder)!r} {is_what}; pass the folder with the corpus: {FILES_TAKEN}."
            )
        os.listdir(folder)  # glob is silent about a folder that may not be read
        found = {
            path for place in PLACES for path in folder.glob(f"{place}/*" if place else "*") if path.is_file()
        }
    except OSError as failure:
        raise ProblemError(
            f"data_dir={str(folder)!r} cannot be read: {failure.strerror or failure}. Pass a folder that can."
        ) from failure
    for pattern in (WIKIPEDIA_NAME, PLAIN_NAME, DUMP_NAME):
        if chosen := [path for path in found if pattern.fullmatch(path.name)]:
            break
    else:
        raise ProblemError(
            f"data_dir={str(folder)!r} holds no corpus; taken are {FILES_TAKEN}. {HOW_TO_GET}."
        )
    named = {path.relative_to(folder).as_posix(): path for path in chosen}
    return tuple(
        CorpusFile(name, named[name])
        for name in sorted(named)
        if not (PACKING.search(name) and PACKING.sub("", name) in named)
    )


def describe_files(files: tuple[CorpusFile, ...]) -> str:
    """Names and md5 of the files as they lie there; reads them once."""
    sums = [_md5(file.path) for file in files]
    if len(files) <= 3:
        names = [printable(file.name) for file in files]
        return ", ".join(f"{name} (md5 {total})" for name, total in zip(names, sums, strict=True))
    combined = hashlib.md5("\n".join(sums).encode(), usedforsecurity=False).hexdigest()
    first, last = printable(files[0].name), printable(files[-1].name)
    return f"{len(files)} files, {first} to {last} (md5 of their md5s {combined})"


def _md5(path: Path) -> str:
    total = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    except OSError as failure:
        raise ProblemError(
            f"{path} cannot be read: {failure.strerror or failure}. Pass a file that can."
        ) from failure
    return total.hexdigest()
