"""Tables 4 and 5, Figures 1 and 2: two weights from N(0, std²), their Hessians, and training.

The rows of a seed use the same random numbers, only scaled, and the same mini-batches. The random
streams are those of the records, so that their numbers come again; `hessinit.sweep` runs the same
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

from hessinit import Problem, initialize_, measure
from hessinit.jobs import Job, derive, generator
from hessinit_paper.experiments import Experiment, PaperSetting, Variant, round_numbers
from hessinit_paper.images import ImageSet, load_images
from hessinit_paper.networks import build, default_, glorot_
from hessinit_paper.reference import make_table, mean, rank_correlation
from hessinit_paper.reproduction import Curve, Findings, PaperFigure, PaperTable, Plain
from hessinit_paper.training import Loss, chunk_means, final_loss, train

OURS = "hessinit"
HESSIANS = ("Hessian 1", "Hessian 2")
LOSS = "Training loss"
Values = Mapping[str, Sequence[float]]  # of a row, by column: one of each initialization or seed


@dataclass(frozen=True)
class Protocol:
    """What the trainings and measurements of both tables share."""

    batch: int = 32  # on which Hessians are measured, and which hessinit sees
    learning_rate: float = 0.01
    epochs: int = 2
    most_points: int = 60  # of a curve, so that records stay small
    clip: float = 1e-7  # the epsilon of Keras


PROTOCOL = Protocol()


def clipped_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return −log of the softmax clipped to [1e-7, 1 − 1e-7], as Keras computes it.

    An example beyond a limit has no gradient: what is badly wrong stays wrong.
    """
    probabilities = torch.softmax(outputs, dim=1).clamp(PROTOCOL.clip, 1 - PROTOCOL.clip)
    return nn.functional.nll_loss(probabilities.log(), targets)


@dataclass(frozen=True)
class TrainedNetwork(Variant):
    """A variant's network, and how it is trained."""

    batch: int = 32
    # The embedded images are few: this many epochs make about as many steps.
    digits_epochs: int = 30

    @property
    def flat(self) -> bool:
        return "hidden units" in self.network

    @property
    def swept(self) -> tuple[str, str]:
        """The two weights that carry the std."""
        return ("dense1", "dense2") if self.flat else ("conv1", "conv2")

    @property
    def loss(self) -> Loss:
        is_clipped = "clipped" in self.network["loss"]
        return clipped_cross_entropy if is_clipped else nn.functional.cross_entropy

    def initialize(self, images: ImageSet, row: str, seed: int) -> nn.Sequential:
        """Return a new network with weights of the std of the row, or those of hessinit."""
        model = build(self.network, images.shape, "relu")
        if row == OURS:
            default_(model, derive(seed, "default weights"))
            batch = images.sample(PROTOCOL.batch, generator(seed, "start batch"), self.flat)
            start = derive(seed, "start")
            initialize_(Problem(model, self.loss, batch, seed=start), lr=PROTOCOL.learning_rate)
            return model
        glorot_(model, generator(seed, "other weights"))
        for name in self.swept:
            weight = model.get_parameter(f"{name}.weight")
            source = generator(seed, f"weights of {name}")
            nn.init.normal_(weight, 0.0, float(row), generator=source)
        return model

    def train(self, images: ImageSet, row: str, seed: int, epochs: int) -> list[float]:
        """Return the loss of every mini-batch; one that is not finite is the last."""
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

        return train(model, self.loss, batches(), PROTOCOL.learning_rate)

    def measure(self, images: ImageSet, row: str, seed: int) -> dict[str, Plain]:
        """Return the norms of both weights, approximate and exact, and of all weights together."""
        batch = images.sample(PROTOCOL.batch, generator(seed, "hessian batch"), self.flat)
        return measure_norms(self.initialize(images, row, seed), self.loss, batch, self.swept)


def measure_norms(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], layers: tuple[str, str]
) -> dict[str, Plain]:
    """Return the norms of `layers` by Theorem 1 and exactly, and of the network by Gauss-Newton."""
    # In float64: where the softmax is nearly saturated, 1 − p has few digits in float32.
    model = copy.deepcopy(model).double()
    inputs = batch[0].double()
    outputs = model(inputs).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(outputs, batch[1]), outputs)
    if not gradient.any():  # every example is clipped
        return {"approximate": [0.0, 0.0], "exact": [0.0, 0.0], "network": 0.0}
    problem = Problem(model, loss, (inputs, batch[1]))
    approximate = measure(problem)
    exact = measure(replace(problem, layers=layers), curvature="hessian", network=False)
    norms = {
        "approximate": [approximate[name].norm for name in layers],
        "exact": [exact[name].norm for name in layers],
        "network": approximate.network.norm,
    }
    return dict(round_numbers(norms))


@dataclass(frozen=True, kw_only=True)
class StdTable(Experiment):
    """Hessian norms and training loss by the std of two weights; the stds are spelled as printed.

    For each seed, the Hessians of several `restarts` are measured, and the first one is trained.
    The training loss is the mean over the `last` mini-batches.
    """

    variants: Mapping[str, TrainedNetwork]
    figure: PaperFigure  # without its curves
    stds: tuple[str, ...]
    scaling: tuple[str, ...]  # the rows from which the power of the std is read
    restarts: int
    last: int

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.stds, OURS)

    def epochs(self, setting: PaperSetting) -> int:
        on_digits = setting.data == "digits"
        return self.variants[setting.variant].digits_epochs if on_digits else PROTOCOL.epochs

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
                "learning_rate": PROTOCOL.learning_rate,
                "batch": network.batch,
                "epochs": self.epochs(setting),
                "last": self.last,
            },
            "hessians": {
                "norm": "largest |eigenvalue|",
                "batch": PROTOCOL.batch,
                "restarts of each seed": self.restarts,
                "precision": "float64",
            },
            OURS: {
                "batch": PROTOCOL.batch,
                "lr": PROTOCOL.learning_rate,
                "options": "as they come",
            },
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
            restarts = [derive(seed, f"restart {number}") for number in range(1, self.restarts)]
            measured = [network.measure(images, row, restart) for restart in (seed, *restarts)]
            return {name: [norms[name] for norms in measured] for name in measured[0]}
        losses = network.train(images, row, seed, self.epochs(setting))
        steps = self.epochs(setting) * (images.examples // network.batch)
        return round_numbers(
            {
                "steps": steps,
                "losses": len(losses),
                LOSS.lower(): final_loss(losses, self.last),
                "curve": chunk_means(losses, math.ceil(steps / PROTOCOL.most_points)),
            }
        )

    def conclude(self, setting: PaperSetting, results: Mapping[str, Plain]) -> Findings:
        rows = dict[str, Values]()
        curves = []
        for name in self.rows:
            norms = [results[f"norms {name} seed {seed}"] for seed in setting.seeds]
            trainings = [results[f"training {name} seed {seed}"] for seed in setting.seeds]
            rows[name] = {
                HESSIANS[0]: _column(norms, "approximate", 0),
                HESSIANS[1]: _column(norms, "approximate", 1),
                LOSS: [float(training[LOSS.lower()]) for training in trainings],
                "exact 1": _column(norms, "exact", 0),
                "exact 2": _column(norms, "exact", 1),
                "network": [float(norm) for seed in norms for norm in seed["network"]],
            }
            label = name if name == OURS else f"std {name}"
            points = [training["curve"] for training in trainings]
            curves.append(mean_curve(label, trainings[0]["steps"], points))
        return Findings(
            tables=(
                self.make_table(setting, rows),
                self.make_growth_table(rows),
                self.make_network_table(rows),
            ),
            figures=(replace(self.figure, curves=tuple(curves)),),
            sentences=tuple(self.write_sentences(rows)),
        )

    def make_table(self, setting: PaperSetting, rows: Mapping[str, Values]) -> PaperTable:
        """Return the paper's table, with the exact norms beside the approximate ones."""
        cells = {
            (name, column): mean(values)
            for name, row in rows.items()
            for column, values in row.items()
            if column != "network"
        }
        return make_table(
            "Hessians at initialization and training loss",
            "Weights std.",
            cells,
            "Hessian: largest |eigenvalue| of the weight's block on a random batch of "
            f"{PROTOCOL.batch}, by Theorem 1; exact: without approximation. Training loss: mean of "
            f"the last {self.last} mini-batches of {self.epochs(setting)} epochs.",
            experiment=self.name,
            data=setting.data,
        )

    def make_growth_table(self, rows: Mapping[str, Values]) -> PaperTable:
        """Return how the norms grow with the std."""
        cells = {}
        for column in HESSIANS:
            label = f"{column} / std²"
            for name in self.stds:
                cells[name, label] = mean([norm / float(name) ** 2 for norm in rows[name][column]])
            cells["power of the std", label] = mean(self.power_of_std(rows, column))
        return make_table(
            "How the Hessians grow with the std",
            "Weights std.",
            cells,
            f"Power: least squares in logarithms over {', '.join(self.scaling)}, for each "
            "initialization; exactly two weights that carry the std give 2.",
        )

    def make_network_table(self, rows: Mapping[str, Values]) -> PaperTable:
        """Return the norms of all weights together."""
        cells = {}
        for name, row in rows.items():
            cells[name, "network"] = mean(row["network"])
            scaled = [PROTOCOL.learning_rate * norm for norm in row["network"]]
            cells[name, "lr · network"] = mean(scaled)
        return make_table(
            "All weights together",
            "Weights std.",
            cells,
            "Largest eigenvalue of the Gauss-Newton matrix of all weights; descent on that batch "
            "is stable up to lr · network = 2.",
        )

    def power_of_std(self, rows: Mapping[str, Values], column: str) -> list[float]:
        """Return the power a of norm ∝ std^a by least squares, for each initialization."""
        logarithms = [math.log(float(row)) for row in self.scaling]
        columns = zip(*(rows[row][column] for row in self.scaling), strict=True)
        curved = [list(map(math.log, norms)) for norms in columns if min(norms) > 0]
        lines = [statistics.linear_regression(logarithms, norms) for norms in curved]
        return [line.slope for line in lines] or [math.nan]

    def write_sentences(self, rows: Mapping[str, Values]) -> Iterator[str]:
        """Yield whether norms near 1 train best, and how hessinit compares with the best std."""
        means = {
            name: {key: statistics.fmean(row[key]) for key in row} for name, row in rows.items()
        }
        losses = {}
        for name in self.stds:
            loss = means[name][LOSS]
            losses[name] = loss if math.isfinite(loss) else math.inf  # it broke off: ranked last
        best = min(self.stds, key=losses.__getitem__)
        norms = [means[best][column] for column in HESSIANS]
        away = max(max(norm, 1 / norm) if norm else math.inf for norm in norms)
        yield (
            f"Of the standard deviations {best} ends with the lowest training loss, "
            f"{mean(rows[best][LOSS])} (n = {len(rows[best][LOSS])}). The paper says that the best "
            f"have norms close to 1: those of {best} are {norms[0]:.3g} and {norms[1]:.3g}, within "
            f"a factor of {away:.2g} of it."
        )
        correlations = []
        for column, name in zip(HESSIANS, ("first", "second"), strict=True):
            norms = [means[row][column] for row in self.stds]
            distances = [abs(math.log(norm)) if norm else math.inf for norm in norms]
            ranked = rank_correlation(distances, list(losses.values()))
            correlations.append(f"ρ = {ranked.rho:.2f} (p = {ranked.p:.2g}) for the {name} weight")
        yield (
            "Distance of the norm from 1, |ln ‖H‖|, and training loss have a rank correlation "
            f"(Spearman) of {' and '.join(correlations)}, over {len(self.stds)} standard "
            "deviations (p: two-sided, of all orders); a positive ρ supports the paper."
        )
        # Seed by seed: the mini-batches are the same.
        pairs = zip(rows[OURS][LOSS], rows[best][LOSS], strict=True)
        differences = [ours - theirs for ours, theirs in pairs]
        rates = [f"{PROTOCOL.learning_rate * means[name]['network']:.2g}" for name in (OURS, best)]
        yield (
            f"Initialized by hessinit for lr = {PROTOCOL.learning_rate:g}, the network ends with "
            f"{mean(rows[OURS][LOSS])} (n = {len(rows[OURS][LOSS])}); the difference from std "
            f"{best}, the best of {len(self.stds)}, is {mean(differences)}, seed by seed. It has "
            f"lr · ‖H‖ = {rates[0]} for all weights together, and std {best} has {rates[1]}; other "
            "learning rates were not tried."
        )


def _column(norms: Sequence[Plain], kind: str, weight: int) -> list[float]:
    """Return the norms of the first or the second weight, of all seeds and restarts."""
    return [float(pair[weight]) for seed in norms for pair in seed[kind]]


def mean_curve(name: str, steps: int, curves: Sequence[Plain]) -> Curve:
    """Return the mean over seeds, up to where the first breaks off, at the middle of each chunk."""
    points = zip(*(map(float, curve) for curve in curves), strict=False)
    means = [mean(point) for point in points if all(map(math.isfinite, point))]
    length = math.ceil(steps / PROTOCOL.most_points)
    middles = [(first + min(first + length, steps)) / 2 for first in range(0, steps, length)]
    return Curve(
        name=name,
        x=tuple(middles[: len(means)]),
        y=tuple(measured.ours for measured in means),
        error=tuple(measured.error or 0.0 for measured in means) if len(curves) > 1 else None,
    )


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
        figure=PaperFigure(
            name="figure-1",
            title="Loss during training by the std of the initial weights",
            x_label="step",
            y_label="loss of a mini-batch",
            curves=(),
            log_y=True,
        ),
        stds=("1.000", "0.500", "0.100", "0.075", "0.050", "0.005"),
        restarts=10,
        last=200,
        seeds=5,
        scaling=("0.100", "0.075", "0.050", "0.005"),  # above, the softmax is saturated
        variants={
            "two-hidden": TrainedNetwork(
                "Two hidden layers of 64, whose weights carry the std, as the text's “2 hidden "
                "layers” and “hidden layer weights” say; the output layer is Glorot uniform.",
                DENSE,
            ),
            "one-hidden": TrainedNetwork(
                "One hidden layer of 80; both weights carry the std, that of the output layer too.",
                {**DENSE, "hidden units": [80]},
            ),
            "clipped": TrainedNetwork(
                "As two-hidden, but probabilities are clipped to [1e-7, 1 − 1e-7] before the "
                "logarithm, as Keras does, so that examples beyond have no gradient.",
                {**DENSE, "loss": "cross-entropy of clipped probabilities"},
            ),
        },
    ),
    StdTable(
        name="table-5",
        title="Table 5 and Figure 2: Hessian norms and training loss by the std of the kernels",
        data=("cifar-10", "fashion-mnist", "digits"),
        figure=PaperFigure(
            name="figure-2",
            title="Loss during training by the std of the initial kernels",
            x_label="step",
            y_label="loss of a mini-batch",
            curves=(),
            log_y=False,
        ),
        stds=("0.100", "0.075", "0.050", "0.001"),
        scaling=("0.100", "0.075", "0.050", "0.001"),
        restarts=8,
        last=100,
        seeds=5,
        variants={
            "3x3": TrainedNetwork(
                "Two convolutions of 32 kernels of 3×3, each with a max pool, then 120–84–10; "
                "mini-batches of 128.",
                CONVOLUTIONS,
                batch=128,
                digits_epochs=56,
            ),
            "lenet-5": TrainedNetwork(
                "LeNet-5's convolutions, 6 and 16 kernels of 5×5 with average pools, then "
                "120–84–10; mini-batches of 32.",
                {**CONVOLUTIONS, "channels": [6, 16], "kernel": 5, "pool": "average"},
            ),
        },
    ),
]
