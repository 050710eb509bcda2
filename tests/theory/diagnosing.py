"""Diagnoses of small problems, and what module hooks see: the independent truth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.curvature.evaluation import evaluate
from hessinit.diagnostics.diagnose import diagnose
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import Diagnostics


def diagnosis(model: nn.Module, loss: Any, batch: Any, **options: Any) -> dict[str, Diagnostics]:
    """By layer, as the report names it."""
    problem = Problem(model, loss, batch, **options)
    with problem.settings():
        found = diagnose(problem, evaluate(problem))
    assert list(found) == [layer.parameter for layer in problem.layers]
    return {layer.name: found[layer.parameter] for layer in problem.layers}


class Seen:
    """What a module gave, at every call, and the loss gradient by it."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def value(self) -> Tensor:
        return torch.cat([value.flatten() for value in self.values])

    def gradient(self) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in self.gradients])


def watch(
    model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Any, Any], names: list[str]
) -> tuple[dict[str, Seen], nn.Module]:
    """Run a copy with hooks on modules and on what they give, and `.backward()`; it keeps its `.grad`s."""
    model = copy.deepcopy(model)
    seen = {name: Seen() for name in names}
    for name in names:

        def hook(module: nn.Module, given: Any, output: Tensor, one: Seen = seen[name]) -> None:
            one.values.append(output.detach().clone())
            output.register_hook(one.gradients.append)

        model.get_submodule(name).register_forward_hook(hook)
    loss(model(batch[0]), batch[1]).backward()
    return seen, model


def assert_like(found: Diagnostics, value: Tensor, gradient: Tensor, before: Tensor | None = None) -> None:
    """Means and standard deviations to six figures of what they are made of."""
    pairs = [
        (found.activation_mean, found.activation_std, value),
        (found.gradient_mean, found.gradient_std, gradient),
    ]
    for mean, std, given in pairs:
        truth = given.detach()
        size = float(truth.double().square().mean().sqrt())
        assert size > 0
        assert abs(mean - float(truth.double().mean())) < 2e-6 * size
        assert abs(std - float(truth.double().std(correction=0))) < 2e-6 * size
    if before is not None:
        truth_before = float(before.double().std(correction=0))
        assert abs(found.preactivation_std - truth_before) < 2e-6 * truth_before
