"""From a call with its arguments to steps of the trace: the same for calls that ran and calls traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessinit.init import trace as ops
from hessinit.init.layer_functions import COMPOSITES, WEIGHT_FUNCTIONS, arguments
from hessinit.init.trace import (
    BY_SHAPE,
    Call,
    Derived,
    Noise,
    Shape,
    Signal,
    Trace,
    Unknown,
    identity_call,
    leaves_of,
    map_leaves,
)  # fmt: skip

_TURNING = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
_TRANSPOSING = (*_TURNING, "t", "T", "mT", "H", "mH", "adjoint")
_BY_CHANNEL = ("mul", "div", "prelu")
_SLICING = {"getitem", "narrow", "select", "chunk", "split", "unbind", "tensor_split"}
# Only layers call these, so their first argument is never a weight.
_MODULES = {"linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}
_ABOVE, _BELOW = ("gt", "ge", "greater"), ("lt", "le", "less")
_FILLS = {"zeros": 0.0, "ones": 1.0}


class Recorder:
    """Appends to `trace` what a call does, and returns what stands for the call's result.

    That is a `Signal`, a `Derived`, a `Noise`, an `Unknown`, a tuple of these, or None for a constant.
    """

    def __init__(self) -> None:
        self.trace = Trace()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str = "",
        shape: Shape = None,
        value: Any = None,
    ) -> Any:
        """`value` is the result itself where it is known."""
        name = name or ops.name_of(function)
        leaves = list(leaves_of([args, kwargs]))
        signals = [leaf for leaf in leaves if isinstance(leaf, Signal)]
        parameters = [leaf for leaf in leaves if isinstance(leaf, Derived)]
        call = Call(function, args, kwargs)
        if name in ops.DRAWING:
            return _drawn(name, args, kwargs, shape)
        if not (signals or parameters) and any(isinstance(leaf, Noise) for leaf in leaves):
            return _made_of_noise(name, args, shape)
        if name in ops.SHAPE_QUERIES or not (signals or parameters):
            unknown = name in ops.SHAPE_QUERIES or any(isinstance(leaf, Unknown) for leaf in leaves)
            return Unknown(call, name, fill_of(name, args, kwargs)) if unknown else None
        if name in _MODULES and args and isinstance(args[0], Derived) and len(parameters) > 1:
            # A learned input, as the queries of a Perceiver: what a layer is called on is a signal.
            for used in args[0].parameters:
                self.trace.other_uses.setdefault(
                    used, "a learned input of the network, not a map of a signal"
                )
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
        if name in ("max", "min") and _compares(*args[1:2], *kwargs.values()):
            name = "maximum" if name == "max" else "minimum"
        return self._step(name, call, signals, shape)

    def part(self, whole: Signal, place: int, shape: Shape = None) -> Signal:
        """One entry of a step that returns a tuple."""
        call = Call(operator.getitem, (whole, place))
        return self.trace.add("part", "rearrange", (whole.index,), call=call, shape=shape)

    def _step(self, name: str, call: Call, signals: list[Signal], shape: Shape) -> Signal:
        if name == "where" and isinstance((*call.args, None)[0], Signal):
            signals = [*signals[1:], signals[0]]  # the condition is not what goes on
        kind, sources = ops.kind_of(name), tuple(dict.fromkeys(signal.index for signal in signals))
        constants = any(isinstance(leaf, Tensor) for leaf in leaves_of(call.args))
        if kind == "mix" and len(sources) == 1 and constants:
            kind = "unknown"  # a constant matrix, as of a graph: it may add up any number of entries
        passed = identity_call(sources[0])
        mask = _mask_in(name, call.args)
        if mask is not None and len(sources) == 1:
            return self._multiply_by_mask(sources[0], mask, shape)
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

    def _elementwise(self, name: str, call: Call, sources: tuple[int, ...], shape: Shape) -> Signal:
        def rearranged(words: str) -> Signal:
            passed = identity_call(sources[0])
            return self.trace.add(words, "rearrange", sources[:1], call=passed, shape=shape)

        given: Any = map_leaves(lambda leaf: _as_number(leaf, name), [call.args, dict(call.kwargs)])
        # One number cannot be written into in place, as the zeros that it stands for.
        written = isinstance((*given[0], None)[0], Tensor)
        call = Call(getattr(torch, name, call.function) if written else call.function, *given)
        leaves = list(leaves_of(given))
        others = [leaf for leaf in leaves if isinstance(leaf, (Derived, Tensor))]
        if any(isinstance(leaf, Noise) for leaf in leaves):
            return rearranged("noise")
        if any(isinstance(leaf, Unknown) for leaf in leaves):
            if name in ops.SUMS:  # most likely a table of positions, cut to length
                return self.trace.add(name, "sum", sources, shape=shape)
            return rearranged(BY_SHAPE)
        if name in ops.SUMS and len(sources) == 1 and any(not _is_scalar(other) for other in others):
            if all(isinstance(other, Derived) and other.is_vector for other in others):
                return rearranged("bias")
            return self.trace.add(name, "sum", sources, shape=shape)
        learnable = any(isinstance(other, Derived) for other in others)
        if name in ("mul", "div") and len(sources) == 1 and learnable:
            # A learnable scale, as of a LayerScale or a branch that starts at 0, is not for a weight to undo.
            return rearranged("scale")
        if any(_is_mask(other) for other in others):
            return rearranged("mask")
        known = all(isinstance(other, Tensor) or other.value is not None for other in others)
        if not known or (name not in _BY_CHANNEL and not all(_is_scalar(other) for other in others)):
            return self.trace.add(name, "unknown", sources, shape=shape)

        def plain(leaf: Any) -> Any:
            return _one_number(leaf, name) if isinstance(leaf, (Derived, Tensor)) else leaf

        args, kwargs = map_leaves(plain, call.args), map_leaves(plain, dict(call.kwargs))
        if name == "rrelu":  # its slope is drawn in train mode; the mean slope stands for it
            args, kwargs = args[:3], {key: kwargs[key] for key in ("lower", "upper") if key in kwargs}
        call = Call(call.function, args, kwargs)
        return self.trace.add(name, "elementwise", sources, call=call, shape=shape)

    def _multiply_by_mask(self, source: int, noise: Noise, shape: Shape) -> Signal:
        """A signal times a random mask whose kept fraction is known.

        One number for each unit is a dropout, which scales by 1/keep, and a scale to undo that. One for each
        example is a stochastic depth: only its mean counts.
        """
        assert noise.keep is not None
        known = self.trace[source].shape
        whole = noise.like if noise.shape is None or known is None else noise.shape == known
        if whole and 0 < noise.keep < 1:
            words = f"dropout {1 - noise.keep:.3g}"
            dropped = self.trace.add(words, "dropout", (source,), keep=noise.keep, active=True, shape=shape)
            source = dropped.index
        call = Call(torch.mul, (Signal(source), noise.keep * noise.scale))
        return self.trace.add("mul", "elementwise", (source,), call=call, shape=shape)


def _compares(*others: Any) -> bool:
    """`max` of two tensors, and not over a dimension."""
    filled = any(isinstance(other, Unknown) and other.fill is not None for other in others)
    return filled or any(isinstance(other, (Signal, Tensor, Derived)) for other in others)


def _derive(name: str, parameters: list[Derived], value: Any) -> Any:
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
        return tuple(Derived(names, entry, transposed, how) for entry in value)
    return Derived(names, value if isinstance(value, Tensor) else None, transposed, how)


# --- Constants among the arguments of a call --------------------------------------------------------------


def fill_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The number that the result of a call holds everywhere, whatever its shape; None if that is not known.

    >>> fill_of("zeros_like", (), {}), fill_of("new_full", (None, (2, 3), 7), {}), fill_of("arange", (3,), {})
    (0.0, 7.0, None)
    """
    plain = name.removeprefix("new_").removesuffix("_like")
    if plain in _FILLS:
        return _FILLS[plain]
    given: Any = None
    if plain == "full":
        given = kwargs.get("fill_value", args[-1] if args else None)
    elif name == "new_tensor":
        given = args[-1]
    elif name in ops.REARRANGING and args and isinstance(args[0], Unknown):
        given = args[0].fill
    return float(given) if isinstance(given, (bool, int, float)) else None


def _as_number(leaf: Any, name: str) -> Any:
    """A constant that is the same number everywhere as that number; anything else as it is.

    A signal times zeros stays: it is masked, as the first step of a recurrence, and not gone for good.
    """
    if isinstance(leaf, Unknown) and leaf.fill is not None:
        leaf = torch.full((2,), leaf.fill)
    if not isinstance(leaf, Tensor) or leaf.numel() < 2 or leaf.dtype is torch.bool or leaf.is_meta:
        return leaf
    first = leaf.flatten()[0]
    same = bool((leaf == first).all()) and (name not in ops.SCALINGS or bool(first != 0))
    return first.clone() if same else leaf


def _is_scalar(other: Derived | Tensor) -> bool:
    value = other.value if isinstance(other, Derived) else other
    return value is not None and value.numel() == 1


def _is_mask(other: Derived | Tensor) -> bool:
    """A constant of zeros and one other number: what it lets through keeps its size."""
    if isinstance(other, Derived) or other.numel() < 2:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return True
    rest = other[other != 0]
    return rest.numel() < other.numel() and bool((rest == rest[:1]).all())


def _one_number(other: Derived | Tensor, name: str) -> Tensor:
    """The root mean square of a tensor of gains or slopes, which is right for second moments."""
    value = other.value if isinstance(other, Derived) else other
    assert value is not None
    value = value.detach().cpu()
    if value.numel() > 1:
        value = value.double()
        value = value.reciprocal().square().mean().rsqrt() if name == "div" else value.square().mean().sqrt()
    value = value.double() if value.is_floating_point() else value
    return value.reshape(1) if name == "prelu" else value.reshape(())


# --- Dropout written by hand: a signal times a mask that is drawn at every call ---------------------------


def _drawn(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape) -> Noise:
    first = args[0] if args else None
    shaped = isinstance(first, Unknown) and first.name.endswith(("_like", "shape", "size"))
    keep = None
    if name == "bernoulli":
        keep = _number(kwargs.get("p", args[1] if len(args) > 1 else first))
    like = name.endswith("_like") or shaped
    return Noise(keep, uniform=name in ("rand", "rand_like"), like=like, shape=shape)


def _made_of_noise(name: str, args: tuple[Any, ...], shape: Shape) -> Noise:
    """The result of a call on noise and constants: a mask that is moved, scaled or compared stays one."""
    noise = next((leaf for leaf in leaves_of(args) if isinstance(leaf, Noise)), Noise())
    noise = replace(
        noise, shape=shape, like=noise.like and (name in ops.CASTS or name not in ops.REARRANGING)
    )
    other = _number(args[1]) if len(args) > 1 and isinstance(args[0], Noise) else None
    plain = replace(noise, keep=None, scale=1.0, uniform=False)
    if name in ops.REARRANGING:
        return noise
    if noise.uniform and other is not None and name in (*_ABOVE, *_BELOW) and 0 <= other <= 1:
        return replace(plain, keep=1 - other if name in _ABOVE else other)
    if noise.keep is not None and other and name in ("mul", "div"):
        return replace(noise, scale=noise.scale * other if name == "mul" else noise.scale / other)
    if name in ("logical_not", "invert", "bitwise_not") and noise.keep is not None:
        return replace(noise, keep=1 - noise.keep)
    return plain


def _mask_in(name: str, args: tuple[Any, ...]) -> Noise | None:
    """The random mask that a call multiplies a signal by, if its kept fraction is known."""
    noise = next((leaf for leaf in args if isinstance(leaf, Noise)), None)
    if noise is None or noise.keep is None:
        return None
    if name == "mul":
        return noise
    if len(args) < 3:
        return None
    if name == "where" and args[0] is noise and _number(args[2]) == 0:
        return replace(noise, scale=1.0)
    cleared = name == "masked_fill" and _number(args[2]) == 0
    if cleared or (name == "where" and args[0] is noise and _number(args[1]) == 0):
        return replace(noise, keep=1 - noise.keep, scale=1.0)
    return None


def _number(given: Any) -> float | None:
    if isinstance(given, Unknown):
        return given.fill
    if isinstance(given, Tensor) and given.numel() and bool((given == given.flatten()[0]).all()):
        return float(given.flatten()[0])
    return float(given) if isinstance(given, (int, float)) else None
