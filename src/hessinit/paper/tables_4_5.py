"""Tables 4 and 5, Figures 1 and 2: two weights from N(0, std²), their initial Hessians, and training.

The rows of a seed use the same random numbers, only scaled, and the same mini-batches. The streams
are those of the records, so that their numbers come again; `hessinit.sweep` runs the same
comparison on other networks.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from hessinit.measurement.measure import measure
from hessinit.paper.datasets import ImageSet, load_images
from hessinit.paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit.paper.networks import build, default_, glorot_
from hessinit.paper.reference import make_table, mean, rank_correlation
from hessinit.problem.problem import Loss, Problem
from hessinit.results.reproduction import Curve, Findings, PaperFigure, PaperTable
from hessinit.results.result import Plain, read_numbers
from hessinit.training.data import derive, generator
from hessinit.training.initialize import initialize_
from hessinit.training.loop import chunk_means, final_loss, make_optimizer, train
from hessinit.training.workers import Job

OURS = "hessinit"
BATCH = 32  # on which Hessians are measured, and which hessinit sees
MOST_POINTS = 60  # of a curve, so that records stay small
CLIP = 1e-7  # Keras' epsilon
LEARNING_RATE = 0.01
EPOCHS = 2
HESSIANS = ("Hessian 1", "Hessian 2")
LOSS = "Training loss"
Values = Mapping[
    str, Sequence[float]
]  # of a row by column: over all initializations, or over the seeds


def clipped_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log of the softmax clipped to [1e-7, 1 − 1e-7], as Keras computes it from probabilities.

    An example beyond a limit has no gradient: what is badly wrong stays wrong.
    """
    probabilities = torch.softmax(outputs, dim=1).clamp(CLIP, 1 - CLIP)
    return nn.functional.nll_loss(probabilities.log(), targets)


@dataclass(frozen=True)
class TrainedNetwork(Variant):
    """A variant's network, and how it is trained."""

    batch: int = 32
    digits_epochs: int = (
        30  # the embedded images are few: as many epochs as make about as many steps
    )

    @property
    def flat(self) -> bool:
        return "hidden units" in self.network

    @property
    def swept(self) -> tuple[str, str]:
        """The two weights that carry the std."""
        return ("dense1", "dense2") if self.flat else ("conv1", "conv2")

    @property
    def loss(self) -> Loss:
        return (
            clipped_cross_entropy
            if "clipped" in self.network["loss"]
            else nn.functional.cross_entropy
        )

    def initialize(self, images: ImageSet, row: str, seed: int) -> nn.Sequential:
        """A new network whose weights are drawn with the std of the row, or written by hessinit."""
        model = build(self.network, images.shape, "relu")
        if row == OURS:
            default_(model, derive(seed, "default weights"))
            batch = images.batch(images.draw(BATCH, generator(seed, "start batch")), self.flat)
            problem = Problem(model, self.loss, batch, seed=derive(seed, "start"))
            initialize_(problem, lr=LEARNING_RATE)
            return model
        glorot_(model, generator(seed, "other weights"))
        for name in self.swept:
            weight = model.get_parameter(f"{name}.weight")
            source = generator(seed, f"weights of {name}")
            nn.init.normal_(weight, 0.0, float(row), generator=source)
        return model

    def train(self, images: ImageSet, row: str, seed: int, epochs: int) -> list[float]:
        """The loss of every mini-batch; one that is not finite is the last."""
        model = self.initialize(images, row, seed)
        order = generator(seed, "order")
        # Channels last: convolutions and pools of few channels take 60 % of the time on a CPU.
        layout = torch.contiguous_format if self.flat else torch.channels_last
        model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's own stubs miss it

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(epochs):
                for index in images.epoch(self.batch, order):
                    inputs, targets = images.batch(index, self.flat)
                    yield inputs.contiguous(memory_format=layout), targets

        return train(model, self.loss, batches(), make_optimizer("sgd", model, LEARNING_RATE))[0]

    def measure(self, images: ImageSet, row: str, seed: int) -> dict[str, Plain]:
        """Norms of both weights' blocks, approximate and exact, and of all weights together, on one batch."""
        batch = images.batch(images.draw(BATCH, generator(seed, "hessian batch")), self.flat)
        return measure_norms(self.initialize(images, row, seed), self.loss, batch, self.swept)


def measure_norms(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], layers: tuple[str, str]
) -> dict[str, Plain]:
    """The norms of the weights of `layers` by Theorem 1 and exactly, and of the network by Gauss-Newton."""
    # In float64: where the softmax is nearly saturated, 1 − p has few digits in float32.
    model = copy.deepcopy(model).double()
    batch = (batch[0].double(), batch[1])
    outputs = model(batch[0]).detach().requires_grad_()
    if not torch.autograd.grad(loss(outputs, batch[1]), outputs)[
        0
    ].any():  # every example is clipped
        return {"approximate": [0.0, 0.0], "exact": [0.0, 0.0], "network": 0.0}
    approximate = measure(model, loss, batch)
    exact = measure(Problem(model, loss, batch, layers=layers), curvature="hessian", network=False)
    norms = {
        "approximate": [approximate[name].norm for name in layers],
        "exact": [exact[name].norm for name in layers],
        "network": approximate.network.norm,
    }
    return dict(round_numbers(norms))


@dataclass(frozen=True, kw_only=True)
class StdTable(Experiment):
    """Hessian norms and training loss by the std of two weights; the stds are named as printed."""

    variants: Mapping[str, TrainedNetwork]
    figure: PaperFigure  # without its curves
    stds: tuple[str, ...]
    scaling: tuple[str, ...]  # the rows from which the power of the std is read
    restarts: int  # initializations for each seed whose Hessians are measured; the first of them is trained
    last: int  # losses whose mean is the training loss

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.stds, OURS)

    def epochs(self, setting: PaperSetting) -> int:
        return self.variants[setting.variant].digits_epochs if setting.data == "digits" else EPOCHS

    def configure(self, setting: PaperSetting) -> dict[str, Plain]:
        network = self.variants[setting.variant]
        return {
            "network": dict(network.network),
            "activation": "relu",
            "weights with the std": list(network.swept),
            "other weights": "Glorot uniform",
            "biases": "zero",
            "pixels": "in [0, 1]",
            "rows": list(self.rows),
            "training": {
                "optimizer": "SGD",
                "learning_rate": LEARNING_RATE,
                "batch": network.batch,
                "epochs": self.epochs(setting),
                "last": self.last,
            },
            "hessians": {
                "norm": "largest |eigenvalue|",
                "batch": BATCH,
                "restarts of each seed": self.restarts,
                "precision": "float64",
            },
            OURS: {"batch": BATCH, "lr": LEARNING_RATE, "options": "as they come"},
        }

    def plan(self, setting: PaperSetting) -> list[Job]:
        return [
            Job(f"{part} {row} seed {seed}", {"part": part, "row": row, "seed": seed})
            for part, seed, row in product(("training", "norms"), setting.seeds, self.rows)
        ]

    def run(self, setting: PaperSetting, parameters: Mapping[str, Plain]) -> Plain:
        row = str(parameters["row"])
        seed = int(parameters["seed"])
        images = load_images(setting.data, setting.data_dir)
        network = self.variants[setting.variant]
        if parameters["part"] == "norms":
            seeds = [
                seed,
                *(derive(seed, f"restart {number}") for number in range(1, self.restarts)),
            ]
            found = [network.measure(images, row, each) for each in seeds]
            return {name: [norms[name] for norms in found] for name in found[0]}
        losses = network.train(images, row, seed, self.epochs(setting))
        steps = self.epochs(setting) * (images.examples // network.batch)
        final = final_loss(losses, self.last)
        curve = chunk_means(losses, math.ceil(steps / MOST_POINTS))
        return round_numbers(
            {"steps": steps, "losses": len(losses), LOSS.lower(): final, "curve": curve}
        )

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        rows = dict[str, Values]()
        curves = []
        for name in self.rows:
            norms = [results[f"norms {name} seed {seed}"] for seed in setting.seeds]
            trainings = [results[f"training {name} seed {seed}"] for seed in setting.seeds]
            approximate, exact = (
                list(
                    zip(*(read_numbers(pair) for part in norms for pair in part[kind]), strict=True)
                )
                for kind in ("approximate", "exact")
            )
            losses = read_numbers([each[LOSS.lower()] for each in trainings])
            network = read_numbers([norm for part in norms for norm in part["network"]])
            columns = (*HESSIANS, LOSS, "exact 1", "exact 2", "network")
            rows[name] = dict(zip(columns, (*approximate, losses, *exact, network), strict=True))
            label = name if name == OURS else f"std {name}"
            curves.append(
                mean_curve(label, trainings[0]["steps"], [each["curve"] for each in trainings])
            )
        figures = (replace(self.figure, curves=tuple(curves)),)
        tables = self.make_tables(setting, rows)
        sentences = self.write_sentences(rows)
        return Findings(tables=tuple(tables), figures=figures, sentences=tuple(sentences))

    def make_tables(
        self, setting: PaperSetting, rows: Mapping[str, Values]
    ) -> Iterator[PaperTable]:
        """The paper's table, how the norms grow with the std, and the norms of the network."""
        yield make_table(
            "Hessians at initialization and training loss",
            "Weights std.",
            {
                (name, column): mean(values)
                for name, row in rows.items()
                for column, values in row.items()
                if column != "network"
            },
            f"Hessian: largest |eigenvalue| of the weight's block on a random batch of {BATCH}, by Theorem "
            f"1; exact: without approximation. Training loss: mean of the last {self.last} mini-batches of "
            f"{self.epochs(setting)} epochs.",
            experiment=self.name,
            data=setting.data,
        )
        growth = {}
        for column in HESSIANS:
            label = f"{column} / std²"
            for name in self.stds:
                growth[name, label] = mean([norm / float(name) ** 2 for norm in rows[name][column]])
            growth["power of the std", label] = mean(self.power_of_std(rows, column))
        yield make_table(
            "How the Hessians grow with the std",
            "Weights std.",
            growth,
            f"Power: least squares in logarithms over {', '.join(self.scaling)}, for each initialization; "
            "exactly two weights that carry the std give 2.",
        )
        yield make_table(
            "All weights together",
            "Weights std.",
            {
                (name, column): mean([factor * norm for norm in row["network"]])
                for name, row in rows.items()
                for column, factor in {"network": 1.0, "lr · network": LEARNING_RATE}.items()
            },
            "Largest eigenvalue of the Gauss-Newton matrix of all weights; descent on that batch is stable "
            "up to lr · network = 2.",
        )

    def power_of_std(self, rows: Mapping[str, Values], column: str) -> list[float]:
        """The power a of norm ∝ std^a by least squares in logarithms, for each initialization."""
        logarithms = [math.log(float(row)) for row in self.scaling]
        columns = zip(*(rows[row][column] for row in self.scaling), strict=True)
        curved = [list(map(math.log, norms)) for norms in columns if min(norms) > 0]
        return [statistics.linear_regression(logarithms, norms).slope for norms in curved] or [
            math.nan
        ]

    def write_sentences(self, rows: Mapping[str, Values]) -> Iterator[str]:
        """Whether norms near 1 train best, over the stds; and how hessinit compares with the best of them."""
        means = {
            name: {key: statistics.fmean(row[key]) for key in row} for name, row in rows.items()
        }
        # A training that broke off ranks last.
        losses = {
            name: loss if math.isfinite(loss := means[name][LOSS]) else math.inf
            for name in self.stds
        }
        best = min(self.stds, key=losses.__getitem__)
        theirs = rows[best][LOSS]
        ours = rows[OURS][LOSS]
        norms = [means[best][column] for column in HESSIANS]
        away = max(max(norm, 1 / norm) if norm else math.inf for norm in norms)
        yield (
            f"Of the standard deviations {best} ends with the lowest training loss, {mean(theirs)} (n = "
            f"{len(theirs)}). The paper says that the best have norms close to 1: those of {best} are "
            f"{norms[0]:.3g} and {norms[1]:.3g}, within a factor of {away:.2g} of it."
        )
        found = []
        for column, name in zip(HESSIANS, ("first", "second"), strict=True):
            norms = [means[row][column] for row in self.stds]
            distances = [abs(math.log(norm)) if norm else math.inf for norm in norms]
            ranked = rank_correlation(distances, list(losses.values()))
            found.append(f"ρ = {ranked.rho:.2f} (p = {ranked.p:.2g}) for the {name} weight")
        yield (
            "Distance of the norm from 1, |ln ‖H‖|, and training loss have a rank correlation (Spearman) of "
            f"{' and '.join(found)}, over {len(self.stds)} standard deviations (p: two-sided, of all "
            "orders); a positive ρ supports the paper."
        )
        # Seed by seed: the mini-batches are the same.
        differences = [one - other for one, other in zip(ours, theirs, strict=True)]
        rates = [f"{LEARNING_RATE * means[name]['network']:.2g}" for name in (OURS, best)]
        yield (
            f"Initialized by hessinit for lr = {LEARNING_RATE:g}, the network ends with {mean(ours)} (n = "
            f"{len(ours)}); the difference from std {best}, the best of {len(self.stds)}, is "
            f"{mean(differences)}, seed by seed. It has lr · ‖H‖ = {rates[0]} for all weights together, and "
            f"std {best} has {rates[1]}; other learning rates were not tried."
        )


def mean_curve(name: str, steps: int, curves: Sequence[Plain]) -> Curve:
    """The mean over seeds, up to where the first breaks off; x is the middle of each chunk of steps."""
    points = zip(*map(read_numbers, curves), strict=False)
    means = [mean(point) for point in points if all(map(math.isfinite, point))]
    length = math.ceil(steps / MOST_POINTS)
    middles = [(first + min(first + length, steps)) / 2 for first in range(0, steps, length)]
    errors = tuple(each.error or 0.0 for each in means) if len(curves) > 1 else None
    return Curve(
        name=name, x=(*middles[: len(means)],), y=tuple(each.ours for each in means), error=errors
    )


def make_figure(name: str, weights: str, log_y: bool) -> PaperFigure:
    title = f"Loss during training by the std of the initial {weights}"
    loss = "loss of a mini-batch"
    return PaperFigure(name=name, title=title, x_label="step", y_label=loss, curves=(), log_y=log_y)


DENSE = {"hidden units": [64, 64], "loss": "cross-entropy"}
CONVOLUTIONS = {
    "channels": [32, 32],
    "kernel": 3,
    "pool": "max",
    "dense": [120, 84],
    "loss": "cross-entropy",
}
EXPERIMENTS = [
    StdTable(
        name="table-4",
        title="Table 4 and Figure 1: Hessian norms and training loss by the std of the weights",
        data=("mnist", "fashion-mnist", "digits"),
        figure=make_figure("figure-1", "weights", log_y=True),
        stds=("1.000", "0.500", "0.100", "0.075", "0.050", "0.005"),
        restarts=10,
        last=200,
        seeds=5,
        scaling=("0.100", "0.075", "0.050", "0.005"),  # above, the softmax is saturated
        variants={
            "two-hidden": TrainedNetwork(
                "Two hidden layers of 64, whose weights carry the std, as the text's “2 hidden layers” and "
                "“hidden layer weights” say; the output layer is Glorot uniform.",
                DENSE,
            ),
            "one-hidden": TrainedNetwork(
                "One hidden layer of 80; both weights carry the std, that of the output layer too.",
                {**DENSE, "hidden units": [80]},
            ),
            "clipped": TrainedNetwork(
                "As two-hidden, but probabilities are clipped to [1e-7, 1 − 1e-7] before the logarithm, as "
                "Keras does, so that examples beyond have no gradient.",
                {**DENSE, "loss": "cross-entropy of clipped probabilities"},
            ),
        },
    ),
    StdTable(
        name="table-5",
        title="Table 5 and Figure 2: Hessian norms and training loss by the std of the kernels",
        data=("cifar-10", "fashion-mnist", "digits"),
        figure=make_figure("figure-2", "kernels", log_y=False),
        stds=("0.100", "0.075", "0.050", "0.001"),
        scaling=("0.100", "0.075", "0.050", "0.001"),
        restarts=8,
        last=100,
        seeds=5,
        variants={
            "3x3": TrainedNetwork(
                "Two convolutions of 32 kernels of 3×3, each with a max pool, then 120–84–10; mini-batches "
                "of 128.",
                CONVOLUTIONS,
                batch=128,
                digits_epochs=56,
            ),
            "lenet-5": TrainedNetwork(
                "LeNet-5's convolutions, 6 and 16 kernels of 5×5 with average pools, then 120–84–10; "
                "mini-batches of 32.",
                {**CONVOLUTIONS, "channels": [6, 16], "kernel": 5, "pool": "average"},
            ),
        },
    ),
]
