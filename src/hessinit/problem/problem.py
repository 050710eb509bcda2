"""A model, a loss and batches as a function of the measured weights, and the errors of evaluating it."""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hessinit.errors import DerivativeError, ProblemError
from hessinit.problem import validate
from hessinit.problem.batches import Batch, cast, map_tensors, read_batches, tensors_in
from hessinit.problem.double_backward import Substitutes, default_device, twice_differentiable
from hessinit.problem.preserve import Draws, UserState, untouched_random_state
from hessinit.problem.preserve import uninterrupted as uninterrupted
from hessinit.problem.validate import Layer, check_apart, check_present, check_values, find_layers

_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")
_RECOMPUTES = (
    "the forward recomputes activations (torch.utils.checkpoint) or stores them by hooks, which would run "
    "outside of measuring, on other weights and buffers. Turn it off while measuring "
    "(in Hugging Face models: model.gradient_checkpointing_disable())."
)
# torch has no class of error for it, and as many wordings as operations.
_MIXED = re.compile(r"dtype|scalar type|type \(.*\) and .*type", re.IGNORECASE)


@contextlib.contextmanager
def explained(
    model: nn.Module, inputs: Any, forward: Forward | None, converted: bool
) -> Iterator[None]:
    """Turn known errors of the forward into a `ProblemError` with the way out; other errors pass."""
    try:
        yield
    except (TypeError, AttributeError) as failure:
        if forward is not None or isinstance(inputs, Tensor):
            raise
        if not any(True for _ in tensors_in(inputs)):
            what = f"the model takes no {type(inputs).__name__}: {failure}"
            raise ProblemError(f"{what}. Convert the inputs with torch.as_tensor.") from failure
        call = "model(**x)" if isinstance(inputs, Mapping) else "model(*x)"
        raise ProblemError(
            f"the model, called with one {type(inputs).__name__}, failed: {failure}. If it takes its "
            f"inputs one by one, pass forward=lambda model, x: {call}; several batches are passed as a list."
        ) from failure
    except (RuntimeError, ValueError, IndexError) as failure:
        if str(failure) == _RECOMPUTES:
            raise ProblemError(_RECOMPUTES) from None
        if "differentiated Tensors does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by a tensor that is held constant while measuring: a parameter "
                "that is frozen or not among the measured layers (by default biases and norm gains are not). "
                f'layers="{validate.EVERYTHING}" measures all that are trained.'
            ) from failure
        if converted and _MIXED.search(str(failure)):
            raise ProblemError(
                f"the forward failed on weights converted to float32 or better: {failure}. It seems to cast "
                "by itself; let it follow the weights instead, as in x.to(self.linear.weight.dtype)."
            ) from failure
        explain_module(failure, model, inputs)
        raise


def _frames_in_torch(failure: BaseException) -> list[types.FrameType]:
    """The frames of the failure if a module or function of torch.nn refused what it was given, or none."""
    walked = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    # `Substitutes` stands between a module and torch's function.
    frames = [frame for frame in walked if not frame.f_globals["__name__"].startswith("hessinit.")]
    by_torch = bool(frames) and frames[-1].f_globals["__name__"].startswith("torch.nn.")
    return frames if by_torch and not _NO_MEMORY.search(str(failure)) else []


def explain_module(failure: Exception, model: nn.Module, inputs: Any) -> None:
    """Name the layer that refused its input, and the shapes; return where it was no layer of torch."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(_frames_in_torch(failure)):
        module = frame.f_locals.get("self")
        given = frame.f_locals.get("input")
        if isinstance(module, nn.Module) and isinstance(given, Tensor) and not [*module.children()]:
            layer = (
                f"Its layer {names[id(module)]}, {module},"
                if names.get(id(module))
                else f"{module}"
            )
            raise ProblemError(
                f"the model failed on inputs of {describe_tensors(inputs)}. {layer} got "
                f"{describe_tensors(given)}: "
                f"{str(failure).rstrip('.')}. Change the layer, or the shape or dtype of the inputs."
            ) from failure


def describe_tensors(structure: Any) -> str:
    """Shape and dtype of every tensor, or the type of what is none."""
    found = [f"shape {tuple(one.shape)} in {str(one.dtype)[6:]}" for one in tensors_in(structure)]
    return ", ".join(found) or f"type {type(structure).__name__}"


@contextlib.contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """Turn what a loss of torch says of the shape or dtype of its arguments into a `ProblemError`."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as failure:
        if isinstance(failure, ProblemError) or not _frames_in_torch(failure):
            raise
        if not isinstance(output, Tensor):
            validate.check_output(output, None)
        way = "Give the loss what it takes: targets.long() for class numbers, targets.float() of the shape "
        way += "of the output for values"
        if isinstance(failure, IndexError) and isinstance(targets, Tensor):
            classes = output.shape[1 if output.ndim > 1 else 0]
            way = f"Class numbers go from 0 to {classes - 1} for {classes} outputs, and the targets from "
            way += f"{targets.min()} to {targets.max()}: renumber them, or give the last layer more outputs"
        raise ProblemError(
            f"the loss failed on an output of {describe_tensors(output)} and targets of "
            f"{describe_tensors(targets)}: {str(failure).rstrip('.')}. {way}."
        ) from failure


@contextlib.contextmanager
def explained_derivatives(*, of_loss: bool = False) -> Iterator[None]:
    """Turn torch's error on a missing second derivative into a `DerivativeError` that names the function."""
    try:
        yield
    except RuntimeError as failure:
        if (missing := _NO_DERIVATIVE.search(str(failure))) is None:
            raise
        name = missing[1].strip("_").removesuffix("_backward")
        raise DerivativeError(
            f"torch has no second derivative of {name}, which the loss uses, and every curvature needs it. "
            "Write the loss with other functions, such as log_softmax, torch.exp and sums."
            if of_loss
            else f"torch has no second derivative of {name}. Leave the weights before it out (layers=), or "
            "write the function with others, such as torch.exp, sums and square roots."
        ) from failure


Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]

# A softmax that is sure of its answer has a curvature of p(1 − p), which float32 cancels away. The
# loss is cheap beside the model, so it is taken in float64, unless the output is that large.
_MOST_FOR_DOUBLE = 2**22


class ProblemOptions(TypedDict, total=False):
    """The options of a `Problem`, which every verb shares."""

    layers: str | Iterable[str] | None
    forward: Forward | None
    dtype: torch.dtype | None
    dropout: str
    reduction: str
    check: bool
    seed: int
    precision: str


class Problem:
    """A model, a loss and batches, checked, as functions of the measured weights.

    `leaves` are copies of the weights, which take the place of the model's own wherever the model,
    the loss or `forward` holds them: neither a derivative nor a forward that writes into its
    weights touches the model's own tensors. Buffers, inputs and targets are cloned for every call:
    BatchNorm's statistics stay where they were, and an in-place forward finds the same data each
    time.
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
        reduction: str = "auto",
        check: bool = True,
        seed: int = 0,
        precision: str = "full",
    ) -> None:
        validate.check_arguments(model, loss, forward, dtype, dropout, reduction, check, precision)
        validate.check_order(model, loss)
        self.model = validate.unwrap(model)
        check_present(self.model)
        check_apart(self.model)
        self.layers: tuple[Layer, ...] = find_layers(self.model, layers)
        check_values(self.model, self.layers)
        validate.check_dropout(self.model, dropout)
        self.device = self.model.get_parameter(self.layers[0].parameter).device
        if self.device.type == "mps":
            why = "the model is on an Apple GPU (mps), which has no float64, and some steps need it"
            raise ProblemError(f"{why}; measure on the CPU: model.cpu().")
        kinds = {
            parameter.dtype
            for parameter in self.model.parameters()
            if parameter.is_floating_point()
        }
        self.dtype = dtype or (torch.float64 if torch.float64 in kinds else torch.float32)
        self.converts = kinds != {self.dtype}
        self.casts_output = (
            False  # to a lower precision than that of the weights, as logits.float()
        )
        self.loss = loss
        self.forward = forward
        self.seed = validate.check_whole("seed", seed, at_least=0)
        self.dropout = dropout
        self.reduction = reduction
        self.check = check
        self.drew = False
        self.precision = "full" if precision == "auto" else precision
        self.batches = tuple(self._convert(place, read) for place, read in read_batches(batch))
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._buffers = {id(buffer) for buffer in self.model.buffers()}
        self._default_device = default_device()
        self._read_weights()
        self._model_state = UserState(self.model, forward)
        self._loss_state = UserState(loss, beside=self._model_state)
        self.loss_dtype: torch.dtype | None = None  # known once the loss was called

    def _read_weights(self) -> None:
        measured = [layer.parameter for layer in self.layers]
        self.constants: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name not in measured:
                # What is not measured may be a large frozen model: it is shared.
                fixed = (
                    parameter.detach().clone() if parameter.is_inference() else parameter.detach()
                )
                self.constants[name] = cast(fixed, self.dtype, fixed.device)
        own = {name: self.model.get_parameter(name).detach() for name in measured}
        self.leaves = {
            name: one.to(self.dtype, copy=True).requires_grad_() for name, one in own.items()
        }

    @torch.inference_mode(False)
    def at_present_weights(self, check: bool) -> Problem:
        """The same problem for the values that the parameters have now; all else must be as it was."""
        check_values(self.model, self.layers)
        other = copy.copy(self)
        other.check = check
        other._read_weights()
        return other

    @property
    def examples(self) -> int:
        return sum(batch.size for batch in self.batches)

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    def _convert(self, place: str, read: Batch) -> Batch:
        inputs = cast(read.inputs, self.dtype, self.device)
        validate.check_finite_inputs(inputs, place)
        return Batch(inputs, read.targets, read.size)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings under which the problem is evaluated; errors are explained."""
        with (
            explained_memory(self),
            untouched_random_state(self.device),
            twice_differentiable(self.model, tf32=self.precision == "tf32"),
            explained_derivatives(),
        ):
            yield

    def output(
        self,
        batch: Batch,
        *,
        draw: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        plain: bool = False,
    ) -> Tensor:
        """The output as a function of `leaves`; `draw` seeds it; `drew` says whether anything was ever drawn.

        `weights` replace leaves and constants, and set the dtype; `plain` runs without
        `Substitutes`.
        """
        weights = weights or self._own_weights()
        with self._with_model(weights, draw):
            return self._call_model(batch, draw, weights, plain)

    def output_and_loss(
        self, batch: Batch, inspect: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor]:
        """Both of one call, as in training; `inspect` may refuse the output."""
        weights = self._own_weights()
        with self._with_model(weights, 0):
            output = self._call_model(batch, 0, weights, plain=False)
            inspect(output)
            loss = self._call_loss(output, batch, 0)
        return output, loss

    def output_and_gradients(
        self, batch: Batch, weights: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[Tensor, list[Tensor]]:
        """The output of the plain model, and the gradient of the loss by the named `weights`."""
        leaves = [weights[name].requires_grad_() for name in names]
        with self._with_model(weights, 0):
            output = self._call_model(batch, 0, weights, plain=True)
            loss = self._call_loss(output, batch, 0)
            # Inside, so that activation checkpoints recompute with these weights.
            found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return output.detach(), [one.to_dense() if one.is_sparse else one for one in found]

    def loss_of(self, output: Tensor, batch: Batch, *, draw: int = 0) -> Tensor:
        """The loss of an output, in float64 where it can be; `draw` and `drew` are those of `output`."""
        meets = self._loss_state.meets_it
        with self._with_model(self._own_weights(), draw) if meets else contextlib.nullcontext():
            return self._call_loss(output, batch, draw)

    def _own_weights(self) -> dict[str, Tensor]:
        return {**self.leaves, **self.constants}

    @contextlib.contextmanager
    def _with_model(self, weights: Mapping[str, Tensor], draw: int) -> Iterator[None]:
        dtype = next(iter(weights.values())).dtype

        def convert(tensor: Tensor) -> Tensor:
            if (name := self._names.get(id(tensor))) is not None:
                return weights[name]
            if id(tensor) in self._buffers:
                return cast(tensor, dtype, self.device).clone()
            return _widened(tensor, dtype)

        with self._model_state.with_stand_ins(convert, self.seed + draw) as self._stand_ins:
            yield
        del self._stand_ins  # they hold a copy of the weights where these are moved or in float64

    def _call_model(
        self, batch: Batch, draw: int, weights: Mapping[str, Tensor], plain: bool
    ) -> Tensor:
        dtype = next(iter(weights.values())).dtype
        # `cast` cuts the graph of inputs that require a gradient.
        given = batch.inputs if dtype == self.dtype else cast(batch.inputs, dtype, self.device)
        inputs = map_tensors(torch.clone, given)
        draws = Draws(self.seed + draw, self.device)
        # A recomputation finds the model's own tensors: of another dtype, or buffers that it would
        # write to.
        training = (module for module in self.model.modules() if module.training)
        stateful = any(True for module in training for _ in module.buffers(recurse=False))
        guarded = self.converts or stateful
        with (
            self._users_default_device(),
            explained(self.model, batch.inputs, self.forward, self.converts),
            disable_saved_tensors_hooks(_RECOMPUTES) if guarded else contextlib.nullcontext(),
            contextlib.nullcontext() if plain else Substitutes(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bf16(dtype)),
        ):
            result = (
                self.model(inputs) if self.forward is None else self.forward(self.model, inputs)
            )
        self.drew |= draws.happened() or self._stand_ins.drew()
        if self._in_bf16(dtype) and isinstance(result, Tensor) and result.dtype == torch.bfloat16:
            result = result.float()
        validate.check_output(result, self.forward)
        if result.dtype != dtype:  # Hugging Face models return logits.float()
            self.casts_output = True
            return result.to(dtype)
        # A bare weight as output has no node of its own in the graph.
        return result.clone() if result.is_leaf and result.requires_grad else result

    def _in_bf16(self, dtype: torch.dtype) -> bool:
        return self.precision == "bf16" and dtype == torch.float32

    def _call_loss(self, output: Tensor, batch: Batch, draw: int) -> Tensor:
        if self.loss_dtype is None:
            self.loss_dtype = output.dtype
            if output.numel() <= _MOST_FOR_DOUBLE:
                # It may be made for one dtype; what fails for another reason fails again.
                with contextlib.suppress(Exception):
                    value = self._call_loss_in(torch.float64, output, batch, draw)
                    self.loss_dtype = torch.float64
                    return value
        return self._call_loss_in(self.loss_dtype, output, batch, draw)

    def _call_loss_in(self, dtype: torch.dtype, output: Tensor, batch: Batch, draw: int) -> Tensor:
        given = output.to(dtype)
        targets = map_tensors(torch.clone, cast(batch.targets, dtype, self.device))
        draws = Draws(self.seed + draw, self.device)
        version = given._version
        seed = self.seed + draw
        with (
            self._loss_state.with_stand_ins(
                lambda tensor: _widened(tensor, dtype), seed
            ) as stand_ins,
            self._users_default_device(),
            explained_loss(output, batch.targets),
        ):
            value = self.loss(given, targets)
        self.drew |= draws.happened() or stand_ins.drew()
        validate.check_loss_value(value)
        if given._version != version:
            raise ProblemError(
                "the loss changes the model's output in place, so a second look would see another output; "
                "let it work on a copy (output / temperature instead of output.div_(temperature))."
            )
        return value

    def _users_default_device(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext() if self._default_device.type == "cpu" else self._default_device
        )


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, in `dtype` if that is wider.

    Its graph is kept, so that a weight behind it can be found.
    """
    wider = tensor.is_floating_point() and torch.finfo(dtype).bits > torch.finfo(tensor.dtype).bits
    if isinstance(tensor, nn.Parameter):  # of the loss, say: a constant here
        tensor = tensor.detach()
    return tensor.to(dtype) if wider else tensor.clone()


_NO_MEMORY = re.compile(
    "out of memory|not enough memory|n.t allocate memory|alloc_failed", re.IGNORECASE
)


@contextlib.contextmanager
def explained_memory(problem: Problem) -> Iterator[None]:
    """Turn a failed allocation into a `ProblemError` that says what to reduce."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        known = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
        if not known and not _NO_MEMORY.search(str(failure)):
            raise
        # The frames that failed still hold what they had built.
        traceback.clear_frames(failure.__traceback__)
        weights = sum(leaf.numel() for leaf in problem.leaves.values())
        raise ProblemError(
            f"out of memory on {problem.device} with {problem.examples} examples and {weights:,} weights. "
            "Pass fewer examples (all batches are held at once), or measure fewer layers (layers=...), or a "
            "single curvature without top, trace or density."
        ) from failure
