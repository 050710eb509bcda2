"""The stability limit of an optimizer, from its name or from a `torch.optim` optimizer's groups."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessinit.curvature import operators
from hessinit.curvature.engine import Engine, Extremes, LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.preconditioner import (
    RESPONSE,
    AdamRule,
    OptimizerCopy,
    Preconditioner,
    adam_preconditioner,
    disagreement,
    gradient_moments,
    is_descent,
    measure_response,
    minibatch_gradients,
    warm_up,
)
from hessinit.errors import ProblemError, accepts, argument
from hessinit.problem import checks
from hessinit.problem.ranks import lockstep_ranks
from hessinit.problem.shards import local_part
from hessinit.results.advice import Descent, check_rate
from hessinit.results.curvature_report import Estimate
from hessinit.training.optimizers import (
    SELF_TUNING,
    AnyOptimizer,
    Training,
    as_tuple,
    check_steps,
    name_kinds,
    unwrap_optimizer,
)

Rule = Descent | AdamRule

# Below this many steps, some entries of Adam's √v are near 0 by chance, and would dominate
# P^-½ H P^-½.
YOUNG = 5

SINGLE_GRADIENT = "The batch could not be split, so P is the size of this one gradient."
DECAY_IN_GRADIENT = "Adam's weight decay, a part of the gradient, is not included in the advice."

# AdamW before Adam, which it derives from.
_CLASSES: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "adam": Adam}
# All settings that must agree between groups; learning rate and weight decay may differ.
_COMMON = ("momentum", "dampening", "nesterov", "betas", "eps", "decoupled_weight_decay")


@dataclass(frozen=True)
class OptimizerRule:
    """How an optimizer updates the measured weights; `rule` is None where that is not known.

    `rates` and `decays` hold learning rate and weight decay of each measured parameter in the
    optimizer; they are empty for a name. `lr` is the largest learning rate, that of the fastest
    group. `moved` are all parameters in the optimizer (None: all there are). `state` is Adam's
    state, where it is to be used; `optimizers` are those that step.
    """

    rule: Rule | None
    lr: float | None = None
    name: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    decays: Mapping[str, float] = field(default_factory=dict)
    moved: frozenset[str] | None = None
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimizers: tuple[Optimizer, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What weights are fitted to: "momentum" or another descent, "adam", "adamw", or a name."""
        if isinstance(self.rule, AdamRule):
            return "adamw" if self.rule.decoupled else "adam"
        if self.rule is None:
            return self.name
        if not self.rule.momentum:
            return "sgd"
        return "nesterov" if self.rule.nesterov else "momentum"

    @property
    def tunes_itself(self) -> bool:
        """Whether it finds its learning rate, as Prodigy does."""
        return any(type(part).__name__.startswith(SELF_TUNING) for part in self.optimizers)

    @property
    def is_uniform(self) -> bool:
        """Whether all weights have the same learning rate and weight decay."""
        return len(set(self.rates.values())) <= 1 and len(set(self.decays.values())) <= 1

    def age(self, leaves: Mapping[str, Tensor]) -> float:
        """Return the number of steps in Adam's state, that of the youngest weight; 0 without."""
        states = [self.state.get(name) or {} for name in leaves]
        return min((float(state["step"]) for state in states if "exp_avg_sq" in state), default=0.0)

    def preconditioner(self, leaves: Mapping[str, Tensor], new: Preconditioner) -> Preconditioner:
        """Return what the optimizer sees, in which all weights move as fast as the fastest.

        With S = P/relative rate it is S^-½ (H + decay) S^-½, or with AdamW S^-½ H S^-½ plus its
        decay. P is that of Adam's own state, or that of a `new` one.
        """
        rule = self.rule
        assert rule is not None
        largest = max(self.rates.values(), default=0.0)
        relative = {name: rate / largest for name, rate in self.rates.items() if largest}
        rates = _flat(relative, leaves)
        decay = _flat(self.decays, leaves, rule.weight_decay)
        if isinstance(rule, Descent):
            return Preconditioner(1 / rates, decay * rates)
        age = self.age(leaves)
        scale = (new.scale if age < YOUNG else self._own_preconditioner(leaves)) / rates
        diagonal = decay / scale
        if rule.decoupled:
            # The curvature that acts as the decay does at z = −1, where the roots leave the unit
            # circle. A common one is in the rule.
            diagonal = (1 + rule.beta1) / (1 - rule.beta1) * decay * rates * (not self.is_uniform)
        elif age < YOUNG:
            diagonal = torch.zeros_like(decay)
        step = None if age or new.step is None else new.step * rates
        return Preconditioner(scale, diagonal, step, new.gradient)

    def _own_preconditioner(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return `P = √v + eps` of Adam's own state, flat; inf where a weight does not move.

        The mean gradient is not corrected for its start at 0: that fades in too few steps to
        diverge in.
        """
        assert isinstance(self.rule, AdamRule)
        pieces = []
        for name, leaf in leaves.items():
            state = self.state.get(name) or {}
            # With amsgrad Adam divides by the largest so far. There may have been no gradient yet.
            moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq", torch.zeros_like(leaf)))
            correction = 1 - self.rule.beta2 ** float(state.get("step", 1.0))
            root = (local_part(moment) / correction).detach().to(leaf).sqrt()
            pieces.append(torch.where(root > 0, root + self.rule.eps, math.inf))
        return operators.join(pieces)


@dataclass(frozen=True)
class StabilityLimit:
    """The largest stable learning rate, and that of the largest guaranteed decrease.

    Both are those of the fastest group. `norm` is that of H plus weight decay, scaled by each
    weight's preconditioner and relative learning rate. `rule` holds the decay that is not a part of
    it; `first_step` is the best rate of the first step alone; `frozen` entries have no gradient;
    `products` counts those with the curvature beyond `extremes`.
    """

    stable: float
    best: float
    norm: Estimate
    rule: Rule | None
    first_step: float = math.inf
    frozen: int = 0
    products: int = 0
    notes: tuple[str, ...] = ()


def find_stability_limit(
    optimizer: OptimizerRule,
    engine: Engine,
    evaluations: Sequence[Evaluation],
    settings: LanczosSettings,
    *,
    semidefinite: bool,
    extremes: Extremes | None = None,
    top_only: bool = False,
) -> StabilityLimit:
    """Return the stability limit of an optimizer on a quadratic with the curvature of `engine`.

    Groups with rates or decays of their own are measured in coordinates in which all weights move
    as fast as the fastest. Negative curvature counts in the norm unless `top_only`: along it every
    rate diverges, so that it sets no limit. `extremes` of the curvature alone may be passed.
    """
    problem = evaluations[0].problem
    leaves = problem.leaves
    rule = optimizer.rule
    if isinstance(rule, Descent) and optimizer.is_uniform:
        extremes = extremes or engine.extremes(list(leaves))
        norm = rule.norm(extremes.top, extremes.bottom)
        limiting = max(extremes.top.value + rule.weight_decay, 0.0) if top_only else norm.value
        return StabilityLimit(rule.stability_limit(limiting), rule.best(norm.value), norm, rule)
    operator = engine.operator(list(leaves))
    if rule is None:
        return _limit_of_response(
            optimizer, operator, evaluations, settings, semidefinite=semidefinite, top_only=top_only
        )
    preconditioner = Preconditioner(torch.ones(()))
    notes: dict[str, Any] = {}
    frozen = 0.0
    if isinstance(rule, AdamRule) and optimizer.age(leaves) < YOUNG:
        moments = gradient_moments(evaluations)
        preconditioner = adam_preconditioner(moments, rule.eps)
        frozen = sum(problem.totals(torch.isinf(preconditioner.scale).sum()[None].double()))
        # Where the decay alone moves a weight, P shrinks with the weight: there is no fixed P.
        notes = {
            SINGLE_GRADIENT: not moments.is_split,
            DECAY_IN_GRADIENT: rule.weight_decay and not rule.decoupled,
        }
    preconditioner = optimizer.preconditioner(leaves, preconditioner)
    norm = preconditioner.norm(operator, settings, semidefinite=semidefinite, top_only=top_only)
    first_step = preconditioner.first_step(operator, problem)
    if not optimizer.is_uniform:
        rule = replace(rule, weight_decay=0.0)
    value = max(norm.value, 0.0)
    return StabilityLimit(
        min(rule.stability_limit(value), 2 * first_step),
        min(rule.best(value), first_step),
        norm,
        rule,
        first_step=first_step,
        frozen=int(frozen),
        products=norm.products,
        notes=tuple(note for note, holds in notes.items() if holds),
    )


# Without a limit in benchmarks/optimizer_limits.py; in the middle of a training their response may
# look linear all the same.
ADAPTIVE_STEPS = {"Adafactor", "Adamax", "Lion", "Muon", "RAdam", "Rprop", "SOAP", "Shampoo"}


def _limit_of_response(
    optimizer: OptimizerRule,
    operator: operators.LinearOperator,
    evaluations: Sequence[Evaluation],
    settings: LanczosSettings,
    *,
    semidefinite: bool,
    top_only: bool,
) -> StabilityLimit:
    """Return the limit by the optimizer's own response; nan with the reason where there is none.

    The response is measured again at the limit that follows from it.
    """
    problem = evaluations[0].problem
    largest = max(
        float(group["lr"]) for part in optimizer.optimizers for group in part.param_groups
    )
    if reason := _reason_for_no_limit(optimizer, largest, in_training=top_only):
        return unknown_limit(reason)
    gradients = minibatch_gradients(evaluations, RESPONSE.most_gradients)
    try:
        stepping = OptimizerCopy(
            optimizer.optimizers, [problem.model.get_parameter(name) for name in problem.leaves]
        )
        step = warm_up(stepping, gradients, RESPONSE.warm_steps) / -largest
        response = measure_response(stepping, gradients, settings.seed) / largest
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as failure:
        return unknown_limit(f"it cannot step on copies of the weights ({failure})")
    preconditioner = Preconditioner(
        torch.where(response > 0, 1 / response, math.inf).to(gradients[0])
    )
    if not top_only:  # a tracked training has begun
        gradient = gradient_moments(evaluations).gradient
        preconditioner = replace(preconditioner, step=step.to(gradient), gradient=gradient)
    best = preconditioner.first_step(operator, problem)
    if not is_descent(response):
        return unknown_limit("its steps do not follow small changes of the gradient", best)
    norm = preconditioner.norm(operator, settings, semidefinite=semidefinite, top_only=top_only)
    limit = StabilityLimit(
        Descent().stability_limit(max(norm.value, 0.0)), best, norm, None, products=norm.products
    )
    if not math.isfinite(limit.stable):
        return limit
    stepping.scale_rates(limit.stable / largest)
    size = RESPONSE.times_larger * RESPONSE.size
    again = measure_response(stepping, gradients, settings.seed + 1, size) / limit.stable
    reason = disagreement(response, again)
    return unknown_limit(reason, best, norm.products) if reason else limit


def _reason_for_no_limit(optimizer: OptimizerRule, largest: float, *, in_training: bool) -> str:
    """Say why the response need not be measured; nothing where it tells the limit."""
    kinds = {type(part).__name__ for part in optimizer.optimizers}
    reasons = {
        "its learning rate is 0": not largest > 0,
        "it finds its learning rate itself": optimizer.tunes_itself,
        "its steps adapt to the weights and to the steps before": (
            in_training and bool(kinds & ADAPTIVE_STEPS)
        ),
        "the response of its steps to shards is not measured": lockstep_ranks() is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def unknown_limit(reason: str, best: float = math.nan, products: int = 0) -> StabilityLimit:
    """Return that there is no limit, for this reason."""
    norm = Estimate(math.nan, 0.0, True, reason, products)
    return StabilityLimit(math.nan, best, norm, None, products=products)


def _flat(values: Mapping[str, float], leaves: Mapping[str, Tensor], usual: float = 1.0) -> Tensor:
    return operators.join(
        [torch.full_like(leaf, values.get(name, usual)).detach() for name, leaf in leaves.items()]
    )


def build_optimizer_rule(
    optimizer: AnyOptimizer,
    model: nn.Module,
    *,
    lr: float | None = None,
    layers: str | Iterable[str] | None = None,
) -> OptimizerRule:
    """Return the rule of any optimizer, before its first step.

    Without `lr` the rate is the optimizer's own; a name, a class, and a function that requires a
    rate, have none.

    >>> build = lambda parameters: SGD(parameters, lr=0.1, momentum=0.5)
    >>> rule = build_optimizer_rule(build, nn.Linear(2, 1))
    >>> rule.name, rule.lr, build_optimizer_rule("adam", nn.Linear(2, 1)).lr
    ('SGD(momentum=0.5)', 0.1, None)
    """
    training = Training.of(optimizer)
    lr = check_rate(lr)
    inner = checks.unwrap(model)
    stepper = training.build(inner)
    read = read_optimizer(stepper.optimizers, inner, checks.find_layers(inner, layers), lr=lr)
    if training.is_built and any(
        unwrap_optimizer(part).state for part in as_tuple(training.optimizer)
    ):
        stepped = "The optimizer has stepped already; the advice is for one that has not."
        read = replace(read, notes=(*read.notes, stepped))
    if training.is_class:  # it moves all weights alike, frozen ones, too
        read = replace(read, rates={}, decays={}, moved=None, notes=())
    takes_rate = not training.is_built and not accepts(training.optimizer, [])
    return replace(read, lr=lr if training.is_class or takes_rate else read.lr)


def _check_rate_of_groups(largest: float) -> None:
    if not 0 < largest < math.inf:
        raise ProblemError(
            f"the largest learning rate of the optimizer is {largest}; it must be above 0 and "
            "finite, as the rates of groups are kept in proportion to it."
        )


def read_optimizer(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    layers: Iterable[checks.Layer],
    *,
    lr: float | None = None,
    in_training: bool = False,
) -> OptimizerRule:
    """Return the rule of the groups that hold some of `layers`.

    They may differ in learning rate and weight decay; where they differ in more, and for optimizers
    without a closed form, `rule` is None. `lr`, if given, replaces the largest learning rate; the
    others keep their proportion to it. `in_training` reads the current learning rates and the
    state. Otherwise rates are those that a warmup leads to, before the first step.
    """
    optimizers = [unwrap_optimizer(part) for part in as_tuple(optimizer)]
    holders = {
        parameter: (part, group)
        for part in optimizers
        for group in part.param_groups
        for parameter in group["params"]
    }
    moved = {name for name, parameter in model.named_parameters() if parameter in holders}
    measured = sorted(layer.parameter for layer in layers)
    held = {name: holders[model.get_parameter(name)] for name in measured if name in moved}
    if not held:
        raise ProblemError(
            "the optimizer holds none of the measured weights of this model; build it from this "
            "model's parameters(), or measure what it holds with ",
            argument("layers"),
            ".",
        )
    for part in optimizers:
        check_steps(part)
    # A scheduler that warms up keeps the rate that it leads to as `initial_lr`.
    key = "lr" if in_training else "initial_lr"
    rates = {name: float(group.get(key, group["lr"])) for name, (_, group) in held.items()}
    largest = max(rates.values())
    if not in_training:
        _check_rate_of_groups(largest)
    decays = {name: float(group.get("weight_decay", 0.0)) for name, (_, group) in held.items()}
    rule = _common_rule(list(held.values()), max(decays.values()))
    read = OptimizerRule(
        rule,
        lr or largest,
        name_kinds(optimizers) if rule is None else str(rule),
        rates,
        decays,
        moved=frozenset(moved),
        state={
            name: part.state.get(model.get_parameter(name)) or {}
            for name, (part, _) in held.items()
        },
        optimizers=tuple(optimizers),
    )
    notes = {
        f"Left out, as not in the optimizer: {len(measured) - len(held)} of {len(measured)} "
        "weights.": len(held) < len(measured),
        "Parameter groups differ in learning rate or weight decay: the rates are for the group "
        "with the largest learning rate, and the others keep their proportion to it.": not (
            in_training or read.is_uniform
        ),
    }
    return replace(read, notes=tuple(note for note, holds in notes.items() if holds))


def _common_rule(
    held: Sequence[tuple[Optimizer, dict[str, Any]]], weight_decay: float
) -> Rule | None:
    """Return the closed form of all groups; None if they differ, or if there is none."""
    optimizer, first = held[0]
    kind = next((name for name, base in _CLASSES.items() if isinstance(optimizer, base)), None)
    # torch wraps `step` once more in every class in use.
    step = inspect.unwrap(type(optimizer).step)
    if kind is None or step is not inspect.unwrap(_CLASSES[kind].step):
        return None
    differ = any(
        type(part) is not type(optimizer) or any(group.get(k) != first.get(k) for k in _COMMON)
        for part, group in held
    )
    if differ or (first.get("momentum") and first["dampening"]):
        return None
    if kind != "sgd":
        return AdamRule(
            beta1=float(first["betas"][0]),
            beta2=float(first["betas"][1]),
            eps=first["eps"],
            weight_decay=weight_decay,
            decoupled=kind == "adamw" or bool(first.get("decoupled_weight_decay")),
        )
    return Descent(
        momentum=float(first["momentum"]),
        nesterov=bool(first["nesterov"]),
        weight_decay=weight_decay,
    )
