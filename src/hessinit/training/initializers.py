"""Initializations by name, for `compare` and `sweep`: how each one writes the weights of a new model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, choose, list_of
from hessinit.init.apply_scheme import SCHEMES, SYNONYMS, Scheme, draw_scheme_
from hessinit.init.weights import find_targets
from hessinit.problem.problem import Forward, Loss
from hessinit.training.data import derive, generator, seed_everything

OURS = "hessinit"
DEFAULT = "default"
WARMUP = "+warmup"
KNOWN = [DEFAULT, OURS, *(scheme for scheme in SCHEMES if scheme != DEFAULT)]

WriteWeights = Callable[..., Any]  # function(model, loss, batch, lr, seed), writes in place


@dataclass(frozen=True)
class NormalWeights:
    """The initialization of a sweep: weights from N(0, std²), biases 0; weights outside `layers` stay."""

    std: float
    layers: str | tuple[str, ...] | None = None

    def __call__(self, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)  # the same numbers for every std, only scaled
        targets = find_targets(model, self.layers)
        if not targets:
            raise ProblemError(f"layers={self.layers!r} names no weight of two or more dimensions.")
        for target in targets:
            value = torch.randn(target.value.shape, generator=source)
            if not target.reason_unchanged:
                target.write_(self.std * value)
                for bias in target.biases().values():
                    nn.init.zeros_(bias)


@dataclass(frozen=True)
class Initializer:
    """A name, the scheme or function behind it, and the steps of learning-rate warmup that go with it."""

    name: str
    scheme: str | WriteWeights
    warmup: int = 0

    @property
    def depends_on_rate(self) -> bool:
        """Whether the weights may depend on the learning rate, which a user's function receives."""
        return self.scheme == OURS or not isinstance(self.scheme, (str, NormalWeights))

    @property
    def description(self) -> str:
        """The same in every process, for the record of the experiment."""
        return describe(self.scheme) + (
            f" with {self.warmup} steps of warmup" if self.warmup else ""
        )

    def initialize_(
        self,
        model: nn.Module,
        loss: Loss,
        batch: tuple[Any, Any],
        lr: float,
        seed: int,
        forward: Forward | None,
        optimizer: Any,
    ) -> str:
        """Write the weights in place; returns why a target was not met, else an empty string."""
        seed_everything(seed, "start")
        if self.scheme == OURS:
            from hessinit.training.initialize import initialize_  # the other schemes do not need it

            number = derive(seed, "start")
            result = initialize_(
                model,
                loss,
                batch,
                lr=lr,
                optimizer=optimizer,
                forward=forward,
                seed=number,
                overwrite=True,
                distributed="each",
            )
            return "" if result.converged else str(result.reason)
        if callable(self.scheme):
            self.scheme(model, loss, batch, lr, derive(seed, "start"))
        elif self.scheme != DEFAULT:
            source = generator(seed, "start")
            draw_scheme_(model, Scheme(self.scheme), batch[0], forward, generator=source)
        return ""


def read_schemes(schemes: Any, warmup: int) -> tuple[Initializer, ...]:
    """Names, or a mapping from names to names or functions; "+warmup" adds `warmup` steps of warmup.

    >>> [(one.scheme, one.warmup) for one in read_schemes(["he", "lsuv+warmup"], warmup=40)]
    [('he', 0), ('lsuv', 40)]
    """
    if isinstance(schemes, str):
        schemes = [schemes]
    named = (
        list(schemes.items())
        if isinstance(schemes, Mapping)
        else [(each, each) for each in list_of(schemes)]
    )
    if not named:
        rule = "a list of names, such as ['he'], or a mapping from names to names or functions"
        raise ProblemError(f"schemes={schemes!r} must be {rule}.")
    if len({name for name, _ in named}) < len(named):
        raise ProblemError(f"schemes={schemes!r} must hold every scheme once.")
    found = []
    for name, scheme in named:
        steps = warmup if any(str(each).endswith(WARMUP) for each in (name, scheme)) else 0
        if isinstance(scheme, Initializer):
            found.append(scheme)
        elif isinstance(scheme, str):
            base = scheme.removesuffix(WARMUP)
            choose("schemes", base, KNOWN, SYNONYMS)
            found.append(Initializer(name, base, steps))
        elif (
            not callable(scheme)
            or isinstance(scheme, (type, nn.Module))
            or not isinstance(name, str)
        ):
            raise ProblemError(
                f"schemes holds {scheme!r}; a scheme is a name, such as 'he', or in a mapping a function "
                "scheme(model, loss, batch, lr, seed) that writes the weights in place: {'mine': function}."
            )
        else:
            found.append(Initializer(name, scheme, steps))
    return tuple(found)


def describe(thing: Any) -> str:
    """A function or module in words that are the same in every process: no addresses.

    >>> describe(torch.nn.functional.mse_loss), describe(NormalWeights(0.1))
    ('torch.nn.functional.mse_loss', 'NormalWeights(std=0.1, layers=None)')
    """
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(thing))
