"""Data pushed through deep networks, and how the pictures of the errata are drawn."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import matplotlib  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from hessinit.present.document import COLORS  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from PIL import Image  # noqa: E402

PICTURES = HERE.parent / "docs" / "pictures"
DEPTH, WIDTH, EXAMPLES, NETS = 20, 512, 128, 16
BLUE, GREEN, GREY, VERMILION = (COLORS[name] for name in ("blue", "green", "grey", "vermilion"))
RIGHT = {"color": BLUE, "linestyle": "-", "linewidth": 1.4}
PRINTED = {"color": VERMILION, "linestyle": "--", "linewidth": 1.4}
PLAIN = {"color": GREY, "linestyle": ":", "linewidth": 1.4}
Set = Callable[[nn.Sequential], object]


# Data pushed through real modules.


def deep(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[module() for _ in range(DEPTH) for module in modules])


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def sizes(build: Callable[[], nn.Sequential], set_: Set, width: int = WIDTH, scale: float = 1.0) -> Tensor:
    """Squared lengths by layers passed, over that at the start: network × (data, gradient) × depth + 1."""
    curves = []
    for seed in range(NETS):
        torch.manual_seed(seed)
        model = build()
        set_(model)
        signal = (scale * torch.randn(EXAMPLES, width)).requires_grad_()
        signals = [signal]
        for position, module in enumerate(model, start=1):
            signal = module(signal)
            if position % (len(model) // DEPTH) == 0:
                signals.append(signal)
        gradients = torch.autograd.grad(signal, signals, torch.randn_like(signal))[::-1]
        curves.append([_relative(signals), _relative(gradients)])
    return torch.tensor(curves, dtype=torch.float64)


def _relative(signals: Sequence[Tensor]) -> list[float]:
    squares = [signal.detach().double().square().sum().item() for signal in signals]
    return [square / squares[0] for square in squares]


def report(label: str, curves: Tensor) -> None:
    """One line: the mean over networks after 20 layers, and the range."""
    for name, ends in zip(("forward", "backward"), curves[:, :, -1].unbind(1), strict=True):
        print(f"   {label:<38} {name:<8} x {ends.mean():.3g}   ({ends.min():.3g} to {ends.max():.3g})")


# What the pictures share.


def new_picture(columns: int = 1, rows: int = 1, width: float = 3.5, height: float = 2.8) -> list[Axes]:
    pyplot.rcParams.update({"font.size": 8, "axes.titlesize": 8, "axes.linewidth": 0.6})
    pyplot.rcParams.update({"legend.fontsize": 7, "legend.handlelength": 2.6})
    _, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return list(axes.flat)


def depth_axis(ax: Axes, title: str = "", what: str = "squared length, relative") -> None:
    ax.set_yscale("log")
    ax.axhspan(0.5, 2, color=GREEN, alpha=0.18, linewidth=0)
    ax.set_xticks(range(0, DEPTH + 1, 5))
    ax.set_xlabel("layers passed")
    ax.set_ylabel(what)
    ax.set_title(title)


def draw_sizes(ax: Axes, curves: Tensor, label: str, style: dict) -> None:
    """Data with filled circles, gradients with hollow squares; the lines are means over the networks."""
    data, gradients = curves.mean(0)
    ax.plot(data, **style, marker="o", markersize=3.5, markevery=4, label=label)
    # Often the two lie upon each other: the markers take turns.
    ax.plot(gradients, **style, marker="s", markersize=3.5, markerfacecolor="white", markevery=(2, 4))


def explain_markers(ax: Axes) -> None:
    ax.plot([], [], color="black", linestyle="none", marker="o", markersize=3.2, label="data, forward")
    ax.plot(
        [], [], color="black", linestyle="none", marker="s", markersize=3.2, markerfacecolor="white",
        label="gradient, backward",
    )  # fmt: skip


def legend_above(ax: Axes, columns: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def save(number: int, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"errata-{number}-{name}.png"
    drawn = io.BytesIO()
    pyplot.savefig(drawn, dpi=170)
    pyplot.close("all")
    # Sixty-four colours are plenty for lines, and a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    print(f"   {path.relative_to(HERE.parent)}, {path.stat().st_size / 1000:.0f} kB")
