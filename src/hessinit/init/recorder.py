"""Records the calls of torch functions in one forward, on a sample or on zeros, as a trace.

A call with a weight becomes the step of that weight, as it is stored. Multi-head attention and
recurrent layers, whose weights hold several output blocks (q, k and v; the gates), become several
steps. A call on signals becomes a step by what its operation does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError, argument
from hessinit.init.trace import (
    Derived,
    ReplayableCall,
    Shape,
    Signal,
    Step,
    Trace,
    WeightUse,
    leaves_of,
    map_leaves,
    sources_of,
)
from hessinit.problem.batches import cast, map_tensors, tensors_in
from hessinit.problem.functional import explain_module
from hessinit.problem.graph import name_of, operation_named
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward
from hessinit.problem.shards import in_shape_of, is_dtensor, without_gathering
from hessinit.problem.substitutes import twice_differentiable

# --- Calls of a model on copies of its weights, which leave it as it was


def prepare_sample(model: nn.Module, sample: Any) -> Any:
    """A copy of the sample in the precision and on the device of the model."""
    first = first_real_parameter(model)
    return map_tensors(torch.clone, cast(sample, first.dtype, first.device))


def first_real_parameter(model: nn.Module) -> nn.Parameter:
    parameters = list(model.parameters())
    return next(filter(Tensor.is_floating_point, parameters), parameters[0])


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
    """The model's output under `mode`, with `tensors` in place of its parameters and buffers.

    FSDP2 itself gathers a sharded parameter.
    """
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not is_dtensor(parameter)
    }
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
                "runs it on copies without gradient. initialize_ with ",
                argument("scheme", "keep"),
                " scales the weights as they are.",
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


# --- The steps that a call of a torch function stands for

_ACTIVATIONS = {"rnn_tanh": torch.tanh, "rnn_relu": torch.relu}


def append_weight(
    trace: Trace, name: str, weight: Derived, use: WeightUse, data: Any, shape: Shape = None
) -> Signal:
    """Append the step of a weight, which completes `use`; note a weight that no scheme can set."""
    sources = sources_of(data)
    if not sources and any(isinstance(leaf, Tensor) for leaf in leaves_of(data)):
        sources = (trace.append(Step("constant", "constant")).index,)
    if not weight.name or weight.how == "slice":
        reason = "used in slices" if weight.name else "mixed from several parameters"
        trace.note_other_use(weight.parameters, f"{reason} by {name}")
        return trace.append(Step(name, "weight", sources, shape=shape))
    stored = tuple(weight.value.shape)
    use = replace(
        use,
        parameter=weight.name,
        shape=stored[::-1] if weight.transposed else stored,
        computed=weight.how == "computed" or weight.parameters != {weight.name},
        outputs_last=use.outputs_last ^ (weight.transposed and use.kind == "dense"),
    )
    return trace.append(Step(name, "weight", sources, use=use, shape=shape))


def append_call_with_weight(
    trace: Trace, name: str, call: ReplayableCall, shape: Shape
) -> Signal | None:
    """Append the step of the weight; None where the call does not use a weight but makes one."""
    operation = operation_named(name)
    arguments = operation.arguments(call.args, call.kwargs)
    if operation.stores == "factor":
        return _append_product(trace, name, arguments, shape)
    data = [arguments.get("input", arguments.get("input1"))]
    if operation.stores == "bilinear":
        data.append(arguments["input2"])
    weight = arguments["weight"]
    if not isinstance(weight, Derived) or isinstance(data[0], Derived):
        return None
    use = WeightUse(kind=operation.stores)  # type: ignore[arg-type]
    if "convolution" in operation.stores:
        dimensions = int(name.rstrip("d")[-1])
        stride = arguments.get("stride", 1)
        strides = tuple(stride) if isinstance(stride, (tuple, list)) else (stride,)
        if len(strides) == 1:
            strides *= dimensions
        use = replace(use, stride=strides, groups=arguments.get("groups", 1))
    signal = append_weight(trace, name, weight, use, data, shape)
    if name == "embedding_bag" and arguments.get("mode", "mean") in ("sum", 0):
        return trace.append(Step("sum", "pool", (signal.index,), shape=shape))
    return signal


def _append_product(
    trace: Trace, name: str, arguments: dict[str, Any], shape: Shape
) -> Signal | None:
    first = arguments.get("input", arguments.get("mat1"))
    second = arguments.get("other", arguments.get("mat2"))
    weights = [factor for factor in (first, second) if isinstance(factor, Derived)]
    signals = [factor for factor in (first, second) if isinstance(factor, Signal)]
    # A buffer times a weight makes a weight, as spectral normalization does, and does not use it.
    if len(weights) != 1 or len(signals) != 1 or weights[0].value.ndim != 2:
        return None
    is_second = weights[0] is second
    if not is_second and shape is not None and len(shape) > 1:
        # The output's channels are not in its last dimension, where blocks are looked for.
        shape = None
    use = WeightUse(outputs_last=is_second)
    return append_weight(trace, name, weights[0], use, signals, shape)


def _append_attention(trace: Trace, name: str, call: ReplayableCall) -> tuple[Signal, Signal]:
    arguments = operation_named(name).arguments(call.args, call.kwargs)
    data = [arguments["query"], arguments["key"], arguments["value"]]
    for bias, role in (("bias_k", "key"), ("bias_v", "value")):
        parameter = arguments.get(bias)
        if isinstance(parameter, Derived):
            trace.note_other_use([parameter.name], f"added as a {role} by {name}")
    use = WeightUse(inside=name)
    if arguments.get("use_separate_proj_weight"):
        weights = [arguments[f"{part}_proj_weight"] for part in "qkv"]
        projected = [
            append_weight(trace, name, weight, use, [signal])
            for weight, signal in zip(weights, data, strict=True)
        ]
    else:
        weight = arguments["in_proj_weight"]
        fused = replace(use, blocks=(weight.value.shape[0] // 3,) * 3)
        projected = [append_weight(trace, name, weight, fused, data)]
    mixed = trace.append(Step("attention", "mix", tuple(signal.index for signal in projected)))
    return append_weight(trace, name, arguments["out_proj_weight"], use, [mixed]), mixed


def _append_recurrent_layer(
    trace: Trace, kind: str, weights: list[Derived], data: Any, state: Any
) -> Signal:
    """One layer in one direction; `weights` are ih, hh and perhaps the projection."""
    activation = _ACTIVATIONS.get(kind)
    gates = operation_named(kind).gates
    if not isinstance(data, Signal):
        data = trace.append(Step("constant", "constant"))

    def weigh(weight: Derived, source: Signal, gates: int) -> Signal:
        blocks = (weight.value.shape[0] // gates,) * gates if gates > 1 else ()
        use = WeightUse(blocks=blocks, inside=kind)
        return append_weight(trace, kind, weight, use, [source])

    def activate(signal: Signal) -> Signal:
        if activation is None:
            return signal
        call = ReplayableCall(activation, (signal,))
        return trace.append(Step(activation.__name__, "elementwise", (signal.index,), call))

    previous = activate(trace.append(Step("hidden state", "state", sources_of(state))))
    from_input = weigh(weights[0], data, gates)
    from_state = weigh(weights[1], previous, gates)
    joined = "gates" if activation is None else "sum"
    step = Step("hidden state", joined, (from_input.index, from_state.index))
    hidden = activate(trace.append(step))
    return weigh(weights[2], hidden, 1) if len(weights) > 2 else hidden


def _append_recurrent(trace: Trace, name: str, call: ReplayableCall) -> tuple[Signal, ...]:
    """`torch.lstm(input, hx, weights, …)`, or with the lengths of a packed sequence second."""
    first = 3 if isinstance(call.args[3], (tuple, list)) else 2
    flat, _, layers, dropout, training, bidirectional = call.args[first : first + 6]
    weights = [weight for weight in flat if weight.value.ndim > 1]
    directions = 2 if bidirectional else 1
    weights_each = len(weights) // (layers * directions)
    state = call.args[first - 1]
    data = call.args[0]
    for layer in range(layers):
        if layer and dropout:
            step = Step(
                f"dropout {dropout:g}",
                "dropout",
                (data.index,),
                keep=1 - dropout,
                active=bool(training),
            )
            data = trace.append(step)
        sides = []
        for direction in range(directions):
            start = (layer * directions + direction) * weights_each
            cell = weights[start : start + weights_each]
            sides.append(_append_recurrent_layer(trace, name, cell, data, state))
        data = sides[0]
        if directions > 1:
            data = trace.append(Step("cat", "cat", tuple(side.index for side in sides)))
    return (data,) * (3 if name == "lstm" else 2)


def _append_cell(trace: Trace, name: str, call: ReplayableCall) -> Signal | tuple[Signal, Signal]:
    arguments = operation_named(name).arguments(call.args, call.kwargs)
    kind = name.removesuffix("_cell")
    hidden = _append_recurrent_layer(
        trace, kind, [arguments["w_ih"], arguments["w_hh"]], arguments["input"], arguments["hx"]
    )
    return (hidden, hidden) if kind == "lstm" else hidden


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# What each appends; returns the signals of the call's results.
COMPOSITES: dict[str, Callable[[Trace, str, ReplayableCall], Any]] = {
    "multi_head_attention_forward": _append_attention,
    **dict.fromkeys(_RECURRENT, _append_recurrent),
    **dict.fromkeys([f"{kind}_cell" for kind in _RECURRENT], _append_cell),
}


def step_of(name: str, call: ReplayableCall) -> Step:
    """The step of a call that gets a signal, and no weight to map it with."""
    operands = (*call.args[1:2], *call.kwargs.values())
    if name in ("max", "min") and any(map(_is_tensor, operands)):
        name = f"{name}imum"  # of two tensors, not over a dimension
    operation = operation_named(name)
    sources = call.sources
    kind = operation.role
    if kind == "dropout":
        return _dropout(name, call)
    # A mask that is a signal may be made of the very signal that it multiplies, as in a handwritten
    # ReLU.
    if kind == "elementwise" or (name == "masked_fill" and len(sources) > 1):
        return _elementwise(name, call)
    if kind in ("rearrange", "norm", "pool", "split"):
        # The further signals are indices, masks, statistics or gains.
        passes = operation.casts or name in ("masked_fill", "sort")
        return Step(name, kind, sources[:1], call=None if passes else call)
    if kind == "mix" and len(sources) == 1 and any(map(_is_tensor, call.constants)):
        kind = "unknown"  # a constant matrix, as of a graph: it may add up any number of entries
    return Step(name, kind, sources, call=call)


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, (Signal, Tensor))


def _dropout(name: str, call: ReplayableCall) -> Step:
    operation = operation_named(name)
    arguments = operation.arguments(call.args, call.kwargs)
    probability = arguments.get("p", 0.5)
    sources = call.sources[:1]
    if probability == 0:
        return Step(name, "rearrange", sources)
    return Step(
        f"{name.rstrip('123d')} {probability:g}",
        "dropout",
        sources,
        keep=1.0 if operation.keeps_moments else 1.0 - probability,
        active=bool(arguments.get("training", True)),
    )


def _elementwise(name: str, call: ReplayableCall) -> Step:
    """A function of the signals, if every constant in it acts like one number."""
    sources = call.sources
    operands = [*(parameter.value for parameter in call.parameters), *call.constants]
    numbers = {id(operand): _one_number(operand, name) for operand in operands}
    arrays = [operand for operand in operands if numbers[id(operand)] is None]
    step = _with_constants(name, call, operands, arrays)
    if step is not None:
        return step

    def number(leaf: Any) -> Any:
        value = leaf.value if isinstance(leaf, Derived) else leaf
        return numbers.get(id(value), value)

    args, kwargs = map_leaves(number, [call.args, dict(call.kwargs)])
    if name == "rrelu":  # its slope is drawn in train mode; the mean slope stands for it
        args = args[:3]
        kwargs = {key: bound for key, bound in kwargs.items() if key in ("lower", "upper")}
    return Step(name, "elementwise", sources, call=ReplayableCall(call.function, args, kwargs))


def _with_constants(
    name: str, call: ReplayableCall, operands: list[Tensor], arrays: list[Tensor]
) -> Step | None:
    """A bias, a sum with a constant, a scale or a mask; None for a function of the signals alone.

    The `operands` are constants and parameters, `arrays` those that are more than one number.
    """
    operation = operation_named(name)
    sources = call.sources
    is_learned = bool(call.parameters)
    if operation.adds and len(sources) == 1 and (arrays or is_learned):
        is_bias = is_learned and all(map(_is_vector, operands))
        return Step("bias", "rearrange", sources) if is_bias else Step(name, "sum", sources)
    if name in ("mul", "div") and len(sources) == 1 and is_learned:
        # A learnable scale, as of a LayerScale or a branch that starts at 0, is not for a weight to
        # undo.
        return Step("scale", "rearrange", sources)
    if any(map(_is_mask, operands if operation.scales else arrays)):
        return Step("mask", "rearrange", sources[:1])
    return Step(name, "unknown", sources) if arrays else None


def derive(name: str, parameters: list[Derived], result: Any) -> Derived:
    """What a call makes of parameters alone."""
    operation = operation_named(name)
    first = parameters[0]
    names = frozenset().union(*(parameter.parameters for parameter in parameters))
    same_shape = isinstance(result, Tensor) and result.shape == first.value.shape
    passes = operation.casts or (operation.role == "rearrange" and same_shape)
    if operation.slices:
        return replace(first, parameters=names, how=first.how or "slice")
    if operation.transposes and first.value.ndim == 2 and not first.how:
        return replace(first, parameters=names, transposed=not first.transposed)
    return replace(first, parameters=names, how=first.how if passes else "computed")


def _is_vector(value: Tensor) -> bool:
    """At most one number for each channel, as a bias or a gain; (1, C, 1, 1) counts."""
    return value.numel() <= max(value.shape, default=1)


def _is_mask(value: Tensor) -> bool:
    """A constant of zeros and one other number: what it lets through keeps its size."""
    passing = value[value != 0]
    return passing.numel() < value.numel() and bool((passing == passing[:1]).all())


def _one_number(value: Tensor, name: str) -> Tensor | None:
    """The number that a constant holds everywhere, or the root mean square of gains; else None."""
    value = value.detach().cpu()
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        value = value.flatten()[0].clone()
    if value.numel() > 1 and not operation_named(name).by_channel:
        return None
    if value.numel() > 1 and name == "div":
        value = value.double().reciprocal().square().mean().rsqrt()
    elif value.numel() > 1:
        value = value.double().square().mean().sqrt()
    if value.is_floating_point():
        value = value.double()
    return value.reshape(1) if name == "prelu" else value.reshape(())


# --- The recorder, and the forward that it sees


class Recorder(TorchFunctionMode):
    """Sees every call of a torch function, and appends what it does to `trace`.

    It knows what each tensor stands for: a `Signal`, a `Derived`, or None for a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.draws = False
        # The tensors are held as well, so that no two of them ever have the same id.
        self._meanings: dict[int, tuple[Any, Tensor]] = {}
        self._norms: list[Signal | None] = []  # the inputs of the normalizations that run now

    def know(self, tensor: Tensor, meaning: Any) -> None:
        self._meanings[id(tensor)] = (meaning, tensor)

    def meaning(self, leaf: Any) -> Any:
        """What a tensor in the arguments of a call stands for; anything else stands for itself."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._meanings:
            # From a custom autograd.Function, a scripted function, a closure: no call was seen.
            step = Step("an unseen function", "unknown", shape=tuple(leaf.shape))
            self.know(leaf, self.trace.append(step))
        meaning = self._meanings[id(leaf)][0]
        return leaf if meaning is None else meaning

    def _is_signal(self, leaf: Any) -> bool:
        return not self._is_inside_norm and isinstance(self.meaning(leaf), Signal)

    def finish(self, output: Any) -> Trace:
        """The trace of a forward that returned `output`."""
        meanings = map(self.meaning, tensors_in(output))
        outputs = {meaning.index for meaning in meanings if isinstance(meaning, Signal)}
        return replace(self.trace, outputs=frozenset(outputs), draws=self.draws)

    @contextlib.contextmanager
    def norms_as_one_step(self, model: nn.Module) -> Iterator[None]:
        """Inside, whatever a normalization of the model computes is one step of the trace."""
        with contextlib.ExitStack() as stack:
            for module in filter(_is_norm, model.modules()):
                stack.enter_context(
                    module.register_forward_pre_hook(self._enter_norm, with_kwargs=True)
                )
                stack.enter_context(
                    module.register_forward_hook(self._leave_norm, always_call=True)
                )
            yield

    @property
    def _is_inside_norm(self) -> bool:
        return any(source is not None for source in self._norms)

    def _enter_norm(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = next(iter([*args, *kwargs.values()]), None)
        source = None if self._is_inside_norm else self.meaning(inputs)
        self._norms.append(source if isinstance(source, Signal) else None)

    def _leave_norm(self, module: nn.Module, args: Any, result: Any) -> None:
        source = self._norms.pop()
        if source is not None and isinstance(result, Tensor):
            step = Step("norm", "norm", (source.index,), shape=tuple(result.shape))
            self.know(result, self.trace.append(step))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = functools.partial(func, *args, **(kwargs or {}))
        if self._is_inside_norm:
            return run()
        call = ReplayableCall(func, *map_leaves(self.meaning, [run.args, run.keywords]))
        first: Any = args[0] if args else None
        version = first._version if isinstance(first, Tensor) else None
        result = run()
        name = name_of(func)
        self.draws |= operation_named(name).draws
        is_written = version is not None and first._version != version
        if name == "setitem":
            result = first
        elif is_written and call.args[0] is first:
            name = "a write into a constant"
        elif isinstance(result, Tensor) and result is first and not is_written:
            result = result.view_as(result)  # returned as it came: a step of its own
        self._assign(result, self._interpret(name, call, result))
        return None if name == "setitem" else result

    def _assign(self, result: Any, meaning: Any) -> None:
        if isinstance(result, Tensor):
            if isinstance(meaning, tuple):
                meaning = meaning[0]
            is_derived = isinstance(meaning, Derived)
            self.know(result, replace(meaning, value=result) if is_derived else meaning)
        elif isinstance(result, (tuple, list)):
            for position, entry in enumerate(result):
                part = meaning[position] if isinstance(meaning, tuple) else meaning
                if isinstance(meaning, Signal) and isinstance(entry, Tensor):
                    part = self._part(meaning, position, tuple(entry.shape))
                self._assign(entry, part)

    def _part(self, whole: Signal, position: int, shape: Shape) -> Signal:
        call = ReplayableCall(lambda parts, index: parts[index], (whole, position))
        return self.trace.append(Step("part", "rearrange", (whole.index,), call, shape=shape))

    def _interpret(self, name: str, call: ReplayableCall, result: Any) -> Any:
        """What the result of a call stands for; appends its steps."""
        operation = operation_named(name)
        if operation.role == "query" or not (call.sources or call.parameters):
            return None
        if name in COMPOSITES:
            return COMPOSITES[name](self.trace, name, call)
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        if operation.stores and call.parameters:
            if operation.stores != "factor":
                call = self._with_input_as_signal(call)
            signal = append_call_with_weight(self.trace, name, call, shape)
            if signal is not None:
                return signal
        if not call.sources:
            return derive(name, call.parameters, result)
        for parameter in call.parameters:
            self.trace.note_other_use(parameter.parameters, name)
        return self.trace.append(replace(step_of(name, call), shape=shape))

    def _with_input_as_signal(self, call: ReplayableCall) -> ReplayableCall:
        """The input of a layer is a signal, even a learned one, as the queries of a Perceiver."""
        if len(call.parameters) < 2 or not isinstance(call.args[0], Derived):
            return call
        learned = call.args[0]
        self.trace.note_other_use(learned.parameters, "a learned input, not a map of a signal")
        shape = tuple(learned.value.shape)
        signal = self.trace.append(Step("parameter", "input", shape=shape))
        return replace(call, args=(signal, *call.args[1:]))


_NORM = re.compile(r"Norm(\d?d)?$")


def _is_norm(module: nn.Module) -> bool:
    """Whether the class is called a norm, as `LlamaRMSNorm`; norms of weights do not count."""
    kind = type(module)
    if not _NORM.search(kind.__name__) or kind.__module__.startswith("torch.nn.utils"):
        return False
    parameters = module.parameters()
    return all(parameter.numel() == max(parameter.shape, default=1) for parameter in parameters)


def record_forward(model: nn.Module, sample: Any, forward: Forward | None) -> Trace:
    """Run the forward once on copies of the weights, the buffers and the sample, and record it.

    Without a sample it runs on zeros of a shape that the model takes; a forward that reads values
    of its input is refused then.
    """
    copies = {
        name: in_shape_of(tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    if sample is not None:
        return _record(model, copies, prepare_sample(model, sample), forward, Recorder())
    return _record_on_zeros(model, copies)


def _record(
    model: nn.Module,
    copies: Mapping[str, Tensor],
    inputs: Any,
    forward: Forward | None,
    recorder: Recorder,
) -> Trace:
    # A closure holds the model's own parameters, which no copy replaces.
    for name, parameter in model.named_parameters():
        for tensor in (copies[name], parameter):
            recorder.know(tensor, Derived(frozenset({name}), tensor))
    with preserved(model), without_gathering(model), recorder.norms_as_one_step(model):
        buffers = [copies[name] for name, _ in model.named_buffers()]
        attributes = [value for part in model.modules() for value in vars(part).values()]
        for constant in [*buffers, *attributes]:
            if isinstance(constant, Tensor):
                recorder.know(constant, None)
        for tensor in tensors_in(inputs):
            step = Step("input", "input", shape=tuple(tensor.shape))
            recorder.know(tensor, recorder.trace.append(step))
        output = run(model, inputs, forward, copies, recorder)
    return recorder.finish(output)


# --- An input that the model takes, where no sample is given


class NeedsSampleError(ProblemError):
    """The forward cannot be recorded on an input that was made up."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the model cannot be traced without data ({reason}); pass sample=, an input as the "
            "model gets it."
        )


_READS_A_VALUE = {
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy"),
    *("equal", "allclose", "is_nonzero"),
}


class RecorderOfZeros(Recorder):
    """Records a forward on zeros, which must not decide by the value of a signal.

    With `widens`, a dense layer gets as many features as it takes: how many there are behind a
    convolution depends on the size of the images, and says nothing of the weights.
    """

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self._widens = widens
        self.met_other_width = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_A_VALUE and any(map(self._is_signal, args)):
            raise NeedsSampleError(f"the forward decides by a value, read by {name}")
        if func is nn.functional.linear and self._is_signal(args[0]):
            *leading, width = args[0].shape
            self.met_other_width |= width != args[1].shape[1]
            if self._widens:
                widened = args[0].new_zeros(*leading, args[1].shape[1])
                self.know(widened, self.meaning(args[0]))
                args = (widened, *args[1:])
        return super().__torch_function__(func, types, args, kwargs)


def _record_on_zeros(model: nn.Module, copies: Mapping[str, Tensor]) -> Trace:
    """The trace on the first zeros that the model takes, in the shapes that its layers take."""
    like = first_real_parameter(model)
    taken = itertools.chain.from_iterable(map(_shapes_taken, model.modules()))
    shapes = [*itertools.islice(dict.fromkeys(taken), _ZEROS.inputs)]
    for widens in (False, True):
        too_narrow = []
        for is_token, shape in shapes:
            dtype = torch.long if is_token else like.dtype
            inputs = torch.zeros(shape, dtype=dtype, device=like.device)
            recorder = RecorderOfZeros(widens)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return _record(model, copies, inputs, _call_on_all, recorder)
            except NeedsSampleError:
                raise
            except Exception:  # not the input of this model: the next one may be
                if recorder.met_other_width:
                    too_narrow.append((is_token, shape))
        shapes = too_narrow
    raise NeedsSampleError("no zeros were found that it takes")


def _call_on_all(model: nn.Module, inputs: Any) -> Any:
    """The model's output with `inputs` for every argument that has no default."""
    parameters = [*inspect.signature(type(model).forward).parameters.values()][1:]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return model(*[inputs] * max(1, len(required)))


@dataclass(frozen=True)
class _Zeros:
    """The shapes that are tried, usual ones first.

    Two examples, as BatchNorm needs them: `alone`, in sequences, in sequences of sequences; or one,
    for a model of a fixed number. Primes, so that a reshape that fits is meant. `lengths` of images
    and signals, as kernels and tables of positions take only some. At most `numbers` in an input,
    and so many `inputs` that a refusal takes seconds.
    """

    alone: tuple[tuple[int, ...], ...] = ((2,), (2, 7), (2, 5, 7), (1,))
    tokens: tuple[tuple[int, ...], ...] = ((2, 7), (2, 3), (2, 2), (2,))
    lengths: tuple[int, ...] = (8, 16, 28, 32, 64, 96, 128, 224, 256, *range(2, 28))
    numbers: int = 2**20
    inputs: int = 100


_ZEROS = _Zeros()


def _shapes_taken(module: nn.Module) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Whether the module takes tokens, and a shape that it may take; usual shapes first."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield from ((True, shape) for shape in _ZEROS.tokens)
        return
    for weight in module.parameters(recurse=False):
        axes = weight.ndim - 2
        if axes < 0:
            continue
        width = getattr(module, "in_channels", weight.shape[1])
        images = [(2, width, *[length] * axes) for length in _ZEROS.lengths if axes]
        yield from ((False, shape) for shape in images if math.prod(shape) <= _ZEROS.numbers)
        for features in (width, weight.shape[0]):
            yield from ((False, (*leading, features)) for leading in _ZEROS.alone)
