"""Calls of a model on copies of its weights, which leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hessinit.errors import ProblemError
from hessinit.problem.batches import cast, map_tensors
from hessinit.problem.functional import explain_module
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward
from hessinit.problem.substitutes import twice_differentiable


def prepare_sample(model: nn.Module, sample: Any) -> Any:
    """A copy of the sample in the precision and on the device of the model."""
    first = first_real_parameter(model)
    return map_tensors(torch.clone, cast(sample, first.dtype, first.device))


def first_real_parameter(model: nn.Module) -> nn.Parameter:
    parameters = list(model.parameters())
    real = (parameter for parameter in parameters if parameter.is_floating_point())
    return next(real, parameters[0])


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Inside, the model may draw, write attributes and differentiate; all is restored."""
    with (
        untouched_random_state(first_real_parameter(model).device),
        UserState(model).with_stand_ins(),
        # With gradients, which the forward of a physics-informed network takes.
        twice_differentiable(model),
        _without_fused_layers(),
    ):
        yield


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """In eval mode, transformer layers run as their parts."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def run(
    model: nn.Module,
    inputs: Any,
    forward: Forward | None,
    tensors: Mapping[str, Tensor],
    mode: contextlib.AbstractContextManager[Any],
) -> Any:
    """The model's output under `mode`, with `tensors` in place of its parameters and buffers."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    replacing = {f"model.{name}": tensor for name, tensor in {**parameters, **tensors}.items()}
    try:
        with mode:
            return functional_call(_Called(model, forward), replacing, (inputs,))
    except ProblemError:
        raise
    except Exception as failure:
        if "does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by its own weights, as that of MAML does, and a scheme "
                'runs it on copies without gradient. initialize_ with scheme="keep" scales the '
                "weights as they are."
            ) from failure
        explain_module(failure, model, inputs)
        call = "model(sample)" if forward is None else "forward(model, sample)"
        raise ProblemError(
            f"the forward fails on the sample ({type(failure).__name__}: {failure}). sample= is "
            f"what the model is called with, as {call}: the inputs without targets. For another "
            "call, pass a hessinit.Problem with forward=, as lambda model, x: model(*x)."
        ) from failure


class _Called(nn.Module):
    """Lets `functional_call` exchange the weights while `forward(model, inputs)` runs."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any] | None) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self.call = call

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs) if self.call is None else self.call(self.model, inputs)
