"""What a word or a `torch.optim` optimizer says: which rule, which rate, which weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.advising.adaptive import ADAPTIVE, Adaptive
from hessinit.advising.wrapped import unwrap_optimizer
from hessinit.errors import ProblemError, choose
from hessinit.problem.layers import Layer
from hessinit.results.advice import DESCENTS, Descent, check_rate, named_descent

Rule = Descent | Adaptive

WORDS = [*DESCENTS, *ADAPTIVE]
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,  # before Adam, which it derives from
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}
# The settings of a group that change its steps, and nothing else does.
_READ = (
    "lr",
    "momentum",
    "dampening",
    "nesterov",
    "betas",
    "alpha",
    "eps",
    "weight_decay",
    "decoupled_weight_decay",
    "maximize",
    "centered",
)


@dataclass(frozen=True)
class Reading:
    """The rule, the rate asked about, what it moves (of the measured; of all; None: everything), remarks."""

    rule: Rule
    lr: float | None
    parameters: frozenset[str] | None = None
    moved: frozenset[str] | None = None
    notes: tuple[str, ...] = ()


def read_word(optimizer: str, lr: float | None, given: Mapping[str, Any]) -> Reading:
    """The rule of a word; `given` are the settings that came with it, None where they did not."""
    choose("optimizer", optimizer, WORDS, {"rms": "rmsprop", "gd": "sgd", "heavy ball": "momentum"})
    known = {
        **dict.fromkeys(DESCENTS, ("momentum", "dampening")),
        "adam": ("betas", "eps"),
        "adamw": ("betas", "eps"),
        "rmsprop": ("alpha", "momentum", "eps"),
    }[optimizer]
    for name, value in given.items():
        if value is not None and name not in (*known, "weight_decay"):
            raise ProblemError(
                f"{name}={value!r} means nothing to optimizer={optimizer!r}, which takes "
                f"{', '.join(known)} and weight_decay; leave it out."
            )
    if optimizer in DESCENTS:
        rule: Rule = named_descent(optimizer, given["momentum"], given["dampening"], given["weight_decay"])
    else:
        rule = _adaptive(optimizer, {name: value for name, value in given.items() if value is not None})
    return Reading(rule, lr)


def read_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, layers: tuple[Layer, ...]) -> Reading:
    """The rule of an optimizer's groups that hold some of `layers`, if they agree."""
    optimizer = unwrap_optimizer(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {layer.parameter for layer in layers}
    groups: list[tuple[int, dict[str, Any], set[str]]] = []
    for number, group in enumerate(optimizer.param_groups):
        held = {names[id(one)] for one in group["params"] if id(one) in names} & wanted
        if held:
            groups.append((number, group, held))
    if not groups:
        raise ProblemError(
            "the optimizer holds none of the measured weights of this model; build it from "
            "model.parameters(), or measure what it holds with layers=."
        )
    _, group, _ = groups[0]
    kind = _kind(optimizer, group)
    _check_agreement(groups)
    if group.get("maximize"):
        raise ProblemError("the optimizer maximizes; advice is for descent. Negate the loss instead.")
    # A scheduler that warms up has put the rate down to its first value, and the one meant beside it.
    lr = float(group.get("initial_lr", group["lr"]))
    measured = frozenset(name for _, _, held in groups for name in held)
    moved = frozenset(
        names[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in names
    )
    notes = []
    if len(measured) < len(wanted):
        missing = f"{len(wanted) - len(measured)} of {len(wanted)}"
        notes.append(f"Left out, as not in the optimizer: {missing} weights.")
    if optimizer.state:
        notes.append("The optimizer has stepped already; the advice is for one that has not.")
    rule = _descent(group) if kind == "sgd" else _adaptive(kind, group)
    return Reading(rule, check_rate(lr) if lr else None, measured, moved, tuple(notes))


def build_optimizer(rule: Rule, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """A new optimizer of torch that steps by the rule."""
    if isinstance(rule, Descent):
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=rule.momentum,
            dampening=rule.dampening,
            weight_decay=rule.weight_decay,
            nesterov=rule.nesterov,
        )
    if rule.kind == "rmsprop":
        return torch.optim.RMSprop(
            parameters,
            lr=lr,
            alpha=rule.memory,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
        )
    build = torch.optim.AdamW if rule.kind == "adamw" else torch.optim.Adam
    betas = (rule.momentum, rule.memory)
    return build(parameters, lr=lr, betas=betas, eps=rule.eps, weight_decay=rule.weight_decay)


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Which of the known classes steps here; a subclass counts if it steps as its parent does."""
    for kind, known in _CLASSES.items():
        # Torch wraps `step` once more in every class that is used.
        if isinstance(optimizer, known) and _step_of(type(optimizer)) is _step_of(known):
            if kind == "adam" and group.get("decoupled_weight_decay"):
                return "adamw"
            return kind
    known_names = ", ".join(f"torch.optim.{one.__name__}" for one in _CLASSES.values())
    raise ProblemError(
        f"the optimizer is a {type(optimizer).__name__}, whose steps are not known here; advice is for "
        f"{known_names}. Pass the nearest of the words {', '.join(map(repr, WORDS))}."
    )


def _step_of(kind: type[torch.optim.Optimizer]) -> Any:
    return inspect.unwrap(kind.step)


def _check_agreement(groups: list[tuple[int, dict[str, Any], set[str]]]) -> None:
    first, settings, _ = groups[0]
    for number, group, held in groups[1:]:
        different = [name for name in _READ if group.get(name) != settings.get(name)]
        different = [name for name in different if name != "lr" or "initial_lr" not in group] + (
            ["initial_lr"] if group.get("initial_lr") != settings.get("initial_lr") else []
        )
        if different:
            shown = ", ".join(f"{name} {settings.get(name)} and {group.get(name)}" for name in different)
            raise ProblemError(
                f"groups {first} and {number} of the optimizer step differently ({shown}), so no single rate "
                f"fits both; ask about one at a time: layers={sorted(held)[:3]!r} for group {number}."
            )


def _descent(group: Mapping[str, Any]) -> Descent:
    return Descent(
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]) if group["momentum"] else 0.0,
        nesterov=bool(group["nesterov"]),
        weight_decay=float(group["weight_decay"]),
    )


def _adaptive(kind: str, settings: Mapping[str, Any]) -> Adaptive:
    if settings.get("centered"):
        raise ProblemError(
            "RMSprop with centered=True divides by the gradients' spread alone, which is not measured here; "
            "use centered=False, or pass the word 'rmsprop'."
        )
    eps = settings.get("eps", 1e-8)
    decay = settings.get("weight_decay", 0.01 if kind == "adamw" else 0.0)
    if kind == "rmsprop":
        momentum, memory = settings.get("momentum", 0.0), settings.get("alpha", 0.99)
    else:
        momentum, memory = _betas(settings.get("betas", (0.9, 0.999)))
    momentum, memory = _plain(momentum), _plain(memory)
    return Adaptive(kind=kind, momentum=momentum, memory=memory, eps=_plain(eps), weight_decay=_plain(decay))


def _betas(betas: Any) -> tuple[Any, Any]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ProblemError(f"betas={betas!r} must be two numbers from 0 to 1, such as (0.9, 0.999).")
    return betas[0], betas[1]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
