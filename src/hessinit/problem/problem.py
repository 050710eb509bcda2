"""A model, a loss and batches in functional form: the one thing every operator differentiates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hessinit.problem import checks
from hessinit.problem.batches import Batch, cast, read_batches
from hessinit.problem.layers import Layer, find_layers
from hessinit.problem.left_as_found import random_state, twice_differentiable

Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]


class Problem:
    """What is to be measured, checked once.

    The weights are seen through `leaves`: detached views (or casts) of the parameters, so no derivative ever touches the
    model's own tensors. Buffers are cloned for every forward, so BatchNorm's statistics stay where they were.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Any,
        *,
        layers: str | Iterable[str] | None = None,
        forward: Forward | None = None,
        dtype: torch.dtype | None = None,
        dropout: str = "refuse",
        seed: int = 0,
    ) -> None:
        checks.check_arguments(model, loss, forward, dtype, dropout)
        self.model = checks.unwrap(model)
        self.layers: tuple[Layer, ...] = find_layers(self.model, layers)
        checks.check_parameters(self.model, self.layers)
        checks.check_dropout(self.model, dropout)
        first = self.model.get_parameter(self.layers[0].parameter)
        self.device = first.device
        self.dtype = dtype or (torch.promote_types(first.dtype, torch.float32))
        self.seed = seed
        self.dropout = dropout
        self.loss = loss
        self.forward = forward
        self.batches: tuple[Batch, ...] = tuple(
            Batch(cast(b.inputs, self.dtype, self.device), cast(b.targets, self.dtype, self.device), b.size)
            for b in read_batches(batch)
        )
        for position, read in enumerate(self.batches):
            checks.check_finite_batch(read, position, len(self.batches))
        self.leaves: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        measured = {layer.parameter for layer in self.layers}
        for name, parameter in self.model.named_parameters():
            view = parameter.detach().to(self.dtype) if parameter.is_floating_point() else parameter.detach()
            if name in measured:
                self.leaves[name] = view.requires_grad_()
            else:
                self._constants[name] = view
        # In the order of `layers`, whatever the model's own order of parameters.
        self.leaves = {layer.parameter: self.leaves[layer.parameter] for layer in self.layers}
        self._loss_tensors = _cast_module(loss, self.dtype, self.device) if isinstance(loss, nn.Module) else {}

    @property
    def examples(self) -> int:
        """How many examples the batches hold together."""
        return sum(batch.size for batch in self.batches)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Everything that evaluates the problem runs inside this."""
        with twice_differentiable(self.model):
            yield

    def output(self, batch: Batch, *, draw: int = 0) -> Tensor:
        """The model's output, as a function of `leaves`. `draw` picks the random numbers a frozen dropout sees."""
        tensors: dict[str, Tensor] = {**self.leaves, **self._constants}
        for name, buffer in self.model.named_buffers():
            tensors[name] = cast(buffer, self.dtype, self.device).clone()
        with random_state(self.seed + draw, self.device):
            if self.forward is None:
                result = functional_call(self.model, tensors, (batch.inputs,))
            else:
                result = functional_call(
                    _Calling(self.model, self.forward), {f"model.{k}": v for k, v in tensors.items()}, (batch.inputs,)
                )
        checks.check_output(result, self.forward)
        return result  # type: ignore[no-any-return]

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of an output, a scalar."""
        with random_state(self.seed, self.device):
            if isinstance(self.loss, nn.Module):
                value = functional_call(self.loss, self._loss_tensors, (output, batch.targets))
            else:
                value = self.loss(output, batch.targets)
        checks.check_loss_value(value)
        return value  # type: ignore[no-any-return]


class _Calling(nn.Module):
    """Lets `functional_call` swap the weights while the user's own `forward(model, inputs)` runs."""

    def __init__(self, model: nn.Module, call: Forward) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self.call = call

    def forward(self, inputs: Any) -> Tensor:
        return self.call(self.model, inputs)


def _cast_module(module: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: cast(tensor, dtype, device) for name, tensor in named}


