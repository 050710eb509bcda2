"""Functions of torch that map a signal with a weight: which argument is the weight, and how it is stored.

Linear and convolutional layers, products, embeddings; multi-head attention and recurrent layers,
whose weights hold several output blocks (q, k and v; the gates), become several steps of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessinit.init.trace import (
    Derived,
    Kind,
    ReplayableCall,
    Shape,
    Signal,
    Trace,
    WeightUse,
    leaves_of,
)

_ATTENTION = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
    "dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask "
    "use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight"
)
# How many blocks the weights of a recurrent layer hold.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_ACTIVATIONS = {"rnn_tanh": torch.tanh, "rnn_relu": torch.relu}


def arguments(args: tuple[Any, ...], kwargs: Any, names: str) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def use_weight(
    trace: Trace,
    name: str,
    weight: Derived,
    kind: Kind,
    data: Any,
    shape: Shape = None,
    **details: Any,
) -> Signal:
    """Append the step of a weight; a weight that no scheme can set is noted in `other_uses`."""
    sources = tuple(
        dict.fromkeys(leaf.index for leaf in leaves_of(data) if isinstance(leaf, Signal))
    )
    if not sources and any(isinstance(leaf, Tensor) for leaf in leaves_of(data)):
        sources = (trace.add("constant", "constant").index,)
    if not weight.name or weight.how == "slice":
        reason = "mixed from several parameters" if not weight.name else "used in slices"
        for parameter in weight.parameters:
            trace.other_uses.setdefault(parameter, f"{reason} by {name}")
        return trace.add(name, "weight", sources, shape=shape)
    if weight.transposed and kind == "dense":
        details["outputs_last"] = not details.get("outputs_last", False)
    stored = tuple(weight.value.shape)[:: -1 if weight.transposed else 1]
    computed = weight.how == "computed" or weight.parameters != {weight.name}
    use = WeightUse(weight.name, kind, stored, computed=computed, **details)
    return trace.add(name, "weight", sources, use=use, shape=shape)


# Each of these returns None where the call is no use of a weight: a part of how one is made, for
# example.


def _layer(trace: Trace, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    order = "output_padding groups dilation" if "transpose" in name else "dilation groups"
    names = {
        "embedding_bag": "input weight offsets max_norm norm_type scale_grad_by_freq mode",
        "bilinear": "input second weight bias",
    }
    given = arguments(args, kwargs, names.get(name, f"input weight bias stride padding {order}"))
    weight = given["weight"]
    data = [given.get("input", given.get("input1"))]
    data += [given.get("second", given.get("input2"))] if name == "bilinear" else []
    if not isinstance(weight, Derived) or isinstance(data[0], Derived):
        return None
    kind: Kind
    if not name.startswith("conv"):
        kind = "dense" if name == "linear" else "bilinear" if name == "bilinear" else "embedding"
        found = use_weight(trace, name, weight, kind, data, shape)
        sums = name == "embedding_bag" and given.get("mode", "mean") in ("sum", 0)
        return trace.add("sum", "pool", (found.index,), shape=shape) if sums else found
    stride = given.get("stride", 1)
    stride = tuple(stride) if isinstance(stride, (tuple, list)) else (stride,)
    stride = stride * int(name.rstrip("d")[-1]) if len(stride) == 1 else stride
    kind = "transposed convolution" if "transpose" in name else "convolution"
    groups = given.get("groups", 1)
    return use_weight(trace, name, weight, kind, data, shape, stride=stride, groups=groups)


def _product(trace: Trace, name: str, args: Any, kwargs: Any, shape: Shape) -> Signal | None:
    given = arguments(args, kwargs, "bias input other" if name.startswith("add") else "input other")
    left = given.get("input", given.get("mat1"))
    right = given.get("other", given.get("mat2"))
    weights = [side for side in (left, right) if isinstance(side, Derived)]
    signals = [side for side in (left, right) if isinstance(side, Signal)]
    # A buffer times a weight is a part of how the weight is made (spectral normalization), not a
    # use of it.
    if len(weights) != 1 or len(signals) != 1 or weights[0].value.ndim != 2:
        return None
    weight = weights[0]
    # From the left, the output's channels are not in its last dimension, where blocks are looked
    # for.
    known = shape if weight is right or (shape is not None and len(shape) == 1) else None
    return use_weight(trace, name, weight, "dense", signals, known, outputs_last=weight is right)


_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
LAYERS = {"linear", "embedding", "embedding_bag", "bilinear", *_CONVOLUTIONS}
WEIGHT_FUNCTIONS: dict[str, Callable[[Trace, str, Any, Any, Shape], Signal | None]] = {
    **dict.fromkeys(LAYERS, _layer),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "addmm", "inner"), _product),
}


def _attention(trace: Trace, name: str, args: Any, kwargs: Any) -> tuple[Signal, Signal]:
    given = arguments(args, kwargs, _ATTENTION)
    data = [given["query"], given["key"], given["value"]]
    for bias, role in (("bias_k", "key"), ("bias_v", "value")):
        if isinstance(given.get(bias), Derived):
            trace.other_uses.setdefault(given[bias].name, f"added as a {role} by {name}")
    if given.get("use_separate_proj_weight"):
        pairs = zip([given[f"{part}_proj_weight"] for part in "qkv"], data, strict=True)
        projected = [
            use_weight(trace, name, one, "dense", [signal], inside=name) for one, signal in pairs
        ]
    else:
        weight = given["in_proj_weight"]
        third = weight.value.shape[0] // 3
        projected = [
            use_weight(trace, name, weight, "dense", data, blocks=(third,) * 3, inside=name)
        ]
    mixed = trace.add("attention", "mix", tuple(signal.index for signal in projected))
    return use_weight(trace, name, given["out_proj_weight"], "dense", [mixed], inside=name), mixed


def _recurrent_layer(
    trace: Trace, kind: str, weights: list[Derived], data: Any, state: Any = None
) -> Signal:
    """One layer of a recurrent module in one direction; `weights` are ih, hh and perhaps the projection."""
    activation = _ACTIVATIONS.get(kind)
    gates = GATES[kind]
    data = data if isinstance(data, Signal) else trace.add("constant", "constant")

    def weigh(weight: Derived, source: Signal, gates: int) -> Signal:
        blocks = (weight.value.shape[0] // gates,) * gates if gates > 1 else ()
        return use_weight(trace, kind, weight, "dense", [source], blocks=blocks, inside=kind)

    def activate(sum: Signal) -> Signal:
        if activation is None:
            return sum
        call = ReplayableCall(activation, (sum,))
        return trace.add(activation.__name__, "elementwise", (sum.index,), call=call)

    earlier = tuple(leaf.index for leaf in leaves_of(state) if isinstance(leaf, Signal))
    previous = activate(trace.add("hidden state", "state", earlier))
    joined = (weigh(weights[0], data, gates).index, weigh(weights[1], previous, gates).index)
    hidden = activate(trace.add("hidden state", "gates" if activation is None else "sum", joined))
    return weigh(weights[2], hidden, 1) if len(weights) > 2 else hidden


def _recurrent(trace: Trace, name: str, args: Any, kwargs: Any) -> tuple[Signal, ...]:
    """`torch.lstm(input, hx, weights, …)`, or with the lengths of a packed sequence in second place."""
    packed = isinstance(args[3], (tuple, list))
    flat, _, layers, dropout, training, bidirectional = (args[3:] if packed else args[2:])[:6]
    weights = [weight for weight in flat if weight.value.ndim > 1]
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    state = args[2] if packed else args[1]
    data = args[0]
    for layer in range(layers):
        if layer and dropout:
            words = f"dropout {dropout:g}"
            data = trace.add(
                words, "dropout", (data.index,), keep=1 - dropout, active=bool(training)
            )
        firsts = [(layer * directions + direction) * each for direction in range(directions)]
        sides = [
            _recurrent_layer(trace, name, weights[at : at + each], data, state) for at in firsts
        ]
        data = (
            sides[0]
            if len(sides) == 1
            else trace.add("cat", "cat", tuple(side.index for side in sides))
        )
    return (data,) * (3 if name == "lstm" else 2)


def _cell(trace: Trace, name: str, args: Any, kwargs: Any) -> Signal | tuple[Signal, Signal]:
    given = arguments(args, kwargs, "input hx w_ih w_hh")
    kind = name.removesuffix("_cell")
    hidden = _recurrent_layer(
        trace, kind, [given["w_ih"], given["w_hh"]], given["input"], given["hx"]
    )
    return (hidden, hidden) if kind == "lstm" else hidden


COMPOSITES: dict[str, Callable[[Trace, str, Any, Any], Any]] = {
    "multi_head_attention_forward": _attention,
    **dict.fromkeys(GATES, _recurrent),
    **dict.fromkeys([f"{kind}_cell" for kind in GATES], _cell),
}
