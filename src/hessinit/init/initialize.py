"""The verb `initialize_`: weights whose curvature fits the learning rate."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.curvature.preconditioner import AdamRule, best_adam_rate
from hessinit.errors import ConvergenceError, ConvergenceWarning, DerivativeError, ProblemError
from hessinit.init import apply_scheme, defaults, mean_field, scales, search, weights
from hessinit.init.defaults import NOT_SCALED, Config, Goal, NetworkTraits
from hessinit.init.trace import WeightUse
from hessinit.measurement.measure import note_unchecked
from hessinit.problem import validate
from hessinit.problem.batches import read_batches
from hessinit.problem.problem import Forward, Loss, ProblemOptions
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization, Measurement, SchemePlan
from hessinit.results.result import replacing

Uses = tuple[WeightUse, ...]


@torch.inference_mode(False)
def initialize_(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | str | None = None,
    target: float | None = None,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    rule: str = "network",
    scheme: str = "auto",
    scaling: str = "auto",
    layers: str | Iterable[str] | None = None,
    curvature: str = "gauss-newton",
    forward: Forward | None = None,
    dropout: str = "freeze",
    reduction: str = "auto",
    check: bool = True,
    biases: str = "auto",
    residual: str = "auto",
    tolerance: float = 0.05,
    max_measurements: int | None = None,
    max_sharpening: float = defaults.MAX_SHARPENING,
    seed: int = 0,
    dry_run: bool = False,
    strict: bool = False,
) -> Initialization:
    """Draw new weights and scale them until the curvature fits the step; in place, on the same Parameters.

    `lr` means a target of κ/lr for the network's ‖H‖, κ = 4 (1/2 for a network with normalizations, 1 for a
    quadratic loss); "auto" takes a rate that suits the weights, returned as `result.lr`. `target` gives the
    norm itself; neither means 1, the paper's principle. `optimizer` is that of the training: "momentum" and
    "nesterov" make steps 1/(1 − `momentum`) times as long; the steps of "adam" and "adamw" do not grow with
    the gradient, so that the scheme alone decides.

    `rule="network"` searches one number. With scaling="auto", weights that are too sharp are all multiplied
    by one gain; weights that are too flat are sharpened with a small output where the network is homogeneous,
    as with ReLU (the largest weight small, the others larger), else by the last weight. By a rate, normalized
    networks, those that read tokens and those with a quadratic loss are not sharpened. "all", "last" and
    "small-output" choose the weights to scale. `rule="layers"` brings every layer's norm to the target.

    `scheme` draws the weights: a closed form or "lsuv" as in `apply_scheme_`, "keep" for the present weights,
    or "auto": "lsuv", with smaller pre-activations where the gradient would explode. `residual="scaled"`
    shrinks residual branches; "auto" does so in normalized networks. Biases become 0 with the weights that
    are drawn; biases="keep" leaves them. Frozen weights are never touched.

    The search stops where the initial loss would exceed `max_sharpening` times the loss of a zero output. A
    target that is not met to `tolerance` warns, or raises with `strict=True`; the result says why. Whatever
    is raised, the model is then as it was found. `undo()` restores the old weights; `dry_run=True` does so at
    once. Costs 70 to 230 gradients for a classifier with ten outputs.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> result = initialize_(model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 3), lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    validate.check_arguments(model, loss, forward, None, dropout, reduction, check)
    validate.check_switches(dry_run=dry_run, strict=strict)
    seed = validate.check_whole("seed", seed, at_least=0)
    config = Config(
        lr, target, optimizer, momentum, rule, scheme, scaling, curvature, biases, residual, tolerance,
        max_measurements, max_sharpening,
    )  # fmt: skip
    inside = validate.unwrap(model)
    validate.check_present(inside)
    validate.check_dropout(inside, dropout)
    named = layers if layers is None or isinstance(layers, str) else list(layers)
    options: ProblemOptions = {"layers": named, "forward": forward, "dropout": dropout}
    options |= {"reduction": reduction, "seed": seed}
    factory = scales.ProblemFactory(inside, loss, scales.read_once(batch), options, curvature, check)
    for place, one in read_batches(factory.batch):  # before a scheme meets them in some layer
        validate.check_finite_inputs(one.inputs, place)
    targets = weights.find_targets(inside, named)
    writable = [one for one in targets if not one.reason_unchanged]
    if not writable:
        reasons = ", ".join(f"{one.name}: {one.reason_unchanged}" for one in targets[:3]) or "there is none"
        raise ProblemError(
            f"no weight of two or more dimensions can be set ({reasons}); unfreeze one, or name others with "
            "layers=."
        )
    restore = weights.snapshot(writable)
    try:
        result = _initialize(factory, writable, config, restore)
        missed = not result.converged and result.scaling != NOT_SCALED
        if strict and missed:
            raise ConvergenceError(result.reason)
    except BaseException:
        restore()
        raise
    result = replace(result, seconds=time.perf_counter() - started)
    if dry_run:
        restore()
    else:
        result = replace(result, _go_back=restore, _save_weights=partial(_save_weights, inside))
    if missed:
        warnings.warn(result.reason, ConvergenceWarning, stacklevel=3)  # past the decorator
    return result


def _initialize(
    factory: scales.ProblemFactory, targets: list[weights.Target], config: Config, restore: Callable[[], None]
) -> Initialization:
    """Measure, draw the scheme, solve for the scales, measure again; the caller restores on any error."""
    every_layer, checked = config.rule == "layers", factory.check
    old, notes = _measure_old(factory, every_layer)
    sizes = _sizes(targets)
    try:
        uses = weights.find_weight_uses(factory.model, factory.sample, factory.options["forward"]).uses
    except ProblemError as failure:  # costs only the knowledge of where the weights are used
        uses = ()
        notes.append(f"the forward could not be traced ({failure}), so every weight is scaled.")
    plan = _draw_scheme_(factory, targets, uses, config)
    model = scales.ScaledModel(factory, targets, config.tolerance * defaults.SEARCH_FRACTION)
    traits, asked = NetworkTraits.of(uses, model.loss_is_quadratic()), config
    if traits.quadratic:  # it does not saturate
        config = replace(config, max_sharpening=math.inf)
    stuck = model.unscalable()
    if stuck:
        notes.append(f"{', '.join(stuck)}: the parametrization removes the scale, so not scaled.")
    scalable = [one for one in targets if one.name not in stuck]
    solve = _solve_layers if every_layer else _solve_network
    goal, outcome, scaling = solve(model, scalable, uses, traits, config)
    after, factors = model.report(every_layer), model.scales
    sizes_of = sizes, _sizes(targets)
    worse = old is not None and _reason_to_restore(old, after, goal.target, outcome, asked, sizes_of)
    if old is not None and worse:
        restore()
        after, factors = old, dict.fromkeys(factors, 1.0)
        reasons = outcome.reason, f"{worse}, so the old weights were put back"
        outcome = replace(outcome, reason="; ".join(filter(None, reasons)))
    if config.scheme_only and not worse:
        goal = replace(goal, target=after.network.norm)
        converged, reason = True, outcome.reason
    else:
        converged, reason = _judge(after, config, goal.target, outcome)
    return Initialization(
        before=old,
        after=after,
        scales=factors,
        target=goal.target,
        lr=goal.lr,
        kappa=goal.kappa,
        rule=config.rule,
        scheme=config.scheme_name,
        scaling=scaling,
        tolerance=config.tolerance,
        converged=converged,
        reason=reason,
        measurements=outcome.measurements,
        plan=plan,
        notes=(*notes, *note_unchecked(checked)),
        seed=factory.options["seed"],
    )


def _solve_network(
    model: scales.ScaledModel,
    targets: list[weights.Target],
    uses: Uses,
    traits: NetworkTraits,
    config: Config,
) -> tuple[Goal, search.Outcome, str]:
    output = model.output()
    # lr="auto" needs a norm in any case; else saturated weights are just too sharp.
    needed = config.lr == "auto" or search.LossCap(config.max_sharpening).admits(output)
    norm = model.network_norm() if needed else math.inf
    first = (Measurement(t=0.0, norm=norm, loss=output.loss),)
    if config.scheme_only:
        reason = f"steps of {config.optimizer} do not grow with the gradient: no curvature is asked for"
        rate, decoupled = config.lr, config.optimizer == "adamw"
        if rate == "auto":
            rule = AdamRule(decoupled=decoupled, weight_decay=0.01 * decoupled)
            rate = best_adam_rate(model.factory.problem(), rule)
        return Goal(norm, rate if math.isfinite(rate) else None), search.Outcome(first, reason), NOT_SCALED

    def homogeneous() -> bool:  # costs forwards
        return scales.small_and_large(targets, uses, model) is not None

    goal = config.goal(traits, norm, unscaled=config.lr == "auto" and not homogeneous())
    insists = config.scaling != "auto" or config.lr is None
    if traits.reason_not_to_sharpen and not insists and 0 < norm < goal.target * (1 - config.tolerance):
        why = f"since {traits.reason_not_to_sharpen}, sharper ones would not learn faster"
        return goal, search.Outcome(first, f"the weights are flat enough for the rate; {why}"), NOT_SCALED
    scaling = config.scaling
    if scaling == "auto":
        sharper = norm / goal.target
        flat = sharper <= 1 or (sharper <= defaults.SMALL_OUTPUT_UP_TO and homogeneous())
        scaling = "small-output" if norm > 0 and flat else "all"
    path = scales.scaling_path(scaling, targets, uses, model, goal.target)
    limited = traits.normalized and scaling == "all" and not insists
    lowest = math.log(defaults.SMALLEST_GAIN_NORMALIZED) if limited else -math.inf
    outcome = search.solve_network(model, path, goal.target, config, lowest)
    rows = tuple(dict.fromkeys((*first, *outcome.measurements)))
    return goal, replace(outcome, measurements=rows), path.name


def _solve_layers(
    model: scales.ScaledModel,
    targets: list[weights.Target],
    uses: Uses,
    traits: NetworkTraits,
    config: Config,
) -> tuple[Goal, search.Outcome, None]:
    norm = model.network_norm() if config.lr == "auto" else math.inf
    goal = config.goal(traits, norm, unscaled=True)
    met = {use.parameter for use in uses}
    names = [one.name for one in targets if not met or one.key in met]
    return goal, search.solve_layers(model, names, goal.target, config), None


def _draw_scheme_(
    factory: scales.ProblemFactory, targets: list[weights.Target], uses: Uses, config: Config
) -> SchemePlan | None:
    """Write the scheme's weights and biases; None for scheme="keep"."""
    if config.scheme == "keep":
        if config.biases == "zero":
            with torch.no_grad():
                for bias in (bias for target in targets for bias in target.biases().values()):
                    bias.zero_()
        return None
    scaled = config.residual == "scaled" or (config.residual == "auto" and NetworkTraits.of(uses).normalized)
    gains = None
    if config.scheme == "auto":
        names = {target.key: target.name for target in targets}
        gains = {names[key]: std for key, std in mean_field.capped_stds(uses).items() if key in names}
    plan = apply_scheme.apply_scheme_(
        factory.model,
        config.scheme_name,
        sample=factory.sample,
        forward=factory.options["forward"],
        layers=factory.options["layers"],
        gains=gains,
        residual="scaled" if scaled else "plain",
        biases="keep" if config.biases == "keep" else "zero",
        generator=torch.Generator().manual_seed(factory.options["seed"]),
    )
    return replace(plan, _go_back=None)  # `initialize_` itself holds one copy of the old weights


def _measure_old(
    factory: scales.ProblemFactory, every_layer: bool
) -> tuple[CurvatureReport | None, list[str]]:
    """None where the old weights cannot be measured; errors that new weights do not cure come again later."""
    found = scales.ScaledModel(factory, [], 0.1)
    try:
        if found.output().is_finite:
            return found.report(every_layer), []
    except DerivativeError:
        raise
    except ProblemError as failure:
        return None, [f"before: {failure}"]
    return None, ["before: the old weights, or the network's output with them, are not finite."]


def _sizes(targets: list[weights.Target]) -> dict[str, float]:
    """The root mean square of every weight."""
    return {one.name: float(one.value.double().square().mean().sqrt()) for one in targets}


def _reason_to_restore(
    old: CurvatureReport,
    after: CurvatureReport,
    target: float,
    outcome: search.Outcome,
    config: Config,
    sizes: tuple[dict[str, float], dict[str, float]],
) -> str:
    """Why the new weights must not stay: farther from the target than the old ones, or not trainable."""
    before, now = sizes
    largest = max(now, key=lambda name: now[name])
    if now[largest] > max(defaults.ABSURD_SIZE, defaults.ABSURD_GROWTH * before[largest]):
        return f"{largest} would have a standard deviation of {now[largest]:.2g}"
    # A larger max_sharpening asks for a larger loss.
    limit = max(defaults.ABSURD_GROWTH, config.max_sharpening)
    if not after.loss <= limit * max(abs(old.loss), 1.0):
        return f"the loss would be {after.loss:.3g}, and was {old.loss:.3g}"
    if config.scheme_only or not outcome.reason:
        return ""
    near, far = (
        max((_distance(row.norm, target) for row in _judged(report, config, outcome)), default=math.inf)
        for report in (old, after)
    )
    farther = far > (2 * near if config.rule == "network" else near)
    return "the new weights are farther from the target" if farther else ""


def _judge(
    after: CurvatureReport, config: Config, target: float, outcome: search.Outcome
) -> tuple[bool, str]:
    """Whether the final report meets the target, and a sentence with the numbers."""
    limit, rows = f"{100 * config.tolerance:.3g} %", _judged(after, config, outcome)
    off = [row for row in rows if not abs(row.norm / target - 1) <= config.tolerance]
    if not rows:
        return False, outcome.reason
    why = outcome.reason or after.network.reason or "the search met the target, the final report does not"
    if config.rule == "network":
        norm = f"the network's ‖H‖ = {after.network.norm:.3g}"
        met, missed = f"{norm} is within {limit} of {target:.3g}", f"{norm}, not {target:.3g}: {why}"
    else:
        met = f"all {len(rows)} layers have ‖H‖ within {limit} of {target:.3g}"
        worst = max(rows, key=lambda row: _distance(row.norm, target))
        missed = (
            f"{len(off)} of {len(rows)} layers are not within {limit} of {target:.3g}, the farthest "
            f"{worst.name} with ‖H‖ = {worst.norm:.3g}: {why}"
        )
    return not off, missed if off else met


def _judged(report: CurvatureReport, config: Config, outcome: search.Outcome) -> Sequence[Any]:
    """The rows of a report that must meet the target."""
    if config.rule == "network":
        return [report.network]
    return [row for row in report if row.name not in outcome.unreachable]


def _distance(norm: float, target: float) -> float:
    return abs(math.log(norm / target)) if 0 < norm < math.inf else math.inf


def _save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write every parameter and buffer as safetensors, whole or not at all; shared ones once."""
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        save_model(model, str(temporary))
