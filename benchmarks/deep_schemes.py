"""Does a scheme keep the variance of a deep network? Data pushed through 20 layers under several schemes.

python benchmarks/deep_schemes.py            # about three minutes; writes results/deep_schemes.json and .png
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import matplotlib as mpl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import hessinit  # noqa: E402

mpl.use("Agg")
from matplotlib import pyplot  # noqa: E402

from hessinit.present.document import COLORS  # noqa: E402

BLUE, GREEN, GREY, VERMILION = (COLORS[name] for name in ("blue", "green", "grey", "vermilion"))
DEPTH, EXAMPLES, SEEDS = 20, 512, range(5)
WIDTHS = (256, 1024)
ACTIVATIONS = {
    "ReLU": nn.ReLU, "tanh": nn.Tanh, "ELU": nn.ELU, "Mish": nn.Mish, "GELU": nn.GELU, "SiLU": nn.SiLU,
}  # fmt: skip
DROPOUTS = (0.0, 0.4, 0.8)


def by_torch(model: nn.Module, activation: str) -> None:
    """`kaiming_normal_` with the gain that torch knows, or ReLU's, which its users take for GELU and SiLU."""
    known = {"ReLU": "relu", "tanh": "tanh"}
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity=known.get(activation, "relu"))
            nn.init.zeros_(layer.bias)


def by_hessinit(model: nn.Module, activation: str) -> None:
    hessinit.apply_scheme_(model, "he")


def without_dropout_factor(model: nn.Module, activation: str) -> None:
    hessinit.apply_scheme_(model, "he", dropout=False)


def without_correction(model: nn.Module, activation: str) -> None:
    """The gain of the activation alone: gains that are given are not corrected."""
    gains = {"*": hessinit.gain(ACTIVATIONS[activation]), "0": 1.0}
    hessinit.apply_scheme_(model, "he", gains=gains)


CONTESTANTS: dict[str, Callable[[nn.Module, str], None]] = {
    "torch kaiming": by_torch,
    "he, no dropout factor": without_dropout_factor,
    "he, no correction": without_correction,
    "he": by_hessinit,
}
STYLES = {
    "torch kaiming": (GREY, "^"), "he, no dropout factor": (VERMILION, "D"),
    "he, no correction": (GREEN, "s"), "he": (BLUE, "o"),
}  # fmt: skip


def end_to_end(activation: str, dropout: float, width: int, start: str, seed: int) -> float:
    """The variance of the last pre-activations, for inputs of variance 1."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(DEPTH - 1):
        layers += [ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(width, width)]
    model = nn.Sequential(*layers)
    CONTESTANTS[start](model, activation)
    with torch.no_grad():
        return float(model(torch.randn(EXAMPLES, width)).double().square().mean())


def draw(cells: list[dict[str, object]], path: Path) -> None:
    figure, axes = pyplot.subplots(
        len(WIDTHS), len(DROPOUTS), figsize=(7, 3.8), sharex=True, sharey=True, layout="constrained"
    )
    for row, width in zip(axes, WIDTHS, strict=True):
        for ax, dropout in zip(row, DROPOUTS, strict=True):
            ax.set_yscale("log")
            ax.axhspan(0.5, 2, color=GREEN, alpha=0.15, linewidth=0)
            ax.set_title(f"width {width}, dropout {dropout:g}", fontsize=8)
            for place, (start, (color, marker)) in enumerate(STYLES.items()):
                found = [
                    cell["variance"]
                    for cell in cells
                    if (cell["width"], cell["dropout"], cell["start"]) == (width, dropout, start)
                ]
                positions = [at + 0.15 * (place - 1.5) for at in range(len(ACTIVATIONS))]
                middle = [statistics.median(one) for one in found]  # type: ignore[type-var]
                ax.plot(positions, middle, marker, color=color, markersize=4, label=start)
                for position, one in zip(positions, found, strict=True):
                    ax.vlines(position, min(one), max(one), color=color, linewidth=1)  # type: ignore[call-overload]
            ax.set_xticks(range(len(ACTIVATIONS)), list(ACTIVATIONS), rotation=90, fontsize=7)
            ax.tick_params(axis="y", labelsize=7)
    figure.supylabel(f"variance after {DEPTH} layers", fontsize=8)
    axes[0, 0].legend(fontsize=6, loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> None:
    cells = []
    for width in WIDTHS:
        for dropout in DROPOUTS:
            for activation in ACTIVATIONS:
                for start in CONTESTANTS:
                    found = [end_to_end(activation, dropout, width, start, seed) for seed in SEEDS]
                    cells.append(
                        {"width": width, "dropout": dropout, "activation": activation, "start": start}
                        | {"variance": found}
                    )
                    shown = "  ".join(f"{value:9.3g}" for value in found)
                    print(f"{width:5} {dropout:4} {activation:5} {start:22} {shown}", flush=True)
    ours = [cell["variance"] for cell in cells if cell["start"] == "he"]
    inside = sum(0.5 <= value <= 2 for one in ours for value in one)
    print(f"he: {inside} of {sum(map(len, ours))} within [0.5, 2]")
    record = {
        "what": f"mean square after {DEPTH} dense layers for inputs of variance 1, {EXAMPLES} examples",
        "seeds": list(SEEDS),
        "versions": {"torch": torch.__version__, "hessinit": hessinit.__version__},
        "python": platform.python_version(),
        "cells": cells,
    }
    assert all(math.isfinite(value) for cell in cells for value in cell["variance"])
    results = HERE / "results"
    (results / "deep_schemes.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(cells, results / "deep_schemes.png")


if __name__ == "__main__":
    main()
