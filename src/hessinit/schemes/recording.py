"""From a call, with its arguments, to steps of the record: the same for calls that ran and calls traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessinit.schemes import operations
from hessinit.schemes.composites import COMPOSITES
from hessinit.schemes.constants import as_number, fill_of, is_mask, is_scalar, one_number
from hessinit.schemes.leaves import leaves_of, map_leaves
from hessinit.schemes.operations import kind_of, name_of
from hessinit.schemes.random_masks import drawn, made_of_noise, mask_in, multiply_by_mask
from hessinit.schemes.record import Call, Derived, Noise, Record, Signal, Unknown, passed_on
from hessinit.schemes.site import BY_SHAPE
from hessinit.schemes.weight_uses import WEIGHT_USES, arguments

Shape = tuple[int, ...] | None
_TURNING = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
_TRANSPOSING = (*_TURNING, "t", "T", "mT", "H", "mH", "adjoint")
_BY_CHANNEL = ("mul", "div", "prelu")
_SLICING = {"getitem", "narrow", "select", "chunk", "split", "unbind", "tensor_split"}


# What only layers call, so that their first argument is never a weight.
_MODULES = {"linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}


class Recorder:
    """Appends to `record` what a call does; gives back what stands for the call's result.

    That is a `Signal`, a `Derived`, an `Unknown`, a tuple of these, or None for a constant.
    """

    def __init__(self) -> None:
        self.record = Record()

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
        name = name or name_of(function)
        leaves = list(leaves_of([args, kwargs]))
        signals = [leaf for leaf in leaves if isinstance(leaf, Signal)]
        parameters = [leaf for leaf in leaves if isinstance(leaf, Derived)]
        call = Call(function, args, kwargs)
        if name in operations.DRAWING:
            return drawn(name, args, kwargs, shape)
        if not (signals or parameters) and any(isinstance(leaf, Noise) for leaf in leaves):
            return made_of_noise(name, args, shape)
        if name in operations.SHAPE_QUERIES or not (signals or parameters):
            unknown = name in operations.SHAPE_QUERIES or any(isinstance(leaf, Unknown) for leaf in leaves)
            return Unknown(call, name, fill_of(name, args, kwargs)) if unknown else None
        if name in _MODULES and args and isinstance(args[0], Derived) and len(parameters) > 1:
            # A learned start, as the queries of a Perceiver: what a layer is called on is a signal.
            for used in args[0].parameters:
                self.record.other_uses.setdefault(used, "a learned start of the signal, not a map of it")
            start = self.record.add("parameter", "input", shape=_shape_of(args[0]))
            return self.call(function, (start, *args[1:]), kwargs, name=name, shape=shape, value=value)
        if name in COMPOSITES:
            return COMPOSITES[name](self.record, name, args, kwargs)
        if parameters and name in WEIGHT_USES:
            found = WEIGHT_USES[name](self.record, name, args, kwargs, shape)
            if found is not None:
                return found
        if not signals:
            return _derive(name, args, kwargs, parameters, value)
        for parameter in parameters:
            for used in parameter.parameters:
                self.record.other_uses.setdefault(used, name)
        if name in ("max", "min") and _compares(*args[1:2], *kwargs.values()):
            name = "maximum" if name == "max" else "minimum"
        return self._step(name, call, signals, shape)

    def part(self, whole: Signal, place: int, shape: Shape = None) -> Signal:
        """One entry of a step that gives a tuple."""
        call = Call(operator.getitem, (whole, place))
        return self.record.add("part", "rearrange", (whole.index,), call=call, shape=shape)

    def _step(self, name: str, call: Call, signals: list[Signal], shape: Shape) -> Signal:
        if name == "where" and isinstance((*call.args, None)[0], Signal):
            signals = [*signals[1:], signals[0]]  # the condition is not what goes on
        kind, sources = kind_of(name), tuple(dict.fromkeys(signal.index for signal in signals))
        if (
            kind == "mix"
            and len(sources) == 1
            and any(isinstance(leaf, Tensor) for leaf in leaves_of(call.args))
        ):
            kind = "unknown"  # a constant matrix, as of a graph: it may add up any number of entries
        passed = passed_on(sources[0])
        mask = mask_in(name, call.args)
        if mask is not None and len(sources) == 1:
            return multiply_by_mask(self.record, sources[0], mask, shape)
        if kind == "dropout":
            given = arguments(call.args, call.kwargs, "input p training")
            p, runs = given.get("p", 0.5), bool(given.get("training", True))
            if not isinstance(p, (int, float)):
                return self.record.add(name, "unknown", sources, shape=shape)
            if p == 0:
                return self.record.add(name, "rearrange", sources[:1], call=passed, shape=shape)
            keep = 1.0 if name in operations.ALPHA_DROPOUTS else 1.0 - p
            words = f"{name.replace('native_', '').rstrip('123d')} {p:g}"
            return self.record.add(words, kind, sources[:1], keep=keep, runs=runs, shape=shape)
        # A mask that is a signal may be made of the very signal that it is laid on, as in a ReLU by hand.
        if kind == "elementwise" or (name == "masked_fill" and len(sources) > 1):
            return self._elementwise(name, call, sources, shape)
        if kind in ("rearrange", "norm", "pool", "split"):
            # The further signals are indices, masks, statistics or gains.
            numbers = name in operations.CASTS and name not in operations.TO_INTEGERS
            kept = passed if numbers or name in ("masked_fill", "sort") else call
            return self.record.add(name, kind, sources[:1], call=kept, shape=shape)
        return self.record.add(name, kind, sources, call=call, shape=shape)

    def _elementwise(self, name: str, call: Call, sources: tuple[int, ...], shape: Shape) -> Signal:
        passed = passed_on(sources[0])
        given: Any = map_leaves(lambda leaf: as_number(leaf, name), [call.args, dict(call.kwargs)])
        # One number cannot be written into in place, as the zeros that it stands for.
        written = isinstance((*given[0], None)[0], Tensor)
        call = Call(getattr(torch, name, call.function) if written else call.function, *given)
        leaves = list(leaves_of(given))
        others = [leaf for leaf in leaves if isinstance(leaf, (Derived, Tensor))]
        if any(isinstance(leaf, Noise) for leaf in leaves):
            return self.record.add("noise", "rearrange", sources[:1], call=passed, shape=shape)
        if any(isinstance(leaf, Unknown) for leaf in leaves):
            if name in operations.SUMS:  # most likely a table of positions, cut to length
                return self.record.add(name, "sum", sources, shape=shape)
            return self.record.add(BY_SHAPE, "rearrange", sources[:1], call=passed, shape=shape)
        if name in operations.SUMS and len(sources) == 1 and any(not is_scalar(other) for other in others):
            if all(isinstance(other, Derived) and other.is_vector for other in others):
                return self.record.add("bias", "rearrange", sources, call=passed, shape=shape)
            return self.record.add(name, "sum", sources, shape=shape)
        if (
            name in ("mul", "div")
            and len(sources) == 1
            and any(isinstance(other, Derived) for other in others)
        ):
            # A learnable scale, as of a LayerScale or a branch that starts at 0, is not for a weight to undo.
            return self.record.add("scale", "rearrange", sources, call=passed, shape=shape)
        if any(is_mask(other) for other in others):
            return self.record.add("mask", "rearrange", sources[:1], call=passed, shape=shape)
        known = all(isinstance(other, Tensor) or other.value is not None for other in others)
        if not known or (name not in _BY_CHANNEL and not all(is_scalar(other) for other in others)):
            return self.record.add(name, "unknown", sources, shape=shape)

        def plain(leaf: Any) -> Any:
            return one_number(leaf, name) if isinstance(leaf, (Derived, Tensor)) else leaf

        args, kwargs = map_leaves(plain, call.args), map_leaves(plain, dict(call.kwargs))
        if name == "rrelu":
            # Its slope is drawn in train mode; the mean slope stands for it.
            args, kwargs = (
                args[:3],
                {key: entry for key, entry in kwargs.items() if key in ("lower", "upper")},
            )
        call = Call(call.function, args, kwargs)
        return self.record.add(name, "elementwise", sources, call=call, shape=shape)


def _compares(*others: Any) -> bool:
    """`max` of two tensors, and not over a dimension."""
    filled = any(isinstance(other, Unknown) and other.fill is not None for other in others)
    return filled or any(isinstance(other, (Signal, Tensor, Derived)) for other in others)


def _derive(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[Derived], value: Any
) -> Any:
    first = parameters[0]
    names = frozenset().union(*(parameter.parameters for parameter in parameters))
    how, transposed = first.how, first.transposed
    if name in _SLICING:
        how = how or "slice"
    elif name in _TRANSPOSING and first.value is not None and first.value.ndim == 2 and not how:
        moved = name not in _TURNING or (isinstance(value, Tensor) and value.stride() != first.value.stride())
        transposed = transposed != moved
    elif name not in operations.CASTS and not (name in operations.REARRANGING and _same_shape(first, value)):
        how = "computed"
    if name in operations.SPLITS and isinstance(value, (tuple, list)):
        return tuple(Derived(names, entry, transposed, how) for entry in value)
    return Derived(names, value if isinstance(value, torch.Tensor) else None, transposed, how)


def _same_shape(first: Derived, value: Any) -> bool:
    return first.value is not None and isinstance(value, Tensor) and value.shape == first.value.shape


def _shape_of(derived: Derived) -> Shape:
    return None if derived.value is None else tuple(derived.value.shape)
