"""The stability limit of an optimizer, from its name or from a `torch.optim` optimizer with its groups."""

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
from hessinit.curvature.preconditioner import AdamRule, ScaledCurvature, measure_adam, spectral_norm
from hessinit.errors import ProblemError, accepts, check_names, choose
from hessinit.problem import validate
from hessinit.problem.functional import ProblemOptions
from hessinit.results.advice import DESCENTS, Descent, check_rate, named_descent
from hessinit.results.curvature_report import Estimate
from hessinit.training import loop

Rule = Descent | AdamRule

# A name, a torch optimizer, or a function that builds one: what every verb that reads a rule
# accepts.
AnyOptimizer = str | Optimizer | loop.MakeOptimizer
# Below this many steps, some entries of Adam's √v are near 0 by chance, and would dominate P^-½ H
# P^-½.
YOUNG = 5

# AdamW before Adam, which it derives from.
_CLASSES: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "adam": Adam}
# All settings that must agree between groups; learning rate and weight decay may differ.
_COMMON = (
    "momentum",
    "dampening",
    "nesterov",
    "betas",
    "eps",
    "decoupled_weight_decay",
    "maximize",
)
# Wrappers of Lightning, Fabric and accelerate pass a step on. Others, as Lookahead, step in their
# own way.
_WRAPPERS = {"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"}


class CurvatureOptions(ProblemOptions, total=False):
    """What `advise` and `track` measure, and how accurately."""

    curvature: str
    tolerance: float
    max_iterations: int


def read_curvature_options(
    model: Any, loss: Any, options: Mapping[str, Any]
) -> tuple[str, LanczosSettings, dict[str, Any]]:
    """Check the options; returns the curvature, the settings of Lanczos, and the options of a `Problem`."""
    check_names(options, CurvatureOptions.__annotations__)
    given = {
        "curvature": "gauss-newton",
        "tolerance": 1e-3,
        "max_iterations": 200,
        "seed": 0,
        **options,
    }
    curvature = given.pop("curvature")
    tolerance = validate.check_tolerance(given.pop("tolerance"))
    choose("curvature", curvature, ["gauss-newton", "hessian"])
    iterations = validate.check_whole("max_iterations", given.pop("max_iterations"), at_least=1)
    given["seed"] = validate.check_whole("seed", given["seed"], at_least=0)
    given["layers"] = validate.list_patterns(given.get("layers"))
    validate.check_arguments(
        model,
        loss,
        **{name: value for name, value in given.items() if name not in ("seed", "layers")},
    )
    return curvature, LanczosSettings(tolerance, iterations, given["seed"]), given


@dataclass(frozen=True)
class OptimizerRule:
    """How an optimizer updates the measured weights; `rule` is None where that is not known.

    `rates` and `decays` hold learning rate and weight decay of each measured parameter in the
    optimizer; they are empty for a name. `lr` is the largest learning rate, that of the fastest
    group. `moved` are all parameters in the optimizer (None: all there are). `state` is Adam's
    state, where it is to be used.
    """

    rule: Rule | None
    lr: float | None = None
    name: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    decays: Mapping[str, float] = field(default_factory=dict)
    moved: frozenset[str] | None = None
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def relative_rates(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Each weight's learning rate over the largest one, flat; None where all are equal."""
        if len(set(self.rates.values())) <= 1:
            return None
        largest = max(self.rates.values())
        return _flat({name: rate / largest for name, rate in self.rates.items()}, leaves)

    def decay(self, leaves: Mapping[str, Tensor]) -> Tensor:
        common = 0.0 if self.rule is None else self.rule.weight_decay
        return _flat({name: self.decays.get(name, common) for name in leaves}, leaves)

    def age(self, leaves: Mapping[str, Tensor]) -> float:
        """The number of steps that Adam's state knows, for the parameter with the fewest; 0 without state."""
        states = [self.state.get(name) or {} for name in leaves]
        return min((float(one["step"]) for one in states if "exp_avg_sq" in one), default=0.0)

    def preconditioner(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """`P = √v + eps` of Adam's own state, flat; inf where a weight does not move.

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
            corrected = moment / (1 - self.rule.beta2 ** float(state["step"]))
            root = corrected.detach().to(leaf).sqrt()
            pieces.append(torch.where(root > 0, root + self.rule.eps, math.inf).detach())
        return operators.join(pieces)


@dataclass(frozen=True)
class StabilityLimit:
    """The largest stable learning rate and the one of the largest guaranteed decrease (of the fastest group).

    `norm` is that of H plus weight decay, scaled by each weight's preconditioner and relative
    learning rate. `rule` holds the decay that is not a part of it; `ends` are those of the
    spectrum, for gradient descent. `first_step` is that of `AdamCurvature`; `products` counts those
    with the curvature beyond `extremes`.
    """

    stable: float
    best: float
    norm: Estimate
    rule: Rule
    ends: tuple[Estimate, Estimate] | None = None
    first_step: float = math.inf
    frozen: int = 0
    products: int = 0
    notes: tuple[str, ...] = ()

    @staticmethod
    def unknown(rule: Rule, why: str) -> StabilityLimit:
        """No limit: the curvature cannot be had, and trials alone tell the rate."""
        return StabilityLimit(math.nan, math.nan, Estimate(math.nan, 0.0, True, why), rule)


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
    """The stability limit of an optimizer on a quadratic with the curvature of `engine`.

    Groups with rates or decays of their own are measured in coordinates in which all weights move
    as fast as the fastest. Negative curvature counts in the norm unless `top_only`: along it every
    rate diverges, so that it sets no limit. `extremes` are those of the curvature alone, if known
    already.
    """
    leaves = evaluations[0].problem.leaves
    rule = optimizer.rule
    relative = optimizer.relative_rates(leaves)
    assert rule is not None
    is_plain = relative is None and len(set(optimizer.decays.values())) <= 1
    if isinstance(rule, AdamRule) and (age := optimizer.age(leaves)) < YOUNG:
        diagonal = None
        if rule.decoupled and not is_plain:
            diagonal = _decoupled(rule, optimizer.decay(leaves), relative)
            rule = replace(rule, weight_decay=0.0)
        found = measure_adam(
            rule,
            engine,
            evaluations,
            settings,
            semidefinite=semidefinite,
            relative_rates=relative,
            diagonal=diagonal,
        )
        stable = rule.stability_limit(found.norm.value) if age else found.stability_limit(rule)
        return StabilityLimit(
            stable,
            found.best(rule),
            found.norm,
            rule,
            None,
            found.first_step,
            found.frozen,
            found.norm.products,
            found.notes,
        )
    if isinstance(rule, Descent) and is_plain:
        extremes = extremes or engine.extremes(list(leaves))
        norm = rule.norm(extremes.top, extremes.bottom)
        limiting = max(extremes.top.value + rule.weight_decay, 0.0) if top_only else norm.value
        stable = rule.stability_limit(limiting)
        best = rule.best(norm.value)
        return StabilityLimit(stable, best, norm, rule, (extremes.top, extremes.bottom))
    # With S = P/relative rate the matrix is S^-½ (H + decay) S^-½, or with AdamW S^-½ H S^-½ + its
    # own decay.
    rule = replace(rule, weight_decay=0.0)
    decay = optimizer.decay(leaves)
    scale = (
        torch.ones_like(decay) if isinstance(rule, Descent) else optimizer.preconditioner(leaves)
    )
    scale = scale if relative is None else scale / relative
    is_decoupled = isinstance(rule, AdamRule) and rule.decoupled
    diagonal = _decoupled(rule, decay, relative) if is_decoupled else decay / scale  # type: ignore[arg-type]
    diagonal = torch.where(torch.isfinite(scale), diagonal, 0.0)
    operator = ScaledCurvature(engine.operator(list(leaves)), scale, diagonal)
    # Not started from the last eigenvector: where the sharpest direction has changed since, such a
    # search often ends at the old one and cannot tell (docs/tracking.md has the numbers).
    if top_only:
        norm = lanczos.lanczos(operator, which="top", **settings.options).top
    else:
        norm = spectral_norm(operator, settings, semidefinite=semidefinite)
    value = max(norm.value, 0.0)
    stable = rule.stability_limit(value)
    best = rule.best(value)
    zero = replace(norm, value=0.0, error=0.0, converged=True, products=0)
    return StabilityLimit(stable, best, norm, rule, (norm, zero), products=norm.products)


def _decoupled(rule: AdamRule, decay: Tensor, relative: Tensor | None) -> Tensor:
    """The curvature that acts as a decoupled decay does at z = −1, where the steps leave the unit circle."""
    strength = (1 + rule.beta1) / (1 - rule.beta1)
    return strength * decay if relative is None else strength * decay * relative


def _flat(values: Mapping[str, float], leaves: Mapping[str, Tensor]) -> Tensor:
    return operators.join(
        [torch.full_like(leaf, values[name]).detach() for name, leaf in leaves.items()]
    )


def require_known_optimizer(optimizer: Any) -> None:
    """Refuse what is neither a torch optimizer, nor a name, nor a function that builds one."""
    if not isinstance(optimizer, Optimizer):
        loop.check_optimizer(optimizer)


def build_optimizer_rule(
    optimizer: AnyOptimizer,
    model: nn.Module,
    *,
    lr: float | None = None,
    layers: str | Iterable[str] | None = None,
    **settings: Any,
) -> OptimizerRule:
    """The rule of a name, a torch optimizer, or a function of the parameters (and the rate) that builds one.

    `settings` are what was given with a name, None where torch's defaults apply. Without `lr` the
    rate is the optimizer's own; a name, and a function that cannot do without a rate, have none.

    >>> made = build_optimizer_rule(lambda parameters: SGD(parameters, lr=0.1, momentum=0.5), nn.Linear(2, 1))
    >>> made.name, made.lr, build_optimizer_rule("adam", nn.Linear(2, 1)).lr
    ('SGD(momentum=0.5)', 0.1, None)
    """
    require_known_optimizer(optimizer)
    lr = check_rate(lr)
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(optimizer, str):
        return _name_optimizer(optimizer, lr, given)
    if given:
        why = f"{', '.join(given)} was given, and the optimizer has its own"
        raise ProblemError(f"{why}; leave it out, or pass a name such as 'adam'.")
    inner = validate.unwrap(model)
    has_rate = True
    if not isinstance(optimizer, Optimizer):
        has_rate = lr is not None or accepts(optimizer, [])
        optimizer = loop.make_optimizer(optimizer, inner, lr)
    found = read_optimizer(optimizer, inner, validate.find_layers(inner, layers), lr=lr)
    return found if has_rate else replace(found, lr=None)


def _name_optimizer(optimizer: str, lr: float | None, given: Mapping[str, Any]) -> OptimizerRule:
    known = (
        ("momentum", "weight_decay") if optimizer in DESCENTS else ("betas", "eps", "weight_decay")
    )
    for name, value in given.items():
        if name not in known:
            raise ProblemError(
                f"{name}={value!r} is no setting of optimizer={optimizer!r}; leave it out."
            )
    if optimizer in DESCENTS:
        rule: Rule = named_descent(optimizer, given.get("momentum"), given.get("weight_decay"))
    else:
        rule = _adam_rule(given, decoupled=optimizer == "adamw")
    return OptimizerRule(rule, lr, str(rule))


def read_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    layers: Iterable[validate.Layer],
    *,
    lr: float | None = None,
    in_training: bool = False,
) -> OptimizerRule:
    """The rule of the groups that hold some of `layers`; they may differ in learning rate and weight decay.

    `lr`, if given, replaces the largest learning rate; the others keep their proportion to it.
    `in_training` reads the current learning rates and Adam's state, and an unknown optimizer has
    `rule=None`. Otherwise rates are those that a warmup leads to, before the first step, and an
    unknown optimizer is refused.
    """
    optimizer = unwrap_optimizer(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = [(id(one), group) for group in optimizer.param_groups for one in group["params"]]
    groups = {names[one]: group for one, group in pairs if one in names}
    wanted = sorted(layer.parameter for layer in layers)
    held = {name: groups[name] for name in wanted if name in groups}
    if not held:
        way = "build it from this model's parameters(), or measure what it holds with layers="
        raise ProblemError(
            f"the optimizer holds none of the measured weights of this model; {way}."
        )
    # A scheduler that warms up lowers `lr` to its first value, and keeps the one meant as
    # `initial_lr`.
    key = "lr" if in_training else "initial_lr"
    rates = {name: float(group.get(key, group["lr"])) for name, group in held.items()}
    decays = {name: float(group.get("weight_decay", 0.0)) for name, group in held.items()}
    largest = max(rates.values())
    notes = []
    rule = None
    if outside := len(wanted) - len(held):
        notes.append(f"Left out, as not in the optimizer: {outside} of {len(wanted)} weights.")
    if not in_training and optimizer.state:
        notes.append("The optimizer has stepped already; the advice is for one that has not.")
    if not in_training and (len(set(rates.values())) > 1 or len(set(decays.values())) > 1):
        notes.append(
            "Parameter groups differ in learning rate or weight decay: the rates are for the group with the "
            "largest learning rate, and the others keep their proportion to it."
        )
    try:
        rule = _common_rule(optimizer, held, max(decays.values()))
    except ProblemError as refusal:
        if not in_training:
            raise
        notes = [f"No stability limit: {refusal}"]
    state = {name: optimizer.state.get(model.get_parameter(name)) or {} for name in held}
    name = type(optimizer).__name__ if rule is None else str(rule)
    return OptimizerRule(
        rule,
        largest if lr is None else lr,
        name,
        rates,
        decays,
        moved=frozenset(groups),
        state=state if in_training else {},
        notes=tuple(notes),
    )


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps, inside a trainer's wrapper; unknown wrappers are returned as they are."""
    inner = getattr(optimizer, "optimizer", None)
    passes_on = _WRAPPERS & {kind.__name__ for kind in type(optimizer).__mro__}
    return unwrap_optimizer(inner) if passes_on and isinstance(inner, Optimizer) else optimizer


def _common_rule(
    optimizer: Optimizer, held: Mapping[str, dict[str, Any]], weight_decay: float
) -> Rule:
    first = next(iter(held.values()))
    for name, group in held.items():
        for key in _COMMON:
            if group.get(key) != first.get(key):
                raise ProblemError(
                    "groups of the optimizer differ in more than learning rate and weight decay "
                    f"({key} {first.get(key)} and {group.get(key)}); measure one at a time: layers={name!r}."
                )
    kind = next((kind for kind, one in _CLASSES.items() if isinstance(optimizer, one)), None)
    # A subclass that overrides `step` is unknown, too. Torch wraps it once more in every class that
    # is used.
    if kind is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(
        _CLASSES[kind].step
    ):
        raise ProblemError(
            f"the optimizer is a {type(optimizer).__name__}, whose stability limit is not known; known are "
            f"torch.optim.SGD, Adam and AdamW. Pass the nearest name of {', '.join(loop.OPTIMIZERS)}."
        )
    if first.get("maximize") or (first.get("momentum") and first["dampening"]):
        raise ProblemError(
            "no stability limit is known with maximize=True or dampening; leave them out."
        )
    if kind != "sgd":
        decoupled = kind == "adamw" or bool(first.get("decoupled_weight_decay"))
        return _adam_rule({**first, "weight_decay": weight_decay}, decoupled=decoupled)
    momentum = float(first["momentum"])
    nesterov = bool(first["nesterov"])
    return Descent(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def _adam_rule(settings: Mapping[str, Any], *, decoupled: bool) -> AdamRule:
    values = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01 * decoupled, **settings}
    betas = values["betas"]
    eps = values["eps"]
    decay = values["weight_decay"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ProblemError(
            f"betas={betas!r} must be two numbers from 0 to 1, such as (0.9, 0.999)."
        )
    beta1, beta2 = (float(beta) if isinstance(beta, Tensor) else beta for beta in betas)
    return AdamRule(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, decoupled=decoupled)
