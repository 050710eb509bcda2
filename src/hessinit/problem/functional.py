"""A problem in functional form: output and loss as functions of the measured weights."""

from __future__ import annotations

import contextlib
import copy
import re
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hessinit.errors import DerivativeError, ProblemError, argument
from hessinit.problem import checks
from hessinit.problem.batches import Batch, cast, map_tensors, read_batches, tensors_in
from hessinit.problem.checks import Layer, check_apart, check_present, check_values, find_layers
from hessinit.problem.preserve import Draws, StandIns, UserState, untouched_random_state
from hessinit.problem.problem import Forward, Problem
from hessinit.problem.substitutes import Substitutes, default_device, twice_differentiable

_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")
RECOMPUTES = (
    "the forward recomputes activations (torch.utils.checkpoint) or stores them by hooks, which "
    "would run outside of measuring, on other weights and buffers. Turn it off while measuring (in "
    "Hugging Face models: model.gradient_checkpointing_disable())."
)
# torch has no class of error for it, and as many wordings as operations.
_MIXED = re.compile(r"dtype|scalar type|type \(.*\) and .*type", re.IGNORECASE)


@contextlib.contextmanager
def explained(
    model: nn.Module, inputs: Any, forward: Forward | None, converted: bool
) -> Iterator[None]:
    """Turn known errors of the forward into a `ProblemError` with the way out; pass on others."""
    try:
        yield
    except (TypeError, AttributeError) as failure:
        if forward is not None or isinstance(inputs, Tensor):
            raise
        if not any(True for _ in tensors_in(inputs)):
            raise ProblemError(
                f"the model takes no {type(inputs).__name__}: {failure}. Convert the inputs with "
                "torch.as_tensor."
            ) from failure
        call = "model(**x)" if isinstance(inputs, Mapping) else "model(*x)"
        raise ProblemError(
            f"the model, called with one {type(inputs).__name__}, failed: {failure}. If it takes "
            "its inputs one by one, pass ",
            argument("forward"),
            f"lambda model, x: {call}; several batches are passed as a list.",
        ) from failure
    except (RuntimeError, ValueError, IndexError) as failure:
        if str(failure) == RECOMPUTES:
            raise DerivativeError(RECOMPUTES) from None
        if "differentiated Tensors does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by a tensor that is held constant while measuring: a "
                "parameter that is frozen or not among the measured layers (by default biases and "
                "norm gains are not). ",
                argument("layers", checks.EVERYTHING),
                " measures all that are trained.",
            ) from failure
        if converted and _MIXED.search(str(failure)):
            raise ProblemError(
                f"the forward failed on weights converted to float32 or better: {failure}. It "
                "seems to cast by itself; let it follow the weights instead, as in "
                "x.to(self.linear.weight.dtype)."
            ) from failure
        explain_module(failure, model, inputs)
        raise


def _frames_in_torch(failure: BaseException) -> list[types.FrameType]:
    """The frames of the failure if a module or function of torch.nn refused its input, or none."""

    def module_of(frame: types.FrameType) -> str:
        return str(frame.f_globals["__name__"])

    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    # `Substitutes` stands between a module and torch's function.
    frames = [frame for frame in frames if not module_of(frame).startswith("hessinit.")]
    by_torch = bool(frames) and module_of(frames[-1]).startswith("torch.nn.")
    if by_torch and not _NO_MEMORY.search(str(failure)):
        return frames
    return []


def explain_module(failure: Exception, model: nn.Module, inputs: Any) -> None:
    """Raise an error that names the layer of torch that refused its input; return if none did."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(_frames_in_torch(failure)):
        module = frame.f_locals.get("self")
        layer_input = frame.f_locals.get("input")
        is_layer = isinstance(module, nn.Module) and not [*module.children()]
        if is_layer and isinstance(layer_input, Tensor):
            layer = str(module)
            if name := names.get(id(module)):
                layer = f"Its layer {name}, {module},"
            raise ProblemError(
                f"the model failed on inputs of {describe_tensors(inputs)}. {layer} got "
                f"{describe_tensors(layer_input)}: {str(failure).rstrip('.')}. Change the layer, "
                "or the shape or dtype of the inputs."
            ) from failure


def describe_tensors(structure: Any) -> str:
    """Shape and dtype of every tensor, or the type of what is none."""
    tensors = [
        f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors_in(structure)
    ]
    return ", ".join(tensors) or f"type {type(structure).__name__}"


@contextlib.contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """Turn a complaint of torch's loss about shapes or dtypes into a `ProblemError`."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as failure:
        if isinstance(failure, ProblemError) or not _frames_in_torch(failure):
            raise
        if not isinstance(output, Tensor):
            checks.check_output(output, None)
        hint = (
            "Give the loss what it takes: targets.long() for class numbers, targets.float() of the "
            "shape of the output for values"
        )
        if isinstance(failure, IndexError) and isinstance(targets, Tensor):
            classes = output.shape[1 if output.ndim > 1 else 0]
            hint = (
                f"Class numbers go from 0 to {classes - 1} for {classes} outputs, and the targets "
                f"from {targets.min()} to {targets.max()}: renumber them, or give the last layer "
                "more outputs"
            )
        raise ProblemError(
            f"the loss failed on an output of {describe_tensors(output)} and targets of "
            f"{describe_tensors(targets)}: {str(failure).rstrip('.')}. {hint}."
        ) from failure


@contextlib.contextmanager
def explained_derivatives(*, of_loss: bool = False) -> Iterator[None]:
    """Turn torch's error on a missing second derivative into one that names the function."""
    try:
        yield
    except RuntimeError as failure:
        if (missing := _NO_DERIVATIVE.search(str(failure))) is None:
            raise
        name = missing[1].strip("_").removesuffix("_backward")
        if of_loss:
            raise DerivativeError(
                f"torch has no second derivative of {name}, which the loss uses, and every "
                "curvature needs it. Write the loss with other functions, such as log_softmax, "
                "torch.exp and sums."
            ) from failure
        raise DerivativeError(
            f"torch has no second derivative of {name}. Leave the weights before it out (",
            argument("layers"),
            "), or write the function with others, such as torch.exp, sums and square roots.",
        ) from failure


_NO_MEMORY = re.compile(
    "out of memory|not enough memory|n.t allocate memory|alloc_failed", re.IGNORECASE
)


@contextlib.contextmanager
def explained_memory(problem: FunctionalProblem) -> Iterator[None]:
    """Turn a failed allocation into a `ProblemError` that says what to reduce."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        out_of_memory = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
        if not out_of_memory and not _NO_MEMORY.search(str(failure)):
            raise
        # The frames that failed still hold what they had built.
        traceback.clear_frames(failure.__traceback__)
        weights = sum(leaf.numel() for leaf in problem.leaves.values())
        raise ProblemError(
            f"out of memory on {problem.device} with {problem.examples} examples and {weights:,} "
            "weights. Pass fewer examples (all batches are held at once), or measure fewer layers "
            "(",
            argument("layers"),
            "), or a single curvature without top, trace or density.",
        ) from failure


# A softmax that is sure of its answer has a curvature of p(1 − p), which float32 cancels away. The
# loss is cheap beside the model, so it is taken in float64, unless the output is that large.
_MOST_FOR_DOUBLE = 2**22


@dataclass(frozen=True)
class FirstCall:
    """The first output and loss of a batch, and what the call showed."""

    output: Tensor
    loss: Tensor
    drew: bool  # random numbers
    casts_output: bool  # to a lower precision than that of the weights, as logits.float()
    seconds: float


@dataclass(frozen=True)
class _ModelCall:
    output: Tensor
    drew: bool
    casts_output: bool


class FunctionalProblem:
    """A checked problem: its output and its loss as functions of the measured weights.

    `leaves` are copies of the weights, which take the place of the model's own wherever the model,
    the loss or `forward` holds them: neither a derivative nor a forward that writes into its
    weights touches the model's own tensors. Buffers, inputs and targets are cloned for every call:
    BatchNorm's statistics stay where they were, and an in-place forward finds the same data each
    time.
    """

    # Without `Substitutes`, and with outputs that the forward itself has rounded to 16 bits.
    runs_as_trained = False

    @torch.inference_mode(False)
    def __init__(self, problem: Problem) -> None:
        self.model = self._find_model(problem)
        check_apart(self.model)
        self.layers: tuple[Layer, ...] = find_layers(self.model, problem.layers)
        self._check_values()
        checks.check_dropout(self.model, problem.dropout)
        parameters = dict(self.model.named_parameters())
        self.device = parameters[self.layers[0].parameter].device
        if self.device.type == "mps":
            raise ProblemError(
                "the model is on an Apple GPU (mps), which has no float64, and some steps need it; "
                "measure on the CPU: model.cpu()."
            )
        kinds = {parameter.dtype for parameter in parameters.values()}
        dtypes = {dtype for dtype in kinds if dtype.is_floating_point}
        self.dtype = self._choose_dtype(problem, dtypes)
        self.converts = dtypes != {self.dtype}
        # A recomputation finds the model's own tensors: of another dtype, or buffers that it would
        # write to.
        training = (module for module in self.model.modules() if module.training)
        stateful = any(True for module in training for _ in module.buffers(recurse=False))
        self._guarded = self.converts or stateful
        self.loss = problem.loss
        self.forward = problem.forward
        self.seed = problem.seed
        self.dropout = problem.dropout
        self.reduction = problem.reduction
        self.check = problem.check
        self.precision = "full" if problem.precision == "auto" else problem.precision
        named_batches = read_batches(problem.batch)
        self.batches = tuple(self._convert(name, batch) for name, batch in named_batches)
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._buffers = {id(buffer) for buffer in self.model.buffers()}
        self._default_device = default_device()
        self._read_weights()
        self._model_state = UserState(self.model, self.forward)
        self._loss_state = UserState(self.loss, beside=self._model_state)
        self._loss_dtype: torch.dtype | None = None

    def _find_model(self, problem: Problem) -> nn.Module:
        model = checks.unwrap(problem.model)
        check_present(model)
        return model

    def _choose_dtype(self, problem: Problem, dtypes: set[torch.dtype]) -> torch.dtype:
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        return problem.dtype or widest

    def _check_values(self) -> None:
        check_values(self.model, self.layers)

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
        weights = {name: self.model.get_parameter(name).detach() for name in measured}
        self.leaves = {
            name: weight.to(self.dtype, copy=True).requires_grad_()
            for name, weight in weights.items()
        }

    @torch.inference_mode(False)
    def at_present_weights(self, check: bool) -> FunctionalProblem:
        """The same problem for the values that the parameters have now.

        All else must be as it was.
        """
        self._check_values()
        other = copy.copy(self)
        other._start_again(check)
        return other

    def _start_again(self, check: bool) -> None:
        self.check = check
        self._read_weights()

    @property
    def examples(self) -> int:
        return sum(batch.size for batch in self.batches)

    def weights_of_forward(self) -> dict[str, Tensor]:
        """The tensors that the forward sees as the parameters."""
        return {**self.leaves, **self.constants}

    def output_at_factors(self, batch: Batch, factors: Mapping[str, float]) -> Tensor:
        """The output with these factors on the parameters."""
        weights = self.weights_of_forward()
        scaled = {name: weight * factors.get(name, 1.0) for name, weight in weights.items()}
        return self.output(batch, weights=scaled)

    def totals(self, numbers: Tensor) -> list[float]:
        """The numbers; in place on ranks in lockstep, their sums over the ranks."""
        return numbers.tolist()

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    def _convert(self, prefix: str, batch: Batch) -> Batch:
        inputs = cast(batch.inputs, self.dtype, self.device)
        checks.check_finite_inputs(inputs, prefix)
        return Batch(inputs, batch.targets, batch.size)

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

    @property
    def loss_dtype(self) -> torch.dtype | None:
        """The dtype in which the loss is taken; None before its first call."""
        return self._loss_dtype

    def output(
        self,
        batch: Batch,
        *,
        draw: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        plain: bool = False,
    ) -> Tensor:
        """The output as a function of `leaves`; `draw` is added to the seed of its random numbers.

        `weights` replace leaves and constants, and set the dtype; `plain` runs without
        `Substitutes`.
        """
        weights = weights or self._own_weights()
        with self._with_model(weights, draw) as stand_ins:
            return self._call_model(batch, draw, weights, stand_ins, plain).output

    def output_and_loss(self, batch: Batch, inspect: Callable[[Tensor], None]) -> FirstCall:
        """Both of one call, as in training; `inspect` may refuse the output."""
        started = self.clock()
        weights = self._own_weights()
        with self._with_model(weights, 0) as stand_ins:
            call = self._call_model(batch, 0, weights, stand_ins, self.runs_as_trained)
            inspect(call.output)
            loss, loss_drew = self._call_loss(call.output, batch, 0)
        seconds = self.clock() - started
        return FirstCall(call.output, loss, call.drew or loss_drew, call.casts_output, seconds)

    def clock(self) -> float:
        """The time in seconds, once the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def output_and_gradients(
        self, batch: Batch, weights: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[Tensor, list[Tensor]]:
        """The output of the plain model, and the gradient of the loss by the named `weights`."""
        leaves = [weights[name].requires_grad_() for name in names]
        with self._with_model(weights, 0) as stand_ins:
            output = self._call_model(batch, 0, weights, stand_ins, plain=True).output
            loss, _ = self._call_loss(output, batch, 0)
            # Inside, so that activation checkpoints recompute with these weights.
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        dense = [part.to_dense() if part.is_sparse else part for part in gradients]
        return output.detach(), dense

    def loss_of(self, output: Tensor, batch: Batch, *, draw: int = 0) -> Tensor:
        """The loss of an output, in float64 where it can be; `draw` is that of `output`."""
        model: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._loss_state.meets_it:
            model = self._with_model(self._own_weights(), draw)
        with model:
            loss, _ = self._call_loss(output, batch, draw)
        return loss

    def _own_weights(self) -> dict[str, Tensor]:
        return {**self.leaves, **self.constants}

    @contextlib.contextmanager
    def _with_model(self, weights: Mapping[str, Tensor], draw: int) -> Iterator[StandIns]:
        dtype = next(iter(weights.values())).dtype

        def convert(tensor: Tensor) -> Tensor:
            if (name := self._names.get(id(tensor))) is not None:
                return weights[name]
            if id(tensor) in self._buffers:
                return cast(tensor, dtype, self.device).clone()
            return _widened(tensor, dtype)

        with self._model_state.with_stand_ins(convert, self.seed + draw) as stand_ins:
            yield stand_ins

    def _call_model(
        self,
        batch: Batch,
        draw: int,
        weights: Mapping[str, Tensor],
        stand_ins: StandIns,
        plain: bool,
    ) -> _ModelCall:
        dtype = next(iter(weights.values())).dtype
        # `cast` cuts the graph of inputs that require a gradient.
        inputs = batch.inputs
        if dtype != self.dtype:
            inputs = cast(inputs, dtype, self.device)
        inputs = map_tensors(torch.clone, inputs)
        draws = Draws(self.seed + draw, self.device)
        with (
            self._users_default_device(),
            explained(self.model, batch.inputs, self.forward, self.converts),
            disable_saved_tensors_hooks(RECOMPUTES) if self._guarded else contextlib.nullcontext(),
            contextlib.nullcontext() if plain else Substitutes(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bf16(dtype)),
        ):
            if self.forward is None:
                output = self.model(inputs)
            else:
                output = self.forward(self.model, inputs)
        drew = draws.happened() or stand_ins.drew()
        may_be_half = self.runs_as_trained or self._in_bf16(dtype)
        if may_be_half and isinstance(output, Tensor) and output.dtype.itemsize < 4:
            output = output.float() if output.is_floating_point() else output
        checks.check_output(output, self.forward)
        casts = output.dtype != dtype  # Hugging Face models return logits.float()
        if casts:
            output = output.to(dtype)
        elif output.is_leaf and output.requires_grad:
            # A bare weight as output has no node of its own in the graph.
            output = output.clone()
        return _ModelCall(output, drew, casts)

    def _in_bf16(self, dtype: torch.dtype) -> bool:
        return self.precision == "bf16" and dtype == torch.float32

    def _call_loss(self, output: Tensor, batch: Batch, draw: int) -> tuple[Tensor, bool]:
        """The loss, and whether it drew random numbers."""
        if self._loss_dtype is None:
            self._loss_dtype = output.dtype
            if output.numel() <= _MOST_FOR_DOUBLE:
                # It may be made for one dtype; what fails for another reason fails again.
                with contextlib.suppress(Exception):
                    result = self._call_loss_in(torch.float64, output, batch, draw)
                    self._loss_dtype = torch.float64
                    return result
        return self._call_loss_in(self._loss_dtype, output, batch, draw)

    def _call_loss_in(
        self, dtype: torch.dtype, output: Tensor, batch: Batch, draw: int
    ) -> tuple[Tensor, bool]:
        converted = output.to(dtype)
        targets = map_tensors(torch.clone, cast(batch.targets, dtype, self.device))
        seed = self.seed + draw
        draws = Draws(seed, self.device)
        version = converted._version

        def convert(tensor: Tensor) -> Tensor:
            return _widened(tensor, dtype)

        with (
            self._loss_state.with_stand_ins(convert, seed) as stand_ins,
            self._users_default_device(),
            explained_loss(output, batch.targets),
        ):
            value = self.loss(converted, targets)
        checks.check_loss_value(value)
        if converted._version != version:
            raise ProblemError(
                "the loss changes the model's output in place, so a second look would see another "
                "output; let it work on a copy (output / temperature instead of "
                "output.div_(temperature))."
            )
        return value, draws.happened() or stand_ins.drew()

    def _users_default_device(self) -> contextlib.AbstractContextManager[Any]:
        if self._default_device.type == "cpu":
            return contextlib.nullcontext()
        return self._default_device


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, in `dtype` if that is wider.

    Its graph is kept, so that a weight behind it can be found.
    """
    wider = tensor.is_floating_point() and torch.finfo(dtype).bits > torch.finfo(tensor.dtype).bits
    if isinstance(tensor, nn.Parameter):  # of the loss, say: a constant here
        tensor = tensor.detach()
    return tensor.to(dtype) if wider else tensor.clone()
