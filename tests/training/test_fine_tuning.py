"""`advise` for trained weights and adapters of peft: the rate trains, and the model comes back as it was."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import hessinit
from hessinit.digits import load_digits
from zoo.snapshot import differences, snapshot

LOSS = nn.CrossEntropyLoss()
STEPS = 60


def digits(classes: range) -> tuple[Tensor, Tensor]:
    """Noisy digits of these classes; labels count from 0."""
    images, labels = load_digits()
    rows = (labels >= classes.start) & (labels < classes.stop)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (2 * images - 1 + 0.5 * noise)[rows], labels[rows] - classes.start


def minibatches(examples: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(examples[0]), (64,), generator=source)
        yield examples[0][rows], examples[1][rows]


def train(model: nn.Module, examples: tuple[Tensor, Tensor], lr: float, steps: int = STEPS) -> float:
    """The loss on the last mini-batches of a training with AdamW."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    losses = []
    for inputs, targets in itertools.islice(minibatches(examples, 1), steps):
        loss = LOSS(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@functools.cache
def base(kind: str) -> nn.Module:
    """A network that knows the digits 0 to 4."""
    torch.manual_seed(0)
    if kind == "convolutions":
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        layers = [first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)]
        model = nn.Sequential(*layers)
    else:
        hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 5))
    train(model, digits(range(5)), 3e-3, 150)
    return model


def adapted(kind: str, method: str) -> nn.Module:
    """The base with a new head, and with adapters in its hidden layers; "full" has none."""
    model: Any = copy.deepcopy(base(kind))
    torch.manual_seed(1)
    head = str(len(model) - 1)
    model[-1] = nn.Linear(model[-1].in_features, 5)
    if method == "full":
        return model
    targets = ["2"] if kind == "convolutions" else ["1", "3"]
    config = peft.LoraConfig(
        r=4, target_modules=targets, modules_to_save=[head], use_dora=method == "DoRA"
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def batch() -> tuple[Tensor, Tensor]:
    return next(minibatches(digits(range(5, 10)), 2))


CASES = list(itertools.product(("dense", "convolutions"), ("full", "LoRA", "DoRA")))


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_the_advised_rate_trains_and_the_model_is_as_it_was(kind: str, method: str) -> None:
    model, data = adapted(kind, method), batch()
    before = snapshot(model, LOSS, data)
    advice = hessinit.advise(model, LOSS, data, optimizer="adamw")
    assert differences(before, snapshot(model, LOSS, data)) == []
    examples = digits(range(5, 10))
    first = LOSS(model(data[0]), data[1]).item()
    rates = [advice.learning_rate * times for times in (0.1, 1.0, 10.0)]
    low, advised, high = (train(copy.deepcopy(model), examples, rate) for rate in rates)
    print(kind, method, advice.learning_rate, first, low, advised, high)
    assert advised < 0.7 * first
    assert advised < low
    assert advised < high + 0.1 * first
