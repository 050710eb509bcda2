"""The demo's trainings in a terminal: loss curves of block characters, and a table over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from hessinit.present.demonstration import STARTS, Story, conclude_pair, conclude_seeds
from hessinit.present.grid import Column, build_grid, fit
from hessinit.present.words import format_number
from hessinit.results.track_record import Tracking

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-=+*%#"  # for terminals without block characters
LEAST_WIDTH, MOST_WIDTH = 12, 48
BESIDE = 52  # columns that labels and numbers take


def blocks_for(encoding: str | None) -> str:
    """The characters that an encoding can show.

    >>> blocks_for("utf-8"), blocks_for("ascii")
    ('▁▂▃▄▅▆▇█', '_.-=+*%#')
    """
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_BLOCKS
    return BLOCKS


def draw_bars(curves: Sequence[Sequence[float]], width: int, blocks: str = BLOCKS) -> list[str]:
    """Curves as rows of characters on one logarithmic scale; x where a curve is not finite or has ended.

    >>> draw_bars([[1.0, 0.1, 0.01, math.nan], [1.0, 1.0, 1.0, 1.0]], 4)
    ['█▅▁x', '████']
    """
    longest = max(map(len, curves))
    averaged = [[_mean(curve, column, width, longest) for column in range(width)] for curve in curves]
    drawable = [math.log(value) for row in averaged for value in row if 0 < value < math.inf]
    low, high = (min(drawable), max(drawable)) if drawable else (0.0, 0.0)
    return ["".join(_block(value, low, high, blocks) for value in row) for row in averaged]


def pair_renderables(
    story: Story, trackings: Sequence[Tracking], width: int, blocks: str = BLOCKS
) -> Iterator[RenderableType]:
    """The loss curves of the seed that is shown, what they lead to, and the verdict."""
    shown = [story.shown(start) for start in ("default", "hessinit")]
    bars = draw_bars(
        [[loss for _, loss in tracking.losses] for tracking in trackings],
        min(max(width - BESIDE, LEAST_WIDTH), MOST_WIDTH),
        blocks,
    )
    columns = [
        Column("training loss", tuple(STARTS[one.start] for one in shown), 9, is_number=False),
        Column(f"step 1 to {story.steps}", tuple(bars), 7, is_number=False),
        Column("first", tuple(format_number(one.first_loss, 2) for one in shown), 6),
        Column("last", tuple(format_number(one.final_loss, 2) for one in shown), 9),
        Column("right", tuple(f"{100 * one.accuracy:.0f} %" for one in shown), 8),
    ]
    kept, _ = fit(columns, width)
    yield build_grid(kept, width)
    yield Text()
    yield Text(conclude_pair(story))


def seeds_renderables(story: Story, width: int) -> Iterator[RenderableType]:
    """The same over all seeds and with two more starts, and who is ahead."""
    starts = story.starts
    columns = [
        Column("start", tuple(STARTS[start] for start in starts), 9, is_number=False),
        Column("median loss", tuple(format_number(story.median_loss(one), 2) for one in starts), 9),
        Column("lowest … highest", tuple(_range(story, start) for start in starts), 6),
        Column("right", tuple(f"{100 * story.median_accuracy(start):.0f} %" for start in starts), 8),
    ]
    kept, _ = fit(columns, width)
    yield build_grid(kept, width)
    yield Text()
    yield Text(conclude_seeds(story))


def _range(story: Story, start: str) -> str:
    losses = sorted((one.final_loss for one in story.of(start)), key=lambda loss: (math.isnan(loss), loss))
    return f"{format_number(losses[0], 2)} … {format_number(losses[-1], 2)}"


def _mean(curve: Sequence[float], column: int, width: int, longest: int) -> float:
    first, last = (
        column * longest // width,
        max((column + 1) * longest // width, column * longest // width + 1),
    )
    part = curve[first:last]
    return statistics.fmean(part) if part else math.nan


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not value < math.inf:
        return "x"
    if value <= 0 or high <= low:
        return blocks[0] if value <= 0 else blocks[-1]
    share = (math.log(value) - low) / (high - low)
    return blocks[round(share * (len(blocks) - 1))]
