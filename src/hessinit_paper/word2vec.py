"""Word2vec: Hessian norms of skip-gram's two matrices at initialization, and how well it trains."""

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

from hessinit import Problem, initialize_, measure
from hessinit.jobs import Job, derive, generator
from hessinit_paper.corpus import SAMPLING, Corpus, find_text, load_text
from hessinit_paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit_paper.reference import (
    SIGNIFICANT,
    Measured,
    RankCorrelation,
    make_table,
    mean,
    rank_correlation,
)
from hessinit_paper.reproduction import Curve, Findings, PaperFigure, PaperTable, Plain
from hessinit_paper.training import chunk_means, final_loss, train


@dataclass(frozen=True)
class Protocol:
    """How skip-gram is drawn, trained and measured."""

    stds: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    batch: int = 100
    # Mikolov et al. (2013): 5 to 20 for small corpora, 2 to 5 for large ones; word2vec.c has 5.
    negatives: int = 5
    curve_points: int = 10  # of every run: the record of all of them is to stay small
    tolerance: float = 1e-2  # a percent is enough: the norms span seven orders of magnitude


PROTOCOL = Protocol()
OURS = "hessinit"
ROWS: tuple[str, ...] = (*(f"{std:g}" for std in PROTOCOL.stds), OURS)
MODELS = {"softmax": "full softmax", "negative": "negative sampling"}
NORMS = {"centre": "centre", "context": "context", "network": "network", "exact": "network, exact"}
# What may be near 1: the norm of the loss averaged over a batch, of the loss summed over it, or
# lr·‖H‖.
LEVELS = {
    "‖H‖": "‖H‖ near 1 for the loss averaged over pairs, the paper's claim",
    "summed ‖H‖": f"‖H‖ near 1 for the loss summed over the {PROTOCOL.batch} pairs of a batch",
    "lr·‖H‖": "lr·‖H‖ near 1, our version of it",
}
Batch = tuple[Tensor, Tensor]


class SkipGram(nn.Module):
    """Two matrices: the scores are bilinear in them, so Gauss-Newton is exact in each one's block.

    The softmax model scores every word of the vocabulary: `context` times the centre word's vector.
    With `negative`, a row of `words` is a centre, a word near it, and words drawn as noise; those
    after the centre are scored.
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
        """Return the mean over pairs of the cross-entropy, or of the logistic loss of all words."""
        if not self.negative:
            return F.cross_entropy(scores, targets)
        total = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
        return total / len(scores)

    def initialize_(self, batch: Batch, row: str, learning_rate: float, seed: int) -> str:
        """Draw both matrices with the std of the row, or by hessinit, whose reason is returned."""
        source = generator(seed, "weights")
        std = 1.0 if row == OURS else float(row)
        with torch.no_grad():
            for weight in (self.centre.weight, self.context.weight):
                weight.normal_(0.0, std, generator=source)
        if row != OURS:
            return ""
        problem = Problem(self, self.loss, batch, seed=derive(seed, "hessinit"))
        return initialize_(problem, lr=learning_rate).reason

    def measure(self, batch: Batch, seed: int) -> dict[str, Plain]:
        """Return the norms on one batch: of each matrix, of both by Gauss-Newton, and exactly."""
        problem = Problem(self, self.loss, batch, seed=derive(seed, "probes"))
        report = measure(problem, curvature="both", tolerance=PROTOCOL.tolerance)
        network = report.network.approximation
        return {
            "centre": report["centre"].norm,
            "context": report["context"].norm,
            "network": None if network is None else abs(network.value),
            "exact": report.network.norm,
            "converged": all(row.converged for row in (*report.layers, report.network)),
            "first": report.loss,
        }

    def train_(self, batches: Sequence[Batch], learning_rate: float) -> list[float]:
        """Train by SGD; return the loss before each step, inf from where it is no longer finite."""
        for module in (self.centre, self.context):
            if isinstance(module, nn.Embedding):
                module.sparse = True  # a step then costs the batch's words, not the vocabulary
        losses = train(self, self.loss, batches, learning_rate)
        finite = [loss for loss in losses if math.isfinite(loss)]
        return finite + [math.inf] * (len(batches) - len(finite))


def draw_batches(model: str, text: Corpus, *, steps: int, seed: int) -> Iterator[Batch]:
    """Yield inputs and targets of every step: the pairs in a random order, again where they end.

    With "negative", each pair gets noise words of its own, rarely its near word too (word2vec.c
    avoids that).
    """
    size = PROTOCOL.batch
    order = torch.randperm(len(text.pairs), generator=generator(seed, "order"))
    repeats = math.ceil(steps * size / len(order))
    pairs = torch.from_numpy(text.pairs)[order].long().repeat(repeats, 1)
    for_noise = generator(seed, "negatives")
    cumulative = torch.from_numpy(text.vocabulary.noise()).cumsum(0)
    labels = torch.zeros(size, 1 + PROTOCOL.negatives)
    labels[:, 0] = 1
    for batch in pairs[: steps * size].split(size):
        if model == "softmax":
            yield batch[:, 0], batch[:, 1]
            continue
        shape = (size, PROTOCOL.negatives)
        numbers = torch.rand(shape, generator=for_noise, dtype=cumulative.dtype)
        noise = torch.searchsorted(cumulative, numbers, right=True)
        # By rounding, the last sum may be below 1, and a number above it would be no word.
        noise.clamp_(max=len(cumulative) - 1)
        yield torch.cat([batch, noise], dim=1), labels


@dataclass(frozen=True, kw_only=True)
class Word2Vec(Experiment):
    """Skip-gram from several standard deviations: do initializations with ‖H‖ near 1 train best?

    `rates` are for one pair, as word2vec.c states them (its default for skip-gram is 0.025). It
    steps pair by pair; for the mean over a batch the learning rate is the rate times the batch.
    """

    vocabulary: Mapping[str, int]
    dimensions: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int

    def prepare(self, setting: PaperSetting) -> str:
        return find_text(setting.data_dir)[1]

    def configure(self, setting: PaperSetting) -> dict[str, Plain]:
        return {
            "vocabulary": dict(self.vocabulary),
            "dimensions": list(self.dimensions),
            "rates": list(self.rates),
            "steps": self.steps,
            "stds": list(PROTOCOL.stds),
            "batch": PROTOCOL.batch,
            "learning rates": [rate * PROTOCOL.batch for rate in self.rates],
            "optimizer": "plain SGD",
            "pairs": self.steps * PROTOCOL.batch,
            "window": SAMPLING.window,
            "subsampling threshold": SAMPLING.threshold,
            "negatives": PROTOCOL.negatives,
            "noise": "counts to the power 0.75",
            "Hessian batch": "the first of the training",
            "tolerance of norms": PROTOCOL.tolerance,
            "final loss": "mean of the last tenth of the steps",
        }

    def plan(self, setting: PaperSetting) -> list[Job]:
        return [
            Job(
                f"{model}-{dimension}-{row}-{seed}",
                {"model": model, "dimension": dimension, "row": row, "seed": seed},
            )
            for model, dimension, row, seed in product(MODELS, self.dimensions, ROWS, setting.seeds)
        ]

    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain:
        """Return initial norms and losses by rate; only hessinit's weights depend on the rate."""
        model = parameters["model"]
        row = parameters["row"]
        seed = parameters["seed"]
        # As many pairs as are trained on: a loss is always that of new pairs.
        text = load_text(
            setting.data_dir, vocabulary=self.vocabulary[model], pairs=self.steps * PROTOCOL.batch
        )
        words = len(text.vocabulary.words)
        batches = list(draw_batches(model, text, steps=self.steps, seed=seed))
        runs = dict[str, Plain]()
        initial = dict[str, Plain]()
        for rate in self.rates:
            network = SkipGram(words, parameters["dimension"], model == "negative")
            learning_rate = rate * PROTOCOL.batch
            remark = network.initialize_(batches[0], row, learning_rate, seed)
            if row == OURS or not initial:
                initial = {**network.measure(batches[0], seed), "remark": remark}
            losses = network.train_(batches, learning_rate)
            final = final_loss(losses, len(losses) // 10)
            curve = chunk_means(losses, len(losses) // PROTOCOL.curve_points)
            runs[f"{rate:g}"] = {**initial, "final": final, "curve": curve}
        return round_numbers(runs)

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        tables = list[PaperTable]()
        figures = []
        sweeps = []
        for model in MODELS:
            of_model = [self.collect(model, rate, setting, results) for rate in self.rates]
            tables += [norms_table(of_model, dimension) for dimension in self.dimensions]
            tables += map(claim_table, of_model)
            figures.append(points_figure(of_model))
            sweeps += of_model
        sentences = []
        for level, words in LEVELS.items():
            verdicts = [sweep.verdict(level) for sweep in sweeps]
            sentences.append(
                f"Of {len(sweeps)} sweeps, each one model at one rate, {verdicts.count(1)} support "
                f"and {verdicts.count(-1)} contradict that the best initializations have {words}; "
                f"the rest show nothing at p < {SIGNIFICANT:g}."
            )
        return Findings(tables=tuple(tables), figures=tuple(figures), sentences=tuple(sentences))

    def collect(
        self, model: str, rate: float, setting: PaperSetting, results: Mapping[str, Plain]
    ) -> Sweep:
        """Return the norms and final losses of that model at that rate."""
        points = {}
        for dimension, row in product(self.dimensions, ROWS):
            keys = [f"{model}-{dimension}-{row}-{seed}" for seed in setting.seeds]
            runs = [results[key][f"{rate:g}"] for key in keys]
            points[dimension, row] = {
                name: tuple(float(run[name]) for run in runs) for name in (*NORMS, "final")
            }
        return Sweep(model, rate, self.dimensions, points)


@dataclass(frozen=True)
class Sweep:
    """One model trained at one rate: norms and final losses of all seeds, by dimension and row."""

    model: str
    rate: float
    dimensions: tuple[int, ...]
    points: Mapping[tuple[int, str], Mapping[str, tuple[float, ...]]]

    def of_stds(self, norm: str, dimension: int | None = None) -> tuple[list[float], list[float]]:
        """Return geometric means of a norm, and mean final losses, of the standard deviations."""
        points = [
            point
            for (size, row), point in self.points.items()
            if row != OURS and dimension in (None, size)
        ]
        norms = [math.exp(statistics.fmean(map(math.log, point[norm]))) for point in points]
        losses = [statistics.fmean(point["final"]) for point in points]
        return norms, losses

    def correlate(self, norm: str, level: str, dimension: int | None = None) -> RankCorrelation:
        """Correlate the distance of a norm from 1, |ln(factor · ‖H‖)|, with the final loss.

        A positive ρ supports the claim that norms near 1 train best. A norm is nearly a function of
        the standard deviation, whatever the dimension, which p takes into account.
        """
        factors = (1.0, float(PROTOCOL.batch), self.rate * PROTOCOL.batch)
        factor = dict(zip(LEVELS, factors, strict=True))[level]
        norms, losses = self.of_stds(norm, dimension)
        distances = [abs(math.log(factor * size)) for size in norms]
        blocks = len(self.dimensions) if dimension is None else 1
        return rank_correlation(distances, losses, blocks=blocks)

    def verdict(self, level: str) -> int:
        """Return 1 if all points and each dimension support the claim, −1 if they contradict it."""
        pooled = self.correlate("network", level)
        within = [self.correlate("network", level, dimension).rho for dimension in self.dimensions]
        agree = pooled.p < SIGNIFICANT and all(rho * pooled.rho > 0 for rho in within)
        return int(math.copysign(1, pooled.rho)) if agree else 0


def norms_table(sweeps: Sequence[Sweep], dimension: int) -> PaperTable:
    """Return initial norms and final losses; those of hessinit's weights depend on the rate."""
    cells: dict[tuple[str, str], Measured] = {}
    for sweep, row in product(sweeps, ROWS):
        point = sweep.points[dimension, row]
        label = row if row != OURS else f"{OURS}, {sweep.rate:g}"
        if sweep is sweeps[0] or row == OURS:
            cells |= {(label, f"‖H‖ {name}"): mean(point[norm]) for norm, name in NORMS.items()}
        cells[label, f"loss at {sweep.rate:g}"] = mean(point["final"])
    return make_table(
        f"Skip-gram, {MODELS[sweeps[0].model]}, dimension {dimension}: initial norms and training "
        "loss",
        "std",
        cells,
        "‖H‖ is the largest |eigenvalue| on the first batch, of the loss averaged over pairs. The "
        "loss is the mean of the last tenth of training, by rate for one pair.",
    )


def claim_table(sweep: Sweep) -> PaperTable:
    """Return how each norm's distance from 1 correlates with the loss, at every level."""
    cells = {}
    # Within a dimension the matrices' norms rank as the network's do, or nearly.
    choices: list[tuple[str, int | None]] = [("centre", None), ("context", None), ("network", None)]
    choices += [*(("network", dimension) for dimension in sweep.dimensions), ("exact", None)]
    for (name, dimension), level in product(choices, LEVELS):
        row = NORMS[name] if dimension is None else f"{NORMS[name]}, dimension {dimension}"
        correlation = sweep.correlate(name, level, dimension)
        cells[row, f"ρ, {level}"] = Measured(correlation.rho, None, correlation.n)
        cells[row, f"p, {level}"] = Measured(correlation.p, None, correlation.n)
    return make_table(
        f"Skip-gram, {MODELS[sweep.model]}, rate {sweep.rate:g}: distance of a norm from 1 against "
        "loss",
        "norm",
        cells,
        "Spearman's ρ between |ln x| and the final loss, x as the column says; positive supports "
        f"the claim. Summed: over the {PROTOCOL.batch} pairs of a batch. p by permutation of whole "
        "standard deviations, in all dimensions alike, two-sided, not corrected for multiple "
        "tests. The points are means over seeds.",
    )


def points_figure(sweeps: Sequence[Sweep]) -> PaperFigure:
    """Return the final loss over the initial norm of the network, a point for each std."""
    curves = []
    for sweep, dimension in product(sweeps, sweeps[0].dimensions):
        norms, losses = sweep.of_stds("network", dimension)
        curves.append(
            Curve(
                name=f"dimension {dimension}, rate {sweep.rate:g}", x=tuple(norms), y=tuple(losses)
            )
        )
    return PaperFigure(
        name=f"word2vec-{sweeps[0].model}",
        title=f"Skip-gram, {MODELS[sweeps[0].model]}: initial norm and training loss",
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
                "The loss is averaged over the pairs of a batch, as in the paper's other "
                "experiments; norms of the loss summed over the batch, which is how word2vec "
                "steps, are those times the batch's size."
            )
        },
    )
]
