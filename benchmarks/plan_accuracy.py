"""How far `measure(…, plan=True)` is off: expected over actual gradients and memory.

python benchmarks/plan_accuracy.py           # about three minutes, one thread, each case in its own process
"""

from __future__ import annotations

import multiprocessing
import platform
import sys
import warnings
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from problems import build_deep_mlp, build_lenet, build_mlp, build_vgg  # noqa: E402
from products_cost import residual  # noqa: E402
from record import processor_name  # noqa: E402
from timing import PeakMemory  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import hessinit  # noqa: E402


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.lstm(signal)[0][:, -1])


class Language(nn.Module):
    """A small transformer with 512 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(64, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens))).transpose(1, 2)


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "transformer":
        return Language(), torch.randint(512, (8, 32)), torch.randint(512, (8, 32))
    networks = {
        "mlp": lambda: (build_mlp([784, 512, 256, 10], nn.ReLU), (128, 784)),
        "deep-mlp": lambda: (build_deep_mlp(16, nn.Tanh), (128, 128)),
        "bn-mlp": lambda: (build_mlp([784, 512, 256, 10], nn.ReLU, norm=True), (128, 784)),
        "lenet": lambda: (build_lenet(nn.Tanh), (64, 3, 32, 32)),
        "residual": lambda: (residual(32), (32, 3, 32, 32)),
        "lstm": lambda: (Recurrent(), (32, 20, 16)),
        "gelu-mlp": lambda: (build_mlp([256, 1024, 1024, 10], nn.GELU), (256, 256)),
        "vgg": lambda: (build_vgg(nn.ReLU), (16, 3, 32, 32)),
    }
    model, shape = networks[name]()
    return model, torch.randn(shape), torch.randint(10, shape[:1])


# The constants of the plan were fitted to the first 14; the last six were looked at once, after that.
CASES: list[tuple[str, dict[str, object]]] = [
    ("mlp", {}), ("deep-mlp", {}), ("lenet", {}), ("vgg", {}), ("mlp", {"estimator": "lanczos"}),
    ("deep-mlp", {"estimator": "lanczos"}), ("lenet", {"estimator": "lanczos"}),
    ("vgg", {"estimator": "lanczos"}), ("vgg", {"estimator": "lanczos", "tolerance": 0.1}), ("bn-mlp", {}),
    ("transformer", {}), ("transformer", {"tolerance": 0.1}), ("lenet", {"curvature": "hessian"}),
    ("deep-mlp", {"curvature": "hessian", "network": False}), ("residual", {}),
    ("residual", {"estimator": "lanczos", "tolerance": 0.01}), ("lstm", {}), ("gelu-mlp", {}),
    ("gelu-mlp", {"estimator": "lanczos", "tolerance": 0.01}), ("gelu-mlp", {"curvature": "hessian"}),
]  # fmt: skip


def compare(case: tuple[str, dict[str, object]]) -> str:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, options = case
    model, inputs, targets = build(name)
    problem = (model, nn.CrossEntropyLoss(), (inputs, targets))
    hessinit.measure(*problem, tolerance=0.1, network=False)  # warm
    with PeakMemory() as peak:
        hessinit.measure(*problem, **options)
    plan = hessinit.measure(*problem, plan=True, **options)
    weights = sum(one.nbytes for one in model.parameters())
    actual = median(hessinit.measure(*problem, **options).gradients or 0.0 for _ in range(3))
    used = peak.mebibytes * 2**20 + weights
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    return (
        f"{name:12} {told:32} {plan.engine:8} gradients {plan.gradients:6.0f} / {actual:6.0f} ="
        f" {plan.gradients / actual:4.2f}   memory {(plan.memory or 0) / 1e6:5.0f} / {used / 1e6:5.0f} MB ="
        f" {(plan.memory or 0) / used:4.2f}"
    )


def main() -> None:
    print(f"{processor_name()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    print("expected / actual:")
    chosen = [case for case in CASES if len(sys.argv) < 2 or case[0] in sys.argv[1:]]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(compare, chosen, chunksize=1):
            print(line, flush=True)


if __name__ == "__main__":
    main()
