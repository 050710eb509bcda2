"""Table 1: over initializations, gradients at the output of a three-layer network correlate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hessinit.paper import correlation_findings, expected_correlations
from hessinit.paper.correlations import Samples, draw_samples, join, pearson
from hessinit.paper.experiment import Experiment, Job, Setting
from hessinit.paper.minibatches import images_of, read_source
from hessinit.results.reproduction import Findings
from hessinit.results.result import Plain, to_plain
from hessinit.training.seeds import generator

OUTPUTS, LAYER = "loss by outputs", "loss by output, output by layer"
SAMPLES = {OUTPUTS: 10_000, LAYER: 100_000}
HIDDEN = (32, 32)
CLASSES = 10
ACTIVATIONS = ("relu", "tanh")
SHUFFLES = 40
NETWORKS_AT_ONCE = 250  # their first weights, some 8 MB, stay near the processor
SECONDS_PER_SAMPLE = 4e-5


def configure(setting: Setting) -> dict[str, Plain]:
    """Every choice that the numbers depend on."""
    return {
        "hidden widths": list(HIDDEN),
        "classes": CLASSES,
        "initialization": "Glorot uniform, biases zero",
        "inputs": "pixels in [0, 1]",
        "loss": "cross-entropy of a softmax",
        "samples": dict(SAMPLES),
        "activations": list(ACTIVATIONS),
        "components": "outputs 0 and 1; output 0 by unit 0 of the layer before",
        "shuffles": SHUFFLES,
        "networks at once": NETWORKS_AT_ONCE,
    }


def plan(setting: Setting) -> list[Job]:
    """One job for each row and seed."""
    return [
        Job(
            setting,
            f"{'outputs' if row == OUTPUTS else 'layer'}-{seed}",
            {"row": row, "seed": seed, "samples": samples},
            samples * SECONDS_PER_SAMPLE,
        )
        for (row, samples), seed in itertools.product(SAMPLES.items(), setting.seeds)
    ]


def run(job: Job) -> Plain:
    """r, its p-value and the r that a formula gives, by activation; and p-values of shuffled samples."""
    row, seed = job.parameters["row"], job.parameters["seed"]
    drawn = draw_all(job)
    found: dict[str, Plain] = {}
    for activation, samples in drawn.items():
        r, p = pearson(*choose_pair(job.setting.variant, row, samples))
        expected = expect(job.setting.variant, row, samples)
        found[activation] = {"r": _rounded(r), "p": _rounded(p), "expected r": _rounded(expected)}
    one, other = choose_pair(job.setting.variant, row, drawn["relu"])
    shuffling = generator(seed, f"shuffles, {row}")
    shuffled = [other[torch.randperm(len(other), generator=shuffling)] for _ in range(SHUFFLES)]
    found["shuffled p"] = [_rounded(pearson(one, each)[1]) for each in shuffled]
    return to_plain(found)


def draw_all(job: Job) -> dict[str, Samples]:
    """The job's samples by activation, some networks at a time."""
    images, row, seed = images_of(job.setting), job.parameters["row"], job.parameters["seed"]
    count = job.parameters["samples"]
    choosing, weights = generator(seed, f"images, {row}"), generator(seed, f"weights, {row}")
    different = 1 if job.setting.variant == "one-image" else count
    chosen = torch.randint(images.examples, (different,), generator=choosing).expand(count)
    parts = [
        draw_samples(*images.batch(some, flat=True), [*HIDDEN, CLASSES], ACTIVATIONS, weights)
        for some in chosen.split(NETWORKS_AT_ONCE)
    ]
    return {name: join([part[name] for part in parts]) for name in ACTIVATIONS}


def choose_pair(variant: str, row: str, samples: Samples) -> tuple[Tensor, Tensor]:
    """The two gradients tested: components 0 and 1, fixed before any was looked at."""
    p, y = samples.probabilities, samples.targets
    if variant == "softmax-layer":
        by_outputs = -y / p
        return by_outputs[:, 0], by_outputs[:, 1] if row == OUTPUTS else p[:, 0] * (1 - p[:, 0])
    by_outputs = samples.loss_by_logits
    return by_outputs[:, 0], by_outputs[:, 1] if row == OUTPUTS else samples.weights


def expect(variant: str, row: str, samples: Samples) -> float:
    if variant == "softmax-layer":
        if row == OUTPUTS:
            return expected_correlations.between_probability_gradients(samples)
        return expected_correlations.with_softmax_derivative(samples)
    if row == OUTPUTS:
        return expected_correlations.between_logit_gradients(samples)
    return expected_correlations.with_last_weight(samples, sigma=math.sqrt(2 / (HIDDEN[-1] + CLASSES)))


def conclude(setting: Setting, results: Mapping[str, Plain]) -> Findings:
    by_row = {
        row: [results[job.key] for job in plan(setting) if job.parameters["row"] == row] for row in SAMPLES
    }
    return correlation_findings.conclude(setting, by_row, SAMPLES)


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


EXPERIMENT = Experiment(
    name="table-1",
    title="Table 1: gradients at the output correlate over initializations",
    data=("mnist", "digits"),
    variants={
        "one-image": "Only the initialization is drawn again: all samples of a seed see one image. ReLU, 32 "
        "and 32 hidden units; Output6 is the last dense layer's, the logits, so Output6/Output5 is its "
        "weight.",
        "new-image": "Every sample draws an image, too. ReLU, 32 and 32 hidden units; Output6 is the last "
        "dense layer's, the logits, so Output6/Output5 is its weight.",
        "softmax-layer": "Activations count as layers and the softmax is the sixth, so Output6 is the "
        "probabilities and Output6/Output5 the softmax's derivative. ReLU, 32 and 32 hidden units, a new "
        "image for every sample.",
    },
    seeds=10,
    prepare=read_source,
    configure=configure,
    plan=plan,
    run=run,
    conclude=conclude,
)
