"""The weights of a model, and how they are written: in place, and with a way back."""

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
from hessinit.problem.checks import find_layers, layer_name
from hessinit.problem.preserve import uninterrupted

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
        is_kept_zero = keeps_zeros and not any(map(torch.any, stored))
        protected = "zero beside trained weights" if is_kept_zero else ""
        targets.setdefault(key, Target(key, aliases, owner, tuple(stored), protected))
    return list(targets.values())


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
