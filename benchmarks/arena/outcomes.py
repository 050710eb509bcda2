"""What the arena's runs gave: one record for every task, from which `scores` are computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hessinit.results.comparison import Comparison

FAILS_FROM = 0.98  # of the loss of guessing


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Final losses of a task, by scheme, rate and seed, and the loss of guessing; nan and inf may occur.

    A scheme that does not apply to the task is not among its schemes.
    """

    task: str
    schemes: tuple[str, ...]
    rates: tuple[float, ...]
    losses: np.ndarray
    chance: float

    def __post_init__(self) -> None:
        wanted = (len(self.schemes), len(self.rates))
        if self.losses.ndim != 3 or self.losses.shape[:2] != wanted or not self.losses.shape[2]:
            raise ValueError(
                f"losses of {self.task!r} have shape {self.losses.shape}; {len(self.schemes)} schemes and "
                f"{len(self.rates)} rates need ({len(self.schemes)}, {len(self.rates)}, seeds)."
            )

    @cached_property
    def counted(self) -> np.ndarray:
        """The losses, chance where above it or not finite: worse than guessing counts as guessing."""
        return count_losses(self.losses, self.chance)

    @cached_property
    def means(self) -> np.ndarray:
        """The counted losses, averaged over seeds: (scheme, rate)."""
        return self.counted.mean(2)

    @cached_property
    def fails(self) -> np.ndarray:
        """Which runs learned next to nothing: (scheme, rate, seed)."""
        return self.counted >= FAILS_FROM * self.chance

    @cached_property
    def trainable(self) -> np.ndarray:
        """The rates at which at least one run of one scheme trains; the others tell nothing about schemes."""
        return ~self.fails.all((0, 2))

    def row(self, scheme: str) -> int:
        return self.schemes.index(scheme)

    def with_seeds(self, places: Sequence[int] | np.ndarray) -> Outcome:
        return replace(self, losses=self.losses[:, :, places])


def count_losses(losses: np.ndarray | Sequence[float], chance: float) -> np.ndarray:
    """
    >>> count_losses([0.5, 3.0, float("nan"), float("inf")], 2.3).tolist()
    [0.5, 2.3, 2.3, 2.3]
    """
    losses = np.asarray(losses, dtype=float)
    return np.where(np.isfinite(losses) & (losses < chance), losses, chance)


def outcome_of(task: str, comparison: Comparison, chance: float, ours: Collection[str] = ()) -> Outcome:
    """The record of a finished comparison.

    A scheme that does not apply is left out; one of `ours` stays, and fails.
    """
    schemes = tuple(scheme for scheme in comparison.schemes if scheme in ours or comparison.applies(scheme))
    losses = np.full((len(schemes), len(comparison.learning_rates), len(comparison.seeds)), math.nan)
    for i, scheme in enumerate(schemes):
        for j, rate in enumerate(comparison.learning_rates):
            found = {run.seed: run.final_loss for run in comparison.runs_of(scheme, rate)}
            missing = sorted(set(comparison.seeds) - set(found))
            if missing:
                raise ValueError(
                    f"{task}: the run of {scheme!r} at {rate:g} with seed {missing[0]} is missing; "
                    "run the comparison to its end first."
                )
            losses[i, j] = [found[seed] for seed in comparison.seeds]
    return Outcome(
        task=task, schemes=schemes, rates=tuple(comparison.learning_rates), losses=losses, chance=chance
    )


def all_schemes(outcomes: Sequence[Outcome]) -> list[str]:
    """Every scheme of any task, in the order of their first appearance."""
    return list(dict.fromkeys(scheme for outcome in outcomes for scheme in outcome.schemes))


def rivals(outcome: Outcome, scheme: str, ours: Collection[str]) -> list[int]:
    """The rows that `scheme` is held against: competitors, without itself and without any of `ours`."""
    return [row for row, name in enumerate(outcome.schemes) if name != scheme and name not in ours]


def trainable_cells(outcome: Outcome) -> Iterator[tuple[int, float]]:
    return ((place, outcome.rates[place]) for place in np.flatnonzero(outcome.trainable).tolist())
