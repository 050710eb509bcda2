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

from hessinit.curvature import lanczos, operators
from hessinit.curvature.engine import Engine, Extremes, LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.optimizer_response import (
    RESPONSE,
    OptimizerCopy,
    disagreement,
    is_descent,
    measure_response,
    warm_up,
)
from hessinit.curvature.preconditioner import (
    AdamRule,
    ScaledCurvature,
    gradient_moments,
    measure_adam,
    minibatch_gradients,
    spectral_norm,
)
from hessinit.errors import ProblemError, argument
from hessinit.problem import checks
from hessinit.problem.ranks import lockstep_ranks
from hessinit.problem.sharding import local_part
from hessinit.results.advice import Descent, check_rate
from hessinit.results.curvature_report import Estimate
from hessinit.training.optimizers import (
    AnyOptimizer,
    Training,
    as_tuple,
    check_steps,
    name_kinds,
    tunes_itself,
    unwrap_optimizer,
)

Rule = Descent | AdamRule

# Below this many steps, some entries of Adam's √v are near 0 by chance, and would dominate
# P^-½ H P^-½.
YOUNG = 5

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
        return any(map(tunes_itself, self.optimizers))

    @property
    def is_uniform(self) -> bool:
        """Whether all weights have the same learning rate and weight decay."""
        return len(set(self.rates.values())) <= 1 and len(set(self.decays.values())) <= 1

    def relative_rates(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Return each weight's learning rate over the largest, flat; None where all are equal."""
        if len(set(self.rates.values())) <= 1:
            return None
        largest = max(self.rates.values())
        return _flat({name: rate / largest for name, rate in self.rates.items()}, leaves)

    def decay(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return each weight's decay, flat."""
        common = 0.0 if self.rule is None else self.rule.weight_decay
        return _flat({name: self.decays.get(name, common) for name in leaves}, leaves)

    def age(self, leaves: Mapping[str, Tensor]) -> float:
        """Return the number of steps in Adam's state, that of the youngest weight; 0 without."""
        states = [self.state.get(name) or {} for name in leaves]
        return min((float(state["step"]) for state in states if "exp_avg_sq" in state), default=0.0)

    def preconditioner(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return `P = √v + eps` of Adam's own state, flat; inf where a weight does not move.

        The mean gradient is not corrected for its start at 0: that fades in too few steps to
        diverge in.
        """
        assert isinstance(self.rule, AdamRule)
        pieces = []
        for name, leaf in leaves.items():
            state = self.state.get(name) or {}
            # With amsgrad Adam divides by the largest so far.
            moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if moment is None:  # there was no gradient yet
                pieces.append(torch.full_like(leaf, math.inf).detach())
                continue
            corrected = local_part(moment) / (1 - self.rule.beta2 ** float(state["step"]))
            root = corrected.detach().to(leaf).sqrt()
            pieces.append(torch.where(root > 0, root + self.rule.eps, math.inf).detach())
        return operators.join(pieces)


@dataclass(frozen=True)
class StabilityLimit:
    """The largest stable learning rate, and that of the largest guaranteed decrease.

    Both are those of the fastest group. `norm` is that of H plus weight decay, scaled by each
    weight's preconditioner and relative learning rate. `rule` holds the decay that is not a part of
    it; `ends` are those of the spectrum, for gradient descent. `first_step` is that of
    `AdamCurvature`; `products` counts those with the curvature beyond `extremes`.
    """

    stable: float
    best: float
    norm: Estimate
    rule: Rule | None
    ends: tuple[Estimate, Estimate] | None = None
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
    rate diverges, so that it sets no limit. `extremes` are those of the curvature alone, if known
    already.
    """
    leaves = evaluations[0].problem.leaves
    rule = optimizer.rule
    if rule is None:
        return _limit_of_response(
            optimizer, engine, evaluations, settings, semidefinite=semidefinite, top_only=top_only
        )
    if isinstance(rule, Descent) and optimizer.is_uniform:
        return _limit_of_descent(rule, extremes or engine.extremes(list(leaves)), top_only)
    if isinstance(rule, AdamRule) and optimizer.age(leaves) < YOUNG:
        return _limit_of_young_adam(
            rule, optimizer, engine, evaluations, settings, semidefinite=semidefinite
        )
    operator = _scaled_curvature(optimizer, engine, leaves)
    norm = _norm_of(operator, settings, semidefinite=semidefinite, top_only=top_only)
    rule = replace(rule, weight_decay=0.0)
    value = max(norm.value, 0.0)
    zero = replace(norm, value=0.0, error=0.0, converged=True, products=0)
    return StabilityLimit(
        rule.stability_limit(value),
        rule.best(value),
        norm,
        rule,
        ends=(norm, zero),
        products=norm.products,
    )


def _norm_of(
    operator: ScaledCurvature, settings: LanczosSettings, *, semidefinite: bool, top_only: bool
) -> Estimate:
    # Not started from the last eigenvector: where the sharpest direction has changed since, such a
    # search often ends at the old one and cannot tell (docs/tracking.md has the numbers).
    if not top_only:
        return spectral_norm(operator, settings, semidefinite=semidefinite)
    return lanczos.lanczos(
        operator,
        which="top",
        tolerance=settings.tolerance,
        max_iterations=settings.max_iterations,
        seed=settings.seed,
    ).top


def _limit_of_response(
    optimizer: OptimizerRule,
    engine: Engine,
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
    parameters = [problem.model.get_parameter(name) for name in problem.leaves]
    largest = max(
        float(group["lr"]) for part in optimizer.optimizers for group in part.param_groups
    )
    norm = Estimate(math.nan, 0.0, True, "its learning rate is 0")
    if optimizer.tunes_itself:
        norm = replace(norm, reason="it finds its learning rate itself")
    is_sharded = lockstep_ranks() is not None
    if is_sharded:
        norm = replace(norm, reason="the response of its steps to shards is not measured")
    if not largest > 0 or optimizer.tunes_itself or is_sharded:
        return StabilityLimit(math.nan, math.nan, norm, None)
    gradients = minibatch_gradients(evaluations, RESPONSE.most_gradients)
    try:
        stepping = OptimizerCopy(optimizer.optimizers, parameters)
        step = warm_up(stepping, gradients, RESPONSE.warm_steps) / largest
        response = measure_response(stepping, gradients, settings.seed) / largest
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as failure:
        reason = f"it cannot step on copies of the weights ({failure})"
        return StabilityLimit(math.nan, math.nan, replace(norm, reason=reason), None)
    operator = engine.operator(list(problem.leaves))
    step = step.to(gradients[0])
    slope = -float(gradient_moments(evaluations).gradient @ step)
    bend = float(step @ (operator @ step))
    first_step = slope / bend if bend > 0 < slope else math.inf
    if not is_descent(response):
        bounded = replace(norm, reason="its steps do not follow a change of the gradient")
        return StabilityLimit(math.nan, first_step, bounded, None, first_step=first_step)
    scale = torch.where(response > 0, 1 / response, math.inf).to(gradients[0])
    scaled = ScaledCurvature(operator, scale)
    scaled_norm = _norm_of(scaled, settings, semidefinite=semidefinite, top_only=top_only)
    stable = 2 / scaled_norm.value if scaled_norm.value > 0 else math.inf
    if math.isfinite(stable):
        stepping.scale_rates(stable / largest)
        size = RESPONSE.times_larger * RESPONSE.size
        again = measure_response(stepping, gradients, settings.seed + 1, size) / stable
        if reason := disagreement(response, again):
            scaled_norm = replace(norm, reason=reason, products=scaled_norm.products)
            stable = math.nan
    return StabilityLimit(
        stable, first_step, scaled_norm, None, first_step=first_step, products=scaled_norm.products
    )


def _limit_of_descent(rule: Descent, extremes: Extremes, top_only: bool) -> StabilityLimit:
    norm = rule.norm(extremes.top, extremes.bottom)
    limiting = max(extremes.top.value + rule.weight_decay, 0.0) if top_only else norm.value
    return StabilityLimit(
        rule.stability_limit(limiting),
        rule.best(norm.value),
        norm,
        rule,
        ends=(extremes.top, extremes.bottom),
    )


def _limit_of_young_adam(
    rule: AdamRule,
    optimizer: OptimizerRule,
    engine: Engine,
    evaluations: Sequence[Evaluation],
    settings: LanczosSettings,
    *,
    semidefinite: bool,
) -> StabilityLimit:
    """Return the limit of Adam before its state is of use: P is that of mini-batch gradients."""
    leaves = evaluations[0].problem.leaves
    relative_rates = optimizer.relative_rates(leaves)
    diagonal = None
    if rule.decoupled and not optimizer.is_uniform:
        diagonal = _decoupled_decay(rule, optimizer.decay(leaves), relative_rates)
        rule = replace(rule, weight_decay=0.0)
    curvature = measure_adam(
        rule,
        engine,
        evaluations,
        settings,
        semidefinite=semidefinite,
        relative_rates=relative_rates,
        diagonal=diagonal,
    )
    stable = curvature.stability_limit(rule)
    if optimizer.age(leaves):  # the first step is behind it
        stable = rule.stability_limit(curvature.norm.value)
    return StabilityLimit(
        stable,
        curvature.best(rule),
        curvature.norm,
        rule,
        first_step=curvature.first_step,
        frozen=curvature.frozen,
        products=curvature.norm.products,
        notes=curvature.notes,
    )


def _scaled_curvature(
    optimizer: OptimizerRule, engine: Engine, leaves: Mapping[str, Tensor]
) -> ScaledCurvature:
    """Return the curvature in coordinates in which all weights move as fast as the fastest.

    With S = P/relative rate it is S^-½ (H + decay) S^-½, or with AdamW S^-½ H S^-½ plus its decay.
    """
    rule = optimizer.rule
    relative_rates = optimizer.relative_rates(leaves)
    decay = optimizer.decay(leaves)
    scale = torch.ones_like(decay)
    if isinstance(rule, AdamRule):
        scale = optimizer.preconditioner(leaves)
    if relative_rates is not None:
        scale = scale / relative_rates
    diagonal = decay / scale
    if isinstance(rule, AdamRule) and rule.decoupled:
        diagonal = _decoupled_decay(rule, decay, relative_rates)
    diagonal = torch.where(torch.isfinite(scale), diagonal, 0.0)
    return ScaledCurvature(engine.operator(list(leaves)), scale, diagonal)


def _decoupled_decay(rule: AdamRule, decay: Tensor, relative_rates: Tensor | None) -> Tensor:
    """Return the curvature that acts as a decoupled decay does where the steps become unstable.

    That is at z = −1, where the roots leave the unit circle.
    """
    acting = (1 + rule.beta1) / (1 - rule.beta1) * decay
    return acting if relative_rates is None else acting * relative_rates


def _flat(values: Mapping[str, float], leaves: Mapping[str, Tensor]) -> Tensor:
    return operators.join(
        [torch.full_like(leaf, values[name]).detach() for name, leaf in leaves.items()]
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
    return replace(read, lr=read.lr if training.has_rate else lr)


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
    held_by = _find_holders(optimizers, model)
    measured = sorted(layer.parameter for layer in layers)
    held = {name: held_by[name] for name in measured if name in held_by}
    if not held:
        raise ProblemError(
            "the optimizer holds none of the measured weights of this model; build it from this "
            "model's parameters(), or measure what it holds with ",
            argument("layers"),
            ".",
        )
    for part in optimizers:
        check_steps(part)
    # A scheduler that warms up lowers `lr` to its first value, and keeps the one meant as
    # `initial_lr`.
    key = "lr" if in_training else "initial_lr"
    rates = {name: float(group.get(key, group["lr"])) for name, (_, group) in held.items()}
    decays = {name: float(group.get("weight_decay", 0.0)) for name, (_, group) in held.items()}
    rule = _common_rule(list(held.values()), max(decays.values()))
    notes = _note_left_out(len(measured) - len(held), len(measured))
    state = {
        name: part.state.get(model.get_parameter(name)) or {} for name, (part, _) in held.items()
    }
    read = OptimizerRule(
        rule,
        lr or max(rates.values()),
        name_kinds(optimizers) if rule is None else str(rule),
        rates,
        decays,
        moved=frozenset(held_by),
        state=state,
        optimizers=tuple(optimizers),
        notes=tuple(notes),
    )
    if in_training or read.is_uniform:
        return read
    differ = (
        "Parameter groups differ in learning rate or weight decay: the rates are for the group "
        "with the largest learning rate, and the others keep their proportion to it."
    )
    return replace(read, notes=(*notes, differ))


def _find_holders(
    optimizers: Sequence[Optimizer], model: nn.Module
) -> dict[str, tuple[Optimizer, dict[str, Any]]]:
    """Return the optimizer, and its group, of each of the model's parameters that one holds."""
    holders = {
        id(parameter): (part, group)
        for part in optimizers
        for group in part.param_groups
        for parameter in group["params"]
    }
    return {
        name: holders[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in holders
    }


def _note_left_out(left_out: int, measured: int) -> list[str]:
    if not left_out:
        return []
    return [f"Left out, as not in the optimizer: {left_out} of {measured} weights."]


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
    for part, group in held:
        if type(part) is not type(optimizer) or any(group.get(k) != first.get(k) for k in _COMMON):
            return None
    if first.get("momentum") and first["dampening"]:
        return None
    if kind != "sgd":
        decoupled = kind == "adamw" or bool(first.get("decoupled_weight_decay"))
        return _adam_rule({**first, "weight_decay": weight_decay}, decoupled=decoupled)
    return Descent(
        momentum=float(first["momentum"]),
        nesterov=bool(first["nesterov"]),
        weight_decay=weight_decay,
    )


def _adam_rule(settings: Mapping[str, Any], *, decoupled: bool) -> AdamRule:
    beta1, beta2 = (float(beta) for beta in settings["betas"])
    return AdamRule(
        beta1=beta1,
        beta2=beta2,
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        decoupled=decoupled,
    )
