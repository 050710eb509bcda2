"""Table 5 and Figure 2: the std of two convolution kernels, their Hessians at the start, and the loss."""

from __future__ import annotations

from functools import partial

from torch import nn

from hessinit.paper.experiment import Experiment
from hessinit.paper.networks import lenet
from hessinit.paper.std_sweep import Sweep, Variant, configure, plan, prepare, run
from hessinit.paper.std_sweep_findings import conclude
from hessinit.paper.training import Recipe

HEAD = (120, 84)


def build(channels: tuple[int, int], kernel: int, pool: str, shape: tuple[int, int, int]) -> nn.Sequential:
    return lenet(shape, channels=channels, kernel=kernel, pool=pool, head=HEAD, activation="relu")


def read(
    about: str, channels: tuple[int, int], kernel: int, pool: str, *, batch: int, digits_epochs: int
) -> Variant:
    return Variant(
        about=about,
        build=partial(build, channels, kernel, pool),
        described={
            "channels": list(channels), "kernel": kernel, "pool": pool, "dense": list(HEAD),
            "loss": "cross-entropy",
        },
        swept=("conv1", "conv2"),
        recipe=Recipe(learning_rate=0.01, batch=batch, epochs=2, last=100),
        digits_epochs=digits_epochs,
        flat=False,
    )  # fmt: skip


SWEEP = Sweep(
    experiment="table-5",
    figure="figure-2",
    figure_title="Loss during training by the std of the initial kernels",
    log_loss=False,
    stds=("0.100", "0.075", "0.050", "0.001"),
    scaling=("0.100", "0.075", "0.050", "0.001"),
    restarts=8,
    variants={
        "3x3": read(
            "Two convolutions of 32 kernels of 3×3, each with a max pool, then 120–84–10; mini-batches of "
            "128.",
            (32, 32), 3, "max", batch=128, digits_epochs=56,
        ),
        "lenet-5": read(
            "LeNet-5's convolutions, 6 and 16 kernels of 5×5 with average pools, then 120–84–10; "
            "mini-batches of 32.",
            (6, 16), 5, "average", batch=32, digits_epochs=30,
        ),
    },
    seconds={"cifar-10": (7.5, 26), "fashion-mnist": (5, 20), "digits": (1.5, 2.7)},
)  # fmt: skip

EXPERIMENT = Experiment(
    name=SWEEP.experiment,
    title="Table 5 and Figure 2: Hessian norms and training loss by the std of the kernels",
    data=("cifar-10", "fashion-mnist", "digits"),
    variants={name: variant.about for name, variant in SWEEP.variants.items()},
    seeds=5,
    prepare=prepare,
    configure=partial(configure, SWEEP),
    plan=partial(plan, SWEEP),
    run=partial(run, SWEEP),
    conclude=partial(conclude, SWEEP),
)
