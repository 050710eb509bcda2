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
from hessinit.errors import DerivativeError
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
ADAPTERS = [case for case in CASES if case[1] != "full"]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_the_advised_rate_trains_and_the_model_is_as_it_was(kind: str, method: str) -> None:
    model, data = adapted(kind, method), batch()
    before = snapshot(model, LOSS, data)
    advice = hessinit.advise(model, LOSS, data, optimizer="adamw")
    assert differences(before, snapshot(model, LOSS, data)) == []
    assert "initial" not in str(advice)
    examples = digits(range(5, 10))
    first = LOSS(model(data[0]), data[1]).item()
    rates = [advice.learning_rate * times for times in (0.1, 1.0, 10.0)]
    low, advised, high = (train(copy.deepcopy(model), examples, rate) for rate in rates)
    assert advised < 0.3 * first
    assert advised < low
    assert advised < high


@pytest.mark.parametrize(("kind", "method"), ADAPTERS)
def test_trials_decide_beside_trained_weights_until_the_loss_rises_on_both_sides(
    kind: str, method: str
) -> None:
    advice = hessinit.advise(adapted(kind, method), LOSS, batch(), optimizer="adamw")
    trials = sorted(advice.trials, key=lambda trial: trial.lr)
    scores = [trial.score if trial.survived else float("inf") for trial in trials]
    best = scores.index(min(scores))
    assert 0 < best < len(scores) - 1
    assert advice.learning_rate == pytest.approx(0.85 * trials[best].lr, rel=0.42)  # a half power of 2
    assert any("A in LoRA while B is 0" in note for note in advice.notes) == (advice.frozen > 0)


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_b_has_curvature_where_a_has_none_and_measuring_changes_nothing(kind: str) -> None:
    model, data = adapted(kind, "LoRA"), batch()
    before = snapshot(model, LOSS, data)
    report = hessinit.measure(model, LOSS, data)
    assert differences(before, snapshot(model, LOSS, data)) == []
    norms = {row.name: row.norm for row in report.layers}
    assert all((norm == 0) == ("lora_A" in name) for name, norm in norms.items())
    assert sum("lora_B" in name for name in norms) == {"dense": 2, "convolutions": 1}[kind]


def test_dora_has_a_stopped_gradient_and_is_advised_on_by_trials() -> None:
    model, data = adapted("dense", "DoRA"), batch()
    with torch.no_grad():  # at B = 0 the two derivatives may agree
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    before = snapshot(model, LOSS, data)
    with pytest.raises(DerivativeError, match=r"a stopped gradient.* check=False measures"):
        hessinit.measure(model, LOSS, data)
    unchecked = hessinit.measure(hessinit.Problem(model, LOSS, data, check=False))
    assert unchecked.network.norm > 0
    advice = hessinit.advise(model, LOSS, data, optimizer="adamw")
    assert differences(before, snapshot(model, LOSS, data)) == []
    assert advice.learns


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
@pytest.mark.parametrize(("kind", "method"), ADAPTERS)
def test_adapters_are_drawn_only_where_that_is_asked_for_and_start_where_they_did(
    kind: str, method: str
) -> None:
    model, data = adapted(kind, method), batch()
    problem = hessinit.Problem(model, LOSS, data, check=False)
    before = snapshot(model, LOSS, data)
    with pytest.raises(hessinit.ProblemError, match="holds adapters of peft, so it was trained before"):
        hessinit.initialize_(problem, lr=0.1)
    assert differences(before, snapshot(model, LOSS, data)) == []
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    hessinit.initialize_(problem, lr=0.1, fit=hessinit.Fit(overwrite=True))
    changed = {name for name, old in weights.items() if not torch.equal(model.get_parameter(name), old)}
    assert changed
    assert all("lora_A" in name or "modules_to_save" in name for name in changed)


def test_adapters_that_learn_nothing_are_told_what_may_help() -> None:
    model, (inputs, targets) = adapted("dense", "LoRA"), batch()
    advice = hessinit.advise(model, LOSS, (torch.zeros_like(inputs), targets.roll(1)), optimizer="adamw")
    assert not advice.learns
    assert "adapters in more layers, a larger rank, or more data" in advice.learning_rate_reason
    assert "hessinit initialize" not in advice.learning_rate_reason
