"""Table 4 and Figure 1: the std of a dense ReLU network, its Hessians at the start, and the training loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hessinit.paper.experiment import Experiment
from hessinit.paper.networks import dense
from hessinit.paper.std_sweep import Sweep, Variant, configure, plan, prepare, run
from hessinit.paper.std_sweep_findings import conclude
from hessinit.paper.training import Recipe

CLASSES = 10
CLIP = 1e-7  # Keras' epsilon
RECIPE = Recipe(learning_rate=0.01, batch=32, epochs=2, last=200)
DIGITS_EPOCHS = 30  # 1,680 steps


def clipped_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log of the softmax clipped to [1e-7, 1 − 1e-7], as Keras takes it of probabilities.

    An example beyond a limit has no gradient: what is badly wrong stays wrong.
    """
    probabilities = torch.softmax(outputs, dim=1).clamp(CLIP, 1 - CLIP)
    return nn.functional.nll_loss(probabilities.log(), targets)


def build(hidden: tuple[int, ...], shape: tuple[int, int, int]) -> nn.Sequential:
    return dense([shape[0] * shape[1] * shape[2], *hidden, CLASSES], "relu")


def read(about: str, hidden: tuple[int, ...], *, loss: str = "cross-entropy") -> Variant:
    return Variant(
        about=about,
        build=partial(build, hidden),
        described={"hidden units": list(hidden), "loss": loss},
        swept=("dense1", "dense2"),
        recipe=RECIPE,
        digits_epochs=DIGITS_EPOCHS,
        loss=nn.functional.cross_entropy if loss == "cross-entropy" else clipped_cross_entropy,
    )


SWEEP = Sweep(
    experiment="table-4",
    figure="figure-1",
    figure_title="Loss during training by the std of the initial weights",
    log_loss=True,
    stds=("1.000", "0.500", "0.100", "0.075", "0.050", "0.005"),
    scaling=("0.100", "0.075", "0.050", "0.005"),  # above, the softmax is saturated
    restarts=10,
    variants={
        "two-hidden": read(
            "Two hidden layers of 64, whose weights carry the std, as the text's “2 hidden layers” and "
            "“hidden layer weights” say; the output layer is Glorot uniform.",
            (64, 64),
        ),
        "one-hidden": read(
            "One hidden layer of 80; both weights carry the std, that of the output layer too.", (80,)
        ),
        "clipped": read(
            "As two-hidden, but probabilities are clipped to [1e-7, 1 − 1e-7] before the logarithm, as Keras "
            "does, so that examples beyond have no gradient.",
            (64, 64),
            loss="cross-entropy of clipped probabilities",
        ),
    },
    seconds={"mnist": (0.4, 2.2), "fashion-mnist": (0.4, 2.2), "digits": (0.3, 0.8)},
)

EXPERIMENT = Experiment(
    name=SWEEP.experiment,
    title="Table 4 and Figure 1: Hessian norms and training loss by the std of the weights",
    data=("mnist", "fashion-mnist", "digits"),
    variants={name: variant.about for name, variant in SWEEP.variants.items()},
    seeds=5,
    prepare=prepare,
    configure=partial(configure, SWEEP),
    plan=partial(plan, SWEEP),
    run=partial(run, SWEEP),
    conclude=partial(conclude, SWEEP),
)
