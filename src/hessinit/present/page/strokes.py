"""The colours and strokes of starts and curves on a page: those of the pictures, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from hessinit.present.comparison_colours import COLOURS, strokes
from hessinit.present.page.content import Color

NAMES = dict(zip(COLOURS, ("blue", "orange", "green", "purple", "sky", "grey"), strict=True))


class Look(TypedDict):
    """What a series takes besides its numbers."""

    color: Color
    dashed: bool


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each start: ours stands out, and one with warmup has the colour of the one without.

    >>> looks(["he", "he+warmup", "hessinit"])["he+warmup"]
    {'color': 'blue', 'dashed': True}
    """
    return {
        name: {"color": NAMES.get(stroke.color, "vermilion"), "dashed": stroke.linestyle != "-"}
        for name, stroke in strokes(names).items()
    }


def ramp_of(values: Sequence[float]) -> list[Color]:
    """A colour for each value, from dark (small) to light, evenly by rank.

    >>> ramp_of([0.1, 1.0, 0.01])
    ['ramp:0.5', 'ramp:1', 'ramp:0']
    """
    ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
    last = max(1, len(ranks) - 1)
    return [f"ramp:{ranks[value] / last:.3g}" for value in values]
