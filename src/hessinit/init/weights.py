"""The weights of a model: how they are written, with a way back, and where the forward uses them.

torch reads fans off a tensor's shape, which is wrong for grouped and transposed convolutions,
strides, fused projections and gates. Here a fan-in is the number of inputs that an output sums
over, and a fan-out the number of outputs that an input feeds, on average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from hessinit.errors import ProblemError, argument
from hessinit.init.recorder import record_forward
from hessinit.init.trace import (
    Downstream,
    Trace,
    WeightUse,
    parametrized_name,
    simplify,
    upstream_of,
)
from hessinit.problem.checks import find_layers, is_stored_otherwise, layer_name, unwrap
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward
from hessinit.problem.ranks import on_any_rank
from hessinit.problem.shards import is_dtensor, local_part, shard_of

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
# embed_positions, position_embeddings, pos_embed
_POSITIONS = re.compile(r"(^|[._])pos", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """One weight, by its name inside the model (`key`) and in reports (`name`).

    A parametrized weight is one target (`fc.weight`) whatever it is computed from, and is written
    through its `parametrization`; `attribute` is its name inside its owner. `protected` says why it
    stays as it is, where it could be written.
    """

    key: str
    aliases: tuple[str, ...]
    owner: Any
    stored: tuple[nn.Parameter, ...]
    protected: str = ""

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
        buffers = [(buffer, buffer.clone()) for buffer in self.owner.buffers()]
        with torch.no_grad():
            value: Tensor = getattr(self.owner, self.attribute)
            for buffer, previous in buffers:
                buffer.copy_(previous)
            return value.detach()

    @property
    def reason_unchanged(self) -> str:
        """Why this weight cannot be written; "" if it can."""
        for parameter in self.stored:
            if not parameter.requires_grad:
                return "frozen"
            if parameter.layout is not torch.strided:
                return "a sparse tensor"
            if not parameter.is_floating_point() or parameter.is_inference():
                return "not of real numbers, or made under inference_mode"
        inverted = all(hasattr(step, "right_inverse") for step in self.parametrization)
        return self.protected if inverted else "its parametrization has no right_inverse"

    def snapshot(self) -> Callable[[], None]:
        """Copy all that `write_` may change, also a parametrization's buffers; returns the undo."""
        stored = [(parameter, parameter.detach().clone()) for parameter in self.stored]
        buffers = [
            (step._buffers, name, buffer, buffer.clone())
            for step in self.parametrization
            for name, buffer in step.named_buffers(recurse=False)
        ]

        @torch.no_grad()
        def restore() -> None:
            for parameter, value in stored:
                parameter.copy_(value)
            for table, name, buffer, value in buffers:
                # A right_inverse may have put another tensor there.
                table[name] = buffer.copy_(value)

        return restore

    def write_(self, value: Tensor) -> None:
        """Write new values in place: the Parameter objects stay the same."""
        with torch.no_grad():
            if self.is_parametrized:
                # A copy, because a parametrization may keep the very tensor.
                setattr(self.owner, self.attribute, value.to(self.stored[0], copy=True))
            elif is_dtensor(self.stored[0]) and not is_dtensor(value):
                local_part(self.stored[0]).copy_(shard_of(value, self.stored[0]))
            else:
                self.stored[0].copy_(value)

    def biases(self) -> dict[str, nn.Parameter]:
        """The trainable biases of the module that owns the weight."""
        return {
            name: parameter
            for name, parameter in self.owner.named_parameters(recurse=False)
            if parameter.ndim == 1 and "bias" in name and parameter.requires_grad
        }


def find_targets(model: nn.Module, layers: str | Iterable[str] | None) -> list[Target]:
    """Every weight of two or more dimensions, or those that `layers` names, also if frozen.

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
        aliases = tuple(
            layer_name(parametrized_name(alias)) for alias in names[id(parameter)] if alias != name
        )
        protected = _reason_protected(stored, keeps_zeros)
        targets.setdefault(key, Target(key, aliases, owner, tuple(stored), protected))
    return list(targets.values())


def _reason_protected(stored: Sequence[nn.Parameter], keeps_zeros: bool) -> str:
    if any(map(is_stored_otherwise, stored)):
        return "quantized"
    if keeps_zeros and not on_any_rank(any(bool(local_part(part).any()) for part in stored)):
        return "zero beside trained weights"
    return ""


def reason_to_keep(model: nn.Module) -> str:
    """Why the model is taken to be trained: it has adapters, or frozen weights; "" if it is not.

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
        if any(weight.ndim >= 2 and not weight.requires_grad for weight in module.parameters())
    ]
    return f"the model has frozen weights ({', '.join(frozen[:3])})" if frozen else ""


def snapshot(
    targets: Sequence[Target], parameters: Iterable[nn.Parameter] = ()
) -> Callable[[], None]:
    """Copy the weights, their biases and further `parameters`; returns what puts them back."""
    restores = [target.snapshot() for target in targets]
    biases = [bias for target in targets for bias in target.biases().values()]
    copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in (*biases, *parameters)}

    @uninterrupted
    @torch.no_grad()
    def restore() -> None:
        for restore_target in restores:
            restore_target()
        for tensor, value in copies.values():
            tensor.copy_(value)

    return restore


# --- Where the forward uses the weights, with their true fans and output blocks

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
    notes = [
        f"the input of {layer_name(use.parameter)} comes from an unknown function and is taken to "
        "have size 1"
        for use in uses
        if use.upstream.end == "unknown"
    ]
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
            "right for it. Remove the layer, or leave it out with ",
            argument("layers"),
            ".",
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
