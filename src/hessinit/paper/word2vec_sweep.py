"""The results of a sweep over starts, and how the norms there go with the losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hessinit.paper.experiment import Setting
from hessinit.paper.rank_correlation import RankCorrelation, rank_correlation
from hessinit.paper.word2vec_design import BATCH, DESIGNS, OURS, ROWS, key_of, step_length
from hessinit.results.result import Plain, read_number, read_numbers

NORMS = {"centre": "centre", "context": "context", "network": "network", "exact": "network, exact"}
# What is to be near 1: the norm for the loss averaged over a batch, for the loss summed over it, or times the
# step.
LEVELS = ("mean", "sum", "step")


@dataclass(frozen=True)
class Place:
    """One start of the sweep over all seeds: a point of the rank correlation."""

    dimension: int
    row: str
    norms: Mapping[str, tuple[float, ...]]
    final: tuple[float, ...]
    curve: tuple[float, ...]  # the mean over seeds
    remarks: tuple[str, ...]

    def norm(self, name: str) -> float:
        """The geometric mean: norms differ by factors."""
        return math.exp(statistics.fmean(map(math.log, self.norms[name])))

    @property
    def loss(self) -> float:
        return statistics.fmean(self.final)


@dataclass(frozen=True)
class Sweep:
    """One model trained at one rate."""

    model: str
    rate: float
    places: tuple[Place, ...]

    @property
    def drawn(self) -> tuple[Place, ...]:
        """The starts of a given standard deviation."""
        return tuple(place for place in self.places if place.row != OURS)

    @property
    def ours(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.row == OURS)

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(place.dimension for place in self.places))

    @property
    def best(self) -> Place:
        return min(self.drawn, key=lambda place: place.loss)

    def factor(self, level: str) -> float:
        """By what a norm is multiplied before it is held against 1."""
        return {"mean": 1.0, "sum": float(BATCH), "step": step_length(self.rate)}[level]


def read_sweep(setting: Setting, results: Mapping[str, Plain], model: str, rate: float) -> Sweep:
    places = []
    for dimension in DESIGNS[setting.data].dimensions:
        for row in ROWS:
            runs = [results[key_of(model, dimension, row, seed)][f"{rate:g}"] for seed in setting.seeds]
            places.append(_read_place(dimension, row, runs))
    return Sweep(model, rate, tuple(places))


def _read_place(dimension: int, row: str, runs: Sequence[Plain]) -> Place:
    curves = [read_numbers(run["curve"]) for run in runs]
    return Place(
        dimension,
        row,
        {name: tuple(read_number(run[name]) for run in runs) for name in NORMS},
        tuple(read_number(run["final"]) for run in runs),
        tuple(statistics.fmean(values) for values in zip(*curves, strict=True)),
        tuple(run["remark"] for run in runs),
    )


def correlate(sweep: Sweep, norm: str, level: str, dimension: int | None = None) -> RankCorrelation:
    """The distance of a norm from 1, |ln(factor · ‖H‖)|, against the final loss, over the drawn starts.

    A positive ρ supports the claim that norms near 1 train best. Starts are the points, not seeds; p knows
    that a norm is nearly a function of the standard deviation, whatever the dimension.
    """
    places = [place for place in sweep.drawn if dimension in (None, place.dimension)]
    distances = [abs(math.log(sweep.factor(level) * place.norm(norm))) for place in places]
    blocks = len(sweep.dimensions) if dimension is None else 1
    return rank_correlation(distances, [place.loss for place in places], blocks=blocks)
