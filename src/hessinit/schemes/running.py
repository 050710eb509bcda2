"""Running a model once with other weights, or its own, and leaving everything as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hessinit.errors import ProblemError
from hessinit.problem.batches import cast, map_tensors
from hessinit.problem.double_backward import twice_differentiable
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward


def prepare_sample(model: nn.Module, sample: Any) -> Any:
    """A copy of the sample in the precision and on the device of the model."""
    first = _first_real(model)
    return map_tensors(torch.clone, cast(sample, first.dtype, first.device))


def _first_real(model: nn.Module) -> nn.Parameter:
    everything = list(model.parameters())
    return next((parameter for parameter in everything if parameter.is_floating_point()), everything[0])


@contextlib.contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """What runs in here may draw, write attributes, count steps and differentiate: all is put back."""
    with (
        untouched_random_state(_first_real(model).device),
        UserState(model).lent(),
        twice_differentiable(model),  # with gradients, which the forward of a physics-informed network takes
        without_fast_path(),
    ):
        yield


def run(
    model: nn.Module,
    inputs: Any,
    forward: Forward | None,
    tensors: Mapping[str, Tensor],
    mode: contextlib.AbstractContextManager[Any],
) -> Any:
    """The model's output under `mode`, with `tensors` in the place of its parameters and buffers.

    A gradient is taken only of what the forward itself asks for.
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    renamed = {f"model.{name}": tensor for name, tensor in {**own, **tensors}.items()}
    try:
        with mode:
            return functional_call(_Called(model, forward), renamed, (inputs,))
    except ProblemError:
        raise
    except Exception as failure:
        if "does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by its own weights, as that of MAML does, and a scheme runs it "
                "on "
                'copies that have no gradient. initialize_ with scheme="keep" scales the weights as they are.'
            ) from failure
        call = "forward(model, sample)" if forward is not None else "model(sample)"
        raise ProblemError(
            f"the forward fails on the sample ({type(failure).__name__}: {failure}). sample= is what the "
            f"model is called with, as {call}: the inputs without targets. For another call, pass "
            "forward=, as lambda model, x: model(*x)."
        ) from failure


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Transformer layers in eval mode would run as one fused call."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Called(nn.Module):
    """Lets `functional_call` exchange the weights while the user's own `forward(model, inputs)` runs."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any] | None) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.call = model, call

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs) if self.call is None else self.call(self.model, inputs)
