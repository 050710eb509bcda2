"""The weights of a model: where the forward uses them, their true fans and blocks, and how they are written.

torch reads fans off a tensor's shape, which is wrong for grouped and transposed convolutions,
strides, fused projections and gates. Here a fan-in is the number of inputs that an output sums
over, and a fan-out the number of outputs that an input feeds, on average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from hessinit.errors import ProblemError
from hessinit.init.context import Downstream, upstream_of
from hessinit.init.recorder import trace_forward
from hessinit.init.trace import Signal, Step, WeightUse, parametrized_name, simplify
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward
from hessinit.problem.validate import find_layers, layer_name, unwrap

_ROLES = {
    "add": "added to a signal, not a map of one",
    "cat": "joined to a signal, not a map of one",
    "mul": "scales a signal elementwise",
    "getitem": "a table read by hand, not by nn.Embedding",
}
# Modules whose weights training sets.
_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    _ConvNd,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.MultiheadAttention,
)
_POSITIONS = re.compile(
    r"(^|[._])pos", re.IGNORECASE
)  # embed_positions, position_embeddings, pos_embed
# Likely leading dimensions, for models traced without a sample; primes, so that a reshape that fits
# is meant.
_SIZES = ((2, 7), (2,), (2, 5, 7))


@dataclass(frozen=True)
class TracedWeights:
    """The uses in execution order; `unmet` says why a weight has none; `notes` what was not understood."""

    uses: tuple[WeightUse, ...]
    unmet: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_weight_uses(
    model: nn.Module, sample: Any = None, forward: Forward | None = None, *, dropout: bool = True
) -> TracedWeights:
    """Trace the model: run it once on `sample`, or trace it symbolically without one.

    A weight that is used several times, or is tied, has several uses under one name. The model, its
    buffers and the random state are left as found. Costs at most one forward. Without `dropout`,
    dropout is named and counts for nothing.
    """
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        return TracedWeights(())
    if sample is None and forward is not None:
        raise ProblemError(
            "forward= says how the model is called on a sample; pass sample= as well."
        )
    trace = trace_forward(model, sample, forward)
    if not dropout:
        trace.steps = [replace(step, keep=1.0) for step in trace.steps]
    simplify(trace)
    downstream = Downstream(trace)
    steps = [(step, step.use) for step in trace.steps if step.use is not None]
    uses = tuple(
        replace(
            use,
            order=order,
            blocks=_output_blocks(downstream, step, use),
            upstream=upstream_of(trace, step),
            downstream=downstream.context(step),
            norm_follows=downstream.norm_follows(step),
            closes_residual=downstream.closes_residual(step),
            step=step.index,
        )
        for order, (step, use) in enumerate(steps)
    )
    # On zeros, as the first state of a handwritten recurrence, a weight does nothing: its other
    # uses tell.
    telling = {use.parameter for use in uses if use.upstream.end != "constant"}
    uses = tuple(
        use for use in uses if use.upstream.end != "constant" or use.parameter not in telling
    )
    unknown = [layer_name(use.parameter) for use in uses if use.upstream.end == "unknown"]
    guess = "comes from an unknown function and is taken to have size 1"
    notes = [f"the input of {name} {guess}" for name in unknown]
    if trace.draws:
        notes.append(
            "the forward draws random numbers itself; only nn.Dropout and F.dropout are counted"
        )
    met = {use.parameter for use in uses}
    unmet = {}
    for name, parameter in model.named_parameters():
        shown = parametrized_name(name)
        if parameter.ndim > 1 and shown not in met:
            words = trace.other_uses.get(name, "not used by the forward")
            unmet[shown] = words if " " in words else _ROLES.get(words, f"used by {words}")
    return TracedWeights(uses, unmet, tuple(dict.fromkeys(notes)))


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
            f"{layer_name(use.parameter)} has shape {shape}: a fan is zero, so no variance can be right for "
            "it. Remove the layer, or leave it out with layers=."
        )
    if use.kind == "embedding":
        return (Fans(1.0, float(shape[1])),)  # a lookup: every output is one entry
    found = []
    positions = math.prod(use.stride)
    for first, *_ in block_views(use, torch.empty(shape, device="meta")):
        inputs = float(math.prod(first.shape[1:]))
        outputs = float(first.shape[0] * math.prod(first.shape[2:]))
        transposed = use.kind == "transposed convolution"
        found.append(
            Fans(inputs / positions, outputs) if transposed else Fans(inputs, outputs / positions)
        )
    return tuple(found)


def block_views(use: WeightUse, weight: Tensor) -> list[list[Tensor]]:
    """For each output block its matrices, one a group, as views (outputs, inputs, …kernel) of `weight`."""
    if use.kind == "embedding":
        return [[weight.T]]
    if use.kind == "bilinear":
        return [[weight.flatten(1)]]
    if use.kind == "transposed convolution":
        return [[group.transpose(0, 1) for group in weight.chunk(use.groups)]]
    if use.kind == "convolution":
        return [list(block.chunk(use.groups)) for block in weight.split(_block_sizes(use))]
    matrix = weight.T if use.outputs_last else weight
    return [[block] for block in matrix.split(_block_sizes(use))]


def widths_change(uses: Sequence[WeightUse]) -> bool:
    """Whether a layer that feeds another has more than twice as many outputs as inputs, or less than half."""
    fans = [fans_of(use)[0] for use in uses if use.kind != "embedding"]
    return any(not 0.5 <= one.outputs / one.inputs <= 2 for one in fans[:-1])


def _block_sizes(use: WeightUse) -> list[int]:
    outputs = use.shape[1] if use.outputs_last else use.shape[0]
    # The groups of a convolution are blocks already; output blocks would cut through them.
    is_one = not use.blocks or sum(use.blocks) != outputs or use.groups > 1
    return [outputs] if is_one else list(use.blocks)


def _output_blocks(downstream: Downstream, step: Step, use: WeightUse) -> tuple[int, ...]:
    """The sizes of the output blocks, in the order of their first channels; () where the output stays whole.

    Channel numbers are sent through the rearranging steps that follow, in place of the output:
    where they arrive in disjoint sets that together are all channels, these sets are the blocks.
    """
    kinds = {consumer.kind for consumer in downstream.consumers.get(step.index, [])}
    weights = ("dense", "convolution", "transposed convolution")
    if use.blocks or use.kind not in weights or not kinds & {"rearrange", "split", "gate"}:
        return use.blocks
    channels = use.shape[1] if use.outputs_last else use.shape[0]
    if use.kind == "transposed convolution":
        channels = use.shape[1] * use.groups
    tail = (1,) * (len(use.shape) - 2)
    if step.shape is not None:
        shapes = [(step.shape, step.shape)]
    elif tail:
        shapes = [((2, channels, *(7, 5, 7)[-len(tail) :]),) * 2]
    else:
        shapes = [((*size, math.prod(use.shape) // channels), (*size, channels)) for size in _SIZES]
    for around, shape in shapes:
        try:
            numbers = torch.arange(channels, dtype=torch.float64).reshape(-1, *tail).expand(shape)
            arrived = set(_arrivals(downstream, step, numbers, around))
        except Exception:  # the shapes assumed do not fit these calls
            continue
        if len(arrived) > 1 and sum(map(len, arrived)) == channels == len(
            frozenset().union(*arrived)
        ):
            return tuple(len(block) for block in sorted(arrived, key=min))
    return ()


def _arrivals(
    downstream: Downstream, step: Step, value: Any, around: tuple[int, ...]
) -> Iterator[frozenset[float]]:
    """The channel numbers that reach each step that does more than rearrange; `around` is others' shape."""

    def value_of(signal: Signal) -> Any:
        shape = downstream.trace[signal.index].shape or around
        return value if signal.index == step.index else torch.empty(shape, device="meta")

    def numbers(value: Any) -> frozenset[float]:
        if not isinstance(value, Tensor) or not value.numel():
            raise ValueError(
                "a tuple was not taken apart, or the dimension is not what was assumed"
            )
        return frozenset(value.unique().tolist())

    consumers = downstream.consumers.get(step.index, [])
    for consumer in consumers:
        call = consumer.call
        if consumer.kind == "gate" and call is not None:
            yield from map(numbers, value.chunk(2, call.kwargs.get("dim", (*call.args, -1)[1])))
        elif consumer.kind in ("rearrange", "split"):
            # An expansion keeps the channels, and its shape may not be known.
            same = call is None or consumer.name.startswith(("expand", "broadcast"))
            moved = value if same or call is None else call.run(value_of)
            yield from _arrivals(downstream, consumer, moved, around)
        else:
            yield numbers(value)
    if not consumers:
        yield numbers(value)


@dataclass(frozen=True)
class Target:
    """One weight: `key` is its name inside the model, as in `WeightUse.parameter`; `name` as in reports.

    A parametrized weight is one target (`fc.weight`) whatever it is computed from, and is written
    through its `parametrization`; `attribute` is its name inside its owner.
    """

    key: str
    aliases: tuple[str, ...]
    owner: Any
    stored: tuple[nn.Parameter, ...]
    kept: str = ""  # why it stays, where it could be written

    @property
    def name(self) -> str:
        return layer_name(self.key)

    @property
    def attribute(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def is_parametrized(self) -> bool:
        return parametrize.is_parametrized(self.owner, self.attribute)

    @property
    def parametrization(self) -> tuple[nn.Module, ...]:
        return tuple(self.owner.parametrizations[self.attribute]) if self.is_parametrized else ()

    @property
    def value(self) -> Tensor:
        """The weight as the forward sees it."""
        # A spectral norm takes a step of its power iteration at every access.
        kept = [(buffer, buffer.clone()) for buffer in self.owner.buffers()]
        with torch.no_grad():
            value: Tensor = getattr(self.owner, self.attribute)
            for buffer, old in kept:
                buffer.copy_(old)
            return value.detach()

    @property
    def reason_unchanged(self) -> str:
        """Why this weight cannot be written; "" if it can."""
        for one in self.stored:
            if not one.requires_grad:
                return "frozen"
            if one.layout is not torch.strided:
                return "a sparse tensor"
            if not one.is_floating_point() or one.is_inference():
                return "not of real numbers, or made under inference_mode"
        inverted = all(hasattr(step, "right_inverse") for step in self.parametrization)
        return self.kept if inverted else "its parametrization has no right_inverse"

    def snapshot(self) -> Callable[[], None]:
        """Copy all that `write_` may change, a parametrization's buffers too; returns the way back."""
        stored = [(parameter, parameter.detach().clone()) for parameter in self.stored]
        tables = [
            (step._buffers, step.named_buffers(recurse=False)) for step in self.parametrization
        ]
        buffers = [
            (table, name, one, one.clone()) for table, found in tables for name, one in found
        ]

        @torch.no_grad()
        def restore() -> None:
            for parameter, value in stored:
                parameter.copy_(value)
            for table, name, buffer, value in buffers:
                table[name] = buffer.copy_(
                    value
                )  # a right_inverse may have put another tensor there

        return restore

    def write_(self, value: Tensor) -> None:
        """Write new values in place: the Parameter objects stay the same."""
        with torch.no_grad():
            if self.is_parametrized:
                kept = value.to(
                    self.stored[0], copy=True
                )  # a parametrization may keep the very tensor
                setattr(self.owner, self.attribute, kept)
            else:
                self.stored[0].copy_(value)

    def biases(self) -> dict[str, nn.Parameter]:
        """The trainable biases of the module that owns the weight."""
        own = self.owner.named_parameters(recurse=False)
        return {
            name: one for name, one in own if one.ndim == 1 and "bias" in name and one.requires_grad
        }


def find_targets(model: nn.Module, layers: str | Iterable[str] | None) -> list[Target]:
    """Every weight of two or more dimensions, or those that `layers` names; frozen ones are among them.

    Unless it is named, a weight that is zero in a model trained before stays so, as the B of LoRA.
    """
    named = None if layers is None else {layer.parameter for layer in find_layers(model, layers)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    targets: dict[str, Target] = {}
    keeps_zeros = layers is None and bool(reason_to_keep(model))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (named is not None and name not in named):
            continue
        key = parametrized_name(name)
        path, _, attribute = key.rpartition(".")
        owner: Any = model.get_submodule(path)
        stored = [parameter]
        if parametrize.is_parametrized(owner, attribute):
            stored = list(owner.parametrizations[attribute].parameters(recurse=False))
        others = [other for other in names[id(parameter)] if other != name]
        aliases = tuple(layer_name(parametrized_name(other)) for other in others)
        kept = (
            "zero beside trained weights" if keeps_zeros and not any(map(torch.any, stored)) else ""
        )
        targets.setdefault(key, Target(key, aliases, owner, tuple(stored), kept))
    return list(targets.values())


def reason_to_keep(model: nn.Module) -> str:
    """What says that somebody has trained the model: adapters, or frozen weights; "" if nothing does.

    Tables of positions do not count: who writes a model fills and freezes them, before any
    training.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return "the model holds adapters of peft"
    frozen = [
        path or type(module).__name__
        for path, module in model.named_modules()
        if isinstance(module, _LAYERS) or type(module).__name__ == "Conv1D"  # of Transformers
        if not (isinstance(module, nn.Embedding) and _POSITIONS.search(path))
        if any(one.ndim >= 2 and not one.requires_grad for one in module.parameters())
    ]
    return f"the model has frozen weights ({', '.join(frozen[:3])})" if frozen else ""


def snapshot(targets: Sequence[Target], others: Iterable[nn.Parameter] = ()) -> Callable[[], None]:
    """Copy the weights, the biases beside them and `others`; the returned function puts them back exactly."""
    ways = [target.snapshot() for target in targets]
    beside = [*(bias for target in targets for bias in target.biases().values()), *others]
    kept = {id(one): (one, one.detach().clone()) for one in beside}

    @uninterrupted
    @torch.no_grad()
    def restore() -> None:
        for way in ways:
            way()
        for one, value in kept.values():
            one.copy_(value)

    return restore
