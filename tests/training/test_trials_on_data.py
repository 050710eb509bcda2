"""Trials on the user's data: what they train on, which rate and which start they choose, what they leave."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import queue
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hessinit import Fit, Problem, advise, initialize_
from hessinit.errors import ProblemError
from hessinit.measurement.loss_range import UNKNOWN, LossRange
from hessinit.problem.batches import read_batches
from hessinit.progress import StepCounter
from hessinit.results.initialization import LEARNED, OURS, YOURS, Trial
from hessinit.training import rate_search, trial, weight_trials
from hessinit.training.optimizers import Training
from hessinit.training.rate_search import RateSearch
from hessinit.training.trial import LENGTHS, TrainingSetup, TrialSetting, lead_of, prepare_trials, try_weights
from hessinit.training.trial_data import TrialData, read_trial_data


class Attention(nn.Module):
    """A transformer of one layer whose head is its embedding; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.block(self.embedding(tokens)).mean(1))


class SmoothedLoss(nn.Module):
    """A loss with a running mean, a counter, and noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.scale = nn.Parameter(torch.ones(()))
        self.source, self.history = torch.Generator().manual_seed(3), list[float]()

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        noisy = output + 0.01 * torch.randn(output.shape, generator=self.source)
        value = nn.functional.cross_entropy(noisy * self.scale, targets)
        self.mean.mul_(0.9).add_(0.1 * value.detach())
        self.history.append(float(value.detach()))
        return value


def convolutional() -> nn.Sequential:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
    return nn.Sequential(*layers, nn.Linear(64, 3))


def images(examples: int = 160) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(examples, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (2 * inputs.mean((1, 2, 3)) * 6).round().clamp(-1, 1).long() + 1


def tokens(examples: int = 160) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(12, (examples, 5), generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, 0]


def read(data: tuple[Tensor, Tensor], steps: int = 9, size: int = 8) -> TrialData:
    return read_trial_data(data, (data[0][:size], data[1][:size]), steps)


# Of a cross-entropy on three classes that come about equally often.
THREE = LossRange(constant=math.log(3), free=0.0)
ENTROPY = nn.CrossEntropyLoss()


def with_gradients(model: nn.Module) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None
    return model


def bits(model: nn.Module, loss: Any = None, *, weights: bool = True) -> list[Any]:
    """Everything that must come back: the values, and the identity of what holds them."""
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    found: list[Any] = []
    for parameter in model.parameters():
        found += [id(parameter), parameter.data_ptr(), id(parameter.grad), parameter.requires_grad]
        found.append(parameter.tolist() if weights else None)
        found.append(None if parameter.grad is None else parameter.grad.tolist())
    for module in itertools.chain.from_iterable(each.modules() for each in modules):
        found += [(name, id(one), one.tolist()) for name, one in module.named_buffers(recurse=False)]
        found += [module.training, getattr(module, "calls", None), list(getattr(module, "history", ()))]
    if isinstance(loss, SmoothedLoss):
        found += [loss.source.get_state().tolist(), loss.scale.tolist(), loss.scale.grad]
    found += [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]  # noqa: NPY002
    return [*found, torch.is_grad_enabled()]


def setup_of(model: nn.Module, loss: Any, optimizer: Any = "sgd", **options: Any) -> TrainingSetup:
    """What the trials share; `options` are those of `TrainingSetup`."""
    momentum = options.pop("momentum", None)
    settings = {"momentum": momentum} if momentum and optimizer in ("momentum", "nesterov") else None
    training = optimizer if isinstance(optimizer, Training) else Training(optimizer, settings=settings)
    options = {"accumulate": training.accumulate, **options}
    return TrainingSetup(model, loss, lambda lr: training.build(model, lr), **options)


@contextlib.contextmanager
def trials_on(
    data: TrialData, batch: tuple[Tensor, Tensor], model: nn.Module, loss: Any = ENTROPY, *given: Any, **options: Any
) -> Iterator[TrialSetting]:
    batches = [one for _, one in read_batches(batch)]
    with prepare_trials(setup_of(model, loss, *given, **options), batches, data) as setting:
        yield setting


def first_of(data: tuple[Tensor, Tensor], size: int = 8) -> tuple[Tensor, Tensor]:
    return data[0][:size], data[1][:size]


def test_scratch() -> None:
    pass
