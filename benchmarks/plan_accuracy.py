"""How far `hessinit.plan` is off: expected over actual gradients, seconds and memory.

python benchmarks/plan_accuracy.py sizes       # thirteen cases from 1,000 to 25 million weights: five minutes
python benchmarks/plan_accuracy.py             # those and the others: a quarter of an hour
python benchmarks/plan_accuracy.py lenet       # the cases of one network

One thread, each case in a process of its own, which has measured a network of 15 weights before. Memory is
the weights and how far the resident memory of the process rises above where it stood before the measurement.
"""

from __future__ import annotations

import multiprocessing
import platform
import sys
import warnings
from pathlib import Path

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
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.lstm(signal)[0][:, -1])


class Language(nn.Module):
    """A transformer, with as many outputs as words."""

    def __init__(self, words: int = 512, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens))).transpose(1, 2)


class Bags(nn.Module):
    """The mean of embedded words, classified: nearly all weights are those of the embedding."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 64), nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.skip = nn.Conv2d(into, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(image)))
        return torch.relu(self.skip(image) + self.norms[1](self.second(hidden)))


def resnet() -> nn.Sequential:
    """ResNet-18 for small images: 11 million weights."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Block(*shape) for shape in [*widths, (256, 512, 2), (512, 512, 1)]]
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU(), *blocks, *end)


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    languages = {"transformer": ((512,), (8, 32)), "transformer-9M": ((8192, 256, 6), (2, 32))}
    if name in languages:
        sizes, shape = languages[name]
        return Language(*sizes), torch.randint(sizes[0], shape), torch.randint(sizes[0], shape)
    if name.startswith("embedding"):
        words = {"embedding-6M": 100_000, "embedding-25M": 390_000}[name]
        return Bags(words), torch.randint(words, (32, 20)), torch.randint(10, (32,))
    networks = {
        "mlp-1k": lambda: (build_mlp([16, 32, 16, 4], nn.Tanh), (64, 16)),
        "mlp": lambda: (build_mlp([784, 512, 256, 10], nn.ReLU), (128, 784)),
        "deep-mlp": lambda: (build_deep_mlp(16, nn.Tanh), (128, 128)),
        "bn-mlp": lambda: (build_mlp([784, 512, 256, 10], nn.ReLU, norm=True), (128, 784)),
        "lenet": lambda: (build_lenet(nn.Tanh), (64, 3, 32, 32)),
        "residual": lambda: (residual(32), (32, 3, 32, 32)),
        "lstm": lambda: (Recurrent(), (32, 20, 16)),
        "lstm-1M": lambda: (Recurrent(512), (16, 20, 16)),
        "gelu-mlp": lambda: (build_mlp([256, 1024, 1024, 10], nn.GELU), (256, 256)),
        "vgg": lambda: (build_vgg(nn.ReLU), (16, 3, 32, 32)),
        "resnet-11M": lambda: (resnet().eval(), (8, 3, 32, 32)),
        "wide-4M": lambda: (build_mlp([2000, 2000, 4], nn.ReLU), (16, 2000)),
        "wide-25M": lambda: (build_mlp([2000, 12500, 4], nn.ReLU), (16, 2000)),
    }
    model, shape = networks[name]()
    classes = 4 if name.endswith(("-1k", "-4M", "-25M")) else 10
    return model, torch.randn(shape), torch.randint(classes, shape[:1])


Case = tuple[str, dict[str, object]]
# From 1,000 to 25 million weights.
SIZES: list[Case] = [
    ("mlp-1k", {}), ("lstm", {}), ("lenet", {}), ("transformer", {}), ("mlp", {}), ("lstm-1M", {}),
    ("vgg", {}), ("wide-4M", {}), ("embedding-6M", {}), ("transformer-9M", {}), ("resnet-11M", {}),
    ("wide-25M", {}), ("embedding-25M", {}),
]  # fmt: skip
OTHERS: list[Case] = [
    ("deep-mlp", {}), ("mlp", {"estimator": "lanczos"}), ("deep-mlp", {"estimator": "lanczos"}),
    ("lenet", {"estimator": "lanczos"}), ("vgg", {"estimator": "lanczos"}),
    ("vgg", {"estimator": "lanczos", "tolerance": 0.1}), ("bn-mlp", {}), ("transformer", {"tolerance": 0.1}),
    ("lenet", {"curvature": "hessian"}), ("deep-mlp", {"curvature": "hessian", "network": False}),
    ("residual", {}), ("residual", {"estimator": "lanczos", "tolerance": 0.01}), ("gelu-mlp", {}),
    ("gelu-mlp", {"estimator": "lanczos", "tolerance": 0.01}), ("gelu-mlp", {"curvature": "hessian"}),
]  # fmt: skip


def compare(case: Case) -> str:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, options = case
    model, inputs, targets = build(name)
    problem = (model, nn.CrossEntropyLoss(), (inputs, targets))
    hessinit.measure(nn.Linear(4, 3), nn.CrossEntropyLoss(), (torch.randn(4, 4), torch.arange(4) % 3))  # warm
    plan = hessinit.plan(*problem, **options)
    with PeakMemory() as peak:
        report = hessinit.measure(*problem, **options)
    weights = sum(one.nbytes for one in model.parameters())
    seconds, gradients = report.seconds or 0.0, report.gradients or 0.0
    used = peak.mebibytes * 2**20 + weights
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    return (
        f"{name:14} {told:30} {plan.parameters / 1e6:6.3f} M {plan.engine:8}"
        f" gradients {plan.gradients:4.0f} / {gradients:4.0f} = {plan.gradients / gradients:4.2f}"
        f"   seconds {plan.seconds:6.2f} / {seconds:6.2f} = {plan.seconds / seconds:4.2f}"
        f"   memory {plan.memory / 1e6:6.1f} / {used / 1e6:6.1f} MB = {plan.memory / used:4.2f}"
    )


def main() -> None:
    print(f"{processor_name()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    print("expected / actual:")
    wanted = sys.argv[1:]
    chosen = SIZES if wanted == ["sizes"] else [*SIZES, *OTHERS]
    chosen = [case for case in chosen if wanted in ([], ["sizes"]) or case[0] in wanted]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(compare, chosen, chunksize=1):
            print(line, flush=True)


if __name__ == "__main__":
    main()
