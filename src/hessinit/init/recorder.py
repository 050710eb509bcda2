"""From a call with its arguments to steps of the trace: the same for calls that ran and calls traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessinit.init import trace
from hessinit.init import trace as ops
from hessinit.init.layer_functions import COMPOSITES, WEIGHT_FUNCTIONS, arguments

_TURNING = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
_TRANSPOSING = (*_TURNING, "t", "T", "mT", "H", "mH", "adjoint")
_BY_CHANNEL = ("mul", "div", "prelu")
_SLICING = {"getitem", "narrow", "select", "chunk", "split", "unbind", "tensor_split"}
# Only layers call these, so their first argument is never a weight.
_MODULES = {"linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}
_FILLS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}


class Recorder:
    """Appends to `trace` what a call does, and returns what stands for the call's result.

    That is a `Signal`, a `Derived`, a `Noise`, an `Unknown`, a tuple of these, one number for a tensor that
    holds it everywhere, or None for another constant.
    """

    def __init__(self) -> None:
        self.trace = trace.Trace()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str = "",
        shape: trace.Shape = None,
        value: Any = None,
    ) -> Any:
        """`value` is the result itself where it is known."""
        name = name or ops.name_of(function)
        leaves = trace.leaves_of([args, kwargs])
        signals = [leaf for leaf in leaves if isinstance(leaf, trace.Signal)]
        parameters = [leaf for leaf in leaves if isinstance(leaf, trace.Derived)]
        call = trace.ReplayableCall(function, args, kwargs)
        given = bool(signals or parameters)
        if name in ops.DRAWING or (not given and any(isinstance(leaf, trace.Noise) for leaf in leaves)):
            return trace.Noise()
        unknown = name in ops.SHAPE_QUERIES or any(isinstance(leaf, trace.Unknown) for leaf in leaves)
        if name in _FILLS and unknown:
            return torch.tensor(_FILLS[name])
        if name in ops.SHAPE_QUERIES or not given:
            return trace.Unknown(call, name) if unknown else None
        if name in _MODULES and args and isinstance(args[0], trace.Derived) and len(parameters) > 1:
            # A learned input, as the queries of a Perceiver: what a layer is called on is a signal.
            for used in args[0].parameters:
                self.trace.other_uses.setdefault(used, "a learned input, not a map of a signal")
            first = None if args[0].value is None else tuple(args[0].value.shape)
            learned = self.trace.add("parameter", "input", shape=first)
            return self.call(function, (learned, *args[1:]), kwargs, name=name, shape=shape, value=value)
        if name in COMPOSITES:
            return COMPOSITES[name](self.trace, name, args, kwargs)
        if parameters and name in WEIGHT_FUNCTIONS:
            found = WEIGHT_FUNCTIONS[name](self.trace, name, args, kwargs, shape)
            if found is not None:
                return found
        if not signals:
            return _derive(name, parameters, value)
        for parameter in parameters:
            for used in parameter.parameters:
                self.trace.other_uses.setdefault(used, name)
        others = (*args[1:2], *kwargs.values())
        if name in ("max", "min") and any(
            isinstance(other, (trace.Signal, Tensor, trace.Derived)) for other in others
        ):
            name = f"{name}imum"  # of two tensors, not over a dimension
        return self._step(name, call, signals, shape)

    def part(self, whole: trace.Signal, place: int, shape: trace.Shape = None) -> trace.Signal:
        """One entry of a step that returns a tuple."""
        call = trace.ReplayableCall(operator.getitem, (whole, place))
        return self.trace.add("part", "rearrange", (whole.index,), call=call, shape=shape)

    def _step(
        self, name: str, call: trace.ReplayableCall, signals: list[trace.Signal], shape: trace.Shape
    ) -> trace.Signal:
        if name == "where" and isinstance((*call.args, None)[0], trace.Signal):
            signals = [*signals[1:], signals[0]]  # the condition is not what goes on
        kind, sources = ops.kind_of(name), tuple(dict.fromkeys(signal.index for signal in signals))
        constants = any(isinstance(leaf, Tensor) for leaf in trace.leaves_of(call.args))
        if kind == "mix" and len(sources) == 1 and constants:
            kind = "unknown"  # a constant matrix, as of a graph: it may add up any number of entries
        passed = trace.ReplayableCall.identity(sources[0])
        if kind == "dropout":
            given = arguments(call.args, call.kwargs, "input p training")
            p, active = given.get("p", 0.5), bool(given.get("training", True))
            if not isinstance(p, (int, float)):
                return self.trace.add(name, "unknown", sources, shape=shape)
            if p == 0:
                return self.trace.add(name, "rearrange", sources[:1], call=passed, shape=shape)
            keep = 1.0 if name in ops.ALPHA_DROPOUTS else 1.0 - p
            words = f"{name.replace('native_', '').rstrip('123d')} {p:g}"
            return self.trace.add(words, kind, sources[:1], keep=keep, active=active, shape=shape)
        # A mask that is a signal may be made of the very signal that it multiplies, as in a handwritten ReLU.
        if kind == "elementwise" or (name == "masked_fill" and len(sources) > 1):
            return self._elementwise(name, call, sources, shape)
        if kind in ("rearrange", "norm", "pool", "split"):
            # The further signals are indices, masks, statistics or gains.
            numbers = name in ops.CASTS and name not in ops.TO_INTEGERS
            kept = passed if numbers or name in ("masked_fill", "sort") else call
            return self.trace.add(name, kind, sources[:1], call=kept, shape=shape)
        return self.trace.add(name, kind, sources, call=call, shape=shape)

    def _elementwise(
        self, name: str, call: trace.ReplayableCall, sources: tuple[int, ...], shape: trace.Shape
    ) -> trace.Signal:
        def rearranged(words: str) -> trace.Signal:
            passed = trace.ReplayableCall.identity(sources[0])
            return self.trace.add(words, "rearrange", sources[:1], call=passed, shape=shape)

        given: Any = trace.map_leaves(lambda leaf: _as_number(leaf, name), [call.args, dict(call.kwargs)])
        # One number cannot be written into in place, as the zeros that it stands for.
        written = isinstance((*given[0], None)[0], Tensor)
        function = getattr(torch, name, call.function) if written else call.function
        leaves = trace.leaves_of(given)
        others = [leaf for leaf in leaves if isinstance(leaf, (trace.Derived, Tensor))]
        if any(isinstance(leaf, trace.Noise) for leaf in leaves):
            return rearranged("noise")
        if any(isinstance(leaf, trace.Unknown) for leaf in leaves):
            if name in ops.SUMS:  # most likely a table of positions, cut to length
                return self.trace.add(name, "sum", sources, shape=shape)
            return rearranged(trace.BY_SHAPE)
        if name in ops.SUMS and len(sources) == 1 and any(not _is_scalar(other) for other in others):
            if all(isinstance(other, trace.Derived) and _is_vector(other) for other in others):
                return rearranged("bias")
            return self.trace.add(name, "sum", sources, shape=shape)
        learnable = any(isinstance(other, trace.Derived) for other in others)
        if name in ("mul", "div") and len(sources) == 1 and learnable:
            # A learnable scale, as of a LayerScale or a branch that starts at 0, is not for a weight to undo.
            return rearranged("scale")
        if any(_is_mask(other) for other in others):
            return rearranged("mask")
        known = all(isinstance(other, Tensor) or other.value is not None for other in others)
        if not known or (name not in _BY_CHANNEL and not all(_is_scalar(other) for other in others)):
            return self.trace.add(name, "unknown", sources, shape=shape)

        def plain(leaf: Any) -> Any:
            return _one_number(leaf, name) if isinstance(leaf, (trace.Derived, Tensor)) else leaf

        args, kwargs = trace.map_leaves(plain, given)
        if name == "rrelu":  # its slope is drawn in train mode; the mean slope stands for it
            args, kwargs = args[:3], {key: kwargs[key] for key in ("lower", "upper") if key in kwargs}
        call = trace.ReplayableCall(function, args, kwargs)
        return self.trace.add(name, "elementwise", sources, call=call, shape=shape)


def _derive(name: str, parameters: list[trace.Derived], value: Any) -> Any:
    """The result of a call on parameters and constants alone."""
    first = parameters[0]
    names = frozenset().union(*(parameter.parameters for parameter in parameters))
    how, transposed = first.how, first.transposed
    same_shape = first.value is not None and isinstance(value, Tensor) and value.shape == first.value.shape
    if name in _SLICING:
        how = how or "slice"
    elif name in _TRANSPOSING and first.value is not None and first.value.ndim == 2 and not how:
        moved = name not in _TURNING or (isinstance(value, Tensor) and value.stride() != first.value.stride())
        transposed = transposed != moved
    elif name not in ops.CASTS and not (name in ops.REARRANGING and same_shape):
        how = "computed"
    if name in ops.SPLITS and isinstance(value, (tuple, list)):
        return tuple(trace.Derived(names, entry, transposed, how) for entry in value)
    return trace.Derived(names, value if isinstance(value, Tensor) else None, transposed, how)


# --- Constants among the arguments of a call --------------------------------------------------------------


def _as_number(leaf: Any, name: str) -> Any:
    """A constant that is the same number everywhere as that number; anything else as it is.

    A signal times zeros stays: it is masked, as the first step of a recurrence, and not gone for good.
    """
    if not isinstance(leaf, Tensor) or leaf.numel() < 2 or leaf.dtype is torch.bool or leaf.is_meta:
        return leaf
    first = leaf.flatten()[0]
    same = bool((leaf == first).all()) and (name not in ops.SCALINGS or bool(first != 0))
    return first.clone() if same else leaf


def _is_scalar(other: trace.Derived | Tensor) -> bool:
    value = other.value if isinstance(other, trace.Derived) else other
    return value is not None and value.numel() == 1


def _is_vector(other: trace.Derived) -> bool:
    """At most one number for each channel, as a bias or a gain; (1, C, 1, 1) counts."""
    return other.value is not None and other.value.numel() <= max(other.value.shape, default=1)


def _is_mask(other: trace.Derived | Tensor) -> bool:
    """A constant of zeros and one other number: what it lets through keeps its size."""
    if isinstance(other, trace.Derived) or other.numel() < 2:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return True
    rest = other[other != 0]
    return rest.numel() < other.numel() and bool((rest == rest[:1]).all())


def _one_number(other: trace.Derived | Tensor, name: str) -> Tensor:
    """The root mean square of a tensor of gains or slopes, which is right for second moments."""
    value = other.value if isinstance(other, trace.Derived) else other
    assert value is not None
    value = value.detach().cpu()
    if value.numel() > 1:
        value = value.double()
        value = value.reciprocal().square().mean().rsqrt() if name == "div" else value.square().mean().sqrt()
    value = value.double() if value.is_floating_point() else value
    return value.reshape(1) if name == "prelu" else value.reshape(())
