"""The independent truth: whole Jacobians by definition, in fp64, for layers that are modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


@dataclass(frozen=True)
class DenseProducts:
    """The norms for one example (or, with one group, for the batch as a whole)."""

    forward: float
    backward: float
    activation: float
    reach: float
    loss: float
    input_length: float

    @property
    def rigorous(self) -> float:
        return self.loss * (self.backward * self.activation * self.reach) ** 2

    def paper(self, taps: int) -> float:
        factor = self.backward * self.activation * self.forward * self.input_length
        return self.loss * taps * factor**2


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
    together: bool = False,
) -> list[DenseProducts]:
    """One row for each example; one for all with `together`."""
    model, (inputs, targets) = model.double(), batch
    inputs = inputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    output, seen, given, behind = run(model, layer, after, inputs)
    groups = [slice(0, len(inputs))] if together else [slice(i, i + 1) for i in range(len(inputs))]
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

        def reach(weight: Tensor, group: slice = group) -> Tensor:
            calls = [functional_call(layer, {"weight": weight}, (one[group].detach(),)) for one in seen]
            return torch.cat([call.flatten() for call in calls])

        backward = torch.cat([part[:, group].flatten(1) for part in jacrev(head)(zero)], dim=1)
        forward = jacrev(tail)(inputs)[:, group].flatten(1)
        reached = jacrev(reach)(layer.weight.detach()).flatten(1)
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
