"""The weights of a model, and how they are written: in place, through a parametrization, with a way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from hessinit.init.trace import parametrized_name
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.validate import find_layers, layer_name

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
