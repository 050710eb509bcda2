"""The step size: descent is guaranteed below 2/‖H‖, and most of it at 1/‖H‖."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessinit.digits import load_digits
from hessinit.measurement.measure import measure


def losses_of_descent(
    model: nn.Module, weight: nn.Parameter, batch: tuple[Tensor, Tensor], rate: float
) -> Tensor:
    """The squared error at the start and after each of 60 steps in one weight, which is put back."""
    start = weight.detach().clone()
    losses = []
    for _ in range(61):
        loss = F.mse_loss(model(batch[0]), batch[1])
        losses.append(loss.detach())
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= rate * gradient
    with torch.no_grad():
        weight.copy_(start)
    return torch.stack(losses)


def always_descends(losses: Tensor) -> bool:
    return bool((losses.diff() < 0).all())


def test_descent_on_a_quadratic_turns_at_two_over_the_norm() -> None:
    torch.manual_seed(0)
    images = load_digits()[0][:256].flatten(1).double()
    model = nn.Linear(64, 10, bias=False).double()
    batch = images, torch.randn(256, 10, dtype=torch.float64)
    norm = measure(model, nn.MSELoss(), batch, tolerance=1e-6).network.norm
    truth = torch.linalg.eigvalsh(images.mT @ images)[-1].item() * 2 / (256 * 10)
    assert norm == pytest.approx(truth, rel=1e-5)
    for factor in (0.5, 1.0, 1.5, 1.95):
        assert always_descends(losses_of_descent(model, model.weight, batch, factor / norm))
    for factor in (2.1, 2.5):
        losses = losses_of_descent(model, model.weight, batch, factor / norm)
        assert losses[-1] > 10 * losses[0]


class NearItsMinimum:
    """A tanh network on the digits whose targets are its own outputs: it starts at a minimum."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.images = load_digits()[0][:64].flatten(1).double()
        self.model = nn.Sequential(
            nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10)
        ).double()
        self.batch = self.images, self.model(self.images).detach()
        self.weight = self.model[2].weight
        self.minimum = self.weight.detach().clone()
        self.norm = self._measured()

    def _measured(self) -> float:
        return measure(
            self.model,
            nn.MSELoss(),
            self.batch,
            curvature="hessian",
            layers="2",
            network=False,
            tolerance=1e-6,
        )["2"].norm

    def move_to(self, offset: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(self.minimum + 1e-4 * offset / offset.norm())

    def steepest(self) -> Tensor:
        """The top eigenvector, by a dense Hessian: the direction in which a step is least safe."""

        def loss(weight: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.model, {"2.weight": weight}, self.images)
            return F.mse_loss(outputs, self.batch[1])

        dense = torch.autograd.functional.hessian(loss, self.minimum).reshape(self.minimum.numel(), -1)
        return torch.linalg.eigh(dense).eigenvectors[:, -1].view_as(self.minimum)

    def gradient(self) -> Tensor:
        (gradient,) = torch.autograd.grad(F.mse_loss(self.model(self.images), self.batch[1]), self.weight)
        return gradient

    def decrease(self, factor: float) -> float:
        """Of one step of factor/‖H‖, in units of ‖g‖²/‖H‖."""
        losses = losses_of_descent(self.model, self.weight, self.batch, factor / self.norm)
        return ((losses[0] - losses[1]) * self.norm / self.gradient().square().sum()).item()


def test_descent_in_a_layer_of_a_network_turns_at_two_over_its_measured_norm() -> None:
    near = NearItsMinimum()
    near.move_to(torch.randn_like(near.minimum))
    for factor in (0.5, 1.0, 1.9):
        assert always_descends(losses_of_descent(near.model, near.weight, near.batch, factor / near.norm))
    losses = losses_of_descent(near.model, near.weight, near.batch, 2.2 / near.norm)
    assert losses[-1] > 10 * losses[0]


def test_the_guaranteed_decrease_is_largest_at_one_over_the_norm_and_gone_at_twice_that() -> None:
    near = NearItsMinimum()
    factors = [0.25 * step for step in range(1, 11)]
    near.move_to(near.steepest())
    worst = [near.decrease(factor) for factor in factors]
    assert worst == pytest.approx([factor - factor**2 / 2 for factor in factors], abs=2e-3)
    assert max(worst) == worst[factors.index(1.0)]
    near.move_to(torch.randn_like(near.minimum))
    # A guarantee: no direction does worse.
    assert all(near.decrease(factor) > least - 1e-3 for factor, least in zip(factors, worst, strict=True))
