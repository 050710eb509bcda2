"""The arena's scores: rate robustness, ranks, regret, divergences, the best rate of each, no tuning at all.

A cell is a task at one rate. A loss above that of guessing, or not finite, counts as guessing; a run fails
from 98 % of it. Cells in which every run of every scheme fails are left out everywhere but in `best_of_grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arena.outcomes import Outcome, all_schemes, count_losses, rivals, trainable_cells


@dataclass(frozen=True)
class MeanRank:
    """The average place of a scheme, 1 the best, over the cells to which it applies."""

    rank: float
    cells: int


@dataclass(frozen=True)
class Regret:
    """(loss − best) / best against the best rival at each cell; negative where the scheme beats them all."""

    cells: dict[tuple[str, float], float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.cells.values()))) if self.cells else float("nan")

    @property
    def mean_of_losses(self) -> float:
        """Wins counted as zero, so that they cannot pay for defeats."""
        return float(np.mean(np.maximum(list(self.cells.values()), 0))) if self.cells else float("nan")

    @property
    def worst_cell(self) -> tuple[str, float]:
        return max(self.cells, key=self.cells.__getitem__)

    @property
    def worst(self) -> float:
        return self.cells[self.worst_cell] if self.cells else float("nan")


@dataclass(frozen=True)
class ZeroTuning:
    """A task at our suggested rate, against the best loss of any competitor at any rate of the grid."""

    task: str
    loss: float
    best: float
    rival: str
    rate: float

    @property
    def excess(self) -> float:
        return (self.loss - self.best) / self.best


@dataclass(frozen=True)
class Reference:
    """The lowest mean loss of a task's whole grid on record, and the rates at which some run of it trains."""

    best: float
    rates: tuple[float, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Reference:
        return cls(float(outcome.means.min()), tuple(rate for _, rate in trainable_cells(outcome)))


def excesses(
    outcome: Outcome, reference: Reference, schemes: Collection[str] | None = None
) -> dict[float, float]:
    """By rate, loss / best of the whole grid − 1: of the best of these schemes there, by default of all."""
    rows = [row for row, name in enumerate(outcome.schemes) if schemes is None or name in schemes]
    columns = {rate: outcome.rates.index(rate) for rate in reference.rates}
    return {
        rate: float(outcome.means[rows, column].min()) / reference.best - 1
        for rate, column in columns.items()
    }


def rate_robustness(
    outcomes: Sequence[Outcome], references: Mapping[str, Reference], schemes: Collection[str] | None = None
) -> float:
    """What a rate that was not tuned costs: the mean of `excesses` over rates, then over tasks.

    With several schemes the best of them is picked anew at every rate. A task to which none applies is left
    out. References are frozen, so that a lower best loss of ours does not worsen the score.

    On the 17 tasks on record: hessinit 0.648, the best other 0.642, the best of all 0.441, default 3.63, LSUV
    1.30, He 1.89. The latter two are 1.39 and 1.98 where a cell with one run that is not finite counts as
    chance as a whole; here, as in every score, each run is counted before seeds are averaged.
    """
    found = [
        np.mean(list(excesses(outcome, references[outcome.task], schemes).values()))
        for outcome in outcomes
        if schemes is None or any(name in schemes for name in outcome.schemes)
    ]
    return float(np.mean(found)) if found else float("nan")


def rank_with_ties(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, the smallest value first; equal values share the mean of their ranks.

    >>> rank_with_ties(np.array([0.3, 0.1, 0.3, 0.9])).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    smaller = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return smaller + (equal + 1) / 2


def mean_ranks(outcomes: Sequence[Outcome]) -> dict[str, MeanRank]:
    """Each scheme's rank by mean loss over seeds, averaged over cells, best first."""
    ranks: dict[str, list[float]] = {scheme: [] for scheme in all_schemes(outcomes)}
    for outcome in outcomes:
        for place, _ in trainable_cells(outcome):
            for scheme, rank in zip(outcome.schemes, rank_with_ties(outcome.means[:, place]), strict=True):
                ranks[scheme].append(float(rank))
    return _averaged(ranks)


def _averaged(ranks: dict[str, list[float]]) -> dict[str, MeanRank]:
    found = {scheme: MeanRank(float(np.mean(each)), len(each)) for scheme, each in ranks.items() if each}
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


def regret(outcomes: Sequence[Outcome], scheme: str, ours: Collection[str]) -> Regret:
    """What it costs to use `scheme` instead of the best competitor, at each cell."""
    cells = {}
    for outcome in outcomes:
        others = rivals(outcome, scheme, ours)
        if scheme not in outcome.schemes or not others:
            continue
        for place, rate in trainable_cells(outcome):
            best = outcome.means[others, place].min()
            cells[outcome.task, rate] = float((outcome.means[outcome.row(scheme), place] - best) / best)
    return Regret(cells)


def divergences(
    outcomes: Sequence[Outcome], scheme: str, ours: Collection[str]
) -> dict[tuple[str, float], tuple[int, ...]]:
    """The cells, and in each the places of the seeds, at which `scheme` fails though a rival never does."""
    found = {}
    for outcome in outcomes:
        others = rivals(outcome, scheme, ours)
        if scheme not in outcome.schemes or not others:
            continue
        for place, rate in trainable_cells(outcome):
            failed = np.flatnonzero(outcome.fails[outcome.row(scheme), place]).tolist()
            if failed and (~outcome.fails[others, place]).all(1).any():
                found[outcome.task, rate] = tuple(failed)
    return found


def best_of_grid(outcome: Outcome) -> dict[str, tuple[float, float]]:
    """Each scheme's loss at its own best rate, and that rate."""
    places = outcome.means.argmin(1)
    return {
        scheme: (float(outcome.means[row, places[row]]), outcome.rates[places[row]])
        for row, scheme in enumerate(outcome.schemes)
    }


def best_rate_ranks(outcomes: Sequence[Outcome]) -> dict[str, MeanRank]:
    """Each scheme's rank by its loss at its own best rate, averaged over tasks, best first."""
    ranks: dict[str, list[float]] = {scheme: [] for scheme in all_schemes(outcomes)}
    for outcome in outcomes:
        if outcome.trainable.any():
            for scheme, rank in zip(outcome.schemes, rank_with_ties(outcome.means.min(1)), strict=True):
                ranks[scheme].append(float(rank))
    return _averaged(ranks)


def zero_tuning(
    outcomes: Sequence[Outcome], at_own_rate: Mapping[str, Sequence[float]], ours: Collection[str]
) -> list[ZeroTuning]:
    """Each task's loss at our suggested rate against the best that any competitor reaches on the grid.

    `at_own_rate` has the final losses by seed of each task; `ours` are the schemes that are no competitors.
    """
    rows = []
    for outcome in outcomes:
        if outcome.task not in at_own_rate:
            continue
        grid = {scheme: found for scheme, found in best_of_grid(outcome).items() if scheme not in ours}
        rival = min(grid, key=lambda scheme: grid[scheme][0])
        loss = float(count_losses(at_own_rate[outcome.task], outcome.chance).mean())
        rows.append(ZeroTuning(outcome.task, loss, grid[rival][0], rival, grid[rival][1]))
    return rows


def share_within(rows: Sequence[ZeroTuning], tolerance: float = 0.05) -> float:
    """The share of tasks at which our suggested rate is at most `tolerance` behind, or ahead."""
    return float(np.mean([row.excess <= tolerance for row in rows])) if rows else float("nan")


def bootstrap_errors(
    outcomes: Sequence[Outcome],
    score: Callable[[Sequence[Outcome]], Mapping[str, float]],
    draws: int = 200,
    seed: int = 0,
) -> dict[str, float]:
    """Standard errors over seeds of named scores: their spread when the seeds of each task are drawn again.

    All schemes of a task keep the same seeds, since they share data. With S seeds the spread is too small by
    √((S − 1)/S), which is put right; nan where a task has one seed.
    """
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xB007]))
    fewest = min(outcome.losses.shape[2] for outcome in outcomes)
    if fewest < 2:
        return dict.fromkeys(score(outcomes), float("nan"))
    values: dict[str, list[float]] = {}
    for _ in range(draws):
        counts = [outcome.losses.shape[2] for outcome in outcomes]
        places = [generator.integers(count, size=count) for count in counts]
        again = [outcome.with_seeds(each) for outcome, each in zip(outcomes, places, strict=True)]
        for name, value in score(again).items():
            values.setdefault(name, []).append(value)
    return {name: float(np.std(each) * np.sqrt(fewest / (fewest - 1))) for name, each in values.items()}


def rank_errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The standard error over seeds of each scheme's mean rank."""
    return bootstrap_errors(
        outcomes, lambda again: {scheme: mean.rank for scheme, mean in mean_ranks(again).items()}
    )
