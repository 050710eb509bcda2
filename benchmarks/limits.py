"""Where the closed forms and the bounds stop being good: numbers of docs/schemes.md and docs/jacobians.md.

python benchmarks/limits.py             # half a minute
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from product_bounds import lipschitz_bounds  # noqa: E402
from torch import nn  # noqa: E402

import hessinit  # noqa: E402
from hessinit.digits import load_digits  # noqa: E402

DEPTH, EXAMPLES, SEEDS = 20, 256, range(4)


def tanh_network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
    for inputs, outputs in zip(widths[1:-1], widths[2:], strict=True):
        layers += [nn.Tanh(), nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def squared_lengths(widths: Sequence[int], scheme: str, seed: int) -> tuple[float, float]:
    """Of the signal, out over in, and of the gradient, in over out; both random at their start."""
    torch.manual_seed(seed)
    model = tanh_network(widths)
    hessinit.apply_scheme_(model, scheme)
    data = torch.randn(EXAMPLES, widths[0], requires_grad=True)
    output = model(data)
    sent = torch.randn_like(output)
    (back,) = torch.autograd.grad(output, data, sent)
    return (output.norm() / data.norm()).item() ** 2, (back.norm() / sent.norm()).item() ** 2


def saturated_tanh() -> float:
    """The true norm of the last layer over the paper's bound, without biases, deep in saturation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(8 * weight.abs())
    batch = torch.rand(32, 8).double(), torch.randint(3, (32,))
    report = hessinit.measure(model, nn.CrossEntropyLoss(), batch, network=False, details="jacobians")
    return max(row.norm / row.jacobians.paper_bound for row in report)


def tightness(scheme: str, width: int, seed: int) -> tuple[float, float]:
    """The Lipschitz product over the rigorous and over the paper's bound, in the worst of ten layers."""
    torch.manual_seed(seed)
    hidden = [part for _ in range(8) for part in (nn.ReLU(), nn.Linear(width, width, bias=False))]
    first, last = nn.Linear(64, width, bias=False), nn.Linear(width, 10, bias=False)
    model = nn.Sequential(nn.Flatten(), first, *hidden, nn.ReLU(), last)
    images, labels = load_digits()
    if scheme != "default":
        hessinit.apply_scheme_(model, scheme, sample=images[:64])
    batch = images[:64], labels[:64]
    report = hessinit.measure(model, nn.CrossEntropyLoss(), batch, network=False, details="jacobians")
    pairs = list(zip(lipschitz_bounds(model, images[:64]), (row.jacobians for row in report), strict=True))
    return (
        min(naive / row.rigorous_bound for naive, row in pairs),
        min(naive / row.paper_bound for naive, row in pairs),
    )


def main() -> None:
    print(f"hessinit {hessinit.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{DEPTH} tanh layers, {EXAMPLES} random examples, seeds {SEEDS[0]} to {SEEDS[-1]}:")
    growing = [round(32 * 16 ** (layer / DEPTH)) for layer in range(DEPTH + 1)]
    for what, widths, scheme, place in (
        ("32 to 512 units, forward, squared length of the signal", growing, "forward", 0),
        ("256 units, backward, squared length of the gradient", [256] * (DEPTH + 1), "backward", 1),
        ("256 units, he, squared length of the gradient", [256] * (DEPTH + 1), "he", 1),
    ):
        found = [squared_lengths(widths, scheme, seed)[place] for seed in SEEDS]
        print(f"  {what}: x " + ", ".join(f"{value:.3g}" for value in found))
    print(f"saturated tanh 8-8-3 without biases: the truth is {saturated_tanh():.3g} times the paper's bound")
    print("Lipschitz product over (rigorous, paper's) bound, worst of 10 ReLU layers without biases, digits:")
    for scheme in ("default", "he", "glorot", "orthogonal", "lsuv"):
        pairs = [tightness(scheme, width, seed) for width in (16, 64, 128) for seed in SEEDS]
        low, high = ([f(one) for one in zip(*pairs, strict=True)] for f in (min, max))
        print(f"  {scheme:<10} rigorous {low[0]:.3g} to {high[0]:.3g}, paper's {low[1]:.3g} to {high[1]:.3g}")


if __name__ == "__main__":
    main()
