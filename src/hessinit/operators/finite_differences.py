"""The plain model at moved weights, as the user calls it: what derivatives are checked against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hessinit.operators.evaluation import Evaluation
from hessinit.problem.problem import Problem

Direction = Mapping[str, Tensor]


def output_at(
    evaluation: Evaluation,
    direction: Direction,
    step: float,
    dtype: torch.dtype,
    examples: Tensor | None = None,
) -> Tensor:
    """The output at the weights plus `step` times the direction, of some examples; costs one forward."""
    problem, weights = evaluation.problem, _moved(evaluation, direction, step, dtype)
    batch = evaluation.batch if examples is None else evaluation.batch.take(examples)
    with _in_the_users_parameters(problem, {name: weights[name] for name in direction}):
        with contextlib.suppress(RuntimeError), torch.no_grad():
            return problem.output(batch, weights=weights, plain=True)
        # A forward that differentiates by its inputs or its weights needs the graph; any other fails again.
        weights = {name: weight.requires_grad_(name in direction) for name, weight in weights.items()}
        return problem.output(batch, weights=weights, plain=True).detach()


def output_and_gradients_at(
    evaluation: Evaluation, direction: Direction, step: float, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The same with the gradient of the loss by the weights of the direction, as training would get it."""
    problem, weights = evaluation.problem, _moved(evaluation, direction, step, dtype)
    with _in_the_users_parameters(problem, {name: weights[name] for name in direction}):
        return problem.output_and_gradients(evaluation.batch, weights, list(direction))


def weights_in(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters of the model, the measured ones first, in another precision."""
    everything = {**problem.leaves, **problem.constants}
    return {
        name: weight.detach().to(dtype) if weight.is_floating_point() else weight.detach()
        for name, weight in everything.items()
    }


def _moved(
    evaluation: Evaluation, direction: Direction, step: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    weights = weights_in(evaluation.problem, dtype)
    for name, part in direction.items():
        weights[name] = torch.add(weights[name], part.to(dtype), alpha=step)
    return weights


@contextlib.contextmanager
def _in_the_users_parameters(problem: Problem, moved: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model's own parameters hold the moved values, for a forward that reaches them unseen.

    Only `parameter.data` is exchanged: the storage of the user's weights is not written to.
    """
    own = {name: problem.model.get_parameter(name) for name in moved}
    # Another dtype would cut a parameter off from hooks that wait for its gradient, as those of DDP do.
    fitting = [
        (parameter, moved[name].detach())
        for name, parameter in own.items()
        if parameter.dtype == moved[name].dtype and not parameter.is_inference()
    ]
    before = [parameter.data for parameter, _ in fitting]
    try:
        for parameter, values in fitting:
            parameter.data = values
        yield
    finally:
        for (parameter, _), values in zip(fitting, before, strict=True):
            parameter.data = values
