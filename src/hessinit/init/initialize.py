"""The verb `initialize_`: weights whose curvature fits the learning rate."""

from __future__ import annotations

import math
import os
import stat
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.curvature.preconditioner import AdamRule, best_adam_rate
from hessinit.errors import ConvergenceError, ConvergenceWarning, DerivativeError, ProblemError
from hessinit.init import defaults
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.defaults import NOT_SCALED, Config, Goal, NetworkTraits
from hessinit.init.mean_field import capped_stds
from hessinit.init.scales import ProblemFactory, ScaledModel, allows_small_output, read_once, scaling_path
from hessinit.init.search import LayersRule, NetworkRule, Outcome
from hessinit.init.trace import WeightUse
from hessinit.init.weights import Target, find_targets, find_weight_uses, snapshot
from hessinit.measurement.measure import note_unchecked
from hessinit.problem import validate
from hessinit.problem.batches import read_batches
from hessinit.problem.layers import check_present
from hessinit.problem.problem import Forward, Loss, ProblemOptions
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization, Measurement, SchemePlan
from hessinit.results.result import replacing

Uses = tuple[WeightUse, ...]
_AFTER_A_SEARCH = "the search met the target, and the report made after it does not"


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
    by one gain; weights that are too flat are sharpened: with a small output where the network is
    homogeneous, as with ReLU (the largest weight small, the others larger), else by the last weight. By a
    rate, normalized networks, those that read tokens and those with a quadratic loss are not sharpened.
    "all", "last" and "small-output" choose the weights to scale. `rule="layers"` brings the norm of every
    layer to the target.

    `scheme` draws the weights: a closed form or "lsuv" as in `apply_scheme_`, "keep" for the present weights,
    or "auto": "lsuv", with smaller pre-activations where the gradient would explode. `residual="scaled"`
    shrinks residual branches; "auto" does so in normalized networks. Biases become 0 with the weights that
    are drawn; biases="keep" leaves them. Frozen weights are never touched.

    The result says whether the target was met to `tolerance`, and why not: the search stops where the initial
    loss would exceed `max_sharpening` times the loss of a zero output. Not meeting the target warns, or
    raises with `strict=True`. Whatever is raised, the model is then as it was found. `undo()` restores the
    old weights; `dry_run=True` does so at once.

    Costs 50 to 170 gradients for a classifier with ten outputs, most of it two reports and two to five
    measurements of the network's norm.

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
    check_present(inside)
    validate.check_dropout(inside, dropout)
    named = layers if layers is None or isinstance(layers, str) else list(layers)
    options: ProblemOptions = {"layers": named, "forward": forward, "dropout": dropout}
    options |= {"reduction": reduction, "seed": seed}
    factory = ProblemFactory(inside, loss, read_once(batch), options, curvature, check)
    for place, one in read_batches(factory.batch):  # before a scheme meets them in some layer
        validate.check_finite_inputs(one.inputs, place)
    targets = find_targets(inside, named)
    writable = [one for one in targets if not one.reason_unchanged]
    if not writable:
        reasons = ", ".join(f"{one.name}: {one.reason_unchanged}" for one in targets[:3])
        shown = f" ({reasons}{' …' if len(targets) > 3 else ''})" if reasons else ""
        raise ProblemError(
            f"no weight of two or more dimensions can be set{shown}; unfreeze one, or name others with "
            "layers=."
        )
    restore = snapshot(writable)
    try:
        result = replace(_initialize(factory, writable, config), seconds=time.perf_counter() - started)
        missed = not result.converged and result.scaling != NOT_SCALED
        if strict and missed:
            raise ConvergenceError(result.reason)
    except BaseException:
        restore()
        raise
    if dry_run:
        restore()
    else:
        result = replace(result, _go_back=restore, _save_weights=partial(_save_weights, inside))
    if missed:
        warnings.warn(result.reason, ConvergenceWarning, stacklevel=3)  # past the decorator
    return result


def _initialize(factory: ProblemFactory, targets: list[Target], config: Config) -> Initialization:
    """Measure, draw the scheme, solve for the scales, measure again; the caller restores on any error."""
    every_layer, checked = config.rule == "layers", factory.check
    old, notes = _measure_old(factory, every_layer)
    restore, sizes = snapshot(targets), _sizes(targets)
    try:
        uses = find_weight_uses(factory.model, factory.sample, factory.options["forward"]).uses
    except ProblemError as failure:  # costs only the knowledge of where the weights are used
        uses = ()
        notes.append(f"the forward could not be traced ({failure}), so every weight is scaled.")
    plan = _draw_scheme_(factory, targets, uses, config)
    model = ScaledModel(factory, targets, config.tolerance * defaults.SEARCH_FRACTION)
    traits, asked = NetworkTraits.of(uses, model.loss_is_quadratic()), config
    if traits.quadratic:  # it does not saturate
        config = replace(config, max_sharpening=math.inf)
    stuck = model.unscalable()
    if stuck:
        notes.append(f"{', '.join(stuck)}: the parametrization removes the scale, so not scaled.")
    scalable = [one for one in targets if one.name not in stuck]
    solve = _solve_layers if every_layer else _solve_network
    goal, outcome, scaling = solve(model, scalable, uses, traits, config)
    after, scales = model.report(every_layer), model.scales
    why_back = ""
    if old is not None:
        why_back = _reason_to_restore(old, after, goal, outcome, asked, sizes, _sizes(targets))
    if why_back and old is not None:
        restore()
        after, scales = old, dict.fromkeys(scales, 1.0)
        put_back = f"{why_back}, so the old weights were put back"
        outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, put_back))))
    if config.scheme_only and not why_back:
        goal = replace(goal, target=after.network.norm)
        converged, reason = True, outcome.reason
    else:
        converged, reason = _judge(after, config, goal.target, outcome)
    return Initialization(
        before=old,
        after=after,
        scales=scales,
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
    model: ScaledModel, targets: list[Target], uses: Uses, traits: NetworkTraits, config: Config
) -> tuple[Goal, Outcome, str]:
    output = model.output()
    # lr="auto" needs a norm in any case; else saturated weights are just too sharp.
    saturated = output.is_saturated(config.max_sharpening) and config.lr != "auto"
    norm = model.network_norm() if output.is_finite and not saturated else math.inf
    rows: tuple[Measurement, ...] = (Measurement(t=0.0, norm=norm, loss=output.loss),)
    if config.scheme_only:
        reason = (
            f"steps of {config.optimizer} do not grow with the gradient, so the rate asks for no curvature"
        )
        return Goal(norm, _adaptive_rate(model.factory, config)), Outcome(rows, reason), NOT_SCALED
    unscaled = config.lr == "auto" and not allows_small_output(targets, uses, model)
    goal = config.goal(traits, norm, unscaled)
    why_not = traits.reason_not_to_sharpen if config.by_rate and config.scaling == "auto" else ""
    if why_not and 0 < norm < goal.target * (1 - config.tolerance):
        reason = (
            f"the weights are flat enough for the rate; since {why_not}, sharper ones would not learn faster"
        )
        return goal, Outcome(rows, reason), NOT_SCALED
    if config.scaling != "auto":
        scalings = [config.scaling]
    elif 0 < norm <= goal.target:
        scalings = ["small-output"]
    elif 0 < norm <= defaults.SMALL_OUTPUT_UP_TO * goal.target and allows_small_output(targets, uses, model):
        scalings = ["small-output", "all"]
    else:
        scalings = ["all"]
    for scaling in scalings:
        model.scale_({})
        path = scaling_path(scaling, targets, uses, model, goal.target)
        if not config.by_rate or config.scaling != "auto":  # a named norm or scaling is insisted on
            path = replace(path, lowest=-math.inf)
        known = norm if not path.offsets and 0 < norm < math.inf else None
        outcome = NetworkRule(model, path, goal.target, config, known).run()
        rows += outcome.measurements[known is not None :]
        if not outcome.reason:
            break
    return goal, replace(outcome, measurements=rows), path.name


def _solve_layers(
    model: ScaledModel, targets: list[Target], uses: Uses, traits: NetworkTraits, config: Config
) -> tuple[Goal, Outcome, None]:
    norm = model.network_norm() if config.lr == "auto" and model.output().is_finite else math.inf
    goal = config.goal(traits, norm, unscaled=True)
    met = {use.parameter for use in uses}
    names = [one.name for one in targets if not met or one.key in met]
    return goal, LayersRule(model, names, goal.target, config).run(), None


def _draw_scheme_(
    factory: ProblemFactory, targets: list[Target], uses: Uses, config: Config
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
        gains = {names[key]: std for key, std in capped_stds(uses).items() if key in names}
    plan = apply_scheme_(
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


def _adaptive_rate(factory: ProblemFactory, config: Config) -> float | None:
    if not isinstance(config.lr, str):
        return config.lr
    rule = AdamRule(decoupled=config.optimizer == "adamw", weight_decay=0.01 * (config.optimizer == "adamw"))
    rate = best_adam_rate(factory.problem(), rule)
    return rate if math.isfinite(rate) else None


def _measure_old(factory: ProblemFactory, every_layer: bool) -> tuple[CurvatureReport | None, list[str]]:
    """None where the old weights cannot be measured; errors that new weights do not cure come again later."""
    found = ScaledModel(factory, [], 0.1)
    try:
        if found.output().is_finite:
            return found.report(every_layer), []
    except DerivativeError:
        raise
    except ProblemError as failure:
        return None, [f"before: {failure}"]
    return None, ["before: the old weights, or the network's output with them, are not finite."]


def _sizes(targets: list[Target]) -> dict[str, float]:
    """The root mean square of every weight."""
    return {one.name: float(one.value.double().square().mean().sqrt()) for one in targets}


def _reason_to_restore(
    old: CurvatureReport,
    after: CurvatureReport,
    goal: Goal,
    outcome: Outcome,
    config: Config,
    sizes: dict[str, float],
    new_sizes: dict[str, float],
) -> str:
    """Why the new weights must not stay: farther from the target than the old ones, or not trainable."""
    largest = max(new_sizes, key=lambda name: new_sizes[name])
    if new_sizes[largest] > max(defaults.ABSURD_SIZE, defaults.ABSURD_GROWTH * sizes[largest]):
        return f"{largest} would have a standard deviation of {new_sizes[largest]:.2g}"
    # A larger max_sharpening asks for a larger loss.
    limit = max(defaults.ABSURD_GROWTH, config.max_sharpening)
    if not after.loss <= limit * max(abs(old.loss), 1.0):
        return f"the loss would be {after.loss:.3g}, and was {old.loss:.3g}"
    if config.scheme_only or not outcome.reason:
        return ""
    if config.rule == "layers":
        rows = ([row for row in report if row.name not in outcome.unreachable] for report in (old, after))
        earlier, new = (
            max((_distance(row.norm, goal.target) for row in one), default=math.inf) for one in rows
        )
        return "the layers would be farther from the target than they were" if new > earlier else ""
    near, far = (_distance(report.network.norm, goal.target) for report in (old, after))
    return f"the old ‖H‖ = {old.network.norm:.3g} is closer to the target" if far > 2 * near else ""


def _judge(after: CurvatureReport, config: Config, target: float, outcome: Outcome) -> tuple[bool, str]:
    """Whether the final report meets the target, and a sentence with the numbers."""
    limit = f"{100 * config.tolerance:.3g} %"
    if config.rule == "network":
        norm = after.network.norm
        if abs(norm / target - 1) <= config.tolerance:
            return True, f"the network's ‖H‖ = {norm:.3g} is within {limit} of {target:.3g}"
        why = outcome.reason or after.network.reason or _AFTER_A_SEARCH
        return False, f"the network's ‖H‖ = {norm:.3g}, not {target:.3g}: {why}"
    curved = [row for row in after if row.name not in outcome.unreachable]
    off = [row for row in curved if not abs(row.norm / target - 1) <= config.tolerance]
    if curved and not off:
        return True, f"all {len(curved)} layers have ‖H‖ within {limit} of {target:.3g}"
    if not curved:
        return False, outcome.reason
    worst = max(off, key=lambda row: _distance(row.norm, target))
    return False, (
        f"{len(off)} of {len(curved)} layers are not within {limit} of {target:.3g}, the farthest "
        f"{worst.name} with ‖H‖ = {worst.norm:.3g}: {outcome.reason or _AFTER_A_SEARCH}"
    )


def _distance(norm: float, target: float) -> float:
    return abs(math.log(norm / target)) if 0 < norm < math.inf else math.inf


def _save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write every parameter and buffer as safetensors, whole or not at all; shared ones once."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        temporary.touch(exist_ok=False)
        usual = stat.S_IMODE(temporary.stat().st_mode)
        try:
            save_model(model, str(temporary))
        except SafetensorError as failure:  # what it makes of a full disk
            raise OSError(str(failure)) from failure
        temporary.chmod(usual)  # safetensors makes a private file, that only its owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
