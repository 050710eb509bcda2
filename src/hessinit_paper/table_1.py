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
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hessinit import ProblemError
from hessinit.jobs import Job, generator
from hessinit_paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit_paper.images import load_images
from hessinit_paper.reference import SIGNIFICANT, Measured, make_table, mean, percentage
from hessinit_paper.reproduction import Findings, PaperTable, Plain

OUTPUTS = "loss by outputs"
LAYER = "loss by output, output by layer"
Numbers: TypeAlias = Mapping[tuple[str, str], Measured]
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}


@dataclass(frozen=True)
class Design:
    """The network and the number of samples, of which the paper gives the latter."""

    hidden: tuple[int, ...] = (32, 32)
    classes: int = 10
    samples: Mapping[str, int] = field(default_factory=lambda: {OUTPUTS: 10_000, LAYER: 100_000})
    shuffles: int = 40
    networks_at_once: int = 250  # their first weights, some 8 MB, stay in the processor's cache


DESIGN = Design()


class CorrelationTable(Experiment):
    """Pearson's correlation between gradients, the predicted one, and a shuffled control."""

    def prepare(self, setting: PaperSetting) -> str:
        if importlib.util.find_spec("scipy") is None:
            raise ProblemError(
                "scipy is not installed, and Table 1 needs its p-values. Run pip install "
                "'hessinit[paper]'."
            )
        return super().prepare(setting)

    def configure(self, setting: PaperSetting) -> dict[str, Plain]:
        return {
            "hidden widths": list(DESIGN.hidden),
            "classes": DESIGN.classes,
            "initialization": "Glorot uniform, biases zero",
            "inputs": "pixels in [0, 1]",
            "loss": "cross-entropy of a softmax",
            "samples": dict(DESIGN.samples),
            "activations": list(ACTIVATIONS),
            "components": "outputs 0 and 1; output 0 by unit 0 of the layer before",
            "shuffles": DESIGN.shuffles,
            "networks at once": DESIGN.networks_at_once,
        }

    def plan(self, setting: PaperSetting) -> list[Job]:
        rows = {"outputs": OUTPUTS, "layer": LAYER}
        pairs = itertools.product(rows, setting.seeds)
        return [Job(f"{short}-{seed}", {"row": rows[short], "seed": seed}) for short, seed in pairs]

    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain:
        row = parameters["row"]
        seed = parameters["seed"]
        samples = draw_all(setting, row, seed)
        result: dict[str, Plain] = {}
        for activation, drawn in samples.items():
            r, p = pearson(*choose_pair(setting.variant, row, drawn))
            result[activation] = {"r": r, "p": p, "expected r": expect(setting.variant, row, drawn)}
        first, second = choose_pair(setting.variant, row, samples["relu"])
        source = generator(seed, f"shuffles, {row}")
        orders = (torch.randperm(len(second), generator=source) for _ in range(DESIGN.shuffles))
        result["shuffled p"] = [pearson(first, second[order])[1] for order in orders]
        return round_numbers(result)

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        counts = {}
        correlations = {}
        control = {}
        plan = self.plan(setting)
        for row in DESIGN.samples:
            seeds = [results[job.key] for job in plan if job.parameters["row"] == row]
            for activation, name in (("relu", row), ("tanh", f"{row}; tanh")):
                numbers = {
                    key: [float(seed[activation][key]) for seed in seeds]
                    for key in ("p", "r", "expected r")
                }
                correlations[name, "r"] = mean(numbers["r"])
                correlations[name, "expected r"] = mean(numbers["expected r"])
                correlations[name, "dependent"] = _count_dependent(numbers["p"])
                if activation == "relu":
                    counts[row, "dependent"] = correlations[name, "dependent"]
                    counts[row, "mean p"] = mean(numbers["p"])
            shuffled = [float(p) for seed in seeds for p in seed["shuffled p"]]
            control[row, "dependent"] = percentage([p < SIGNIFICANT for p in shuffled])
        return Findings(tables=self.make_tables(setting.data, counts, correlations, control))

    def make_tables(
        self, data: str, counts: Numbers, correlations: Numbers, control: Numbers
    ) -> tuple[PaperTable, ...]:
        """Return the paper's table, the correlations themselves, and the control."""
        return (
            make_table(
                "Pearson's r at 95 %: in how many of ten seeds a dependence is detected",
                "Gradients",
                counts,
                "dependent counts the seeds with p < 0.05, out of ten; the components were fixed "
                "beforehand (outputs 0 and 1, and output 0 by unit 0 of the layer before).",
                experiment=self.name,
                data=data,
            ),
            make_table(
                "The correlations themselves, and with tanh in place of ReLU",
                "Gradients",
                correlations,
                "expected r comes from formulas that hold over initializations, with averages of "
                "single variables put in; ± is the standard error over seeds.",
            ),
            make_table(
                "Control: the same samples with one gradient shuffled, where there is nothing to "
                "detect",
                "Gradients",
                control,
                "The share of shuffles with p < 0.05; a correct test gives 5 %.",
            ),
        )


def _count_dependent(p_values: Sequence[float]) -> Measured:
    """Return in how many of ten seeds a dependence is detected, as the paper counts."""
    detected = sum(p < SIGNIFICANT for p in p_values)
    return Measured(10 * detected / len(p_values), None, len(p_values))


class Samples(NamedTuple):
    """One row for each initialization."""

    probabilities: Tensor  # (n, classes), the softmax of the logits
    targets: Tensor  # (n, classes), one-hot
    hidden: Tensor  # (n, units), the last hidden layer's output
    weights: Tensor  # (n,), the weight from hidden unit 0 to logit 0


def draw_all(setting: PaperSetting, row: str, seed: int) -> dict[str, Samples]:
    """Return the samples of a row by activation, drawn a few networks at a time."""
    images = load_images(setting.data, setting.data_dir)
    count = DESIGN.samples[row]
    choosing = generator(seed, f"images, {row}")
    weights = generator(seed, f"weights, {row}")
    different = 1 if setting.variant == "one-image" else count
    chosen = torch.randint(images.examples, (different,), generator=choosing).expand(count)
    widths = [*DESIGN.hidden, DESIGN.classes]
    pieces = [
        draw_samples(*images.batch(index, flat=True), widths, weights)
        for index in chosen.split(DESIGN.networks_at_once)
    ]
    columns = {name: zip(*(piece[name] for piece in pieces), strict=True) for name in ACTIVATIONS}
    return {name: Samples(*map(torch.cat, parts)) for name, parts in columns.items()}


def draw_samples(
    inputs: Tensor, labels: Tensor, widths: Sequence[int], generator: torch.Generator
) -> dict[str, Samples]:
    """Draw a new network for every row of `inputs`, with the same weights for each activation.

    A weight on a pixel that is 0 changes nothing, so it is not drawn: of MNIST's pixels four fifths
    are 0. Each row's other pixels are moved to the front, and columns that are then empty in all
    rows are cut off.
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
        first_weight = weights[-1][:, 0, 0].clone()
        drawn[name] = Samples(logits.softmax(1), targets, hidden.squeeze(1), first_weight)
    return drawn


def pearson(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return Pearson's r and its two-sided p-value."""
    from scipy import stats

    correlation = stats.pearsonr(first.double().numpy(), second.double().numpy())
    return float(correlation.statistic), float(correlation.pvalue)


def choose_pair(variant: str, row: str, samples: Samples) -> tuple[Tensor, Tensor]:
    """Return the two tested gradients: components 0 and 1, fixed before any was looked at."""
    p = samples.probabilities
    y = samples.targets
    by_outputs = p - y
    by_layer = samples.weights
    if variant == "softmax-layer":
        by_outputs = -y / p
        by_layer = p[:, 0] * (1 - p[:, 0])
    if row == OUTPUTS:
        return by_outputs[:, 0], by_outputs[:, 1]
    return by_outputs[:, 0], by_layer


def expect(variant: str, row: str, samples: Samples) -> float:
    """Return the predicted correlation, from symmetry and averages of single variables.

    Over initializations the K classes are exchangeable, and so are the hidden units: averages are
    taken over all of them, so that the noise of a prediction is far below that of the correlation.
    """
    if variant == "softmax-layer":
        return _expect_of_softmax_layer(row, samples)
    p = samples.probabilities.double()
    hidden = samples.hidden.double()
    fractions = _fractions(samples)
    spread = float((p - 1 / p.shape[1]).square().mean())  # the variance of p, whose mean is 1/K
    first, second = (spread + fraction * (1 - fraction) for fraction in fractions)
    if row == OUTPUTS:
        # The p sum to 1, so cov(p₀, p₁) = −var(p)/(K − 1); labels exclude each other. With one
        # image for all samples the label is constant, and r = −1/(K − 1) exactly.
        covariance = -spread / (p.shape[1] - 1) - fractions[0] * fractions[1]
        return covariance / math.sqrt(first * second)
    # Stein's identity, E[p₀ w] = σ² E[∂p₀/∂w] = σ² E[p(1 − p) h]: exact for normal weights.
    slope = float(((p * (1 - p)).mean(1) * hidden.mean(1)).mean())
    return math.sqrt(2 / (DESIGN.hidden[-1] + DESIGN.classes)) * slope / math.sqrt(first)


def _expect_of_softmax_layer(row: str, samples: Samples) -> float:
    """Return the predicted correlation where the probabilities count as the output."""
    p = samples.probabilities.double()
    fractions = _fractions(samples)
    # Mean and variance of y/p from the class's own images: brighter ones have probabilities further
    # apart.
    inverse = [1 / p[samples.targets[:, label] == 1] for label in (0, 1)]
    means = [
        fraction * float(values.mean()) for fraction, values in zip(fractions, inverse, strict=True)
    ]
    variance = [
        fractions[label] * float(inverse[label].square().mean()) - means[label] ** 2
        for label in (0, 1)
    ]
    if row == OUTPUTS:
        # −y₀/p₀ and −y₁/p₁ are never both nonzero: the covariance is minus the product of their
        # means.
        return -means[0] * means[1] / math.sqrt(variance[0] * variance[1])
    # With the label 0, −y₀/p₀ and p₀(1 − p₀) both rise with p₀; without it, the first is 0.
    derivative = p * (1 - p)
    of_label = p[samples.targets[:, 0] == 1]
    covariance = means[0] * float(derivative.mean()) - fractions[0] * float((1 - of_label).mean())
    return covariance / math.sqrt(variance[0] * float(derivative.var(unbiased=False)))


def _fractions(samples: Samples) -> list[float]:
    """Return how often the label is 0, and 1."""
    return samples.targets[:, :2].double().mean(0).tolist()


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
                "Activations count as layers and the softmax is the sixth, so Output6 is the "
                "probabilities and Output6/Output5 the softmax's derivative. "
                f"{NETWORK}, a new image for every sample."
            ),
        },
    )
]
