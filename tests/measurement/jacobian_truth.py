"""Truths for the Jacobian bounds: whole Jacobians by definition, in fp64; and random architectures."""

from __future__ import annotations

import random
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
    model: nn.Module, layer: nn.Module, after: nn.Module, loss: Any, batch: Any, *, joint: bool = False
) -> list[DenseProducts]:
    """One row for each example; one for all with `joint`."""
    model, (inputs, targets) = model.double(), batch
    inputs = inputs.double()
    output, seen, given, behind = run(model, layer, after, inputs)
    groups = [slice(0, len(inputs))] if joint else [slice(i, i + 1) for i in range(len(inputs))]
    zero = [torch.zeros_like(one) for one in behind]
    curvature = jacrev(jacrev(lambda z: loss(z, targets)))(output.detach())

    def products(group: slice) -> DenseProducts:
        def stacked(tensors: list[Tensor]) -> Tensor:
            return torch.cat([one[group].flatten() for one in tensors])

        def weight_map(weight: Tensor) -> Tensor:
            calls = [functional_call(layer, {"weight": weight}, (one[group].detach(),)) for one in seen]
            return torch.cat([call.flatten() for call in calls])

        pushed = jacrev(lambda moved: run(model, layer, after, inputs, moved)[0][group].flatten())(zero)
        backward = torch.cat([part[:, group].flatten(1) for part in pushed], dim=1)
        forward = jacrev(lambda x: stacked(run(model, layer, after, x)[1]))(inputs)[:, group].flatten(1)
        width, values, slope = output[group].numel(), stacked(given).detach().requires_grad_(), 1.0
        if after is not layer:
            slope = torch.autograd.grad(after(values).sum(), values)[0].abs().max().item()
        block = curvature[(group, *[slice(None)] * (output.ndim - 1), group)].reshape(width, width)
        reached = jacrev(weight_map)(layer.weight.detach()).flatten(1)
        length = inputs[group].norm().item()
        return DenseProducts(norm(forward), norm(backward), slope, norm(reached), norm(block), length)

    return [products(group) for group in groups]


def norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach(), 2).item()


ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus)


class Skip(nn.Sequential):
    def forward(self, stream: Tensor) -> Tensor:
        return stream + super().forward(stream)


def random_network(seed: int, *, bias_free_relu: bool = False) -> tuple[nn.Module, nn.Module, Any]:
    """A model, a loss and a batch."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    bias = not bias_free_relu and chance.random() < 0.7
    activation = nn.ReLU if bias_free_relu else chance.choice(ACTIVATIONS)
    examples, classes, images = chance.choice((1, 2, 5, 9)), chance.choice((1, 2, 4)), chance.random() < 0.5
    width = chance.randint(1, 3 if images else 8)
    inputs = torch.randn(examples, width, *([6, 6] if images else []))
    parts: list[nn.Module] = []
    for _ in range(chance.randint(1, 3 if images else 6)):
        if images:
            groups = chance.choice([number for number in (1, 2, 3) if width % number == 0])
            kind, following = chance.choice([nn.Conv2d, nn.ConvTranspose2d]), groups * chance.randint(1, 2)
            settings = {"stride": chance.randint(1, 2), "padding": 1, "groups": groups, "bias": bias}
            settings["dilation"] = chance.randint(1, 2) if kind is nn.Conv2d else 1
            parts += [nn.ZeroPad2d(1), kind(width, following, chance.randint(2, 3), **settings), activation()]
        elif parts and chance.random() < 0.3:
            following = width
            parts.append(Skip(nn.Linear(width, width, bias=bias), activation()))
        else:
            following = chance.randint(1, 8)
            parts += [nn.Linear(width, following, bias=bias), activation()]
        width = following
    body = nn.Sequential(*parts, *([nn.AvgPool2d(2, ceil_mode=True)] if images else []), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(body(inputs).shape[1], classes, bias=bias))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(chance.choice((0.3, 1.0, 3.0)))
    if classes > 1 and chance.random() < 0.5:
        return model, nn.CrossEntropyLoss(), (inputs, torch.randint(classes, (examples,)))
    return model, nn.MSELoss(), (inputs, torch.randn(examples, classes))
