"""A small problem for the tests of compare and sweep, in a file of its own so that workers can import it."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from hessinit import Comparison, Problem, RunSettings, compare
from hessinit.digits import load_digits

LOSS = nn.CrossEntropyLoss()


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def build_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


def build_partly_frozen() -> nn.Module:
    model = build()
    model.get_parameter("1.weight").requires_grad_(False)
    return model


def build_larger() -> nn.Module:
    """The same modules as `build`; only the numbers differ."""
    model = build()
    with torch.no_grad():
        model.get_parameter("3.weight").mul_(1.1)
    return model


def data() -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    return images[:400], labels[:400]


def ready_batches(size: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = data()
    return list(zip(images.split(size), labels.split(size), strict=True))


def keep(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """A scheme that changes nothing."""


def fail(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    raise RuntimeError("this scheme refuses the model")


def draw(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """A scheme that draws from the global generator."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 * lr**0.1)


def adam_without_momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, betas=(0.0, 0.999))


def call_slowly(model: nn.Module, images: Tensor) -> Tensor:
    """Leaves time to be interrupted."""
    time.sleep(0.02)
    output: Tensor = model(images)
    return output


def small(**changes: Any) -> Comparison:
    """Two schemes, two rates, two seeds, twelve steps; `changes` are arguments and settings of `compare`."""
    settings = {"schemes": ("default", "he"), "learning_rates": (0.1, 0.5), "seeds": 2, "steps": 12}
    arguments: dict[str, Any] = {"build": build, "loss": LOSS, "data": data(), "batch_size": 32}
    arguments |= {**settings, **changes}
    names = [field.name for field in fields(RunSettings)]
    rarer = {name: arguments.pop(name) for name in names if name in arguments}
    problem = Problem(nn.Identity(), arguments.pop("loss"), None, forward=arguments.pop("forward", None))
    settings = RunSettings(**{"workers": 1, **rarer})
    return compare(arguments.pop("build"), problem, arguments.pop("data"), settings=settings, **arguments)
