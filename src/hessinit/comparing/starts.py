"""The starts of a comparison: how each one writes the weights of a new model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hessinit.comparing.seeds import derive, generator, seed_everything
from hessinit.errors import ProblemError, choose
from hessinit.init.apply_scheme import SCHEMES, SYNONYMS, apply_scheme_
from hessinit.init.targets import find_targets
from hessinit.problem.batches import Batch
from hessinit.problem.problem import Forward, Loss

OURS = "hessinit"
UNTOUCHED = "default"
WARMUP = "+warmup"
KNOWN = [UNTOUCHED, OURS, *(scheme for scheme in SCHEMES if scheme != UNTOUCHED)]

WriteWeights = Callable[..., Any]  # start(model, loss, batch, lr, seed), writes in place


@dataclass(frozen=True)
class Start:
    """A name, and what it stands for: a word of `KNOWN` or the user's function; then steps of warmup."""

    name: str
    how: str | WriteWeights
    warmup: int = 0

    @property
    def depends_on_rate(self) -> bool:
        """Whether the weights may differ between rates: a user's function is told the rate."""
        return self.how == OURS or not isinstance(self.how, (str, Normal))

    @property
    def description(self) -> str:
        """The same in every process, for the record of the experiment."""
        return describe(self.how) + (f" with {self.warmup} steps of warmup" if self.warmup else "")

    def write_(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Batch,
        lr: float,
        seed: int,
        forward: Forward | None,
        optimizer: Any = "sgd",
    ) -> str:
        """Write the weights in place; returns what a reader should know of it, mostly nothing."""
        seed_everything(seed, "start")
        if self.how == UNTOUCHED:
            return ""
        if self.how == OURS:
            return _initialize_(model, loss, batch, lr, seed, forward, optimizer)
        if isinstance(self.how, str):
            source = generator(seed, "start")
            apply_scheme_(model, self.how, sample=batch.inputs, forward=forward, generator=source)
            return ""
        self.how(model, loss, (batch.inputs, batch.targets), lr, derive(seed, "start"))
        return ""


@dataclass(frozen=True)
class Normal:
    """The start of a sweep: normal weights of one standard deviation, zero biases; other weights as built."""

    std: float
    layers: tuple[str, ...] | None = None

    def check(self, model: nn.Module) -> None:
        """Refuse names that fit no weight, before any run."""
        if not find_targets(model, self.layers):
            raise ProblemError(
                f"layers={self.layers!r} names no weight of two or more dimensions, so a sweep has nothing "
                "to set; leave it out for every weight."
            )

    def __call__(self, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)  # the same numbers for every std, only scaled
        for target in find_targets(model, self.layers):
            value = torch.randn(target.value.shape, generator=source)
            if target.reason_unchanged:
                continue
            target.write_(self.std * value)
            with torch.no_grad():
                for bias in target.biases().values():
                    bias.zero_()


def _initialize_(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    lr: float,
    seed: int,
    forward: Forward | None,
    optimizer: Any,
) -> str:
    from hessinit.init.initialize import initialize_  # only here: the other starts do not need it

    # What a function of the user's own makes is not known: it is taken for plain descent.
    known = optimizer if isinstance(optimizer, str) else "sgd"
    result = initialize_(
        model, loss, (batch.inputs, batch.targets), lr=lr, optimizer=known, forward=forward,
        seed=derive(seed, "start"),
    )  # fmt: skip
    return "" if result.converged else str(result.reason)


def read_starts(schemes: Any, warmup: int) -> tuple[Start, ...]:
    """Names, or a mapping from names to names or functions; "+warmup" means that many steps of it.

    >>> [(start.how, start.warmup) for start in read_starts(["he", "lsuv+warmup"], warmup=40)]
    [('he', 0), ('lsuv', 40)]
    """
    named = _name_all(schemes)
    if not named:
        raise ProblemError(f"schemes={schemes!r} holds no start; name at least one, such as ['default'].")
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(f"schemes holds {name!r} twice; name every start once.")
    return tuple(_read_start(name, how, warmup) for name, how in named)


def _name_all(schemes: Any) -> list[tuple[Any, Any]]:
    if isinstance(schemes, Mapping):
        return list(schemes.items())
    if isinstance(schemes, str):
        return [(schemes, schemes)]
    if not isinstance(schemes, Iterable):
        raise ProblemError(
            f"schemes={schemes!r} must be a list of names, or a mapping from names to names or functions."
        )
    return [(how, how) for how in schemes]


def _read_start(name: Any, how: Any, warmup: int) -> Start:
    if isinstance(how, str) and isinstance(name, str):
        base = how.removesuffix(WARMUP)
        if base not in KNOWN:
            allowed = [*KNOWN, *(f"{known}{WARMUP}" for known in KNOWN)] if "+" in how else KNOWN
            choose("schemes", how, allowed, SYNONYMS)
        return Start(name, base, warmup if WARMUP in (how[-len(WARMUP) :], name[-len(WARMUP) :]) else 0)
    if not callable(how) or isinstance(how, (type, nn.Module)):
        raise ProblemError(
            f"schemes holds {how!r}, a {type(how).__name__}; a start is a name, such as 'he', or a function "
            "start(model, loss, batch, lr, seed) that writes the weights in place."
        )
    if not isinstance(name, str) or not name:
        shown = getattr(how, "__name__", type(how).__name__)
        raise ProblemError(
            f"schemes holds a function without a name; pass a mapping: {{{shown!r}: {shown}}}."
        )
    return Start(name, how, warmup if name.endswith(WARMUP) else 0)


def describe(thing: Any) -> str:
    """A function or a module in words that are the same in every process: no addresses.

    >>> describe(torch.nn.functional.mse_loss), describe(Normal(0.1))
    ('torch.nn.functional.mse_loss', 'Normal(std=0.1, layers=None)')
    """
    if thing is None or isinstance(thing, (str, nn.Module)):
        return str(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return repr(thing)
    if isinstance(thing, functools.partial):
        given = [
            *map(describe, thing.args),
            *(f"{key}={describe(value)}" for key, value in thing.keywords.items()),
        ]
        return f"{describe(thing.func)}({', '.join(given)})"
    if isinstance(thing, (bool, int, float)):
        return repr(thing)
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
