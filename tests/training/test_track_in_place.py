"""Training with a tracker is training without one, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from training_loops import LOSS, batches, tracked, train

import tiny

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def with_dropout_and_statistics() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("build", [tiny.network, with_dropout_and_statistics])
def test_weights_states_and_random_numbers_are_those_of_a_training_alone(
    optimizer: str, curvature: str, build: Callable[[], nn.Module]
) -> None:
    ends = []
    for follows in (False, True):
        model = build()
        stepper = OPTIMIZERS[optimizer](model.parameters())
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)  # noqa: NPY002 - the caller's old global state is at stake
        tracker = None
        if follows:
            tracker = tracked(model, batches(1, 16)[0], stepper, curvature=curvature, each_layer=True)
        losses = train(model, batches(6), stepper, tracker)
        if tracker is not None:
            assert len(tracker.close().points) == 7
            assert all(point.converged for point in tracker.tracking.points)
        drawn = (torch.rand(3).tolist(), random.random(), numpy.random.random())  # noqa: NPY002
        ends.append((model, stepper, losses, drawn))
    (alone, alone_stepper, *alone_rest), (followed, followed_stepper, *followed_rest) = ends
    assert alone_rest == followed_rest
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, followed.state_dict()[name]), name
    for one, other in zip(alone.parameters(), followed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        for name, entry in alone_stepper.state[one].items():
            same = followed_stepper.state[other][name]
            assert torch.equal(entry, same) if isinstance(entry, torch.Tensor) else entry == same


def test_gradients_modes_and_the_optimizer_are_untouched_by_a_measurement() -> None:
    model = with_dropout_and_statistics()
    model[3].eval()
    stepper = OPTIMIZERS["adam"](model.parameters())
    train(model, batches(2), stepper)
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    modes = [module.training for module in model.modules()]
    steps = [float(state["step"]) for state in stepper.state.values()]
    tracked(model, batches(1, 16)[0], stepper).measure()
    assert all(one.grad is gradient for one, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, values))
    assert [module.training for module in model.modules()] == modes
    assert [float(state["step"]) for state in stepper.state.values()] == steps


def test_a_batch_that_is_reused_as_a_buffer_is_measured_as_it_was() -> None:
    model, (inputs, targets) = tiny.network(), tiny.batch()
    tracker = tracked(model, (inputs, targets))
    first = tracker.tracking.points[0].norm
    inputs.zero_()
    targets.zero_()
    assert tracker.measure().norm == first


def test_an_iterator_of_batches_is_read_once() -> None:
    model, pairs = tiny.network(), batches(3)
    tracker = tracked(model, iter(pairs))
    whole = tracked(model, pairs).tracking
    assert tracker.measure().norm == whole.points[0].norm
    assert tracker.tracking.examples == whole.examples == 18


def test_measuring_works_under_no_grad_and_for_wrapped_models() -> None:
    model = tiny.network()
    wrapped = nn.DataParallel(model)
    stepper = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with torch.no_grad():
        point = tracked(wrapped, tiny.batch(), stepper).measure()
    assert point.norm == tracked(model, tiny.batch()).measure().norm


def test_a_loader_with_a_generator_of_its_own_shuffles_as_without_a_tracker() -> None:
    inputs, targets = batches(1, 12)[0]
    orders = []
    for follows in (False, True):
        generator = torch.Generator().manual_seed(0)
        data = torch.utils.data.TensorDataset(inputs, targets)
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator)
        if follows:
            tracked(tiny.network(), loader).measure()
        orders.append(torch.cat([given for given, _ in loader]))
    assert torch.equal(*orders)


def test_a_loss_with_a_state_of_its_own_keeps_it() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return LOSS(output, targets)

    loss = Counting()
    tracked(tiny.network(), tiny.batch(), None, loss).measure()
    assert loss.calls == 0
