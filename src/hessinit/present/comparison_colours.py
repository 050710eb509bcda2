"""The colours and strokes of starts in the pictures of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hessinit.present.figure import BLUE, GREEN, GREY, VERMILION

OURS = "hessinit"
WARMUP = "+warmup"
# Okabe & Ito (2008) without its yellow and black, which fade on a light or a dark page; then strokes differ.
COLOURS = (BLUE, "#E69F00", GREEN, "#CC79A7", "#56B4E9", GREY)
STROKES = ("-", (0, (4, 1.2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
RAMP = "viridis"
# White to the eye, and told apart from other whites: a page gives it, black and grey the colours of its own.
PAPER = "#fefefe"


@dataclass(frozen=True)
class Stroke:
    """How the curve of a start is drawn."""

    color: str
    linestyle: Any  # what matplotlib takes: a word, or an offset and lengths
    linewidth: float = 1.2


def strokes(starts: Sequence[str]) -> dict[str, Stroke]:
    """A stroke for each start: ours stands out, and a start with warmup has the colour of the one without.

    >>> found = strokes(["he", "he+warmup", "hessinit"])
    >>> found["he"].color == found["he+warmup"].color, found["he"].linestyle == found["he+warmup"].linestyle
    (True, False)
    """
    bases = list(dict.fromkeys(start.removesuffix(WARMUP) for start in starts))
    others = [base for base in bases if base != OURS]
    found = {}
    for start in starts:
        base, warm = start.removesuffix(WARMUP), start.endswith(WARMUP)
        if base == OURS:
            found[start] = Stroke(VERMILION, STROKES[1] if warm else "-", 2.0)
            continue
        at = others.index(base)
        again = at // len(COLOURS)
        found[start] = Stroke(COLOURS[at % len(COLOURS)], STROKES[(2 * again + warm) % len(STROKES)])
    return found


def ramp(values: Sequence[float]) -> list[str]:
    """A colour for each value, from dark (small) to light, evenly by rank.

    Both ends are left out: the palest is lost on a light page, the darkest on a dark one.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
    last = max(1, len(ranks) - 1)
    return [to_hex(colormaps[RAMP](0.28 + 0.6 * ranks[value] / last)) for value in values]


def readable_on(color: tuple[float, float, float, float]) -> str:
    """Black or white, whichever is easier to read on that colour (by WCAG's relative luminance)."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color[:3]]
    luminance = math.fsum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    return "#ffffff" if luminance < 0.179 else "#1a1a1a"
