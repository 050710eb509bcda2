"""Table 1: over initializations, gradients at the output of a three-layer network are correlated.

Every sample is a network of its own, drawn by Glorot's uniform rule, that sees one image. Its
gradients need no backward pass: the cross-entropy of a softmax has ∂L/∂z = p − y, and a dense
layer's ∂z/∂h is its weight.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.paper.datasets import load_images
from hessinit.paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit.paper.reference import SIGNIFICANT, Measured, make_table, mean, percentage
from hessinit.results.reproduction import Findings
from hessinit.results.result import Plain, read_numbers
from hessinit.training.data import generator
from hessinit.training.workers import Job

OUTPUTS = "loss by outputs"
LAYER = "loss by output, output by layer"
SAMPLES = {OUTPUTS: 10_000, LAYER: 100_000}
HIDDEN = (32, 32)
CLASSES = 10
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}
SHUFFLES = 40
NETWORKS_AT_ONCE = 250  # their first weights, some 8 MB, stay near the processor


class CorrelationTable(Experiment):
    """Pearson's correlation between gradients, with the one that formulas predict and a shuffled control."""

    def prepare(self, setting: PaperSetting) -> str:
        if importlib.util.find_spec("scipy") is None:
            raise ProblemError(
                "scipy is not installed, and Table 1 needs its p-values. Run pip install 'hessinit[paper]'."
            )
        return super().prepare(setting)

    def configure(self, setting: PaperSetting) -> dict[str, Plain]:
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

    def plan(self, setting: PaperSetting) -> list[Job]:
        rows = {"outputs": OUTPUTS, "layer": LAYER}
        pairs = itertools.product(rows, setting.seeds)
        return [Job(f"{short}-{seed}", {"row": rows[short], "seed": seed}) for short, seed in pairs]

    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain:
        row = parameters["row"]
        seed = parameters["seed"]
        drawn = draw_all(setting, row, seed)
        found: dict[str, Plain] = {}
        for activation, samples in drawn.items():
            r, p = pearson(*choose_pair(setting.variant, row, samples))
            found[activation] = {
                "r": r,
                "p": p,
                "expected r": expect(setting.variant, row, samples),
            }
        one, other = choose_pair(setting.variant, row, drawn["relu"])
        shuffling = generator(seed, f"shuffles, {row}")
        shuffled = [other[torch.randperm(len(other), generator=shuffling)] for _ in range(SHUFFLES)]
        return round_numbers({**found, "shuffled p": [pearson(one, each)[1] for each in shuffled]})

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        counts = {}
        correlations = {}
        control = {}
        plan = self.plan(setting)
        for row in SAMPLES:
            seeds = [results[job.key] for job in plan if job.parameters["row"] == row]
            for activation, name in (("relu", row), ("tanh", f"{row}; tanh")):
                columns = ("p", "r", "expected r")
                p, r, expected = (
                    read_numbers([each[activation][key] for each in seeds]) for key in columns
                )
                # The paper counts so.
                found = Measured(
                    10 * sum(value < SIGNIFICANT for value in p) / len(p), None, len(p)
                )
                correlations[name, "r"], correlations[name, "expected r"] = mean(r), mean(expected)
                correlations[name, "dependent"] = found
                if activation == "relu":
                    counts[row, "dependent"], counts[row, "mean p"] = found, mean(p)
            shuffled = [
                value < SIGNIFICANT for seed in seeds for value in read_numbers(seed["shuffled p"])
            ]
            control[row, "dependent"] = percentage(shuffled)
        tables = (
            make_table(
                "Pearson's r at 95 %: in how many of ten seeds a dependence is detected",
                "Gradients",
                counts,
                "dependent counts the seeds with p < 0.05, out of ten; the components were fixed beforehand "
                "(outputs 0 and 1, and output 0 by unit 0 of the layer before).",
                experiment=self.name,
                data=setting.data,
            ),
            make_table(
                "The correlations themselves, and with tanh in place of ReLU",
                "Gradients",
                correlations,
                "expected r comes from formulas that hold over initializations, with averages of single "
                "variables put in; ± is the standard error over seeds.",
            ),
            make_table(
                "Control: the same samples with one gradient shuffled, where there is nothing to detect",
                "Gradients",
                control,
                "The share of shuffles with p < 0.05; a correct test gives 5 %.",
            ),
        )
        return Findings(tables=tables)


class Samples(NamedTuple):
    """One row for each initialization."""

    probabilities: Tensor  # (n, classes), the softmax of the logits
    targets: Tensor  # (n, classes), one-hot
    hidden: Tensor  # (n, units), the last hidden layer's output
    weights: Tensor  # (n,), the weight from hidden unit 0 to logit 0


def draw_all(setting: PaperSetting, row: str, seed: int) -> dict[str, Samples]:
    """The samples of a row by activation, some networks at a time."""
    images = load_images(setting.data, setting.data_dir)
    count = SAMPLES[row]
    choosing = generator(seed, f"images, {row}")
    weights = generator(seed, f"weights, {row}")
    different = 1 if setting.variant == "one-image" else count
    chosen = torch.randint(images.examples, (different,), generator=choosing).expand(count)
    parts = chosen.split(NETWORKS_AT_ONCE)
    widths = [*HIDDEN, CLASSES]
    pieces = [draw_samples(*images.batch(some, flat=True), widths, weights) for some in parts]
    columns = {name: zip(*(part[name] for part in pieces), strict=True) for name in ACTIVATIONS}
    return {name: Samples(*map(torch.cat, each)) for name, each in columns.items()}


def draw_samples(
    inputs: Tensor, labels: Tensor, widths: Sequence[int], generator: torch.Generator
) -> dict[str, Samples]:
    """A network of its own for every row of `inputs`, the same weights for each activation.

    A weight on a pixel that is 0 changes nothing, so it is not drawn: of MNIST's pixels four fifths
    are 0. Each row's other pixels are moved to the front, and the columns left empty by all are cut
    off.
    """
    lit = inputs != 0
    order = lit.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    lit = inputs.gather(1, order)[:, : max(1, int(lit.sum(1).max()))]
    fans = itertools.pairwise([inputs.shape[1], *widths])
    weights = []
    for row, (before, after) in zip([lit.shape[1], *widths[:-1]], fans, strict=True):
        bound = math.sqrt(6 / (before + after))
        weights.append(
            torch.empty(len(lit), row, after).uniform_(-bound, bound, generator=generator)
        )
    targets = torch.nn.functional.one_hot(labels, widths[-1]).to(inputs.dtype)
    drawn = {}
    for name, activation in ACTIVATIONS.items():
        hidden = lit.unsqueeze(1)
        for weight in weights[:-1]:
            hidden = activation(torch.bmm(hidden, weight))
        logits = torch.bmm(hidden, weights[-1]).squeeze(1)
        drawn[name] = Samples(
            logits.softmax(1), targets, hidden.squeeze(1), weights[-1][:, 0, 0].clone()
        )
    return drawn


def pearson(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Pearson's r and its two-sided p-value."""
    from scipy import stats

    found = stats.pearsonr(one.double().numpy(), other.double().numpy())
    return float(found.statistic), float(found.pvalue)


def choose_pair(variant: str, row: str, samples: Samples) -> tuple[Tensor, Tensor]:
    """The two gradients tested: components 0 and 1, fixed before any was looked at."""
    p = samples.probabilities
    y = samples.targets
    if variant == "softmax-layer":
        by_outputs = -y / p
        by_layer = p[:, 0] * (1 - p[:, 0])
    else:
        by_outputs = p - y
        by_layer = samples.weights
    return by_outputs[:, 0], by_outputs[:, 1] if row == OUTPUTS else by_layer


def expect(variant: str, row: str, samples: Samples) -> float:
    """The predicted correlation, from symmetry and averages of single variables.

    Over initializations the K classes are exchangeable, and so are the hidden units: averages are
    taken over all of them, so that a prediction's noise is far below that of the correlation.
    """
    p = samples.probabilities.double()
    hidden = samples.hidden.double()
    shares: list[float] = (
        samples.targets[:, :2].double().mean(0).tolist()
    )  # how often the label is 0, and 1
    spread = float(
        (p - 1 / p.shape[1]).square().mean()
    )  # the variance of a probability; its mean is 1/K
    if variant != "softmax-layer":
        first, second = (spread + fraction * (1 - fraction) for fraction in shares)
        if row == OUTPUTS:
            # The p sum to 1, so cov(p₀, p₁) = −var(p)/(K − 1); labels exclude each other. With one
            # image for all samples the label is constant, and r = −1/(K − 1) exactly.
            covariance = -spread / (p.shape[1] - 1) - shares[0] * shares[1]
            return covariance / math.sqrt(first * second)
        # Stein's identity, E[p₀ w] = σ² E[∂p₀/∂w] = σ² E[p(1 − p) h]: exact for normal weights.
        slope = float(((p * (1 - p)).mean(1) * hidden.mean(1)).mean())
        return math.sqrt(2 / (HIDDEN[-1] + CLASSES)) * slope / math.sqrt(first)
    # Mean and variance of y/p from the class's own images: brighter ones have probabilities further
    # apart.
    inverse = [1 / p[samples.targets[:, label] == 1] for label in (0, 1)]
    means = [
        fraction * float(values.mean()) for fraction, values in zip(shares, inverse, strict=True)
    ]
    variance = [
        shares[label] * float(inverse[label].square().mean()) - means[label] ** 2
        for label in (0, 1)
    ]
    if row == OUTPUTS:
        # −y₀/p₀ and −y₁/p₁ are never both nonzero: the covariance is minus the product of their
        # means.
        return -means[0] * means[1] / math.sqrt(variance[0] * variance[1])
    # With the label 0, −y₀/p₀ and p₀(1 − p₀) both rise with p₀; without it, the first is 0.
    derivative = p * (1 - p)
    of_label = p[samples.targets[:, 0] == 1]
    covariance = means[0] * float(derivative.mean()) - shares[0] * float((1 - of_label).mean())
    return covariance / math.sqrt(variance[0] * float(derivative.var(unbiased=False)))


NETWORK = "ReLU, 32 and 32 hidden units"
LOGITS = "Output6 is the last dense layer's, the logits, so Output6/Output5 is its weight."
EXPERIMENTS = [
    CorrelationTable(
        name="table-1",
        title="Table 1: gradients at the output correlate over initializations",
        data=("mnist", "digits"),
        seeds=10,
        variants={
            "one-image": Variant(
                "Only the initialization is drawn again: all samples of a seed see one image. "
                f"{NETWORK}; {LOGITS}"
            ),
            "new-image": Variant(f"Every sample draws an image, too. {NETWORK}; {LOGITS}"),
            "softmax-layer": Variant(
                "Activations count as layers and the softmax is the sixth, so Output6 is the probabilities "
                f"and Output6/Output5 the softmax's derivative. {NETWORK}, a new image for every sample."
            ),
        },
    )
]
