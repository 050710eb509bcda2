"""The demo's results as plain data, and what they come to, in sentences that follow from the numbers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import takewhile

from hessinit.present.words import format_number, format_times
from hessinit.results.initialization import Initialization
from hessinit.results.result import Plain, to_plain
from hessinit.results.track_record import Tracking

STARTS = {"default": "PyTorch's default", "he": "He", "lsuv": "LSUV", "hessinit": "hessinit"}
GUESSING = math.log(10)  # the loss of a network that finds all ten digits equally likely
LEARNS_NOTHING = 0.95  # losses above this share of guessing count as guessing
SMOOTHED = 10  # steps that a point of a loss curve is the mean of
ALIKE = 1.25  # losses within this factor are a tie


@dataclass(frozen=True, kw_only=True)
class Try:
    """One training: the loss of its first mini-batch, the mean of the last tenth, the share read right."""

    start: str
    seed: int
    first_loss: float
    final_loss: float
    accuracy: float

    @property
    def learns(self) -> bool:
        """Whether it gets below guessing; a loss that is not finite does not."""
        return self.final_loss < LEARNS_NOTHING * GUESSING


@dataclass(frozen=True, kw_only=True)
class Story:
    """All trainings of the demo; those of `seed` are the ones shown in full."""

    lr: float
    seed: int
    steps: int
    batch_size: int
    trained_on: int
    held_out: int
    tries: tuple[Try, ...]

    def of(self, start: str) -> list[Try]:
        """The trainings from that start, by seed."""
        return sorted((one for one in self.tries if one.start == start), key=lambda one: one.seed)

    def shown(self, start: str) -> Try:
        """The one shown in full."""
        return next(one for one in self.of(start) if one.seed == self.seed)

    @property
    def starts(self) -> list[str]:
        """Those tried, in the order of the tables."""
        return [start for start in STARTS if self.of(start)]

    def median_loss(self, start: str) -> float:
        """Of the seeds; one that is not finite counts as the largest."""
        losses = [one.final_loss if math.isfinite(one.final_loss) else math.inf for one in self.of(start)]
        return statistics.median(losses)

    def median_accuracy(self, start: str) -> float:
        """Of the seeds."""
        return statistics.median(one.accuracy for one in self.of(start))

    def to_dict(self) -> dict[str, Plain]:
        """The story as what strict JSON can hold."""
        return to_plain(self)


def conclude_pair(story: Story) -> str:
    """How hessinit's start and PyTorch's fared with the seed that is shown."""
    ours, theirs = story.shown("hessinit"), story.shown("default")
    return f"{_judge(ours, theirs)} {_numbers(story, ours, theirs)}"


def conclude_seeds(story: Story) -> str:
    """Who is ahead over all seeds, how often hessinit's start is, and what failed."""
    by_loss = sorted(story.starts, key=story.median_loss)
    best, others = by_loss[0], by_loss[1:]
    seeds = len(story.of(best))
    listed = ", ".join(f"{STARTS[one]} {format_number(story.median_loss(one), 2)}" for one in others)
    head = (
        f"Over {seeds} seeds the lowest median loss is that of {STARTS[best]}, "
        f"{format_number(story.median_loss(best), 2)}; {listed}."
    )
    counts = [f"{STARTS[start]} in {_wins(story, start)}" for start in story.starts if start != "hessinit"]
    ahead = f"hessinit's loss is the lower one against {', '.join(counts)} of {seeds} seeds."
    return " ".join(filter(None, (head, ahead, _failures(story, seeds))))


def conclude_rates(result: Initialization) -> str:
    """Where the rate stands to the stable ones of the two starts."""
    said = []
    if result.lr is not None and result.before is not None:
        said.append(_place("PyTorch's start", result.lr, result.before.stable_learning_rate))
    if result.lr is not None and result.after is not None:
        said.append(_place("hessinit's start", result.lr, result.after.stable_learning_rate))
    if result.kappa is not None:
        kappa = format_number(result.kappa)
        said.append(f"It aims at lr·‖H‖ = {kappa}, since the curvature usually falls in the first steps.")
    return " ".join(said)


def average_losses(tracking: Tracking) -> list[tuple[float, float]]:
    """Step and training loss, averaged over chunks of steps; up to the first loss that is not finite."""
    finite = list(takewhile(lambda pair: math.isfinite(pair[1]), tracking.losses))
    chunks = [finite[first : first + SMOOTHED] for first in range(0, len(finite), SMOOTHED)]
    return [
        (statistics.fmean(s for s, _ in chunk), statistics.fmean(x for _, x in chunk)) for chunk in chunks
    ]


def _place(whose: str, rate: float, stable: float) -> str:
    if rate > stable:
        times = f"lr = {format_number(rate)} is {format_times(rate / stable)} times that"
        return f"{whose} is stable up to {format_number(stable)}, and {times}."
    return (
        f"{whose} would stand {format_number(stable)} in its weights: at lr = {format_number(rate)} their "
        f"first steps are {format_times(stable / rate)} times shorter than they could be."
    )


def _judge(ours: Try, theirs: Try) -> str:
    if not ours.learns and not theirs.learns:
        return f"Neither start gets below guessing ({format_number(GUESSING)}): take another --lr."
    if not theirs.learns:
        return f"hessinit's start trains; PyTorch's does not get below guessing ({format_number(GUESSING)})."
    if not ours.learns:
        return f"PyTorch's start trains; hessinit's does not get below guessing ({format_number(GUESSING)})."
    ratio = theirs.final_loss / ours.final_loss
    if 1 / ALIKE <= ratio <= ALIKE:
        return "A tie: both starts end at about the same loss."
    if ratio > 1:
        return f"hessinit's start is ahead: PyTorch's ends at {format_times(ratio)} times its loss."
    return f"PyTorch's start is ahead: hessinit's ends at {format_times(1 / ratio)} times its loss."


def _numbers(story: Story, ours: Try, theirs: Try) -> str:
    losses = [format_number(one.final_loss, 2) for one in (ours, theirs)]
    right = [f"{100 * one.accuracy:.0f}" for one in (ours, theirs)]
    return (
        f"After {story.steps} steps at lr = {format_number(story.lr)} the loss is {losses[0]} from "
        f"hessinit's start and {losses[1]} from PyTorch's; of {story.held_out} held-out digits {right[0]} % "
        f"and {right[1]} % are read right."
    )


def _wins(story: Story, start: str) -> int:
    pairs = zip(story.of("hessinit"), story.of(start), strict=True)
    return sum(_height(ours) < _height(theirs) for ours, theirs in pairs)


def _height(one: Try) -> float:
    return one.final_loss if math.isfinite(one.final_loss) else math.inf


def _failures(story: Story, seeds: int) -> str:
    failed = {start: sum(not one.learns for one in story.of(start)) for start in story.starts}
    said = [f"{STARTS[start]} {count}" for start, count in failed.items() if count]
    return f"Not below guessing, of {seeds}: {', '.join(said)}." if said else ""
