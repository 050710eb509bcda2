"""Small training loops with and without a tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calls import call
from hessinit.training.track import Tracker, track

LOSS = nn.CrossEntropyLoss()


def quadratic(curvatures: list[float]) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """½ Σ a w²: gradient descent on it is known in closed form. n·MSE/2 of a linear map is that."""
    model = nn.Linear(len(curvatures), 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    size = len(curvatures)
    inputs = torch.diag(torch.tensor(curvatures, dtype=torch.float64).mul(size / 2).sqrt())
    return model, nn.MSELoss(), (inputs, torch.zeros(size, 1, dtype=torch.float64))


def train(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    tracker: Tracker | None = None,
    loss: Any = LOSS,
) -> list[float]:
    """One step a batch, as a plain loop does it; returns the losses."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if tracker is not None:
            tracker.step(value)
    return losses


def batches(count: int, examples: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(examples, 4, generator=generator), torch.arange(examples) % 3) for _ in range(count)]


def tracked(model: nn.Module, batch: Any, optimizer: Any = None, loss: Any = LOSS, **options: Any) -> Tracker:
    """Without a file and without a limit of time, unless asked for."""
    settings: dict[str, Any] = {"path": None, "log_to": None, "every": 1, "max_overhead": 1.0, "warn": False}
    return call(track, model, loss, batch, optimizer=optimizer, **{**settings, **options})


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def lasting(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which takes so long."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self.time += seconds
            return call(*arguments, **options)

        return slow
