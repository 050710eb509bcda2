"""Any optimizer: a name, a class, a function, an instance or several, built anew for a training."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from hessinit.errors import ProblemError, accepts, argument, check_positive, choose
from hessinit.problem import checks

# A function of the parameters and the learning rate, or of the parameters alone.
MakeOptimizer = Callable[..., Optimizer | Sequence[Optimizer]]
Stepping = str | Optimizer | Sequence[Optimizer] | MakeOptimizer

_MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NAMES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    **{
        kind.__name__.lower(): (kind, {})
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    },
    "momentum": (SGD, _MOMENTUM),
    "nesterov": (SGD, {**_MOMENTUM, "nesterov": True}),
}

EXAMPLE = "lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr)"
MUON_EXAMPLE = (
    "lambda parameters, lr: [torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=lr), "
    "torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=lr)]"
)
# Their class names begin so; the rate that they find multiplies `lr`.
SELF_TUNING = ("Prodigy", "DAdapt", "DoG", "LDoG")
# Wrappers of Lightning, Fabric and accelerate pass a step on. Others, such as Lookahead, step in a
# way of their own.
_WRAPPERS = {"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"}


@dataclass(frozen=True)
class Training:
    """How a network is trained: what every argument `optimizer` takes, where more is to be said.

    `optimizer` is the name of a class in `torch.optim` in any case, or "momentum" or "nesterov"; an
    optimizer; a list of several, such as Muon with AdamW for the biases; a class; or a function
    `(parameters)` or `(parameters, lr)` that builds one or a list. `settings` are arguments of a
    named class. Before every step gradients of `accumulate` mini-batches are averaged, and clipped
    to `clip_norm`, the length of all of them together, as by `torch.nn.utils.clip_grad_norm_`.

    >>> Training("SGD", clip_norm=1.0, settings={"momentum": 0.5}).accumulate
    1
    >>> Training("adamm")
    Traceback (most recent call last):
    hessinit.errors.ProblemError: optimizer='adamm' is unknown; ... Did you mean 'adam'?
    """

    optimizer: Stepping = "sgd"
    _: KW_ONLY
    clip_norm: float | None = None
    accumulate: int = 1
    settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_optimizer(self.optimizer)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm, "such as 1.0; None: no clipping")
        checks.check_whole("accumulate", self.accumulate, at_least=1)
        if not isinstance(self.settings, Mapping | None):
            raise ProblemError(
                argument("settings", self.settings),
                " must be a dict of arguments of a named optimizer, such as {'momentum': 0.5}.",
            )
        if self.settings and not self.is_class:
            raise ProblemError(
                f"{', '.join(self.settings)} was given, and the optimizer has its own; leave out ",
                argument("settings"),
                ", or pass a name such as 'adam'.",
            )

    @classmethod
    def of(cls, optimizer: AnyOptimizer) -> Training:
        """Return what is described; only the optimizer is, unless it is a `Training`."""
        return optimizer if isinstance(optimizer, Training) else cls(optimizer)

    @property
    def is_class(self) -> bool:
        """Whether a name or a class says what to build: it has no learning rate of its own."""
        return isinstance(self.optimizer, str | type)

    @property
    def is_built(self) -> bool:
        """Whether it was built by the user, over the parameters of one model."""
        return isinstance(self.optimizer, Optimizer | Sequence) and not self.is_class

    def check_rebuilds(self) -> None:
        """Raise ProblemError if it is built, over the weights of one model: runs train new ones."""
        if self.is_built:
            raise ProblemError(
                f"optimizer is {name_kinds(as_tuple(self.optimizer))} over the weights of one "
                f"model, and every run trains a new one; pass a function such as {EXAMPLE}."
            )

    def build(self, model: nn.Module, lr: float | None = None) -> Stepper:
        """Build the optimizer of the model's trainable parameters, without a past.

        The rates of its groups are scaled, the largest to `lr`, unless a function takes the rate.
        With None its rates stay; a function that requires a rate is then passed 1.

        >>> import functools
        >>> training = Training(functools.partial(SGD, lr=0.1, momentum=0.5))
        >>> (group,) = training.build(nn.Linear(2, 1, bias=False), 0.3).param_groups
        >>> group["lr"], group["momentum"]
        (0.3, 0.5)
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise ProblemError(
                "the model has no trainable parameter; unfreeze some with requires_grad_()."
            )
        keeps_rate = self.is_class or self.is_built or (lr is None and accepts(self.optimizer, []))
        takes_rate = not keeps_rate and accepts(self.optimizer, [], 0.1)
        if self.is_built:
            optimizers = tuple(_rebuild(part, model) for part in as_tuple(self.optimizer))
        else:
            arguments = [1.0 if lr is None else lr] * takes_rate
            optimizers = as_tuple(self._make(parameters, *arguments))
        _check_trains(optimizers, model)
        stepper = Stepper(optimizers, parameters, self)
        if lr is not None and not takes_rate:
            stepper.scale_rates(lr)
        return stepper

    def _make(self, *arguments: Any) -> Any:
        make: Any = self.optimizer
        settings = dict(self.settings or {})
        if isinstance(make, str):
            make, usual = NAMES[make.lower()]
            settings = {**usual, **settings}
        try:
            return make(*arguments, **settings)
        # torch refuses an empty list, a class wants more arguments, or Muon matrices only.
        except Exception as failure:
            chosen = f" with settings={self.settings}" if self.settings else ""
            fault = _explain_build(f"optimizer cannot be built{chosen}: {failure}")
            if "2D" in str(failure):
                fault = f"{fault.rstrip('.')}, or with the rest for another: {MUON_EXAMPLE}."
            raise ProblemError(fault) from failure


AnyOptimizer = Stepping | Training


class Stepper:
    """The optimizers of one training, which step together after the gradients were clipped."""

    def __init__(
        self, optimizers: Sequence[Optimizer], parameters: list[nn.Parameter], training: Training
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.accumulate = training.accumulate
        self._clip_norm = training.clip_norm
        self._parameters = parameters
        # Schedule-Free trains at other weights than those that count.
        self.averaging = [
            optimizer for optimizer in optimizers if {"train", "eval"} <= set(dir(optimizer))
        ]
        self._set_mode("train")
        self._rates = [group["lr"] for group in self.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def scale_rates(self, lr: float) -> None:
        """Bring the largest rate to this one; the other groups keep their proportion to it."""
        largest = max(map(float, self._rates))
        for group in self.param_groups:
            group["lr"] = lr * (group["lr"] / largest) if largest > 0 else group["lr"]
        self._rates = [group["lr"] for group in self.param_groups]

    def warm_up(self, step: int, steps: int) -> None:
        """Set the rates of a step, counted from 0, of which the first `steps` rise linearly."""
        if step < steps:
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                group["lr"] = rate * (step + 1) / steps

    def step(self) -> None:
        """Clip the gradients and step."""
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer in self.optimizers:
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                kind = type(optimizer).__name__
                raise ProblemError(
                    f"{kind}.step() raised {type(failure).__name__}: {failure}. It must step "
                    "without arguments, with the gradients in .grad, and with None for weights "
                    "that have none; what works is, for instance, optimizer='adamw'."
                ) from failure

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the weights in the model that count, without gradients."""
        self._set_mode("eval")
        try:
            with torch.no_grad():
                yield
        finally:
            self._set_mode("train")

    def _set_mode(self, mode: str) -> None:
        for optimizer in self.averaging:
            getattr(optimizer, mode)()


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps, inside a trainer's wrapper; unknown wrappers stay."""
    inner = getattr(optimizer, "optimizer", None)
    passes_on = _WRAPPERS & {kind.__name__ for kind in type(optimizer).__mro__}
    return unwrap_optimizer(inner) if passes_on and isinstance(inner, Optimizer) else optimizer


def check_steps(optimizer: Optimizer) -> None:
    """Raise ProblemError if the optimizer cannot be used as others, or has no learning rate."""
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    takes_closure = closure is not None and closure.default is inspect.Parameter.empty
    refusals = {
        "which evaluates the loss several times in a step. No rate is advised, and no weights are "
        "fitted for it; pass another, such as 'adam', or leave it out.": takes_closure
        or isinstance(optimizer, LBFGS),
        "which takes sparse gradients only; pass 'adam', and an nn.Embedding with sparse=False, "
        "which trains alike.": isinstance(optimizer, SparseAdam),
        "with maximize=True, which climbs the loss; leave that out, and return the negative from "
        "the loss.": any(group.get("maximize") for group in optimizer.param_groups),
        "whose groups hold no 'lr', so no rate can be set; add it to the defaults that its "
        "__init__ passes to torch.optim.Optimizer.": any(
            "lr" not in g for g in optimizer.param_groups
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ProblemError(f"optimizer is {kind}, {reason}")


def _check_optimizer(optimizer: Any) -> None:
    """Raise ProblemError if this is no optimizer, nor says how to build one."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in NAMES:
            choose("optimizer", optimizer, sorted(NAMES), {"gd": "sgd", "heavy ball": "momentum"})
        return
    if isinstance(optimizer, type):
        is_known = issubclass(optimizer, Optimizer)
    elif callable(optimizer) and not isinstance(optimizer, nn.Module):
        calls: list[list[Any]] = [[[]], [[], 0.1]]
        is_known = any(accepts(optimizer, *call, wrapped=False) for call in calls)
    else:
        is_known = _are_optimizers(as_tuple(optimizer))
    if not is_known:
        raise ProblemError(
            f"optimizer is of type {type(optimizer).__name__}; it must be a name, such as 'adam', "
            f"a torch.optim.Optimizer, a list of them, or a function that builds one, such as "
            f"{EXAMPLE}."
        )


def _check_trains(optimizers: Sequence[Any], model: nn.Module) -> None:
    """Raise ProblemError unless these are optimizers of this model's parameters."""
    kind = name_kinds(optimizers)
    if not _are_optimizers(optimizers):
        raise ProblemError(
            f"optimizer returned {kind or 'nothing'}; it must be called as optimizer(parameters, "
            "lr) or optimizer(parameters) and return a torch.optim.Optimizer, or a list of them."
        )
    for optimizer in optimizers:
        check_steps(optimizer)
    of_model = {id(parameter) for parameter in model.parameters()}
    updated = [
        id(parameter) in of_model
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    if updated and all(updated):
        return
    raise ProblemError(
        _explain_build(
            f"optimizer returned {kind}, which does not train the model: {updated.count(False)} of "
            f"its {len(updated)} parameters are not the model's"
        )
    )


def _are_optimizers(parts: Sequence[Any]) -> bool:
    return bool(parts) and all(isinstance(part, Optimizer) for part in parts)


def _rebuild(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return such an optimizer without a past, over those of its parameters that are the model's.

    Its rates are those that a warmup leads to.
    """
    optimizer = unwrap_optimizer(optimizer)
    of_model = {id(parameter) for parameter in model.parameters()}
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    groups = []
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if id(weight) in of_model]
        # What is no argument is a state that begins anew.
        settings = {
            name: value
            for name, value in group.items()
            if (name in accepted or name not in optimizer.defaults)
            and name not in ("params", "param_names", "initial_lr")
        }
        if weights:
            rate = group.get("initial_lr", group.get("lr"))
            groups.append({**settings, "params": weights, "lr": rate})
    if not groups:
        raise ProblemError(
            f"optimizer is {kind.__name__} over other parameters than this model's; build it from "
            "this model's parameters()."
        )
    check_steps(optimizer)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        rebuilt: Optimizer = kind(groups, **copy.deepcopy(defaults))
    except Exception as failure:
        raise ProblemError(
            f"optimizer is {kind.__name__}, which cannot be built anew from its groups and "
            f"defaults: {failure}. Pass a function instead, such as {EXAMPLE}."
        ) from failure
    return rebuilt


def _explain_build(fault: str) -> str:
    return f"{fault.rstrip('.')}. Build it over the parameters that it is given, as {EXAMPLE}."


def as_tuple(built: Any) -> tuple[Any, ...]:
    return tuple(built) if isinstance(built, list | tuple) else (built,)


def name_kinds(optimizers: Sequence[Any]) -> str:
    return " with ".join(type(optimizer).__name__ for optimizer in optimizers)
