"""The weights of a model that can be written: their owners, how they are stored, which are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hessinit.init.trace import parametrized_name
from hessinit.problem.layers import find_layers, layer_name


@dataclass(frozen=True)
class Target:
    """One weight: `key` is its name inside the model, as in `WeightUse.parameter`.

    A parametrized weight is one target (`fc.weight`) whatever it is computed from, and is written through
    its parametrization.
    """

    key: str
    aliases: tuple[str, ...]
    owner: nn.Module
    stored: tuple[nn.Parameter, ...]

    @property
    def name(self) -> str:
        """As reports call it."""
        return layer_name(self.key)

    @property
    def attribute(self) -> str:
        """Its name inside its owner."""
        return self.key.rpartition(".")[2]

    @property
    def is_parametrized(self) -> bool:
        return parametrize.is_parametrized(self.owner, self.attribute)

    @property
    def value(self) -> Tensor:
        """The weight as the forward sees it."""
        # A spectral norm takes a step of its power iteration at every access.
        kept = [(buffer, buffer.clone()) for buffer in self.owner.buffers()]
        with torch.no_grad():
            value: Tensor = getattr(self.owner, self.attribute)
            for buffer, before in kept:
                buffer.copy_(before)
            return value.detach()

    @property
    def reason_unchanged(self) -> str:
        """Why this weight cannot be written; "" if it can."""
        if not all(parameter.requires_grad for parameter in self.stored):
            return "frozen"
        if not all(parameter.is_floating_point() for parameter in self.stored):
            return "not real numbers"
        if any(parameter.layout is not torch.strided for parameter in self.stored):
            return "a sparse tensor"
        if any(parameter.is_inference() for parameter in self.stored):
            return "made under inference_mode: clone it outside"
        writable = all(hasattr(step, "right_inverse") for step in self._parametrization)
        return "" if writable else "its parametrization has no right_inverse"

    @property
    def _parametrization(self) -> tuple[nn.Module, ...]:
        inside: Any = self.owner
        return tuple(inside.parametrizations[self.attribute]) if self.is_parametrized else ()

    def snapshot(self) -> Callable[[], None]:
        """Copy all that `write_` may change, a parametrization's buffers too; returns the way back."""
        stored = [(parameter, parameter.detach().clone()) for parameter in self.stored]
        buffers = [
            (step._buffers, name, buffer, buffer.clone())
            for step in self._parametrization
            for name, buffer in step.named_buffers(recurse=False)
        ]

        @torch.no_grad()
        def restore() -> None:
            for parameter, value in stored:
                parameter.copy_(value)
            for table, name, buffer, value in buffers:
                table[name] = buffer.copy_(value)  # a right_inverse may have put another tensor there

        return restore

    def write_(self, value: Tensor) -> None:
        """Write new values in place: the Parameter objects stay the same."""
        with torch.no_grad():
            if self.is_parametrized:
                kept = value.to(self.stored[0], copy=True)  # a parametrization may keep the very tensor
                setattr(self.owner, self.attribute, kept)
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
    """Every weight of two or more dimensions, or those that `layers` names; frozen ones are among them."""
    wanted = None if layers is None else {layer.parameter for layer in find_layers(model, layers)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    targets: dict[str, Target] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (wanted is not None and name not in wanted):
            continue
        key = parametrized_name(name)
        path, _, attribute = key.rpartition(".")
        owner = model.get_submodule(path)
        stored = [parameter]
        if parametrize.is_parametrized(owner, attribute):
            inside: Any = owner.parametrizations
            stored = list(inside[attribute].parameters(recurse=False))
        others = [other for other in names[id(parameter)] if other != name]
        aliases = tuple(layer_name(parametrized_name(other)) for other in others)
        targets.setdefault(key, Target(key, aliases, owner, tuple(stored)))
    return list(targets.values())


def snapshot(targets: Sequence[Target]) -> Callable[[], None]:
    """Copy the weights and the biases beside them; the returned function puts them back, bit for bit."""
    ways = [target.snapshot() for target in targets]
    biases = {id(bias): (bias, bias.detach().clone()) for t in targets for bias in t.biases().values()}

    @torch.no_grad()
    def restore() -> None:
        for way in ways:
            way()
        for bias, value in biases.values():
            bias.copy_(value)

    return restore
