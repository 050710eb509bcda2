"""The steps of a trace that a call of a torch function stands for.

A call with a weight becomes the step of that weight, as it is stored. Multi-head attention and
recurrent layers, whose weights hold several output blocks (q, k and v; the gates), become several
steps. A call on signals becomes a step by what its operation does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

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
from hessinit.problem.graph import operation_named

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
        step = Step(activation.__name__, "elementwise", (signal.index,), call=call)
        return trace.append(step)

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
            words = f"dropout {dropout:g}"
            keep = 1 - dropout
            step = Step(words, "dropout", (data.index,), keep=keep, active=bool(training))
            data = trace.append(step)
        sides = []
        for direction in range(directions):
            start = (layer * directions + direction) * weights_each
            own_weights = weights[start : start + weights_each]
            sides.append(_append_recurrent_layer(trace, name, own_weights, data, state))
        data = sides[0]
        if directions > 1:
            data = trace.append(Step("cat", "cat", tuple(side.index for side in sides)))
    return (data,) * (3 if name == "lstm" else 2)


def _append_cell(trace: Trace, name: str, call: ReplayableCall) -> Signal | tuple[Signal, Signal]:
    arguments = operation_named(name).arguments(call.args, call.kwargs)
    kind = name.removesuffix("_cell")
    weights = [arguments["w_ih"], arguments["w_hh"]]
    hidden = _append_recurrent_layer(trace, kind, weights, arguments["input"], arguments["hx"])
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
    keep = 1.0 if operation.keeps_moments else 1.0 - probability
    words = f"{name.rstrip('123d')} {probability:g}"
    active = bool(arguments.get("training", True))
    return Step(words, "dropout", sources, keep=keep, active=active)


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
