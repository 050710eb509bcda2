"""MetaInit (Dauphin & Schoenholz 2019): norms at which the gradient changes least along itself."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from arena.competitors.evaluation import (
    Forward,
    Loss,
    differentiate,
    evaluate,
    evaluating,
    inner,
    seeded_generator,
    trained_weights,
)
from arena.competitors.scales import is_bias
from hessinit.errors import choose
from hessinit.problem.batches import map_tensors

Data = Literal["random", "real"]
_LEAST = 0.01  # of the norm as drawn; the published listing lets a norm pass zero and turn the weights over


def metainit_(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    steps: int = 100,
    lr: float = 0.1,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    data: Data = "random",
    seed: int = 0,
    forward: Forward | None = None,
) -> None:
    """Set the norm of every weight of two or more dimensions, in place, and every bias to zero.

    Sign-SGD with momentum on the norms lowers `gradient_quotient`. As in the paper, every step sees new
    random data (`data="random"`): normal inputs and shuffled targets of the batch's shape; whole numbers
    (tokens) are shuffled over all places, since they cannot be normal. `data="real"` uses the batch itself.
    The published listing takes 500 steps at a constant rate; here 100 with the rate falling linearly to
    zero, without which the norms swing by lr/(1 − momentum) to the end.

    Costs 10 to 12 gradients a step (measured on a CNN; overheads of small MLPs make it up to three times as
    many) and keeps the graph of a second derivative. Where the quotient is not finite the norms return to the
    last ones at which it was; a network that overflows as drawn stays so. Far too large weights (1.6 times
    He's in nine layers) need 300 steps; from He's or PyTorch's, 100 reach the same quotient.
    """
    choose("data", data, ["random", "real"])
    named = trained_weights(model)
    generator = seeded_generator(seed, "MetaInit's random data")
    with torch.no_grad():
        for name, weight in named.items():
            if is_bias(name):
                weight.zero_()
    scaled = [weight for weight in named.values() if weight.ndim >= 2 and bool(weight.detach().any())]
    drawn = [weight.detach().clone() for weight in scaled]
    first = torch.stack([tensor.double().norm() for tensor in drawn]).cpu()
    norms = finite = first
    speed = torch.zeros_like(norms)
    with evaluating(model):
        for step in range(steps):
            seen = batch if data == "real" else _random_like(batch, generator)
            quotient = gradient_quotient(model, loss, seen, epsilon=epsilon, forward=forward)
            # The direction alone: the weights as drawn are the present ones but for a positive factor.
            slopes = torch.stack([
                inner([gradient], [weight])
                for gradient, weight in zip(differentiate(quotient, scaled), drawn, strict=True)
            ]).cpu()  # fmt: skip
            if bool(quotient.isfinite()) and bool(slopes.isfinite().all()):
                finite = norms
                speed = momentum * speed - lr * (1 - step / steps) * slopes.sign()
                norms = torch.maximum(norms + speed, _LEAST * first)
            else:
                norms, speed = finite, torch.zeros_like(speed)
            with torch.no_grad():
                for weight, tensor, factor in zip(scaled, drawn, (norms / first).tolist(), strict=True):
                    weight.copy_(tensor).mul_(factor)


def gradient_quotient(
    model: nn.Module, loss: Loss, batch: Any, *, epsilon: float = 1e-5, forward: Forward | None = None
) -> Tensor:
    """(1/n) Σ |(g − Hg) / (g ± ε) − 1| over all n weights, with ± the sign of g: zero where H g = 0.

    Differentiable. Takes the network as it is: dropout must be off, and attention and recurrence run with
    kernels that can be differentiated again.
    """
    weights = list(trained_weights(model).values())
    gradients = differentiate(evaluate(model, loss, batch, forward), weights, again=True)
    # Not `inner`: sums in the network's own precision, as in the listing, keep the graph small.
    half_square = torch.stack([gradient.square().sum() for gradient in gradients]).sum() / 2
    products = differentiate(half_square, weights, again=True)
    total = torch.stack([
        ((gradient - product) / (gradient + epsilon * _sign(gradient)) - 1).abs().sum()
        for gradient, product in zip(gradients, products, strict=True)
    ]).sum()  # fmt: skip
    return total / sum(weight.numel() for weight in weights)


def _sign(gradient: Tensor) -> Tensor:
    """1 at zero, where torch.sign has 0: nothing may be divided by zero."""
    return torch.where(gradient.detach() >= 0, 1.0, -1.0).to(gradient.dtype)


def _random_like(batch: Any, generator: torch.Generator) -> Any:
    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            return tensor.flatten()[order].view_as(tensor)
        return torch.randn(tensor.shape, generator=generator).to(tensor)

    def shuffle(tensor: Tensor) -> Tensor:
        return tensor[torch.randperm(len(tensor), generator=generator).to(tensor.device)]

    inputs, targets = batch
    return map_tensors(draw, inputs), map_tensors(shuffle, targets)
