"""The paper's slips, each beside what is right: the pictures and the numbers of docs/errata.md.

python benchmarks/errata.py             # all seven, about a minute
python benchmarks/errata.py --only 2    # the second
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from errata_drawing import (  # noqa: E402
    DEPTH,
    EXAMPLES,
    NETS,
    PLAIN,
    PRINTED,
    RIGHT,
    WIDTH,
    deep,
    depth_axis,
    draw_sizes,
    explain_markers,
    legend_above,
    linear,
    new_picture,
    report,
    save,
    sizes,
)
from matplotlib.axes import Axes  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from hessinit import Problem  # noqa: E402
from hessinit._version import __version__  # noqa: E402
from hessinit.digits import load_digits  # noqa: E402
from hessinit.init.apply_scheme import apply_scheme_  # noqa: E402
from hessinit.init.gain import gain  # noqa: E402
from hessinit.measurement.measure import measure  # noqa: E402
from hessinit.present.document import COLORS  # noqa: E402

BLUE, GREEN, GREY, VERMILION = (COLORS[name] for name in ("blue", "green", "grey", "vermilion"))

# The seven.


def relu() -> None:
    def curves(factor: float) -> Tensor:
        return sizes(
            lambda: deep(nn.ReLU, linear), lambda model: apply_scheme_(model, "he", gains={"*": factor})
        )

    (ax,) = new_picture()
    depth_axis(ax)
    for label, factor, style in (
        ("right: σ·√2", math.sqrt(2), RIGHT),
        ("σ, uncorrected", 1.0, PLAIN),
        ("printed: σ/√2", 1 / math.sqrt(2), PRINTED),
    ):
        found = curves(factor)
        report(label, found)
        draw_sizes(ax, found, label, style)
    explain_markers(ax)
    ax.legend(frameon=False, loc="lower left")
    save(1, "relu")


def dropout() -> None:
    axes = new_picture(columns=2, width=5.2)
    for ax, keep in zip(axes, (0.6, 0.2), strict=True):
        depth_axis(ax, f"keep rate {keep}")
        for label, factor, style in (
            ("right: σ·√(1−p)", math.sqrt(keep), RIGHT),
            ("σ, uncorrected", 1.0, PLAIN),
            ("printed: σ/√(1−p)", 1 / math.sqrt(keep), PRINTED),
        ):
            found = sizes(
                lambda keep=keep: deep(nn.ReLU, lambda: nn.Dropout(1 - keep), linear),
                lambda model, factor=factor: apply_scheme_(
                    model, "he", gains={"*": math.sqrt(2) * factor}, dropout=False
                ),
            )
            report(f"keep {keep}, {label}", found)
            draw_sizes(ax, found, label, style)
    axes[1].set_ylabel("")
    axes[1].set_yticks([10.0**power for power in (0, 7, 14, 21, 28)])
    explain_markers(axes[0])
    legend_above(axes[0], columns=3)
    save(2, "dropout")


def spectral_norm() -> None:
    left, right = new_picture(columns=2, width=5.2)
    torch.manual_seed(0)
    shapes = [(16, 16), (64, 16), (64, 64), (256, 64), (256, 256), (32, 1024), (1024, 256), (1024, 1024)]
    totals = [math.sqrt(m) + math.sqrt(n) for m, n in shapes]
    norms = [
        sum(torch.linalg.matrix_norm(torch.randn(shape), 2).item() for _ in range(4)) / 4 for shape in shapes
    ]
    for (m, n), total, norm in zip(shapes, totals, norms, strict=True):
        print(f"   {m:>4} x {n:<4}  norm {norm:.4g} = {norm / total:.3f} (√m+√n); printed {1 / total:.3g}")
    ends = [min(totals), max(totals)]
    left.loglog(ends, ends, **RIGHT, label="right: √m+√n")
    left.loglog(ends, [1 / end for end in ends], **PRINTED, label="printed: 1/(√m+√n)")
    left.loglog(totals, norms, "ko", markersize=3.5, label="measured")
    left.set_xticks([8, 16, 32, 64], ["8", "16", "32", "64"])
    left.minorticks_off()
    left.set_xlabel("√m + √n")
    left.set_ylabel("spectral norm")
    left.legend(frameon=False, loc="center left")
    total = 2 * math.sqrt(WIDTH)
    logs, data = (
        torch.zeros(DEPTH + 1, dtype=torch.float64),
        sizes(
            lambda: deep(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
            lambda model: [nn.init.normal_(layer.weight, std=1 / total) for layer in model],
        ),
    )
    for layer in range(DEPTH):
        norm = torch.linalg.matrix_norm(torch.randn(WIDTH, WIDTH).double(), 2)
        logs[layer + 1] = logs[layer] + torch.log(norm)
    steps = torch.arange(DEPTH + 1)
    bound, wrong = (logs - steps * math.log(total)).exp(), (logs + steps * math.log(total)).exp()
    depth_axis(right, what="relative length")
    right.plot(bound, **RIGHT, label="norms, each over √m+√n")
    right.plot(wrong, **PRINTED, label="norms, each over 1/(√m+√n)")
    right.plot(data[:, 0].mean(0).sqrt(), **PLAIN, label="typical data, over √m+√n")
    right.set_ylim(1e-36, 1e72)
    right.set_yticks([10.0**power for power in (0, 20, 40, 60)])
    right.legend(frameon=False, loc="lower left")
    print(f"   product of 20 norms, 512 x 512: right {bound[-1]:.3g}, printed {wrong[-1]:.3g}; ", end="")
    print(f"length of typical data {data[:, 0, -1].mean().sqrt():.3g}")
    save(3, "spectral-norm")


def activations() -> None:
    for name in ("tanh", "sigmoid", "gelu", "silu", "softplus", "relu"):
        zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = getattr(F, name)(zero)
        (slope,) = torch.autograd.grad(value, zero, create_graph=True)
        (bend,) = torch.autograd.grad(slope, zero, allow_unused=True)
        values = [value.item(), slope.item(), 0.0 if bend is None else bend.item() + 0.0]
        print(f"   {name:<9} f, f', f'' at 0: " + "  ".join(f"{value:.4g}" for value in values))
    left, right = new_picture(columns=2, width=5.2)
    _draw_gaps(left)
    depth_axis(right, "20 sigmoid layers")
    true = gain("sigmoid", backward=True)
    for label, factor, centred, style in (
        (f"σ·{true:.2f}, offset removed", true, True, RIGHT),
        (f"σ·{true:.2f}, f(0) = 1/2 left in", true, False, PLAIN),
        ("σ, as if f'(0) = 1", 1.0, False, PRINTED),
    ):
        found = sizes(lambda: deep(nn.Sigmoid, linear), lambda model: _set_sigmoids(model, factor, centred))  # noqa: B023
        report(label, found)
        right.plot(found[:, 1].mean(0), **style, label=label)
    right.set_ylabel("squared gradient, relative")
    right.set_ylim(1e-34, 1e2)
    right.legend(frameon=False, loc="lower left")
    save(4, "activations")


@torch.no_grad()
def _set_sigmoids(model: nn.Sequential, factor: float, centred: bool) -> None:
    apply_scheme_(model, "he", gains={"*": factor})
    for layer in model:
        if isinstance(layer, nn.Linear) and centred:
            layer.bias.copy_(-layer.weight.sum(1) / 2)


def _draw_gaps(ax: Axes) -> None:
    cases = [(nn.ReLU, 1.0), (nn.Tanh, 1.0), (nn.SiLU, 1.0), (nn.GELU, 1.0), (nn.Tanh, 0.1), (nn.Tanh, 0.01)]
    images, labels = load_digits()
    batch = images[:256].flatten(1), labels[:256]
    names = []
    for place, (activation, scale) in enumerate(cases):
        names.append(activation.__name__ + ("" if scale == 1 else f" × {scale}"))
        gaps = []
        for seed in range(5):
            torch.manual_seed(seed)
            hidden = [module for _ in range(3) for module in (nn.Linear(64, 64), activation())]
            model = nn.Sequential(*hidden, nn.Linear(64, 10))
            torch.nn.utils.vector_to_parameters(
                scale * nn.utils.parameters_to_vector(model.parameters()), model.parameters()
            )
            row = measure(
                Problem(model, nn.CrossEntropyLoss(), batch, layers="0", dtype=torch.float64),
                curvature="both",
                network=False,
            )["0"]
            gaps.append(row.norm / row.approximation.value)
        middle = sorted(gaps)[2]
        print(
            f"   exact over Theorem 1, first layer: {names[-1]:<12} {middle:.3g}   "
            f"({min(gaps):.3g} to {max(gaps):.3g}, 5 seeds)"
        )
        ax.plot(gaps, [place] * 5, "o", color=BLUE, markersize=3.5, alpha=0.7, clip_on=False)
        text = f"{float(f'{middle:.2g}'):,g}"
        ax.annotate(
            text, (max(gaps), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7
        )
    ax.axvspan(0.5, 2, color=GREEN, alpha=0.18, linewidth=0)
    ax.set_xscale("log")
    ax.set_xlim(0.4, 3e5)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("exact norm over Theorem 1's")


def step_size() -> None:
    torch.manual_seed(0)
    images, labels = load_digits()
    images, labels = images[:256].flatten(1).double(), labels[:256]
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
    model = nn.Sequential(*layers).double()
    weight, own = model[2].weight, model(images).detach()
    start = weight.detach().clone()
    factors = torch.linspace(0, 2.5, 26)
    real = _changes_of_loss(model, nn.CrossEntropyLoss(), (images, labels), factors)
    # The worst direction is the top eigenvector; near a minimum (the targets are the network's own outputs)
    # taking the gradient for the next offset is a power iteration towards it.
    offset = torch.randn_like(start)
    for _ in range(200):
        with torch.no_grad():
            weight.copy_(start + 1e-4 * offset / offset.norm())
        (offset,) = torch.autograd.grad(F.mse_loss(model(images), own), weight)
    worst = _changes_of_loss(model, nn.MSELoss(), (images, own), factors)
    for factor in (0.5, 1.0, 1.9, 2.0, 2.1, 2.5):
        at = round(factor * 10)
        print(f"   step {factor}/‖H‖: loss {worst[at]:+.3f} (worst), {real[at]:+.3f} (digits), in ‖g‖²/‖H‖")
    (ax,) = new_picture(height=3.1)
    ax.axvspan(0, 2, color=GREEN, alpha=0.18, linewidth=0)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.plot(factors, factors**2 / 2 - factors, **RIGHT, label="guaranteed: x²/2 − x")
    ax.plot(factors[::2], worst[::2], "o", color=BLUE, markersize=3.5, label="worst direction")
    ax.axvline(1, **PRINTED, label="printed as largest step")
    hollow = {"color": GREY, "markersize": 3.5, "markerfacecolor": "white"}
    ax.plot(factors[::2], real[::2], "s", **hollow, label="the digits' gradient")
    ax.set_ylim(-1.3, 0.75)
    ax.set_xlabel("step size × ‖H‖")
    ax.set_ylabel("change of the loss, in ‖g‖²/‖H‖")
    legend_above(ax, columns=2)
    save(5, "step-size")


def _changes_of_loss(
    model: nn.Sequential, loss: nn.Module, batch: tuple[Tensor, Tensor], factors: Tensor
) -> list[float]:
    """By one step of factor/‖H‖ in the middle layer, in units of ‖g‖²/‖H‖."""
    norm = measure(Problem(model, loss, batch, layers="2"), curvature="hessian", network=False)["2"].norm
    weight = model[2].weight
    at, before = weight.detach().clone(), loss(model(batch[0]), batch[1])
    (gradient,) = torch.autograd.grad(before, weight)
    changes = []
    with torch.no_grad():
        for factor in factors.tolist():
            weight.copy_(at - factor / norm * gradient)
            change = loss(model(batch[0]), batch[1]) - before
            changes.append((change * norm / gradient.square().sum()).item())
        weight.copy_(at)
    return changes


def norms_or_units() -> None:
    widths = [round(32 * 16 ** (layer / DEPTH)) for layer in range(DEPTH + 1)]
    shares = torch.tensor(widths, dtype=torch.float64) / widths[0]

    def growing() -> nn.Sequential:
        pairs = zip(widths[:-1], widths[1:], strict=True)
        return nn.Sequential(*[module for m, n in pairs for module in (nn.Tanh(), nn.Linear(m, n))])

    axes = new_picture(columns=2, rows=2, width=5.2, height=4.2)
    names = ("forward, length", "forward, each unit", "backward, length", "backward, each unit")
    for ax, name in zip(axes, names, strict=True):
        depth_axis(ax, name, "squared size, relative")
        ax.set_ylim(1 / 40, 40)
    for scheme, label, style in (
        ("forward", "variance 1/outputs", {**RIGHT, "marker": "o"}),
        ("backward", "variance 1/inputs", {**PRINTED, "linestyle": "-", "marker": "s"}),
    ):
        found = sizes(
            growing,
            lambda model, scheme=scheme: apply_scheme_(model, scheme, gains={"*": 1.0}),
            widths[0],
            1e-3,
        )
        report(f"{label}, length", found)
        length, back = found.mean(0)
        # A gradient comes from the wide end: its width shrinks by what the data's grows.
        back_shares = shares.flip(0) / shares[-1]
        for ax, curve in zip(axes, (length, length / shares, back, back / back_shares), strict=True):
            ax.plot(curve, **style, markersize=3, markevery=4, label=label)
        print(f"   {label}, each unit: forward x {(length / shares)[-1]:.3g}, ", end="")
        print(f"backward x {(back / back_shares)[-1]:.3g}")
    for ax in (axes[1], axes[3]):
        ax.set_ylabel("")
    for ax in axes[:2]:
        ax.set_xlabel("")
    legend_above(axes[0], columns=2)
    save(6, "norms-or-units")


def formulas() -> None:
    first, second, third = new_picture(columns=3, width=7.0, height=2.6)
    _draw_chain(first)
    _draw_active(second)
    torch.manual_seed(0)
    w1, w2, x, t = torch.randn(4, 60, dtype=torch.float64)
    z = (w2 * w1 * x).requires_grad_()
    (truth,) = torch.autograd.grad(((z - t) ** 2).sum(), z)
    third.plot(truth, 2 * (w2 * w1 * x - t), "o", color=BLUE, markersize=3, label="right: 2(w₂w₁x − t)")
    third.plot(truth, -2 * (w2 * w1 - t), "x", color=VERMILION, markersize=3.5, label="printed: −2(w₂w₁ − t)")
    third.set_xlabel("∂L/∂z by autograd")
    third.set_ylabel("∂L/∂z by formula")
    third.set_ylim(-7, 11)
    third.legend(frameon=False, loc="upper left")
    save(7, "formulas")


def _draw_chain(ax: Axes) -> None:
    torch.manual_seed(0)
    width = 32
    model = nn.Sequential(
        *[module for _ in range(DEPTH) for module in (nn.Linear(width, width, bias=False), nn.Tanh())]
    ).double()
    apply_scheme_(model, "glorot")
    signals, jacobians, slopes = [torch.randn(width, dtype=torch.float64)], [], []
    weights = [layer.weight.detach() for layer in model[::2]]
    for weight in weights:
        u = weight @ signals[-1]
        slopes.append(torch.diag(1 - u.tanh() ** 2))
        jacobians.append(slopes[-1] @ weight)
        signals.append(u.tanh())
    behind = [torch.eye(width, dtype=torch.float64)]
    for jacobian in jacobians[::-1]:
        behind.insert(0, behind[0] @ jacobian)
    errors = {"right": [], "printed": []}
    for k, weight in enumerate(weights):
        g = torch.randn_like(weight)

        def output(value: Tensor, k: int = k) -> Tensor:
            return torch.func.functional_call(model, {f"{2 * k}.weight": value}, signals[0])

        truth = torch.autograd.functional.jvp(output, weight, g)[1]
        for name, product in (("right", behind[k + 1]), ("printed", behind[k])):
            v = product @ slopes[k] @ g @ signals[k]
            errors[name].append(((v - truth).norm() / truth.norm()).item())
    ax.semilogy(errors["right"], **RIGHT, marker="o", markersize=3, label="right: B⁽ᵏ⁺¹⁾")
    ax.semilogy(errors["printed"], **PRINTED, marker="s", markersize=3, label="printed: B⁽ᵏ⁾")
    ax.set_xticks(range(0, DEPTH, 5))
    ax.set_xlabel("layer k")
    ax.set_ylabel("relative error of v")
    ax.legend(frameon=False, loc="center left")
    for name, found in errors.items():
        print(f"   relative error of v, {name}: {min(found):.2g} to {max(found):.2g} over 20 layers")


def _draw_active(ax: Axes) -> None:
    torch.manual_seed(0)
    model = deep(nn.ReLU, linear)
    apply_scheme_(model, "he")
    signal, active, at_one = torch.randn(EXAMPLES, WIDTH), [], []
    for module in model:
        if isinstance(module, nn.ReLU):
            active.append((signal > 0).float().mean().item())
            at_one.append((signal == 1).float().mean().item())
        signal = module(signal)
    ax.plot(active, **RIGHT, marker="o", markersize=3, label="right: u > 0")
    ax.plot(at_one, **PRINTED, marker="s", markersize=3, label="printed: u = 1")
    ax.set_ylim(-0.05, 1)
    ax.set_xticks(range(0, DEPTH, 5))
    ax.set_xlabel("layer")
    ax.set_ylabel("share of active units")
    ax.legend(frameon=False, loc="upper left")
    shares = f"{min(active):.3f} to {max(active):.3f}"
    print(f"   active units: u > 0 {shares} a layer, u = 1 at most {max(at_one):.2g}")


ERRATA: dict[str, Callable[[], None]] = {
    "ReLU": relu,
    "dropout": dropout,
    "spectral norm": spectral_norm,
    "activations": activations,
    "step size": step_size,
    "norms or units": norms_or_units,
    "formulas": formulas,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, choices=range(1, 8), help="one of the seven")
    only = parser.parse_args().only
    print(f"hessinit {__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU.")
    print(
        f"{DEPTH} layers of {WIDTH} units, {EXAMPLES} random examples, {NETS} networks (seeds from 0):",
        end=" ",
    )
    print("the mean, and the range, of squared lengths at the end over the start.")
    for number, (name, show) in enumerate(ERRATA.items(), start=1):
        if only in (None, number):
            print(f"{number}. {name}")
            show()


if __name__ == "__main__":
    main()
