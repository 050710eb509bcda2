"""What measuring a small network costs, in gradients: LeNet-5 with 256 examples, an MLP with 32.

python benchmarks/small_networks.py            # half a minute on one core
python benchmarks/small_networks.py --results benchmarks/results/small_networks.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from record import run_facts, write_record  # noqa: E402
from torch import nn  # noqa: E402

import hessinit  # noqa: E402

TOLERANCE = 1e-2


def lenet_5() -> nn.Sequential:
    """LeNet-5 on images of 28 × 28."""
    images = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)]
    images += [nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]
    return nn.Sequential(
        *images, nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)
    )


def mlp() -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], int]] = {
    "LeNet-5, 256 examples": (lenet_5, 256),
    "MLP 784-256-256-10, 32 examples": (mlp, 32),
}


def process_seconds(function: Callable[[], object], repeats: int = 1) -> float:
    started = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - started) / repeats


def cost(build: Callable[[], nn.Sequential], examples: int, rounds: int) -> dict[str, float]:
    """Medians of process seconds; gradients and measurements take turns."""
    torch.manual_seed(0)
    model, loss = build(), nn.CrossEntropyLoss()
    batch = torch.randn(examples, 1, 28, 28), torch.randint(10, (examples,))
    weights = list(model.parameters())
    gradient = lambda: torch.autograd.grad(loss(model(batch[0]), batch[1]), weights)  # noqa: E731
    measure = lambda: hessinit.measure(model, loss, batch, tolerance=TOLERANCE, network=False)  # noqa: E731
    process_seconds(measure, 3)
    pairs = [(process_seconds(gradient, 20), process_seconds(measure)) for _ in range(rounds)]
    of_gradient, of_measure = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"gradient": of_gradient, "measure": of_measure, "gradients": of_measure / of_gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="measurements of each (default: 25)")
    parser.add_argument("--results", type=Path, default=None, help="write the record to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        **run_facts("small_networks.py", rounds=arguments.rounds),
        "threads": 1,
        "tolerance": TOLERANCE,
        "process_seconds": {
            name: cost(build, examples, arguments.rounds) for name, (build, examples) in NETWORKS.items()
        },
    }
    write_record(record, arguments.results)


if __name__ == "__main__":
    main()
