"""What a layer's products lie between: for every use of its weight, its input, output and activation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature.gram import KnownCall, find_layouts
from hessinit.curvature.layer_uses import Call, EmbeddingCall, Node, Use, read_call
from hessinit.problem.activations import Consumers


@dataclass(frozen=True)
class LayerUse:
    """One use of a weight: `after` is the edge behind the activation, or behind the call where none follows.

    `before` is the edge of the call's input (None for tokens and constants). `time_first` and
    `after_time_first` say how the rows of the call, and of what the activation gives, belong to the examples.
    """

    call: Call
    before: GradientEdge | None
    node: Node
    activation: Node | None
    after: GradientEdge
    time_first: bool = False
    after_time_first: bool = False


@dataclass(frozen=True)
class LayerUses:
    """All uses of a weight, for `size` examples that do not see each other behind it (1: the whole batch)."""

    name: str
    uses: tuple[LayerUse, ...]
    size: int


def read_uses(
    output: Tensor, uses: dict[str, list[Use]], leaves: dict[str, Tensor], seed: int
) -> tuple[list[LayerUses], dict[str, str]]:
    """The layers whose every use is a known call; for the others, why not."""
    consumers, size = Consumers(output), output.shape[0] if output.ndim else 1
    reasons: dict[str, str] = {}
    found: dict[str, list[LayerUse]] = {}
    for name, ones in uses.items():
        calls = [read_call(use, leaves[name]) for use in ones]
        unknown = [use.kind for use, call in zip(ones, calls, strict=True) if call is None]
        if not ones:
            reasons[name] = "the forward does not use this weight"
        elif unknown:
            reasons[name] = (
                f"the weight goes into {unknown[0]}, none of the known uses (dense, convolution, embedding)"
            )
        else:
            found[name] = [
                _read(use, call, consumers) for use, call in zip(ones, calls, strict=True) if call is not None
            ]
    return _with_rows(output, found, size, seed), reasons


def _read(use: Use, call: Call, consumers: Consumers) -> LayerUse:
    before = None
    if not isinstance(call, EmbeddingCall):
        # addmm(bias, inputs, weight), mm(inputs, weight), convolution(inputs, weight, bias)
        source, number = use.node.next_functions[1 if use.kind == "AddmmBackward0" else 0]
        before = None if source is None else GradientEdge(source, number)
    activation = consumers.activation_after(use.node)
    if activation is not None and not _keeps_lengths(use.node, activation, call):
        activation = None
    return LayerUse(call, before, use.node, activation, GradientEdge(activation or use.node, 0))


def _keeps_lengths(node: Node, activation: Node, call: Call) -> bool:
    """Whether the activation gets the call's own numbers: a sum on the way may repeat or scale them."""
    if math.prod(shape_behind(activation)) != math.prod(call.output_shape):
        return False
    between = activation.next_functions[0][0]
    while between is not node:
        if getattr(between, "_saved_alpha", 1) != 1:
            return False
        sources = [source for source, _ in between.next_functions if source is not None]
        between = next(source for source in sources if type(source).__name__ != "AccumulateGrad")
    return True


def shape_behind(node: Node, number: int = 0) -> tuple[int, ...]:
    """The shape of what a node gave in the forward."""
    if type(node).__name__ == "AccumulateGrad":
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[number].shape)


def _with_rows(output: Tensor, found: dict[str, list[LayerUse]], size: int, seed: int) -> list[LayerUses]:
    """Which rows belong to which example, at the call and behind its activation."""
    apart = {name: all(use.call.rows % size == 0 for use in uses) for name, uses in found.items()}
    flat = [(name, use) for name, uses in found.items() if apart[name] and size > 1 for use in uses]
    calls = [KnownCall(name, use.call, GradientEdge(use.node, 0)) for name, use in flat]
    behind = [KnownCall(name, use.call, use.after) for name, use in flat]
    orders = find_layouts(output, [*calls, *behind], seed) if calls else []
    layers: dict[str, list[LayerUse]] = {name: [] for name in found}
    for (name, use), order, after in zip(flat, orders[: len(flat)], orders[len(flat) :], strict=True):
        if order is None or after is None:
            apart[name] = False
        else:
            layers[name].append(dataclasses.replace(use, time_first=order, after_time_first=after))
    return [
        LayerUses(name, tuple(layers[name]), size)
        if apart[name] and size > 1
        else LayerUses(name, tuple(uses), 1)
        for name, uses in found.items()
    ]
