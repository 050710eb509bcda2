"""Functions that hold several weights: multi-head attention and recurrent layers, as steps of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hessinit.schemes.leaves import leaves_of
from hessinit.schemes.record import Call, Derived, Record, Signal
from hessinit.schemes.weight_uses import arguments, use_weight

_ATTENTION = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
    "dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask "
    "use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight"
)
# How many blocks the weights of a recurrent layer hold.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_ACTIVATIONS = {"rnn_tanh": torch.tanh, "rnn_relu": torch.relu}


def _attention(record: Record, name: str, args: Any, kwargs: Any) -> tuple[Signal, Signal]:
    given = arguments(args, kwargs, _ATTENTION)
    data = [given["query"], given["key"], given["value"]]
    for bias, role in (("bias_k", "key"), ("bias_v", "value")):
        if isinstance(given.get(bias), Derived):
            record.other_uses.setdefault(given[bias].name, f"added as a {role} by {name}")
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{part}_proj_weight"] for part in "qkv"]
        projected = [
            use_weight(record, name, weight, "dense", [signal], inside=name)
            for weight, signal in zip(weights, data, strict=True)
        ]
    else:
        weight = given["in_proj_weight"]
        third = weight.value.shape[0] // 3
        projected = [use_weight(record, name, weight, "dense", data, parts=(third,) * 3, inside=name)]
    mixed = record.add("attention", "mix", tuple(signal.index for signal in projected))
    output = use_weight(record, name, given["out_proj_weight"], "dense", [mixed], inside=name)
    return output, mixed


def _layer(record: Record, kind: str, weights: list[Derived], data: Signal, state: Any = None) -> Signal:
    """One layer of a recurrent module in one direction; `weights` are ih, hh and perhaps the projection."""
    activation = _ACTIVATIONS.get(kind)
    gates = GATES[kind]

    def weigh(weight: Derived, source: Signal, gates: int) -> Signal:
        rows = 0 if weight.value is None else weight.value.shape[0] // gates
        parts = (rows,) * gates if gates > 1 else ()
        return use_weight(record, kind, weight, "dense", [source], parts=parts, inside=kind)

    def activate(sum: Signal) -> Signal:
        if activation is None:
            return sum
        call = Call(activation, (sum,))
        return record.add(activation.__name__, "elementwise", (sum.index,), call=call)

    earlier = tuple(leaf.index for leaf in leaves_of(state) if isinstance(leaf, Signal))
    previous = activate(record.add("hidden state", "state", earlier))
    fresh = weigh(weights[0], data, gates)
    remembered = weigh(weights[1], previous, gates)
    joined = (fresh.index, remembered.index)
    hidden = activate(record.add("hidden state", "gates" if activation is None else "sum", joined))
    return weigh(weights[2], hidden, 1) if len(weights) > 2 else hidden


def _recurrent(record: Record, name: str, args: Any, kwargs: Any) -> tuple[Signal, ...]:
    """`torch.lstm(input, hx, weights, …)`, or with the lengths of a packed sequence in second place."""
    packed = isinstance(args[3], (tuple, list))
    flat, _, layers, dropout, training, bidirectional = (args[3:] if packed else args[2:])[:6]
    weights = [weight for weight in flat if weight.value is not None and weight.value.ndim > 1]
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    state = args[2] if packed else args[1]
    data = _data(record, args[0])
    for layer in range(layers):
        if layer and dropout:
            words = f"dropout {dropout:g}"
            data = record.add(words, "dropout", (data.index,), keep=1 - dropout, runs=bool(training))
        starts = [(layer * directions + direction) * each for direction in range(directions)]
        sides = [_layer(record, name, weights[start : start + each], data, state) for start in starts]
        data = sides[0]
        if len(sides) > 1:
            data = record.add("cat", "cat", tuple(side.index for side in sides))
    return (data,) * (3 if name == "lstm" else 2)


def _cell(record: Record, name: str, args: Any, kwargs: Any) -> Signal | tuple[Signal, Signal]:
    given = arguments(args, kwargs, "input hx w_ih w_hh")
    kind = name.removesuffix("_cell")
    data = _data(record, given["input"])
    hidden = _layer(record, kind, [given["w_ih"], given["w_hh"]], data, given["hx"])
    return (hidden, hidden) if kind == "lstm" else hidden


def _data(record: Record, given: Any) -> Signal:
    return given if isinstance(given, Signal) else record.add("constant", "constant")


COMPOSITES: dict[str, Callable[[Record, str, Any, Any], Any]] = {
    "multi_head_attention_forward": _attention,
    **dict.fromkeys(GATES, _recurrent),
    **dict.fromkeys([f"{kind}_cell" for kind in GATES], _cell),
}
