"""The traceback of a worker process: it comes as text, and is read back into frames."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

# Between the failure that caused another and that other one, as Python prints them.
LINK = re.compile(r"\n\n(?=The above exception was|During handling of the above)")
FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    .*\n)*', re.MULTILINE
)


@dataclass(frozen=True)
class Part:
    """One of the failures of a chain: what is printed before its frames, they, and what it says itself."""

    before: str
    frames: tuple[tuple[traceback.FrameSummary, str], ...]
    after: str


def read_parts(failure: BaseException) -> list[Part]:
    """The chain of failures in the worker, the first cause first; empty where it failed in this process."""
    text = getattr(failure.__cause__, "tb", None)  # what concurrent.futures sends along
    if type(failure.__cause__).__name__ != "_RemoteTraceback" or not isinstance(text, str):
        return []
    inner = text.strip("\n").removeprefix('"""').removesuffix('"""').strip("\n")
    return [_read_part(part) for part in LINK.split(inner)]


def _read_part(text: str) -> Part:
    text = f"{text.strip()}\n"
    found = list(FRAME.finditer(text))
    if not found:
        return Part("", (), text)
    frames = tuple(
        (
            traceback.FrameSummary(each["file"], int(each["line"]), each["function"], lookup_line=False),
            each[0],
        )
        for each in found
    )
    return Part(text[: found[0].start()], frames, text[found[-1].end() :])
