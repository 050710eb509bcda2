"""Which networks may be the paper's: candidates for Tables 2 to 5, and how far each is from what is printed.

`python benchmarks/paper_variants.py FOLDER --restarts 150` (20 minutes on a busy core), FOLDER holding MNIST
and CIFAR-10 as they are published. For Tables 2 and 3 it prints the shares within each relative error, both
ways to divide, and the largest distance from the printed shares; for Tables 4 and 5 the norms at std 0.1 and
the largest factor between them and the printed ones. Seeds begin at 1,000,000: none is one of the records'.
What it printed is in results/paper_variants.txt.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hessinit import Problem, measure
from hessinit.jobs import derive, generator, reproducible
from hessinit_paper.images import ImageSet, load_images
from hessinit_paper.networks import dense, glorot_, lenet
from hessinit_paper.reference import printed
from hessinit_paper.tables_2_3 import APPROXIMATION, EXACT, divide, share_within
from hessinit_paper.theorem_1 import quadratic_form

FIRST_SEED = 1_000_000
LOSS = nn.CrossEntropyLoss()
Build = Callable[[], nn.Module]

SHAPES = [
    (512, 256, 128, 64), (1024, 512, 256, 128), (256, 128, 64, 32), (300, 200, 100, 50), (512, 512, 512, 512),
    (256, 256, 256, 256), (128, 128, 128, 128), (64, 64, 64, 64), (100, 256, 256, 256), (64, 256, 64, 32),
    (32, 256, 64, 32), (32, 256, 32, 16), (64, 400, 100, 16), (128, 784, 32, 128),
]  # fmt: skip
CONVOLUTIONS = [
    ((channels), kernel, pool, head)
    for channels, kernel in (
        ((6, 16), 5), ((6, 16), 3), ((16, 32), 3), ((32, 32), 3), ((32, 64), 3), ((20, 50), 5),
    )
    for pool in ("average", "max")
    for head in ((120, 84), (84,))
]  # fmt: skip
HIDDEN = [(64, 64), (80, 80), (100, 100), (128, 64), (64,), (80,), (100,), (128,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--restarts", type=int, default=200, help="for Tables 2 and 3")
    parser.add_argument("--starts", type=int, default=20, help="for Tables 4 and 5")
    chosen = parser.parse_args()
    print(
        f"{chosen.restarts} restarts (Tables 2, 3), {chosen.starts} starts (Tables 4, 5), batches of 32; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    with reproducible():
        mnist = load_images("mnist", chosen.folder)
        cifar = load_images("cifar-10", chosen.folder)
        print("\nTable 2: tanh, Glorot uniform, MNIST")
        for hidden in SHAPES:
            build = lambda hidden=hidden: dense([784, *hidden, 10], "tanh")  # noqa: E731
            shares("table-2", str(hidden), build, mnist, True, (0.5, 1.0, 1.5), chosen.restarts)
        print("\nTable 3: tanh, Glorot uniform, CIFAR-10")
        for name, build in convolutions("tanh"):
            shares("table-3", name, build, cifar, False, (1.0, 2.0, 5.0), chosen.restarts)
        print("\nTable 4: ReLU, MNIST; two hidden layers: both carry the std; one: it and the output layer")
        for hidden in HIDDEN:
            build = lambda hidden=hidden: dense([784, *hidden, 10], "relu")  # noqa: E731
            norms("table-4", str(hidden), build, mnist, True, ("dense1", "dense2"), chosen.starts)
        print("\nTable 5: ReLU, CIFAR-10; the kernels carry the std")
        for name, build in convolutions("relu"):
            norms("table-5", name, build, cifar, False, ("conv1", "conv2"), chosen.starts)


def convolutions(activation: str) -> list[tuple[str, Build]]:
    return [
        (
            f"{channels} kernels of {kernel}×{kernel}, {pool} pools, {head}",
            lambda channels=channels, kernel=kernel, pool=pool, head=head: lenet(
                (3, 32, 32), channels=channels, kernel=kernel, pool=pool, head=head, activation=activation
            ),
        )
        for channels, kernel, pool, head in CONVOLUTIONS
    ]


def shares(
    table: str, name: str, build: Build, images: ImageSet, flat: bool, tolerances: Sequence[float], n: int
) -> None:
    model = build()
    layers = [f"dense{number}" for number in range(1, 6)] if flat else ["conv1", "conv2"]
    ratios: dict[str, list[float]] = {layer: [] for layer in layers}
    for seed in range(FIRST_SEED, FIRST_SEED + n):
        glorot_(model, generator(seed, "weights"))
        batch = images.sample(32, generator(seed, "batch"), flat)
        problem = Problem(model, LOSS, batch, layers=layers, seed=derive(seed, "directions"))
        forms = quadratic_form(problem)
        for layer in layers:
            ratios[layer].append(divide(forms[layer].exact[0], forms[layer].theorem1[0]))
    wanted = [list(row.values()) for row in printed()[table]["rows"].values()]
    print(f"  {name}")
    for way in (APPROXIMATION, EXACT):
        found = [[share_within(ratios[layer], rtol, way)[0] for rtol in tolerances] for layer in layers]
        off = max(
            abs(a - b)
            for ours, theirs in zip(found, wanted, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        shown = " | ".join("/".join(f"{share:.0f}" for share in row) for row in found)
        print(f"    relative to the {way:13}: at most {off:2.0f} points off   {shown}", flush=True)


def norms(
    table: str, name: str, build: Build, images: ImageSet, flat: bool, layers: tuple[str, str], n: int
) -> None:
    model, found = build(), []
    for seed in range(FIRST_SEED, FIRST_SEED + n):
        glorot_(model, generator(seed, "other weights"))
        for layer in layers:
            source = generator(seed, f"weights of {layer}")
            nn.init.normal_(model.get_parameter(f"{layer}.weight"), 0.0, 0.1, generator=source)
        batch = images.sample(32, generator(seed, "hessian batch"), flat)
        report = measure(Problem(model, LOSS, batch, layers=layers), network=False)
        found.append([report[layer].norm for layer in layers])
    wanted = printed()[table]["rows"]["0.100"]
    means = [statistics.fmean(column) for column in zip(*found, strict=True)]
    factor = max(
        max(a / b, b / a) for a, b in zip(means, (wanted["Hessian 1"], wanted["Hessian 2"]), strict=True)
    )
    print(f"  {name:48} {means[0]:6.2f} {means[1]:6.2f}   within a factor of {factor:.2f}", flush=True)


if __name__ == "__main__":
    main()
