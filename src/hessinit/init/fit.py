"""Draw a scheme's weights and scale them until the curvature fits: along symmetries first, then by gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit.curvature.preconditioner import AdamRule, best_adam_rate
from hessinit.errors import DerivativeError, ProblemError
from hessinit.init import apply_scheme, defaults, mean_field, scales, search, symmetric_fit, weights
from hessinit.init.defaults import NOT_SCALED, SYMMETRIES, Config, Goal, NetworkTraits
from hessinit.init.scales import ProblemFactory, ScaledModel
from hessinit.init.trace import WeightUse, parametrized_name
from hessinit.init.weights import Target, TracedWeights
from hessinit.problem.functional import ProblemOptions
from hessinit.problem.validate import layer_name
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization, Measurement, SchemePlan, Symmetry

Uses = tuple[WeightUse, ...]


@dataclass(frozen=True)
class Solution:
    """The goal, how it was sought, and why it was missed; empty where it was met.

    `unreachable` are layers whose norm no scale changes. `met` is a sentence where symmetries met
    the goal.
    """

    goal: Goal
    scaling: str | None
    measurements: tuple[Measurement, ...] = ()
    reason: str = ""
    unreachable: tuple[str, ...] = ()
    symmetries: tuple[Symmetry, ...] = ()
    met: str = ""


def fit_(
    factory: ProblemFactory, targets: list[Target], config: Config, restore: Callable[[], None]
) -> Initialization:
    """Measure, draw the scheme, solve for the scales, measure again; the caller restores on any error."""
    every_layer = config.rule == "layers" or config.report is True
    kind = every_layer, config.reports
    if kind not in factory.old:  # every fit starts from the same weights
        factory.old[kind] = _measure_old(factory, every_layer, config)
    old, old_loss, found_old = factory.old[kind]
    notes = [*found_old]
    sizes = _root_mean_squares(targets)
    try:
        traced = weights.find_weight_uses(factory.model, factory.sample, factory.options["forward"])
    except ProblemError as failure:
        if config.scheme != "keep":
            raise
        # It costs only the knowledge of where the weights are used.
        traced = TracedWeights(())
        notes.append(f"the forward could not be traced ({failure}), so every weight is scaled.")
    uses = traced.uses
    plan = _draw_scheme_(factory, targets, traced, config)
    model = ScaledModel(factory, targets, config.tolerance * defaults.SEARCH_FRACTION)
    if shrunk := _embedding_logs(model, targets, uses) if config.scheme == "auto" else {}:
        model.scale_(shrunk)
        model = ScaledModel(factory, targets, config.tolerance * defaults.SEARCH_FRACTION)
    traits = NetworkTraits.of(uses, model.loss_is_quadratic())
    asked = config
    if traits.quadratic:  # it does not saturate
        config = replace(config, max_sharpening=math.inf)
    if stuck := model.unscalable():
        notes.append(f"{', '.join(stuck)}: the parametrization removes the scale, so not scaled.")
    scalable = [one for one in targets if one.name not in stuck]
    norms = {
        name: one for name, one in factory.model.named_modules() if isinstance(one, _BatchNorm)
    }
    fixed = [
        name for name, one in norms.items() if not one.training and one.running_mean is not None
    ]
    if fixed and config.fits_symmetries:
        notes.append(
            f"{fixed[0]}{f' and {len(fixed) - 1} more' if fixed[1:] else ''}: BatchNorm in eval mode, so the "
            "weights before it are not scale-free; call model.train() first if you train so."
        )
    found = _solve(model, scalable, uses, traits, config)
    after = model.report(every_layer) if config.reports else None
    factors = {
        name: factor * math.exp(shrunk.get(name, 0.0)) for name, factor in model.scales.items()
    }
    for name, factor in (
        pair for symmetry in found.symmetries for pair in symmetry.factors.items()
    ):
        layer = layer_name(parametrized_name(name))
        factors |= {layer: factors[layer] * factor} if layer in factors else {}
    changes = (sizes, _root_mean_squares(targets)), (old_loss, model.output().loss)
    if worse := _reason_to_restore(old, after, found, asked, *changes, model.loss_unit(old_loss)):
        restore()
        after = old
        factors = dict.fromkeys(factors, 1.0)
        reasons = found.reason, f"{worse}, so the old weights were put back"
        found = replace(found, reason="; ".join(filter(None, reasons)), symmetries=(), met="")
    converged, reason = _judge(after, config, found)
    return Initialization(
        before=old,
        after=after,
        scales=factors,
        target=found.goal.target,
        lr=found.goal.lr,
        kappa=found.goal.kappa,
        optimizer=config.optimizer,
        rule=config.rule,
        scheme=config.scheme_name,
        scaling=found.scaling,
        tolerance=config.tolerance,
        converged=converged,
        reason=reason,
        measurements=found.measurements,
        symmetries=found.symmetries,
        plan=plan,
        notes=tuple(notes),
        seed=factory.options["seed"],
    )


def _solve(
    model: ScaledModel, targets: list[Target], uses: Uses, traits: NetworkTraits, config: Config
) -> Solution:
    if config.rule == "layers":
        norm = model.network_norm() if config.lr == "auto" else math.inf
        goal = config.goal(traits.kappa, norm, unscaled=True)
        assert goal.target is not None
        met = {use.parameter for use in uses}
        layers = [one.name for one in targets if not met or one.key in met]
        outcome = search.solve_layers(model, layers, goal.target, config)
        return Solution(goal, None, outcome.measurements, outcome.reason, outcome.unreachable)
    if config.fits_symmetries and model.output().is_finite:
        names = {id(one): name for name, one in model.factory.model.named_parameters()}
        stored = [names[id(one)] for target in targets for one in target.stored]
        if (blocks := symmetric_fit.find_blocks(model.factory, stored)) is not None:
            last = scales.effective_and_last(targets, uses)[1]
            kappa = defaults.KAPPA_ADAM if config.is_adaptive else defaults.KAPPA
            kappa *= defaults.KAPPA_QUADRATIC / defaults.KAPPA if traits.quadratic else 1
            return _solve_symmetries(model, targets, last, blocks, kappa, config)
    return _solve_network(model, targets, uses, traits, config)


def _solve_symmetries(
    model: ScaledModel,
    targets: list[Target],
    last: list[str],
    blocks: symmetric_fit.Blocks,
    kappa: float,
    config: Config,
) -> Solution:
    """Scale-free weights to the target, others to at most that; a gain only for what no symmetry reaches."""
    goal = config.goal(kappa, math.nan, unscaled=True)
    if config.scheme == "auto":
        size = model.output().size
        if size > defaults.SMALL_OUTPUT_SCALE_FREE:
            model.scale_(dict.fromkeys(last, math.log(defaults.SMALL_OUTPUT_SCALE_FREE / size)))
    rest = [one for one in targets if one.key in blocks.rest]
    if rest and goal.target is not None and config.lr != "auto" and not config.is_adaptive:
        _lower_rest_(model.factory, rest, goal.target, config)
    adam = AdamRule() if config.is_adaptive else None
    scaler = symmetric_fit.SymmetryScaler(model.factory, blocks, adam, config.tolerance)
    fitted = scaler.fit_(None if config.lr == "auto" else goal.target)
    if config.lr == "auto":
        goal = config.goal(kappa, fitted.target, unscaled=True)
    seen = "as Adam sees it" if config.is_adaptive else "of their own"
    norm = fitted.symmetries[0].norm
    percent = f"{100 * config.tolerance:.3g} %"
    unmoved = f"the function is unchanged (the output moved by {100 * fitted.output_change:.2g} %)"
    if not all(one.exact for one in fitted.symmetries):
        unmoved = "smaller gains before an activation changed the function"
    met = f"the scale-free weights have ‖H‖ = {norm:.3g} {seen}, within {percent} of {goal.target:.3g}"
    met = f"{met}, and no other weights are sharper; {unmoved}"
    reason = f"{fitted.reason}; {unmoved}" if fitted.reason else ""
    return Solution(goal, SYMMETRIES, reason=reason, symmetries=fitted.symmetries, met=met)


def _lower_rest_(
    factory: ProblemFactory, rest: list[Target], target: float, config: Config
) -> None:
    """One gain for weights that no symmetry reaches, where they are too sharp and answer to it."""
    options: ProblemOptions = {**factory.options, "layers": [one.key for one in rest]}
    model = ScaledModel(replace(factory, options=options), rest, config.tolerance / 5)
    if model.network_norm() > target * (1 + config.tolerance):
        path = scales.ScalingPath("all", dict.fromkeys((one.name for one in rest), 1.0))
        lowest = math.log(defaults.SMALLEST_GAIN_NORMALIZED)
        if search.solve_network(model, path, target, config, lowest).reason:
            model.scale_({})


def _solve_network(
    model: ScaledModel, targets: list[Target], uses: Uses, traits: NetworkTraits, config: Config
) -> Solution:
    output = model.output()
    if config.is_adaptive and config.lr is not None:
        drawn = (
            "the given weights"
            if config.scheme == "keep"
            else f"the weights of {config.scheme_name}"
        )
        name = "AdamW" if config.optimizer == "adamw" else "Adam"
        kept = f"as steps of {name} do not grow with the gradient: {drawn} are kept"
        rate = config.lr
        decoupled = config.optimizer == "adamw"
        if rate == "auto":
            rule = AdamRule(decoupled=decoupled, weight_decay=0.01 * decoupled)
            rate = best_adam_rate(model.factory.problem(), rule)
        goal = Goal(None, rate if math.isfinite(rate) else None)
        return Solution(goal, NOT_SCALED, met=f"no curvature was fitted, {kept}")
    # lr="auto" needs a norm in any case; else saturated weights are just too sharp.
    needed = config.lr == "auto" or search.LossCap(config.max_sharpening, model.loss_unit()).admits(
        output
    )
    norm = model.network_norm() if needed else math.inf
    first = (Measurement(t=0.0, norm=norm, loss=output.loss),)

    def homogeneous() -> bool:  # costs forwards
        return scales.small_and_large(targets, uses, model) is not None

    goal = config.goal(traits.kappa, norm, unscaled=config.lr == "auto" and not homogeneous())
    assert goal.target is not None
    insists = config.scaling != "auto" or config.lr is None
    if (
        traits.reason_not_to_sharpen
        and not insists
        and 0 < norm < goal.target * (1 - config.tolerance)
    ):
        reason = (
            f"the weights are flat enough for the rate; since {traits.reason_not_to_sharpen}, sharper ones "
            "would not learn faster"
        )
        return Solution(goal, NOT_SCALED, first, reason)
    scaling = config.scaling
    if scaling == "auto":
        sharper = norm / goal.target
        flat = sharper <= 1 or (sharper <= defaults.SMALL_OUTPUT_UP_TO and homogeneous())
        scaling = "small-output" if norm > 0 and flat else "all"
    path = scales.scaling_path(scaling, targets, uses, model, goal.target)
    limited = traits.normalized and scaling == "all" and not insists
    lowest = math.log(defaults.SMALLEST_GAIN_NORMALIZED) if limited else -math.inf
    outcome = search.solve_network(model, path, goal.target, config, lowest)
    rows = (*first, *outcome.measurements)
    loud = model.output().loss > output.zero_loss + (defaults.LOUD - 1) * model.loss_unit()
    if config.scaling == "auto" and path.name == "last" and (outcome.reason or loud):
        reached = dict(model.scales)
        far = abs(search.log_ratio(model.network_norm(), goal.target))
        model.scale_({})
        other = scales.scaling_path("small-output", targets, uses, model, goal.target, nearly=True)
        second = search.solve_network(model, other, goal.target, config, lowest)
        rows = (*rows, *second.measurements)
        if not second.reason or (
            outcome.reason and abs(search.log_ratio(model.network_norm(), goal.target)) < far
        ):
            path = other
            outcome = second
        else:
            model.scale_({name: math.log(factor) for name, factor in reached.items()})
    met = f"the network's ‖H‖ is within {100 * config.tolerance:.3g} % of {goal.target:.3g}"
    return Solution(goal, path.name, tuple(dict.fromkeys(rows)), outcome.reason, met=met)


def _draw_scheme_(
    factory: ProblemFactory, targets: list[Target], traced: TracedWeights, config: Config
) -> SchemePlan | None:
    if config.scheme == "keep":
        if config.biases == "zero":
            with torch.no_grad():
                for bias in (bias for target in targets for bias in target.biases().values()):
                    bias.zero_()
        return None
    uses = traced.uses
    residual = config.residual
    if residual == "auto":
        residual = (
            "scaled" if NetworkTraits.of(uses).normalized and not config.is_adaptive else "plain"
        )
    gains = None
    if config.scheme == "auto":
        names = {target.key: target.name for target in targets}
        gains = {
            names[key]: std
            for key, std in mean_field.preactivation_stds(uses).items()
            if key in names
        }
    plan = apply_scheme.write_scheme_(
        factory.model,
        config.scheme_name,
        weights.find_targets(factory.model, factory.options["layers"]),
        traced,
        factory.sample,
        factory.options["forward"],
        gains=gains,
        residual=residual,
        biases="keep" if config.biases == "keep" else "zero",
        generator=torch.Generator().manual_seed(factory.options["seed"]),
    )
    return replace(plan, _go_back=None)  # `initialize_` itself holds one copy of the old weights


def _embedding_logs(model: ScaledModel, targets: list[Target], uses: Uses) -> dict[str, float]:
    """Shrink embeddings that are factors of the output, as in skip-gram, to vectors of length 1.

    Vectors of unit variance would have products of size √dimension, which training must first
    unlearn.
    """
    names = {use.parameter for use in uses if use.kind == "embedding"}
    logs = {
        one.name: -0.5 * math.log(float(one.value.double().square().sum(-1).mean()))
        for one in targets
        if one.key in names
    }
    size = model.output().size if logs else math.inf
    if not 0 < size < math.inf:
        return {}
    model.scale_(dict.fromkeys(logs, -math.log(2)))
    halved = math.log2(size / max(model.output().size, 1e-300))
    model.scale_({})
    return logs if abs(halved - round(halved)) < 0.01 and 1 <= round(halved) <= len(logs) else {}


def _measure_old(
    factory: ProblemFactory, every_layer: bool, config: Config
) -> tuple[CurvatureReport | None, float, list[str]]:
    """The report and the loss of the old weights; errors that new weights do not cure come again later."""
    found = ScaledModel(factory, [], 0.1)
    try:
        output = found.output()
        if output.is_finite:
            return found.report(every_layer) if config.reports else None, output.loss, []
    except DerivativeError:
        raise
    except ProblemError as failure:
        return None, math.nan, [f"before: {failure}"]
    return (
        None,
        math.nan,
        ["before: the old weights, or the network's output with them, are not finite."],
    )


def _root_mean_squares(targets: list[Target]) -> dict[str, float]:
    return {one.name: float(one.value.double().square().mean().sqrt()) for one in targets}


def _reason_to_restore(
    old: CurvatureReport | None,
    after: CurvatureReport | None,
    found: Solution,
    config: Config,
    sizes: tuple[dict[str, float], dict[str, float]],
    losses: tuple[float, float],
    unit: float,
) -> str:
    """Why the new weights must not stay: farther from the target than the old ones, or not trainable."""
    before, now = sizes
    if math.isnan(losses[0]):
        return ""
    largest = max(now, key=lambda name: now[name])
    if now[largest] > max(defaults.ABSURD_SIZE, defaults.ABSURD_GROWTH * before[largest]):
        return f"{largest} would have a standard deviation of {now[largest]:.2g}"
    # A larger max_sharpening asks for a larger loss.
    most = max(defaults.ABSURD_GROWTH, config.max_sharpening) * unit
    if not losses[1] <= losses[0] + most:
        return f"the loss would be {losses[1]:.3g}, and was {losses[0]:.3g}"
    target = found.goal.target
    is_far = found.reason and not found.symmetries and found.scaling != NOT_SCALED
    if old is None or after is None or target is None or not is_far:
        return ""
    near, far = (
        max(
            (abs(search.log_ratio(row.norm, target)) for row in _judged(report, config, found)),
            default=math.inf,
        )
        for report in (old, after)
    )
    farther = far > (2 * near if config.rule == "network" else near)
    return "the new weights are farther from the target" if farther else ""


def _judge(after: CurvatureReport | None, config: Config, found: Solution) -> tuple[bool, str]:
    target = found.goal.target
    if after is None or target is None or found.scaling == SYMMETRIES:
        return not found.reason, found.reason or found.met
    limit = f"{100 * config.tolerance:.3g} %"
    rows = _judged(after, config, found)
    off = [row for row in rows if not abs(row.norm / target - 1) <= config.tolerance]
    if not rows:
        return False, found.reason
    why = (
        found.reason
        or after.network.reason
        or "the search met the target, the final report does not"
    )
    if config.rule == "network":
        norm = f"the network's ‖H‖ = {after.network.norm:.3g}"
        met = f"{norm} is within {limit} of {target:.3g}"
        missed = f"{norm}, not {target:.3g}: {why}"
    else:
        met = f"all {len(rows)} layers have ‖H‖ within {limit} of {target:.3g}"
        worst = max(rows, key=lambda row: abs(search.log_ratio(row.norm, target)))
        missed = (
            f"{len(off)} of {len(rows)} layers are not within {limit} of {target:.3g}, the farthest "
            f"{worst.name} with ‖H‖ = {worst.norm:.3g}: {why}"
        )
    return not off, missed if off else met


def _judged(report: CurvatureReport, config: Config, found: Solution) -> Sequence[Any]:
    if config.rule == "network":
        return [report.network]
    return [row for row in report if row.name not in found.unreachable]
