"""Initializations by name, for `compare` and `sweep`: how they write the weights of a model."""

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
from hessinit.problem.problem import Problem
from hessinit.training.data import generator, seed_everything

OURS = "hessinit"
DEFAULT = "default"
WARMUP = "+warmup"
KNOWN = [DEFAULT, OURS, *(scheme for scheme in SCHEMES if scheme != DEFAULT)]

WriteWeights = Callable[..., Any]  # function(model, loss, batch, lr, seed), writes in place


@dataclass(frozen=True)
class NormalWeights:
    """The initialization of a sweep: weights of `layers` from N(0, std²), their biases 0."""

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
    """A name, the scheme or function behind it, and the steps of its learning-rate warmup."""

    name: str
    scheme: str | WriteWeights
    warmup: int = 0

    @property
    def depends_on_rate(self) -> bool:
        """Whether the weights may depend on the learning rate, which a user's function receives."""
        return self.scheme == OURS or not isinstance(self.scheme, (str, NormalWeights))

    @property
    def description(self) -> str:
        """What the record of the experiment says; the same in every process."""
        if not self.warmup:
            return describe(self.scheme)
        return f"{describe(self.scheme)} with {self.warmup} steps of warmup"

    def initialize_(self, problem: Problem, lr: float, seed: int, optimizer: Any) -> str:
        """Write the weights in place; return why a target was not met, or an empty string."""
        seed_everything(seed, "start")
        if self.scheme == OURS:
            from hessinit.training.initialize import initialize_  # the other schemes do not need it

            result = initialize_(
                problem, lr=lr, optimizer=optimizer, overwrite=True, distributed="each"
            )
            return "" if result.converged else str(result.reason)
        if callable(self.scheme):
            self.scheme(problem.model, problem.loss, problem.batch, lr, problem.seed)
        elif self.scheme != DEFAULT:
            draw_scheme_(
                problem.model,
                Scheme(self.scheme),
                problem.batch[0],
                problem.forward,
                generator=generator(seed, "start"),
            )
        return ""


def read_schemes(schemes: Any, warmup: int) -> tuple[Initializer, ...]:
    """Return the initializers of names, or of a mapping from names to names or functions.

    A name that ends in "+warmup" has `warmup` steps of warmup.

    >>> schemes = read_schemes(["he", "lsuv+warmup"], warmup=40)
    >>> [(initializer.scheme, initializer.warmup) for initializer in schemes]
    [('he', 0), ('lsuv', 40)]
    """
    if isinstance(schemes, Mapping):
        named = list(schemes.items())
    else:
        names = [schemes] if isinstance(schemes, str) else list_of(schemes)
        named = list(zip(names, names, strict=True))
    if not named:
        rule = "a list of names, such as ['he'], or a mapping from names to names or functions"
        raise ProblemError(f"schemes={schemes!r} must be {rule}.")
    if len({name for name, _ in named}) < len(named):
        raise ProblemError(f"schemes={schemes!r} must hold every scheme once.")
    return tuple(_read_scheme(name, scheme, warmup) for name, scheme in named)


def _read_scheme(name: Any, scheme: Any, warmup: int) -> Initializer:
    if isinstance(scheme, Initializer):
        return scheme
    steps = warmup if str(name).endswith(WARMUP) or str(scheme).endswith(WARMUP) else 0
    if isinstance(scheme, str):
        base = scheme.removesuffix(WARMUP)
        choose("schemes", base, KNOWN, SYNONYMS)
        return Initializer(name, base, steps)
    is_function = callable(scheme) and not isinstance(scheme, (type, nn.Module))
    if is_function and isinstance(name, str):
        return Initializer(name, scheme, steps)
    raise ProblemError(
        f"schemes holds {scheme!r}; a scheme is a name, such as 'he', or in a mapping a function "
        "scheme(model, loss, batch, lr, seed) that writes the weights in place: {'mine': function}."
    )


def describe(source: Any) -> str:
    """Return a function or module in words that are the same in every process: no addresses.

    >>> describe(torch.nn.functional.mse_loss), describe(NormalWeights(0.1))
    ('torch.nn.functional.mse_loss', 'NormalWeights(std=0.1, layers=None)')
    """
    if hasattr(source, "__qualname__"):
        return f"{source.__module__}.{source.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(source))
