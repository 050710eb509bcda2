"""How much sharper a network is with its biases and norm gains than in its matrices alone.

    python benchmarks/uncounted.py [--seeds 5]

Gauss-Newton on 256 digits, at PyTorch's default start, at He's and after `initialize_` for the rate 0.1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import hessinit  # noqa: E402
from hessinit.digits import load_digits  # noqa: E402
from hessinit.errors import ConvergenceWarning  # noqa: E402

EXAMPLES, WIDTH = 256, 64


def mlp(activation: type[nn.Module], hidden: int) -> nn.Module:
    modules: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        modules += [nn.Linear(WIDTH, WIDTH), activation()]
    return nn.Sequential(*modules, nn.Linear(WIDTH, 10))


def convolutions() -> nn.Module:
    modules: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 16), (16, 16), (16, 16)):
        modules += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(16 * 64, 10))


class Rows(nn.Module):
    """A pre-norm transformer that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        self.out = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(images[:, 0])).mean(1))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "3 ReLU layers": lambda: mlp(nn.ReLU, 2),
    "10 ReLU layers": lambda: mlp(nn.ReLU, 9),
    "10 tanh layers": lambda: mlp(nn.Tanh, 9),
    "3 sigmoid layers": lambda: mlp(nn.Sigmoid, 2),
    "convolutions, BatchNorm": convolutions,
    "transformer, LayerNorm": Rows,
}
STARTS = ("default", "he", "initialize_")


def ratio(build: Callable[[], nn.Module], start: str, seed: int) -> float:
    torch.manual_seed(seed)
    model, loss = build(), nn.CrossEntropyLoss()
    images, labels = load_digits()
    batch = images[:EXAMPLES], labels[:EXAMPLES]
    if start == "he":
        hessinit.apply_scheme_(model, "he", sample=images[:2], generator=torch.Generator().manual_seed(seed))
    if start == "initialize_":
        hessinit.initialize_(hessinit.Problem(model, loss, batch, seed=seed), lr=0.1)
    weights, everything = (
        hessinit.measure(
            hessinit.Problem(model, loss, batch, layers=layers), estimator="lanczos"
        ).network.norm
        for layers in (None, "**")
    )
    return everything / weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(f"‖H‖ of all parameters over ‖H‖ of the matrices: median (largest) of {len(seeds)} seeds")
    print(f"{'':24}" + "".join(f"{start:>16}" for start in STARTS))
    for name, build in NETWORKS.items():
        cells = []
        for start in STARTS:
            found = [ratio(build, start, seed) for seed in seeds]
            cells.append(f"{statistics.median(found):.2f} ({max(found):.2f})")
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    print(f"\ntorch {torch.__version__}, Gauss-Newton on {EXAMPLES} digits; python benchmarks/uncounted.py")


if __name__ == "__main__":
    main()
