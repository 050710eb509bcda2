"""Functions that map a signal with a weight: which argument is which, and how the weight is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hessinit.schemes.leaves import leaves_of
from hessinit.schemes.record import Derived, Record, Signal, Use
from hessinit.schemes.site import Kind

Shape = tuple[int, ...] | None


def arguments(args: tuple[Any, ...], kwargs: Any, names: str) -> dict[str, Any]:
    """Positional and keyword arguments together, by name."""
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def use_weight(
    record: Record, name: str, weight: Derived, kind: Kind, data: Any, shape: Shape = None, **details: Any
) -> Signal:
    """Append the step of a weight; a weight that no scheme can set is noted instead of described."""
    sources = tuple(dict.fromkeys(leaf.index for leaf in leaves_of(data) if isinstance(leaf, Signal)))
    if not sources and any(isinstance(leaf, Tensor) for leaf in leaves_of(data)):
        sources = (record.add("constant", "constant").index,)
    if not weight.name or weight.how == "slice" or weight.value is None:
        reason = "mixed from several parameters" if not weight.name else "used in slices"
        for parameter in sorted(weight.parameters):
            record.other_uses.setdefault(parameter, f"{reason} by {name}")
        return record.add(name, "weight", sources, shape=shape)
    if weight.transposed and kind == "dense":
        details["outputs_last"] = not details.get("outputs_last", False)
    stored = tuple(weight.value.shape)
    if weight.transposed:
        stored = stored[::-1]
    use = Use(weight.name, kind, stored, computed=weight.how == "computed" or _is_made(weight), **details)
    return record.add(name, "weight", sources, use=use, shape=shape)


def _is_made(weight: Derived) -> bool:
    return weight.parameters != {weight.name}


def _linear(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    given = arguments(args, kwargs, "input weight bias")
    weight = given["weight"]
    if not isinstance(weight, Derived) or isinstance(given["input"], Derived):
        return None
    return use_weight(record, name, weight, "dense", given["input"], shape)


def _convolution(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    transposed = "transpose" in name
    order = "output_padding groups dilation" if transposed else "dilation groups"
    given = arguments(args, kwargs, f"input weight bias stride padding {order}")
    weight = given["weight"]
    if not isinstance(weight, Derived) or isinstance(given["input"], Derived):
        return None
    dimensions = int(name.rstrip("d")[-1])
    stride = given.get("stride", 1)
    stride = tuple(stride) if isinstance(stride, (tuple, list)) else (stride,)
    if len(stride) == 1:
        stride = stride * dimensions
    kind: Kind = "transposed convolution" if transposed else "convolution"
    groups = given.get("groups", 1)
    return use_weight(record, name, weight, kind, given["input"], shape, stride=stride, groups=groups)


def _product(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    names = "bias input other" if name.startswith(("add", "badd")) else "input other"
    given = arguments(args, kwargs, names)
    left = given.get("input", given.get("mat1", given.get("batch1")))
    right = given.get("other", given.get("mat2", given.get("batch2", given.get("vec"))))
    weights = [side for side in (left, right) if isinstance(side, Derived)]
    signals = [side for side in (left, right) if isinstance(side, Signal)]
    # A buffer times a weight is a part of how the weight is made (spectral normalization), not a use of it.
    if len(weights) != 1 or len(signals) != 1:
        return None
    weight = weights[0]
    if weight.value is not None and weight.value.ndim != 2:
        for parameter in weight.parameters:
            record.other_uses.setdefault(parameter, f"used by {name} with {weight.value.ndim} dimensions")
        return record.add(name, "weight", (signals[0].index,), shape=shape)
    # From the left, the channels of the output are not in its last place, where parts are looked for.
    known = shape if weight is right or (shape is not None and len(shape) == 1) else None
    return use_weight(record, name, weight, "dense", signals, known, outputs_last=weight is right)


def _einsum(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    weights = [operand for operand in operands if isinstance(operand, Derived)]
    signals = [operand for operand in operands if isinstance(operand, Signal)]
    if not isinstance(equation, str) or not signals or len(weights) != 1:
        return None
    weight = weights[0]
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if output and len(operands) == 2 and weight.value is not None and weight.value.ndim == 2:
        place = operands.index(weight)
        letters, data = terms[place], terms[1 - place]
        summed = [letter for letter in letters if letter in data and letter not in output]
        free = [letter for letter in letters if letter in output and letter not in data]
        if len(summed) == len(free) == 1:
            last = letters.index(free[0]) == 1
            # Where the output's channels lie matters for its parts; only the last place is looked at.
            known = shape if output.endswith(free[0]) else None
            return use_weight(record, name, weight, "dense", signals, known, outputs_last=last)
    for parameter in weight.parameters:
        record.other_uses.setdefault(parameter, f"used by einsum({equation!r}), which is not plainly dense")
    return record.add(name, "weight", tuple(signal.index for signal in signals), shape=shape)


def _embedding(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    given = arguments(args, kwargs, "input weight offsets max_norm norm_type scale_grad_by_freq mode")
    if not isinstance(given["weight"], Derived):
        return None
    found = use_weight(record, name, given["weight"], "embedding", given["input"], shape)
    if name == "embedding_bag" and given.get("mode", "mean") in ("sum", 0):
        return record.add("sum", "pool", (found.index,), shape=shape)
    return found


def _lookup(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    """`weight[tokens]`: an embedding written by hand."""
    table, index = args[0], args[-1]
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    tokens = isinstance(index, Signal) or (isinstance(index, Tensor) and not index.is_floating_point())
    if not isinstance(table, Derived) or table.value is None or table.value.ndim != 2 or not tokens:
        return None
    if name == "index_select" and args[1] != 0:
        return None
    return use_weight(record, name, table, "embedding", index, shape)


def _bilinear(record: Record, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    given = arguments(args, kwargs, "input1 input2 weight bias")
    if not isinstance(given["weight"], Derived):
        return None
    return use_weight(record, name, given["weight"], "bilinear", [given["input1"], given["input2"]], shape)


WEIGHT_USES: dict[str, Callable[[Record, str, Any, Any, Shape], Signal | None]] = {
    "linear": _linear,
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "addmv", "inner"), _product),
    "einsum": _einsum,
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "getitem": _lookup,
    "index_select": _lookup,
    "bilinear": _bilinear,
}
