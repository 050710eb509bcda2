"""What Tables 4 and 5 share: two weights from N(0, std²), their Hessians at the start, and a training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ConvergenceWarning
from hessinit.init.initialize import initialize_
from hessinit.measurement.measure import measure
from hessinit.paper.experiment import Job, Setting
from hessinit.paper.minibatches import ImageSet, images_of
from hessinit.paper.networks import default_, glorot_, normal_
from hessinit.paper.scipy_extra import import_stats
from hessinit.paper.training import Loss, Recipe, chunk_length, chunk_means, final_loss, train
from hessinit.results.result import Plain, to_plain
from hessinit.training.seeds import derive, generator

OURS = "hessinit"
HESSIAN_BATCH = 32
START_BATCH = 32  # what hessinit sees of the data: as much as the Hessians


@dataclass(frozen=True)
class Variant:
    """One way to fill in what the paper leaves unsaid."""

    about: str
    build: Callable[[tuple[int, int, int]], nn.Sequential]
    described: Mapping[str, Plain]  # the network in words and numbers, for the record
    swept: tuple[str, str]  # the two weights that carry the std
    recipe: Recipe
    digits_epochs: int  # the embedded images are few: as many epochs as make about as many steps
    loss: Loss = nn.functional.cross_entropy
    flat: bool = True

    def recipe_for(self, data: str) -> Recipe:
        return replace(self.recipe, epochs=self.digits_epochs) if data == "digits" else self.recipe


@dataclass(frozen=True)
class Sweep:
    """A table of the paper, its rows named as printed."""

    experiment: str
    figure: str
    figure_title: str
    log_loss: bool  # whether the figure's losses need a logarithmic axis
    stds: tuple[str, ...]
    scaling: tuple[str, ...]  # the rows from which the power of the std is read
    restarts: int  # starts for each seed whose Hessians are measured; the first of them is trained
    variants: Mapping[str, Variant]
    seconds: Mapping[str, tuple[float, float]]  # of the norms of a seed and of a training, by data

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.stds, OURS)

    def variant(self, setting: Setting) -> Variant:
        return self.variants[setting.variant]


def prepare(setting: Setting) -> str:
    """The source of the images, which are read; what else is missing is refused now, not after the work."""
    import_stats()
    return images_of(setting).source


def configure(sweep: Sweep, setting: Setting) -> dict[str, Plain]:
    """All that the numbers depend on, but the seeds."""
    variant = sweep.variant(setting)
    return {
        "network": dict(variant.described),
        "activation": "relu",
        "weights with the std": list(variant.swept),
        "other weights": "Glorot uniform",
        "biases": "zero",
        "pixels": "in [0, 1]",
        "rows": list(sweep.rows),
        "training": {"optimizer": "SGD", **asdict(variant.recipe_for(setting.data))},
        "hessians": {
            "norm": "largest |eigenvalue|",
            "batch": HESSIAN_BATCH,
            "restarts of each seed": sweep.restarts,
            "precision": "float64",
        },
        OURS: {"batch": START_BATCH, "lr": variant.recipe.learning_rate, "options": "as they come"},
    }


def plan(sweep: Sweep, setting: Setting) -> list[Job]:
    """For every row and seed the norms of some starts, and one training."""
    norms, training = sweep.seconds[setting.data]
    return [
        Job(setting, job_key(part, row, seed), {"part": part, "row": row, "seed": seed}, cost)
        for part, cost in (("training", training), ("norms", norms))
        for seed in setting.seeds
        for row in sweep.rows
    ]


def job_key(part: str, row: str, seed: int) -> str:
    return f"{part} {row} seed {seed}"


def run(sweep: Sweep, job: Job) -> Plain:
    row, seed = str(job.parameters["row"]), int(job.parameters["seed"])
    images, variant = images_of(job.setting), sweep.variant(job.setting)
    if job.parameters["part"] == "training":
        return run_training(variant, images, row, seed, variant.recipe_for(job.setting.data))
    found = [
        start_norms(variant, images, row, restart_seed(seed, number)) for number in range(sweep.restarts)
    ]
    return {name: [start[name] for start in found] for name in found[0]}


def restart_seed(seed: int, restart: int) -> int:
    """The first start of a seed is the one that is trained."""
    return seed if restart == 0 else derive(seed, f"restart {restart}")


def start(variant: Variant, images: ImageSet, row: str, seed: int) -> nn.Sequential:
    """A new network; the rows of a seed have the same random numbers, only scaled."""
    model = variant.build(images.shape)
    if row == OURS:
        default_(model, generator(seed, "default weights"))
        batch = images.batch(images.draw(START_BATCH, generator(seed, "start batch")), variant.flat)
        rate = variant.recipe.learning_rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the norms that follow say what was reached
            initialize_(model, variant.loss, batch, lr=rate, seed=derive(seed, "start"))
        return model
    glorot_(model, generator(seed, "other weights"))
    for name in variant.swept:
        normal_(model.get_submodule(name), float(row), generator(seed, f"weights of {name}"))
    return model


def run_training(variant: Variant, images: ImageSet, row: str, seed: int, recipe: Recipe) -> Plain:
    model = start(variant, images, row, seed)
    losses = train(model, variant.loss, images, recipe, generator(seed, "order"), flat=variant.flat)
    steps = recipe.steps(images.examples)
    return plain_numbers(
        {
            "steps": steps,
            "losses": len(losses),
            "training loss": final_loss(losses, recipe.last),
            "curve": chunk_means(losses, chunk_length(steps)),
        }
    )


def start_norms(variant: Variant, images: ImageSet, row: str, seed: int) -> dict[str, Plain]:
    """The norms of both weights' blocks, approximate and exact, and of all weights together."""
    model = start(variant, images, row, seed)
    batch = images.batch(images.draw(HESSIAN_BATCH, generator(seed, "hessian batch")), variant.flat)
    return measure_norms(model, variant.loss, batch, variant.swept)


def measure_norms(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], layers: tuple[str, str]
) -> dict[str, Plain]:
    # In fp64: where the softmax is nearly saturated, 1 − p has few digits in fp32.
    model, inputs = copy.deepcopy(model).double(), batch[0].double()
    batch = (inputs, batch[1])
    if is_flat(model, loss, batch):
        return {"approximate": [0.0, 0.0], "exact": [0.0, 0.0], "network": 0.0}
    approximate = measure(model, loss, batch)
    exact = measure(model, loss, batch, curvature="hessian", layers=layers, network=False)
    return plain_numbers(
        {
            "approximate": [approximate[name].norm for name in layers],
            "exact": [exact[name].norm for name in layers],
            "network": approximate.network.norm,
        }
    )


def is_flat(model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor]) -> bool:
    """Whether the loss does not change with the outputs, as when every example is clipped: no curvature."""
    outputs = model(batch[0]).detach().requires_grad_()
    return not torch.autograd.grad(loss(outputs, batch[1]), outputs)[0].any()


def plain_numbers(value: Any) -> Plain:
    """Plain data with seven significant digits, which is what fp32 carries.

    >>> plain_numbers({"loss": [0.123456789, float("nan")], "steps": 12345678})
    {'loss': [0.1234568, 'nan'], 'steps': 12345678}
    """
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    return to_plain(float(f"{value:.7g}") if isinstance(value, float) else value)
