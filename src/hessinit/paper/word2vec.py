"""Word2vec: Hessian norms of skip-gram's two matrices at the start, and how well it then trains."""

from __future__ import annotations

import statistics
import warnings
from functools import lru_cache
from typing import Any

from hessinit.errors import ConvergenceWarning
from hessinit.init.initialize import initialize_
from hessinit.measurement.measure import measure
from hessinit.paper.experiment import Experiment, Job, Setting
from hessinit.paper.skip_gram import MODELS, SkipGram, normal_
from hessinit.paper.skip_gram_training import Batch, draw_batches, train_
from hessinit.paper.text.cache import cached_text
from hessinit.paper.text.load import THRESHOLD, Text, load_text
from hessinit.paper.word2vec_design import (
    BATCH,
    CURVE_POINTS,
    DESIGNS,
    NEGATIVES,
    OURS,
    ROWS,
    STDS,
    WINDOW,
    key_of,
    step_length,
)
from hessinit.paper.word2vec_findings import conclude
from hessinit.results.result import Plain, to_plain
from hessinit.training.seeds import derive, generator

# A percent is enough: the norms of the sweep span seven orders of magnitude.
TOLERANCE = 1e-2
# Seconds for 1,000 steps, roughly.
COSTS = {"softmax": {16: 0.65, 64: 0.9, 128: 1.5}, "negative": {16: 0.55, 64: 0.75, 128: 1.1}}


def prepare(setting: Setting) -> str:
    """Count the words and draw the pairs once, for the workers to find in `setting.cache`."""
    return "; ".join(dict.fromkeys(text_of(setting, model).source for model in MODELS))


def configure(setting: Setting) -> dict[str, Plain]:
    design = DESIGNS[setting.data]
    plain: dict[str, Plain] = to_plain(
        {
            **vars(design),
            "stds": STDS,
            "batch": BATCH,
            "learning rates": [step_length(rate) for rate in design.rates],
            "optimizer": "plain SGD",
            "pairs": design.pairs,
            "window": WINDOW,
            "subsampling threshold": THRESHOLD,
            "negatives": NEGATIVES,
            "noise": "counts to the power 0.75",
            "Hessian batch": "the first of the training",
            "tolerance of norms": TOLERANCE,
            "final loss": "mean of the last tenth of the steps",
        }
    )
    return plain


def plan(setting: Setting) -> list[Job]:
    design = DESIGNS[setting.data]
    return [
        Job(
            setting,
            key_of(model, dimension, row, seed),
            {"model": model, "dimension": dimension, "row": row, "seed": seed},
            COSTS[model][dimension] * len(design.rates) * design.steps / 1000,
        )
        for model in MODELS
        for dimension in design.dimensions
        for row in ROWS
        for seed in setting.seeds
    ]


def run(job: Job) -> Plain:
    """Norms at the start and losses for each rate; our own start depends on the rate, the others do not."""
    model, row = job.parameters["model"], job.parameters["row"]
    dimension, seed = job.parameters["dimension"], job.parameters["seed"]
    design = DESIGNS[job.setting.data]
    text = text_of(job.setting, model)
    batches = list(draw_batches(model, text, size=BATCH, steps=design.steps, seed=seed, negatives=NEGATIVES))
    runs: dict[str, Plain] = {}
    start: dict[str, Plain] = {}
    for rate in design.rates:
        network = MODELS[model](len(text.vocabulary.words), dimension)
        remark = _write_start(network, batches[0], row, step_length(rate), seed)
        if row == OURS or not start:
            start = {**_measure_start(network, batches[0], seed), "remark": remark}
        losses = train_(network, batches, step_length(rate))
        runs[f"{rate:g}"] = {**start, "final": final_loss(losses), "curve": thin_out(losses)}
    return to_plain(_rounded(runs))


def text_of(setting: Setting, model: str) -> Text:
    """The text of a setting as that model reads it; counted once in a process, or once in `setting.cache`."""
    return _read_text(setting.data, setting.data_dir, setting.cache, model)


@lru_cache(maxsize=2)
def _read_text(data: str, data_dir: str | None, cache: str | None, model: str) -> Text:
    design = DESIGNS[data]
    vocabulary, pairs = design.vocabulary[model], design.pairs
    if cache is None:
        return load_text(data, data_dir, vocabulary=vocabulary, pairs=pairs, window=WINDOW)
    return cached_text(cache, data, data_dir, vocabulary=vocabulary, pairs=pairs, window=WINDOW)


def _write_start(network: SkipGram, batch: Batch, row: str, rate: float, seed: int) -> str:
    """Write the weights; what our own start has to say of them."""
    if row != OURS:
        normal_(network, float(row), generator(seed, "weights"))
        return ""
    normal_(network, 1.0, generator(seed, "weights"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the remark says the same
        result = initialize_(network, network.loss, batch, lr=rate, seed=derive(seed, "hessinit"))
    return result.reason


def _measure_start(network: SkipGram, batch: Batch, seed: int) -> dict[str, Plain]:
    """Norms on one batch: of each matrix and of both together, there by Gauss-Newton and exactly."""
    report = measure(
        network, network.loss, batch, curvature="both", tolerance=TOLERANCE, seed=derive(seed, "probes")
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


def final_loss(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return statistics.fmean(losses[-max(len(losses) // 10, 1) :])


def thin_out(losses: list[float]) -> list[float]:
    """Means of equal pieces; a remainder at the end is left out."""
    size = max(len(losses) // CURVE_POINTS, 1)
    return [
        statistics.fmean(losses[start : start + size]) for start in range(0, len(losses) - size + 1, size)
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


EXPERIMENT = Experiment(
    name="word2vec",
    title="Word2vec: skip-gram's Hessian at the start and its training",
    data=("wikipedia", "docstrings"),
    variants={
        "mean": "The loss is averaged over the pairs of a batch, as in the paper's other experiments; norms "
        "of the loss summed over the batch, which is how word2vec steps, are those times the batch's size."
    },
    seeds=3,
    prepare=prepare,
    configure=configure,
    plan=plan,
    run=run,
    conclude=conclude,
)
