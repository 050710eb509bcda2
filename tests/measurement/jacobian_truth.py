"""Truths for the Jacobian bounds: whole Jacobians by definition, in fp64; and random architectures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import evaluate
from hessinit.measurement.bounds import jacobian_bounds
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import JacobianBounds

Parts = tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]


def measured_bounds(
    model: nn.Module, loss: Any, batch: Any, *, tolerance: float = 1e-3, **settings: Any
) -> dict[str, JacobianBounds]:
    """By layer name, in double precision unless told otherwise."""
    problem = Problem(model, loss, batch, **{"dtype": torch.float64, **settings})
    with problem.settings():
        found = jacobian_bounds(problem, evaluate(problem), LanczosSettings(tolerance, 200, 0))
    return {layer.name: found[layer.parameter] for layer in problem.layers}


@dataclass(frozen=True)
class DenseProducts:
    """The norms for one example (or, with one group, for the batch as a whole)."""

    forward: float
    backward: float
    activation: float
    weight_map: float
    loss: float
    input_length: float

    @property
    def rigorous(self) -> float:
        return self.loss * (self.backward * self.activation * self.weight_map) ** 2

    def paper(self, overlap: int) -> float:
        factor = self.backward * self.activation * self.forward * self.input_length
        return self.loss * overlap * factor**2


def run(
    model: nn.Module, layer: nn.Module, after: nn.Module, inputs: Tensor, moved: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """The output, and at each use of the layer its input, its output, and what `after` gives."""
    seen: list[Tensor] = []
    given: list[Tensor] = []
    behind: list[Tensor] = []

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen.append(arguments[0])
        given.append(output)

    def move(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        behind.append(output)
        return output if moved is None else output + moved[len(behind) - 1]

    handles = [layer.register_forward_hook(watch), after.register_forward_hook(move)]
    try:
        return model(inputs), seen, given, behind
    finally:
        for handle in handles:
            handle.remove()


def dense_products(
    model: nn.Module,
    layer: nn.Module,
    after: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: tuple[Tensor, Tensor],
    *,
    joint: bool = False,
) -> list[DenseProducts]:
    """One row for each example; one for all with `joint`."""
    model, (inputs, targets) = model.double(), batch
    inputs = inputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    output, seen, given, behind = run(model, layer, after, inputs)
    groups = [slice(0, len(inputs))] if joint else [slice(i, i + 1) for i in range(len(inputs))]
    zero = [torch.zeros_like(one) for one in behind]
    curvature = jacrev(jacrev(lambda z: loss(z, targets)))(output.detach())

    def stacked(tensors: list[Tensor], group: slice) -> Tensor:
        return torch.cat([one[group].flatten() for one in tensors])

    rows = []
    for group in groups:

        def head(moved: list[Tensor], group: slice = group) -> Tensor:
            return run(model, layer, after, inputs, moved)[0][group].flatten()

        def tail(x: Tensor, group: slice = group) -> Tensor:
            return stacked(run(model, layer, after, x)[1], group)

        def weight_map(weight: Tensor, group: slice = group) -> Tensor:
            calls = [functional_call(layer, {"weight": weight}, (one[group].detach(),)) for one in seen]
            return torch.cat([call.flatten() for call in calls])

        backward = torch.cat([part[:, group].flatten(1) for part in jacrev(head)(zero)], dim=1)
        forward = jacrev(tail)(inputs)[:, group].flatten(1)
        reached = jacrev(weight_map)(layer.weight.detach()).flatten(1)
        width = output[group].numel()
        block = curvature[(group, *[slice(None)] * (output.ndim - 1), group)].reshape(width, width)
        rows.append(
            DenseProducts(
                norm(forward),
                norm(backward),
                largest_slope(layer, after, stacked(given, group)),
                norm(reached),
                norm(block),
                inputs[group].norm().item(),
            )
        )
    return rows


def norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach(), 2).item()


def largest_slope(layer: nn.Module, after: nn.Module, given: Tensor) -> float:
    if after is layer:
        return 1.0
    values = given.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(after(values).sum(), values)
    return slopes.abs().max().item()


PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.Identity)
SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Hardswish)


class Skip(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.branch(stream)


def random_network(seed: int, *, bias_free_relu: bool = False) -> Parts:
    """A model, a loss and a batch."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    bias = not bias_free_relu and chance.random() < 0.7
    activation = nn.ReLU if bias_free_relu else chance.choice((*PIECEWISE_LINEAR, *SMOOTH))
    examples, classes = chance.choice((1, 2, 5, 9)), chance.choice((1, 2, 4))
    if chance.random() < 0.5:
        features = chance.randint(1, 8)
        inputs, body, width = torch.randn(examples, features), *dense_body(chance, features, activation, bias)
    else:
        channels, side = chance.randint(1, 3), chance.randint(5, 7)
        inputs = torch.randn(examples, channels, side, side)
        body = conv_body(chance, channels, activation, bias)
        width = body(inputs).shape[1]
    model = nn.Sequential(body, nn.Linear(width, classes, bias=bias))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(chance.choice((0.3, 1.0, 3.0)))
    if classes > 1 and chance.random() < 0.5:
        return model, nn.CrossEntropyLoss(), (inputs, torch.randint(classes, (examples,)))
    return model, nn.MSELoss(), (inputs, torch.randn(examples, classes))


def dense_body(chance: random.Random, width: int, activation: Any, bias: bool) -> tuple[nn.Module, int]:
    parts: list[nn.Module] = []
    for _ in range(chance.randint(1, 6)):
        if parts and chance.random() < 0.3:
            inner = nn.Linear(width, width, bias=bias)
            parts.append(Skip(nn.Sequential(inner, activation())))
        else:
            following = chance.randint(1, 8)
            parts += [nn.Linear(width, following, bias=bias), activation()]
            width = following
    return nn.Sequential(*parts), width


def conv_body(chance: random.Random, channels: int, activation: Any, bias: bool) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(chance.randint(1, 3)):
        groups = chance.choice([g for g in (1, 2, 3) if channels % g == 0])
        out = groups * chance.randint(1, 2)
        kind = nn.ConvTranspose2d if chance.random() < 0.25 else nn.Conv2d
        settings = {"stride": chance.randint(1, 2), "padding": 1, "groups": groups, "bias": bias}
        settings["dilation"] = 1 if kind is nn.ConvTranspose2d else chance.randint(1, 2)
        parts += [
            nn.Sequential(nn.ZeroPad2d(1), kind(channels, out, chance.randint(2, 3), **settings)),
            activation(),
        ]
        channels = out
    if chance.random() < 0.5:
        parts.append(
            nn.AvgPool2d(2, ceil_mode=True) if chance.random() < 0.5 else nn.MaxPool2d(2, ceil_mode=True)
        )
    return nn.Sequential(*parts, nn.Flatten())
