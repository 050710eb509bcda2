"""The pictures of the pages under docs/concepts, drawn from numbers computed here.

python benchmarks/concept_pictures.py     # 20 seconds; also run by document_pictures.py

Every picture shows a network on the embedded digits, but for the parabola, which is a formula. The numbers
that the pages quote are printed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import matplotlib as mpl  # noqa: E402

mpl.use("Agg")

import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import hessinit  # noqa: E402
from hessinit.curvature.lanczos import top_eigenpairs  # noqa: E402
from hessinit.digits import load_digits  # noqa: E402
from hessinit.present.document import COLORS  # noqa: E402

BLUE, GREEN, GREY, VERMILION = (COLORS[name] for name in ("blue", "green", "grey", "vermilion"))
PICTURES = HERE.parent / "docs" / "pictures"
PURPLE, ORANGE = "#CC79A7", "#E69F00"  # of the same palette
LOSS = nn.CrossEntropyLoss()
SEEDS = range(5)


def main() -> None:
    torch.set_num_threads(1)
    mpl.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    drawings = {
        "concept-sharpest-direction": draw_sharpest_direction,
        "concept-depth": draw_depth,
        "concept-parabola": draw_parabola,
        "concept-first-steps": draw_first_steps,
        "concept-edge": draw_edge,
        "concept-gap": draw_gap,
    }
    for name, draw in drawings.items():
        print(f"{name}:")
        figure = draw()
        figure.savefig(PICTURES / f"{name}.png", dpi=150)
        pyplot.close(figure)


def digits(examples: int) -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    images = (images.flatten(1) - images.mean()) / images.std()
    return images[:examples], labels[:examples]


def chain(activation: Callable[[], nn.Module], hidden: int, seed: int, width: int = 64) -> nn.Sequential:
    """A chain of dense layers with `hidden` activations, with PyTorch's own weights."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for position in range(hidden):
        parts += [nn.Linear(64 if position == 0 else width, width), activation()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def draw_sharpest_direction() -> Figure:
    """The loss along the sharpest direction of a network, along a random one, and the parabola of ‖H‖."""
    model, batch = chain(nn.Tanh, 2, seed=0).double(), digits(256)
    batch = batch[0].double(), batch[1]
    matrix = hessinit.hessian(model, LOSS, batch)
    pair = top_eigenpairs(matrix, 1)
    sharpest = pair.vectors[:, 0]
    random = torch.randn(len(sharpest), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm, distances = pair.values[0].value, torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    figure, ax = pyplot.subplots(figsize=(4.2, 2.6), layout="constrained")
    gradient = flat_gradient(model, batch)
    for direction, colour, label in (
        (sharpest, BLUE, "along the sharpest direction"),
        (random / random.norm(), ORANGE, "along a random direction"),
    ):
        losses = [loss_at(model, batch, distance * direction) for distance in distances]
        ax.plot(distances, losses, color=colour, label=label)
        print(f"  {label}: loss from {min(losses):.3f} to {max(losses):.3f}")
    start = loss_at(model, batch, 0 * sharpest)
    parabola = start + distances * (gradient @ sharpest) + norm * distances**2 / 2
    ax.plot(distances, parabola, "--", color=GREY, linewidth=1, label=f"parabola with ‖H‖ = {norm:.2f}")
    ax.plot([0], [start], "o", color=GREY, markersize=4)
    ax.set(xlabel="distance from the initial weights", ylabel="loss")
    ax.legend(frameon=False)
    print(f"  ‖H‖ = {norm:.3f}, {len(sharpest)} weights")
    return figure


def loss_at(model: nn.Module, batch: tuple[Tensor, Tensor], moved: Tensor) -> float:
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.ndim > 1]
    pieces = moved.split([weight.numel() for _, weight in weights])
    changed = {
        name: weight + piece.view_as(weight) for (name, weight), piece in zip(weights, pieces, strict=True)
    }
    with torch.no_grad():
        return LOSS(torch.func.functional_call(model, changed, batch[0]), batch[1]).item()


def flat_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.ndim > 1]
    gradients = torch.autograd.grad(LOSS(model(batch[0]), batch[1]), weights)
    return torch.cat([gradient.flatten() for gradient in gradients])


def draw_depth() -> Figure:
    """‖H‖ of every layer of ten ReLU layers from three initializations."""
    batch = digits(64)
    figure, ax = pyplot.subplots(figsize=(4.2, 2.6), layout="constrained")
    ax.axhspan(0.1, 10, color=GREEN, alpha=0.13, linewidth=0, label="ok: 0.1 to 10")
    schemes = (("twice He", VERMILION, "s"), ("He", BLUE, "o"), ("PyTorch's default", GREY, "^"))
    for label, colour, marker in schemes:
        model = chain(nn.ReLU, 9, seed=0)
        if "He" in label:
            hessinit.apply_scheme_(model, "he", generator=torch.Generator().manual_seed(0))
        if label == "twice He":
            with torch.no_grad():
                for weight in (weight for weight in model.parameters() if weight.ndim > 1):
                    weight.mul_(2)
        report = hessinit.measure(model, LOSS, batch)
        norms = [layer.norm for layer in report]
        ax.plot(range(1, 11), norms, marker=marker, color=colour, label=label, linewidth=1, markersize=4)
        print(f"  {label}: {norms[0]:.3g} … {norms[-1]:.3g}, network {report.network.norm:.3g}")
    ax.set(yscale="log", xlabel="layer", ylabel="‖H‖", xticks=range(1, 11))
    ax.legend(frameon=False, fontsize=7)
    return figure


def draw_parabola() -> Figure:
    """Gradient descent on λw²/2 at four values of lr·λ: w is multiplied by 1 − lr·λ in every step."""
    figure, axes = pyplot.subplots(1, 4, figsize=(7, 1.9), sharey=True, layout="constrained")
    line = torch.linspace(-1.75, 1.75, 101)
    words = ("slow and safe", "the bottom in one step", "overshoots, still arrives", "grows: unstable")
    for ax, product, word in zip(axes, (0.5, 1.0, 1.8, 2.1), words, strict=True):
        colour = VERMILION if product > 2 else BLUE
        points = [(1 - product) ** step for step in range(7)]
        ax.plot(line, line**2 / 2, color=GREY, linewidth=1)
        ax.plot(
            points,
            [point**2 / 2 for point in points],
            "o-",
            color=colour,
            markersize=3,
            linewidth=0.8,
            alpha=0.9,
        )
        ax.plot(points[:1], [points[0] ** 2 / 2], "o", color="black", markersize=4)
        ax.set_title(f"lr·‖H‖ = {product:g}\n{word}", fontsize=8)
        ax.set(xlabel="w", xticks=[-1, 0, 1], ylim=(-0.08, 1.6))
    axes[0].set_ylabel("loss")
    return figure


def draw_first_steps() -> Figure:
    """The loss after twenty steps of full-batch gradient descent, by the rate in units of the first 1/‖H‖."""
    inputs, targets = digits(256)
    figure, ax = pyplot.subplots(figsize=(4.2, 2.6), layout="constrained")
    nets = (("ReLU", nn.ReLU, BLUE, "o-"), ("tanh", nn.Tanh, ORANGE, "s--"), ("GELU", nn.GELU, PURPLE, "^:"))
    products = 2.0 ** torch.arange(-4, 5.1, 0.5)
    for label, activation, colour, style in nets:
        start = chain(activation, 4, seed=0)
        hessinit.apply_scheme_(start, "lsuv", sample=inputs, generator=torch.Generator().manual_seed(0))
        norm = hessinit.measure(start, LOSS, (inputs, targets), curvature="hessian").network.norm
        losses = []
        for product in products.tolist():
            model = copy.deepcopy(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=product / norm)
            for _ in range(20):
                optimizer.zero_grad()
                LOSS(model(inputs), targets).backward()
                optimizer.step()
            # Where it is not finite, the line leaves the panel.
            losses.append(LOSS(model(inputs), targets).nan_to_num(nan=100.0, posinf=100.0).item())
        ax.plot(products, losses, style, color=colour, markersize=3, label=f"{label}, ‖H‖ = {norm:.3g}")
        best = products[int(torch.tensor(losses).argmin())]
        shown = {f"{p:.2g}": f"{loss:.2f}" for p, loss in zip(products.tolist(), losses, strict=True)}
        print(f"  {label}: best at lr·‖H‖ = {best:.2g}; {shown}")
    for product, word in ((1, "1/‖H‖"), (2, "2/‖H‖")):
        ax.axvline(product, color=GREY, linewidth=0.8, linestyle="--")
        place = {"xytext": (2, 0), "textcoords": "offset points", "fontsize": 6.5, "va": "top"}
        ax.annotate(word, (product, 0.98), xycoords=("data", "axes fraction"), **place)
    ax.set(
        xlabel="lr·‖H‖, with ‖H‖ of the initial weights",
        ylabel="loss after 20 steps",
        xscale="log",
        ylim=(0, 4),
    )
    ax.set_xticks([0.0625, 0.25, 1, 4, 16], ["1/16", "1/4", "1", "4", "16"])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def draw_edge() -> Figure:
    """Sharpness during full-batch gradient descent at two rates: it grows until 2/lr, and stays there."""
    inputs, targets = digits(128)
    marks = nn.functional.one_hot(targets, 10).float()
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(4.2, 3.6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    for rate, colour, style in ((0.12, BLUE, "-"), (0.2, VERMILION, "--")):
        model = chain(nn.Tanh, 3, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        steps, norms, losses = [], [], []
        for step in range(801):
            value = half_squares(model(inputs), marks)
            losses.append(value.item())
            if step % 20 == 0:
                report = hessinit.measure(
                    hessinit.Problem(model, half_squares, (inputs, marks), layers=["*", "*.bias"]),
                    curvature="hessian",
                    tolerance=1e-2,
                )
                steps.append(step)
                norms.append(report.network.norm)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        upper.plot(steps, norms, style, color=colour, label=f"lr = {rate}")
        upper.axhline(2 / rate, color=colour, linewidth=0.8, linestyle=":")
        upper.annotate(
            f"2/lr = {2 / rate:.3g}", (800, 2 / rate), fontsize=7, color=colour, ha="right", va="top"
        )
        lower.plot(losses, style, color=colour, linewidth=1)
        rises = sum(later > earlier for earlier, later in zip(losses, losses[1:], strict=False))
        print(
            f"  lr = {rate}: ‖H‖ from {norms[0]:.2f} to {norms[-1]:.2f} (2/lr = {2 / rate:.3g}); "
            f"{rises} of 800 steps raise the loss; last {losses[-1]:.2g}"
        )
    upper.set(ylabel="‖H‖ (exact Hessian)")
    upper.legend(frameon=False, fontsize=7, loc="upper left")
    lower.set(yscale="log", xlabel="step of full-batch gradient descent", ylabel="loss")
    return figure


def half_squares(outputs: Tensor, marks: Tensor) -> Tensor:
    return (outputs - marks).square().sum(1).mean() / 2


def draw_gap() -> Figure:
    """Exact over Gauss-Newton norm, for each layer and the network: three activations, five seeds."""
    batch = digits(128)
    figure, axes = pyplot.subplots(1, 3, figsize=(7, 2.3), sharey=True, layout="constrained")
    nets = (("ReLU", nn.ReLU, BLUE), ("tanh", nn.Tanh, ORANGE), ("GELU", nn.GELU, PURPLE))
    for ax, (label, activation, colour) in zip(axes, nets, strict=True):
        gaps = []
        for seed in SEEDS:
            report = hessinit.measure(chain(activation, 4, seed), LOSS, batch, curvature="both")
            gaps.append([*(layer.gap for layer in report), report.network.gap])
        columns = torch.tensor(gaps).T
        medians = columns.median(1).values
        for position, column in enumerate(columns, start=1):
            ax.plot([position] * len(SEEDS), column, "o", color=colour, markersize=3, alpha=0.6)
            ax.hlines(medians[position - 1], position - 0.3, position + 0.3, color="black", linewidth=1)
        ax.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
        ax.set(title=label, yscale="log", xticks=range(1, 7), xlabel="layer")
        ax.set_xticklabels([*map(str, range(1, 6)), "net"])
        ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        ax.minorticks_off()
        print(f"  {label}: medians {', '.join(f'{value:.2f}' for value in medians)}")
    axes[0].set_ylabel("exact ‖H‖ / Gauss-Newton ‖H‖")
    return figure


if __name__ == "__main__":
    main()
