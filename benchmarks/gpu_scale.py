"""What a measurement costs on one GPU, at sizes that people train: seconds, gradients, memory.

python benchmarks/gpu_scale.py    # needs a CUDA device; prints the rows, writes results/gpu_scale.json
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import hessinit  # noqa: E402


def vgg16(classes: int = 10) -> nn.Module:
    plan = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]
    layers: list[nn.Module] = []
    channels = 3
    for width in plan:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))


def mlp(depth: int = 20, width: int = 1024) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Classifier(nn.Module):
    """A transformer encoder that classifies sequences by their mean."""

    def __init__(self, layers: int = 6, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        block = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def seconds(run: object, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; this benchmark needs one.")
    torch.manual_seed(0)
    images, digits = torch.randn(128, 3, 32, 32), torch.randn(128, 784)
    cases = [
        ("VGG-16 without BN, N=128", vgg16(), images),
        ("MLP, 20 layers of 1024, N=128", mlp(), digits),
        ("transformer, 6 layers of 256, N=32, T=64", Classifier(), torch.randint(1000, (32, 64))),
    ]
    rows = []
    for name, model, inputs in cases:
        model, inputs = model.cuda(), inputs.cuda()
        targets = torch.randint(10, (len(inputs),), device="cuda")
        loss = nn.CrossEntropyLoss()
        weights = list(model.parameters())

        def gradient() -> None:
            torch.autograd.grad(loss(model(inputs), targets), weights)  # noqa: B023

        reports = {}

        def measure() -> None:
            reports["last"] = hessinit.measure(model, loss, (inputs, targets))  # noqa: B023

        seconds(gradient, 2), seconds(measure, 1)
        unit = seconds(gradient, 5)
        torch.cuda.reset_peak_memory_stats()
        gradient()
        train_memory = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        took = seconds(measure, 2)
        report = reports["last"]
        row = {
            "problem": name,
            "layers": len(report.layers),
            "engine": report.engine,
            "gradient_seconds": unit,
            "measure_seconds": took,
            "gradients": took / unit,
            "memory_in_training_steps": torch.cuda.max_memory_allocated() / train_memory,
            "network_norm": report.network.norm,
            "converged": report.converged,
        }
        rows.append(row)
        print(json.dumps(row))
    record = {
        "command": "python benchmarks/gpu_scale.py",
        "device": torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "repeats": "gradient: best of 5; measure: best of 2; seed 0",
        "rows": rows,
    }
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "gpu_scale.json"
    target.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
