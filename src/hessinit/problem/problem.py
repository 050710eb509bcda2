"""A model, a loss and batches in functional form: the one thing every operator differentiates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hessinit.errors import ProblemError
from hessinit.problem import checks, weights
from hessinit.problem.batches import Batch, cast, read_batches
from hessinit.problem.failures import explained, explained_derivatives, explained_loss
from hessinit.problem.layers import Layer, find_layers
from hessinit.problem.left_as_found import default_device, kept_attributes, twice_differentiable
from hessinit.problem.lending import Loan
from hessinit.problem.randomness import Draws, untouched_random_state
from hessinit.problem.structures import map_tensors
from hessinit.problem.substitutes import Substitutes

Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]


class Problem:
    """What is to be measured, checked once.

    The weights are seen through `leaves`: copies, so neither a derivative nor a forward that writes into its
    weights (`nn.Embedding` with max_norm does) ever touches the model's own tensors. Buffers, inputs and
    targets are cloned for every call: BatchNorm's statistics stay where they were, and an in-place forward
    finds the same data each time.
    """

    @torch.inference_mode(False)
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
        weights.check_present(self.model)
        self.layers: tuple[Layer, ...] = find_layers(self.model, layers)
        weights.check_values(self.model, self.layers)
        checks.check_dropout(self.model, dropout)
        self.device = self.model.get_parameter(self.layers[0].parameter).device
        kinds = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        self.dtype = dtype or (torch.float64 if torch.float64 in kinds else torch.float32)
        self.converts = kinds != {self.dtype}
        self.seed = seed
        self.dropout = dropout
        self.loss = loss
        self.forward = forward
        self.drew = False
        self.batches: tuple[Batch, ...] = tuple(
            self._convert(place, read) for place, read in read_batches(batch)
        )
        self.leaves: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        self._default_device = default_device()
        measured = {layer.parameter for layer in self.layers}
        renormed = {id(module.weight) for module in self.model.modules() if getattr(module, "max_norm", None)}
        for name, parameter in self.model.named_parameters():
            kind = self.dtype if parameter.is_floating_point() else parameter.dtype
            if name in measured:
                self.leaves[name] = parameter.detach().to(kind, copy=True).requires_grad_()
            else:
                # What is not measured may be a large frozen model: it is shared where nothing writes into it.
                written = id(parameter) in renormed or parameter.is_inference()
                self._constants[name] = parameter.detach().to(kind, copy=written)
        # In the order of `layers`, whatever the model's own order of parameters.
        self.leaves = {layer.parameter: self.leaves[layer.parameter] for layer in self.layers}
        self._loss_tensors = (
            _cast_module(loss, self.dtype, self.device) if isinstance(loss, nn.Module) else {}
        )

    @property
    def examples(self) -> int:
        """How many examples the batches hold together."""
        return sum(batch.size for batch in self.batches)

    def _convert(self, place: str, read: Batch) -> Batch:
        batch = Batch(
            cast(read.inputs, self.dtype, self.device), cast(read.targets, self.dtype, self.device), read.size
        )
        checks.check_finite_inputs(read.inputs, batch, place)
        return batch

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Everything that evaluates the problem runs inside this."""
        with untouched_random_state(self.device), twice_differentiable(self.model), explained_derivatives():
            yield

    def output(self, batch: Batch, *, draw: int = 0) -> Tensor:
        """The model's output, as a function of `leaves`; `draw` picks the random numbers.

        Afterwards `drew` says whether the forward drew any.
        """
        tensors: dict[str, Tensor] = {**self.leaves, **self._constants}
        for name, buffer in self.model.named_buffers():
            tensors[name] = cast(buffer, self.dtype, self.device).clone()
        inputs = map_tensors(torch.clone, batch.inputs)
        draws = Draws(self.seed + draw, self.device)
        with (
            self._calling_the_user(self.model, draw) as loan,
            explained(self.model, batch, self.forward, self.converts),
            Substitutes(),
        ):
            if self.forward is None:
                result = functional_call(self.model, tensors, (inputs,))
            else:
                result = functional_call(
                    _Calling(self.model, self.forward),
                    {f"model.{k}": v for k, v in tensors.items()},
                    (inputs,),
                )
        self.drew = draws.happened() or loan.drew()
        checks.check_output(result, self.forward)
        # A bare weight as output has no node of its own in the graph.
        return result.clone() if result.is_leaf and result.requires_grad else result

    def loss_of(self, output: Tensor, batch: Batch, *, draw: int = 0) -> Tensor:
        """The loss of an output, a scalar; `draw` and `drew` are those of `output`."""
        targets = map_tensors(torch.clone, batch.targets)
        draws, version = Draws(self.seed + draw, self.device), output._version
        with self._calling_the_user(self.loss, draw) as loan, explained_loss(output, batch):
            if self._loss_tensors:
                assert isinstance(self.loss, nn.Module)
                tensors = {name: tensor.clone() for name, tensor in self._loss_tensors.items()}
                value = functional_call(self.loss, tensors, (output, targets))
            else:
                value = self.loss(output, targets)
        self.drew = draws.happened() or loan.drew()
        checks.check_loss_value(value)
        if output._version != version:
            raise ProblemError(
                "the loss changes the model's output in place, so a second look would see another output; "
                "let it work on a copy (output / temperature instead of output.div_(temperature))."
            )
        return value

    @contextlib.contextmanager
    def _calling_the_user(self, called: Any, draw: int) -> Iterator[Loan]:
        loan = Loan(self.seed + draw)
        with contextlib.ExitStack() as stack:
            if isinstance(called, nn.Module):
                loan = stack.enter_context(kept_attributes(called, self.seed + draw))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            yield loan


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
