"""Where the forward uses the weights of a model, with their true fans and output blocks.

torch reads fans off a tensor's shape, which is wrong for grouped and transposed convolutions,
strides, fused projections and gates. Here a fan-in is the number of inputs that an output sums
over, and a fan-out the number of outputs that an input feeds, on average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.init.context import Downstream, upstream_of
from hessinit.init.recorder import record_forward
from hessinit.init.trace import Trace, WeightUse, parametrized_name, simplify
from hessinit.problem.checks import layer_name, unwrap
from hessinit.problem.problem import Forward

# What an operation says of a parameter that is not the weight of a layer.
_OTHER_USES = {
    "add": "added to a signal, not a map of one",
    "cat": "joined to a signal, not a map of one",
    "mul": "scales a signal elementwise",
    "getitem": "a table read by hand, not by nn.Embedding",
}


@dataclass(frozen=True)
class TracedWeights:
    """The uses in execution order; why a weight has none (`unmet`); what is not understood."""

    uses: tuple[WeightUse, ...]
    unmet: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_weight_uses(
    model: nn.Module, sample: Any = None, forward: Forward | None = None, *, dropout: bool = True
) -> TracedWeights:
    """Record one forward, on `sample` or on zeros of a shape that the model takes, and read it.

    A weight that is used several times, or is tied, has several uses under one name. The model, its
    buffers and the random state are left as found. Costs one forward. Without `dropout`, dropout is
    named and counts for nothing.
    """
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        return TracedWeights(())
    trace = record_forward(model, sample, forward)
    if not dropout:
        trace = replace(trace, steps=[replace(step, keep=1.0) for step in trace.steps])
    trace = simplify(trace)
    uses = _read_uses(trace)
    unknown = [layer_name(use.parameter) for use in uses if use.upstream.end == "unknown"]
    guess = "comes from an unknown function and is taken to have size 1"
    notes = [f"the input of {name} {guess}" for name in unknown]
    if trace.draws:
        notes.append(
            "the forward draws random numbers itself; only nn.Dropout and F.dropout are counted"
        )
    return TracedWeights(uses, _reasons_unmet(model, trace, uses), tuple(dict.fromkeys(notes)))


def _read_uses(trace: Trace) -> tuple[WeightUse, ...]:
    downstream = Downstream(trace)
    steps = [(step, step.use) for step in trace.steps if step.use is not None]
    uses = [
        replace(
            use,
            order=order,
            blocks=downstream.output_blocks(step, use),
            upstream=upstream_of(trace, step),
            downstream=downstream.context(step),
            norm_follows=downstream.norm_follows(step),
            closes_residual=downstream.closes_residual(step),
            step=step.index,
        )
        for order, (step, use) in enumerate(steps)
    ]
    # On zeros, as the first state of a handwritten recurrence, a weight does nothing: its other
    # uses count.
    counting = {use.parameter for use in uses if use.upstream.end != "constant"}
    return tuple(
        use for use in uses if use.upstream.end != "constant" or use.parameter not in counting
    )


def _reasons_unmet(model: nn.Module, trace: Trace, uses: Sequence[WeightUse]) -> Mapping[str, str]:
    used = {use.parameter for use in uses}
    reasons = {}
    for name, parameter in model.named_parameters():
        shown = parametrized_name(name)
        if parameter.ndim > 1 and shown not in used:
            words = trace.other_uses.get(name, "not used by the forward")
            is_sentence = " " in words
            reasons[shown] = words if is_sentence else _OTHER_USES.get(words, f"used by {words}")
    return reasons


@dataclass(frozen=True)
class Fans:
    """How many inputs an output sums over, and how many outputs an input feeds.

    Borders aside. With a stride, or a transposed convolution's, they are means over the positions.
    """

    inputs: float
    outputs: float


def fans_of(use: WeightUse) -> tuple[Fans, ...]:
    """The fans of each output block of the weight.

    >>> fans_of(WeightUse("conv.weight", "convolution", (64, 3, 5, 5), stride=(2, 2)))
    (Fans(inputs=75.0, outputs=400.0),)
    >>> fans_of(WeightUse("up.weight", "transposed convolution", (8, 4, 4, 4), stride=(2, 2)))
    (Fans(inputs=32.0, outputs=64.0),)
    >>> fans_of(WeightUse("qkv.weight", "dense", (192, 64), blocks=(64, 64, 64)))[0]
    Fans(inputs=64.0, outputs=64.0)
    """
    shape = use.shape
    if math.prod(shape) == 0:
        raise ProblemError(
            f"{layer_name(use.parameter)} has shape {shape}: a fan is zero, so no variance can be "
            "right for it. Remove the layer, or leave it out with layers=."
        )
    if use.kind == "embedding":
        return (Fans(1.0, float(shape[1])),)  # a lookup: every output is one entry
    positions = math.prod(use.stride)
    fans = []
    for first_group, *_ in block_views(use, torch.empty(shape, device="meta")):
        inputs = float(math.prod(first_group.shape[1:]))
        outputs = float(first_group.shape[0] * math.prod(first_group.shape[2:]))
        if use.kind == "transposed convolution":
            fans.append(Fans(inputs / positions, outputs))
        else:
            fans.append(Fans(inputs, outputs / positions))
    return tuple(fans)


def block_views(use: WeightUse, weight: Tensor) -> list[list[Tensor]]:
    """For each output block its matrices, one a group, as views (outputs, inputs, …kernel)."""
    if use.kind == "embedding":
        return [[weight.T]]
    if use.kind == "bilinear":
        return [[weight.flatten(1)]]
    if use.kind == "transposed convolution":
        return [[group.transpose(0, 1) for group in weight.chunk(use.groups)]]
    matrix = weight.T if use.outputs_last else weight
    outputs = len(matrix)
    # The groups of a convolution are blocks already; output blocks would cut through them.
    has_blocks = sum(use.blocks) == outputs and use.groups == 1
    blocks = matrix.split(list(use.blocks) if has_blocks else outputs)
    return [list(block.chunk(use.groups)) for block in blocks]


def widths_change(uses: Sequence[WeightUse]) -> bool:
    """Whether outputs of a layer that feeds another are over twice, or under half, its inputs."""
    fans = [fans_of(use)[0] for use in uses if use.kind != "embedding"]
    return any(not 0.5 <= layer.outputs / layer.inputs <= 2 for layer in fans[:-1])
