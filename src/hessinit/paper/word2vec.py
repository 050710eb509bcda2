"""Word2vec: Hessian norms of skip-gram's two matrices at initialization, and how well it then trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.measurement.measure import measure
from hessinit.paper.datasets import THRESHOLD, WINDOW, Corpus, find_text, load_text
from hessinit.paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit.paper.reference import (
    SIGNIFICANT,
    Measured,
    RankCorrelation,
    make_table,
    mean,
    rank_correlation,
)
from hessinit.problem.problem import Problem
from hessinit.results.reproduction import Curve, Findings, PaperFigure, PaperTable
from hessinit.results.result import Plain, read_numbers, to_plain
from hessinit.training.data import derive, generator
from hessinit.training.initialize import initialize_
from hessinit.training.loop import chunk_means, final_loss, make_optimizer, train
from hessinit.training.workers import Job

OURS = "hessinit"
STDS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
ROWS: tuple[str, ...] = (*(f"{std:g}" for std in STDS), OURS)
BATCH = 100
# Mikolov et al. (2013): 5 to 20 for small corpora, 2 to 5 for large ones; 5 is word2vec.c's
# default.
NEGATIVES = 5
CURVE_POINTS = 10  # of every run: the record of all of them is to stay small
TOLERANCE = 1e-2  # a percent is enough: the norms of the sweep span seven orders of magnitude
MODELS = {"softmax": "full softmax", "negative": "negative sampling"}
NORMS = {"centre": "centre", "context": "context", "network": "network", "exact": "network, exact"}
# What may be near 1: the norm of the loss averaged over a batch, of the loss summed over it, or
# lr·‖H‖.
LEVELS = {
    "‖H‖": "‖H‖ near 1 for the loss averaged over pairs, the paper's claim",
    "summed ‖H‖": f"‖H‖ near 1 for the loss summed over the {BATCH} pairs of a batch",
    "lr·‖H‖": "lr·‖H‖ near 1, our version of it",
}
Batch = tuple[Tensor, Tensor]


class SkipGram(nn.Module):
    """Two matrices. The scores are bilinear in them, so the Gauss-Newton block of each is its exact Hessian.

    The softmax model scores every word of the vocabulary: `context` times the centre word's vector.
    With `negative`, rows of `words` are a centre, a word near it, and words drawn as noise; the
    latter are scored.
    """

    context: nn.Embedding | nn.Linear

    def __init__(self, vocabulary: int, dimension: int, negative: bool) -> None:
        super().__init__()
        self.negative = negative
        self.centre = nn.utils.skip_init(nn.Embedding, vocabulary, dimension)
        if negative:
            self.context = nn.utils.skip_init(nn.Embedding, vocabulary, dimension)
        else:
            self.context = nn.utils.skip_init(nn.Linear, dimension, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Any:
        if self.negative:
            return (self.context(words[:, 1:]) @ self.centre(words[:, 0]).unsqueeze(2)).squeeze(2)
        return self.context(self.centre(words))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Averaged over the pairs: cross-entropy, or the logistic loss summed over near word and noise."""
        if self.negative:
            return F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / len(
                scores
            )
        return F.cross_entropy(scores, targets)

    def initialize_(self, batch: Batch, row: str, learning_rate: float, seed: int) -> str:
        """Draw both matrices with the std of the row, or let hessinit write them; returns its reason."""
        source = generator(seed, "weights")
        with torch.no_grad():
            for weight in (self.centre.weight, self.context.weight):
                weight.normal_(0.0, 1.0 if row == OURS else float(row), generator=source)
        if row != OURS:
            return ""
        problem = Problem(self, self.loss, batch, seed=derive(seed, "hessinit"))
        return initialize_(problem, lr=learning_rate).reason

    def measure(self, batch: Batch, seed: int) -> dict[str, Plain]:
        """Norms on one batch: of each matrix and of both together, there by Gauss-Newton and exactly."""
        probes = derive(seed, "probes")
        report = measure(
            Problem(self, self.loss, batch, seed=probes), curvature="both", tolerance=TOLERANCE
        )
        whole = report.network.approximation
        return {
            "centre": report["centre"].norm,
            "context": report["context"].norm,
            "network": None if whole is None else abs(whole.value),
            "exact": report.network.norm,
            "converged": all(row.converged for row in (*report.layers, report.network)),
            "first": report.loss,
        }

    def train_(self, batches: Sequence[Batch], learning_rate: float) -> list[float]:
        """Plain SGD; the loss of every batch before its step, and inf from where it is no longer finite."""
        for module in (self.centre, self.context):
            if isinstance(module, nn.Embedding):
                module.sparse = True  # a step then costs the batch's words, not the vocabulary
        losses, _ = train(self, self.loss, batches, make_optimizer("sgd", self, learning_rate))
        finite = [loss for loss in losses if math.isfinite(loss)]
        return finite + [math.inf] * (len(batches) - len(finite))


def draw_batches(model: str, text: Corpus, *, steps: int, seed: int) -> Iterator[Batch]:
    """Inputs and targets of every step for that model: the text's pairs in a random order, again if they end.

    With "negative", each pair gets noise words of its own, rarely its near word too (word2vec.c
    avoids that).
    """
    order = torch.randperm(len(text.pairs), generator=generator(seed, "order"))
    times = math.ceil(steps * BATCH / len(order))
    pairs = torch.from_numpy(text.pairs)[order].long().repeat(times, 1)
    for_noise = generator(seed, "negatives")
    cumulative = torch.from_numpy(text.vocabulary.noise()).cumsum(0)
    labels = torch.zeros(BATCH, 1 + NEGATIVES)
    labels[:, 0] = 1
    for chosen in pairs[: steps * BATCH].split(BATCH):
        if model == "softmax":
            yield chosen[:, 0], chosen[:, 1]
        else:
            numbers = torch.rand((BATCH, NEGATIVES), generator=for_noise, dtype=cumulative.dtype)
            # The last sum may fall short of 1 by rounding, and a number between them would be no
            # word.
            noise = torch.searchsorted(cumulative, numbers, right=True).clamp_(
                max=len(cumulative) - 1
            )
            yield torch.cat([chosen, noise], dim=1), labels


@dataclass(frozen=True, kw_only=True)
class Word2Vec(Experiment):
    """Skip-gram from several standard deviations: do initializations with ‖H‖ near 1 train best?

    `rates` are for one pair, as word2vec.c states them (its default for skip-gram is 0.025). It
    steps pair by pair; for the mean over a batch the learning rate is `BATCH` times as large.
    """

    vocabulary: Mapping[str, int]
    dimensions: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int

    def prepare(self, setting: PaperSetting) -> str:
        return find_text(setting.data_dir)[1]

    def configure(self, setting: PaperSetting) -> dict[str, Plain]:
        found = {
            "vocabulary": self.vocabulary,
            "dimensions": self.dimensions,
            "rates": self.rates,
            "steps": self.steps,
            "stds": STDS,
            "batch": BATCH,
            "learning rates": [rate * BATCH for rate in self.rates],
            "optimizer": "plain SGD",
            "pairs": self.steps * BATCH,
            "window": WINDOW,
            "subsampling threshold": THRESHOLD,
            "negatives": NEGATIVES,
            "noise": "counts to the power 0.75",
            "Hessian batch": "the first of the training",
            "tolerance of norms": TOLERANCE,
            "final loss": "mean of the last tenth of the steps",
        }
        return dict(to_plain(found))

    def plan(self, setting: PaperSetting) -> list[Job]:
        names = ("model", "dimension", "row", "seed")
        choices = product(MODELS, self.dimensions, ROWS, setting.seeds)
        return [Job("-".join(map(str, one)), dict(zip(names, one, strict=True))) for one in choices]

    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain:
        """Initial norms and losses by rate; hessinit's weights depend on the rate, the others do not."""
        model, row, seed = (parameters[key] for key in ("model", "row", "seed"))
        # As many pairs as are trained on: a loss is always that of new pairs.
        text = load_text(
            setting.data_dir, vocabulary=self.vocabulary[model], pairs=self.steps * BATCH
        )
        batches = list(draw_batches(model, text, steps=self.steps, seed=seed))
        runs = dict[str, Plain]()
        initial = dict[str, Plain]()
        for rate in self.rates:
            network = SkipGram(
                len(text.vocabulary.words), parameters["dimension"], model == "negative"
            )
            remark = network.initialize_(batches[0], row, rate * BATCH, seed)
            if row == OURS or not initial:
                initial = {**network.measure(batches[0], seed), "remark": remark}
            losses = network.train_(batches, rate * BATCH)
            final = final_loss(losses, len(losses) // 10)
            curve = chunk_means(losses, len(losses) // CURVE_POINTS)
            runs[f"{rate:g}"] = {**initial, "final": final, "curve": curve}
        return round_numbers(runs)

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        tables = list[PaperTable]()
        figures = []
        sweeps = []
        for model in MODELS:
            found = [Sweep(model, rate, self.dimensions, {}) for rate in self.rates]
            for sweep, place in product(found, product(self.dimensions, ROWS)):
                keys = ["-".join(map(str, (model, *place, seed))) for seed in setting.seeds]
                runs = [results[key][f"{sweep.rate:g}"] for key in keys]
                columns = {
                    key: read_numbers([run[key] for run in runs]) for key in (*NORMS, "final")
                }
                sweep.points[place] = columns
            tables += [norms_table(found, dimension) for dimension in self.dimensions]
            tables += map(claim_table, found)
            figures.append(points_figure(found))
            sweeps += found
        sentences = []
        for level, words in LEVELS.items():
            verdicts = [sweep.verdict(level) for sweep in sweeps]
            sentences.append(
                f"Of {len(sweeps)} sweeps, each one model at one rate, {verdicts.count(1)} support and "
                f"{verdicts.count(-1)} contradict that the best initializations have {words}; the rest show "
                f"nothing at p < {SIGNIFICANT:g}."
            )
        return Findings(tables=tuple(tables), figures=tuple(figures), sentences=tuple(sentences))


@dataclass(frozen=True)
class Sweep:
    """One model trained at one rate: norms and final losses of all seeds, by dimension and row."""

    model: str
    rate: float
    dimensions: tuple[int, ...]
    points: dict[tuple[int, str], Mapping[str, tuple[float, ...]]]

    def drawn(self, norm: str, dimension: int | None = None) -> tuple[list[float], list[float]]:
        """Geometric means of a norm, and mean final losses, of the standard deviations."""
        places = [
            place for place in self.points if place[1] != OURS and dimension in (None, place[0])
        ]
        logarithms = [statistics.fmean(map(math.log, self.points[place][norm])) for place in places]
        losses = [statistics.fmean(self.points[place]["final"]) for place in places]
        return list(map(math.exp, logarithms)), losses

    def correlate(self, norm: str, level: str, dimension: int | None = None) -> RankCorrelation:
        """The distance of a norm from 1, |ln(factor · ‖H‖)|, against the final loss, over the drawn points.

        A positive ρ supports the claim that norms near 1 train best. A norm is nearly a function of
        the standard deviation, whatever the dimension, which p takes into account.
        """
        factor = dict(zip(LEVELS, (1.0, float(BATCH), self.rate * BATCH), strict=True))[level]
        norms, losses = self.drawn(norm, dimension)
        distances = [abs(math.log(factor * each)) for each in norms]
        return rank_correlation(
            distances, losses, blocks=len(self.dimensions) if dimension is None else 1
        )

    def verdict(self, level: str) -> int:
        """1 if the claim is supported, −1 if contradicted, 0 if neither: by all points and each dimension."""
        pooled = self.correlate("network", level)
        within = [self.correlate("network", level, dimension).rho for dimension in self.dimensions]
        agree = pooled.p < SIGNIFICANT and all(rho * pooled.rho > 0 for rho in within)
        return int(math.copysign(1, pooled.rho)) if agree else 0


def norms_table(sweeps: Sequence[Sweep], dimension: int) -> PaperTable:
    # hessinit's weights have other norms at every rate
    cells: dict[tuple[str, str], Measured] = {}
    for sweep, row in product(sweeps, ROWS):
        point = sweep.points[dimension, row]
        label = row if row != OURS else f"{OURS}, {sweep.rate:g}"
        if sweep is sweeps[0] or row == OURS:
            cells |= {(label, f"‖H‖ {name}"): mean(point[norm]) for norm, name in NORMS.items()}
        cells[label, f"loss at {sweep.rate:g}"] = mean(point["final"])
    title = f"Skip-gram, {MODELS[sweeps[0].model]}, dimension {dimension}: initial norms and training loss"
    return make_table(
        title,
        "std",
        cells,
        "‖H‖ is the largest |eigenvalue| on the first batch, of the loss averaged over pairs. The loss is "
        "the mean of the last tenth of training, by rate for one pair.",
    )


def claim_table(sweep: Sweep) -> PaperTable:
    cells = {}
    # Within a dimension the matrices' norms rank as the network's do, or nearly.
    choices: list[tuple[str, int | None]] = [("centre", None), ("context", None), ("network", None)]
    choices += [*(("network", dimension) for dimension in sweep.dimensions), ("exact", None)]
    for (name, dimension), level in product(choices, LEVELS):
        row = NORMS[name] if dimension is None else f"{NORMS[name]}, dimension {dimension}"
        found = sweep.correlate(name, level, dimension)
        cells[row, f"ρ, {level}"] = Measured(found.rho, None, found.n)
        cells[row, f"p, {level}"] = Measured(found.p, None, found.n)
    title = f"Skip-gram, {MODELS[sweep.model]}, rate {sweep.rate:g}: distance of a norm from 1 against loss"
    return make_table(
        title,
        "norm",
        cells,
        "Spearman's ρ between |ln x| and the final loss, x as the column says; positive supports the claim. "
        f"Summed: over the {BATCH} pairs of a batch. p by permutation of whole standard deviations, in all "
        "dimensions alike, two-sided, not corrected for multiple tests. The points are means over seeds.",
    )


def points_figure(sweeps: Sequence[Sweep]) -> PaperFigure:
    curves = []
    for sweep, dimension in product(sweeps, sweeps[0].dimensions):
        x, y = map(tuple, sweep.drawn("network", dimension))
        curves.append(Curve(name=f"dimension {dimension}, rate {sweep.rate:g}", x=x, y=y))
    title = f"Skip-gram, {MODELS[sweeps[0].model]}: initial norm and training loss"
    return PaperFigure(
        name=f"word2vec-{sweeps[0].model}",
        title=title,
        curves=tuple(curves),
        log_x=True,
        log_y=True,
        x_label="‖H‖ of the network at initialization (Gauss-Newton)",
        y_label="training loss, last tenth",
        style="points",
    )


EXPERIMENTS = [
    Word2Vec(
        name="word2vec",
        title="Word2vec: skip-gram's Hessian at initialization and its training",
        data=("wikipedia",),
        seeds=3,
        vocabulary={"softmax": 1_000, "negative": 10_000},
        dimensions=(16, 64, 128),
        rates=(0.025, 0.1),
        steps=4_000,
        variants={
            "mean": Variant(
                "The loss is averaged over the pairs of a batch, as in the paper's other experiments; norms "
                "of the loss summed over the batch, which is how word2vec steps, are those times the batch's "
                "size."
            )
        },
    )
]
