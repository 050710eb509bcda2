"""How often and by how much the paper's bound lies below the truth: `python benchmarks/product_bounds.py`.

Ten dense layers on the digits, PyTorch's default weights, with and without biases, one row per activation.
Every layer of every seed counts once. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from torch import nn

import hessinit
from hessinit.digits import load_digits

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
}
# The largest |f'| of those that overshoot 1 or stay below it, rounded up.
SLOPES = {nn.GELU: 1.12905, nn.SiLU: 1.09985, nn.Sigmoid: 0.25}


def network(activation: type[nn.Module], bias: bool, seed: int, depth: int, width: int) -> nn.Sequential:
    """`depth` dense layers."""
    torch.manual_seed(seed)
    widths = [64] + [width] * (depth - 1)
    pairs = zip(widths[:-1], widths[1:], strict=True)
    hidden = [part for a, b in pairs for part in (nn.Linear(a, b, bias=bias), activation())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10, bias=bias))


def lipschitz_bounds(model: nn.Sequential, inputs: torch.Tensor) -> list[float]:
    """Return for each dense layer the naive bound: ‖H_z‖·‖x‖² times the squared norms of all other layers."""
    linear = [part for part in model if isinstance(part, nn.Linear)]
    norms = [torch.linalg.matrix_norm(part.weight.detach().double(), 2).item() for part in linear]
    slope = math.prod(SLOPES.get(type(part), 1.0) for part in model)
    p = model(inputs).detach().double().softmax(1)
    loss = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])[:, -1]
    start = (loss * inputs.flatten(1).double().square().sum(1)).mean().item()
    return [start * (slope * math.prod(norms) / norm) ** 2 for norm in norms]


def ratios(name: str, bias: bool, options: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Paper's, rigorous and Lipschitz bound over the Gauss-Newton norm, for every layer of every seed."""
    images, labels = load_digits()
    found = []
    for seed in range(options.seeds):
        model = network(ACTIVATIONS[name], bias, seed, options.depth, options.width)
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[
            : options.examples
        ]
        batch = (images[chosen], labels[chosen])
        report = hessinit.measure(
            hessinit.Problem(model, nn.CrossEntropyLoss(), batch, dtype=torch.float64),
            network=False,
            details="jacobians",
        )
        for layer, naive in zip(report, lipschitz_bounds(model, batch[0]), strict=True):
            row = layer.jacobians
            assert row is not None
            bounds = row.paper_bound, row.rigorous_bound, naive
            paper, rigorous, lipschitz = (bound / layer.norm for bound in bounds if bound is not None)
            found.append((paper, rigorous, lipschitz))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--examples", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"bounds over the Gauss-Newton norm: {options.depth} dense layers of {options.width}, digits, "
        f"{options.examples} examples, medians over all layers of seeds 0 to {options.seeds - 1}, fp64, "
        f"hessinit {hessinit.__version__}, torch {torch.__version__}\n"
    )
    headings = (
        "activation",
        "biases",
        "paper's below 1",
        "lowest",
        "paper's",
        "rigorous: lowest, median",
        "Lipschitz",
    )
    print(f"| {' | '.join(headings)} |")
    print("|---|---|---|---|---|---|---|")
    for name in ACTIVATIONS:
        for bias in (False, True):
            paper, rigorous, lipschitz = zip(*ratios(name, bias, options), strict=True)
            below = sum(ratio < 1 for ratio in paper)
            print(
                f"| {name} | {'yes' if bias else 'no'} | {below} of {len(paper)} | {min(paper):.2g} | "
                f"{statistics.median(paper):.3g} | {min(rigorous):.3g}, {statistics.median(rigorous):.3g} | "
                f"{statistics.median(lipschitz):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
