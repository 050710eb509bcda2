"""What the details "jacobians" and "diagnostics" cost beside the plain measurement.

python benchmarks/products_cost.py           # about two minutes; ratios within one process, least of three
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from record import processor_name  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import hessinit  # noqa: E402

LOSS = nn.CrossEntropyLoss()


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, signal: Tensor) -> Tensor:
        return torch.relu(signal + self.two(torch.relu(self.one(signal))))


def dense(width: int, layers: int) -> nn.Sequential:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def residual(side: int) -> nn.Sequential:
    stem = [nn.Conv2d(3, 16, 3, stride=side // 32, padding=1), nn.ReLU()]
    return nn.Sequential(
        *stem, *(Residual(16) for _ in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def lenet() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)
    )


PROBLEMS = {
    "10 dense layers of 64, n = 128": (lambda: dense(64, 10), (128, 64)),
    "10 dense layers of 512, n = 32": (lambda: dense(512, 10), (32, 512)),
    "LeNet, n = 32": (lenet, (32, 3, 32, 32)),
    "12-layer residual network, n = 16": (lambda: residual(32), (16, 3, 32, 32)),
}


def seconds(model: nn.Module, batch: tuple[Tensor, Tensor], details: str = "") -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        hessinit.measure(model, LOSS, batch, details=details or ())
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    print(f"{processor_name()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    print("Times the plain measurement (Gauss-Newton, all layers and the network):")
    torch.set_num_threads(1)
    for name, (build, shape) in PROBLEMS.items():
        torch.manual_seed(0)
        model, batch = build(), (torch.randn(shape), torch.randint(10, (shape[0],)))
        plain = seconds(model, batch)
        found = [seconds(model, batch, what) / plain for what in ("jacobians", "diagnostics")]
        jacobians, diagnostics = found
        print(f"{name:36} {plain:6.2f} s   jacobians {jacobians:5.1f}   diagnostics {diagnostics:5.1f}")


if __name__ == "__main__":
    main()
