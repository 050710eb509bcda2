"""The verb `initialize_`: weights whose curvature fits the learning rate."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.initializing import arguments, defaults
from hessinit.initializing.freedoms import FREEDOMS
from hessinit.initializing.judging import judge, worst_distance
from hessinit.initializing.rules import LayersRule, NetworkRule, Outcome
from hessinit.initializing.saving import save_model_weights
from hessinit.initializing.workbench import Setting, Workbench, keep_all, read_once
from hessinit.problem.checks import (
    check_arguments,
    check_dropout,
    check_switches,
    check_tolerance,
    check_whole,
    unwrap,
)
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.weights import check_present
from hessinit.report.initialization import Initialization
from hessinit.report.report import CurvatureReport
from hessinit.report.scheme_plan import SchemePlan
from hessinit.schemes.applying import apply_scheme_
from hessinit.schemes.site import Site
from hessinit.schemes.targets import Target, find_targets
from hessinit.schemes.walk import find_sites


@dataclass(frozen=True)
class _Wish:
    """What was asked for, read and checked."""

    target: float
    rule: str
    scheme: str
    freedom: str
    biases: str
    residual: str
    tolerance: float
    most: int
    most_sharpening: float


@torch.inference_mode(False)
def initialize_(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | None = None,
    target: float | None = None,
    rule: str = "network",
    scheme: str = "auto",
    freedom: str = "auto",
    layers: str | Iterable[str] | None = None,
    curvature: str = "gauss-newton",
    forward: Forward | None = None,
    dropout: str = "freeze",
    biases: str = "auto",
    residual: str = "scaled",
    tolerance: float = 0.05,
    max_measurements: int | None = None,
    most_sharpening: float = defaults.MOST_SHARPENING,
    seed: int = 0,
    dry_run: bool = False,
    strict: bool = False,
) -> Initialization:
    """Draw new weights and scale them until the curvature fits the step; in place, on the same Parameters.

    `lr` means a target of κ/lr for the network's ‖H‖; `target` gives the norm itself; neither means 1, the
    paper's principle. `rule="network"` moves one number: with freedom="gain" all weights that matter, with
    "last" those before the output. `rule="layers"` brings the norm of every layer to the target. `scheme` is
    the start: a closed form or "lsuv" as `apply_scheme_` knows them, "auto", or "keep" for the weights as
    they are. `residual="scaled"` tames branches that are added up. Biases become 0 with the weights that are
    drawn; biases="keep" leaves them. Frozen weights are never touched.

    The result says whether the target was met to `tolerance`, and why not: a target that only a saturated
    network could reach is capped where the loss would pass `most_sharpening` times that of a silent one. Not
    meeting it warns, or raises with `strict=True`. Whatever is raised, the model is then as it was found.
    `undo()` takes all back; `dry_run=True` does so at once.

    Costs 50 to 100 gradients for a classifier with ten outputs, most of it two reports and two to five
    measurements of the network's norm.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> result = initialize_(model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 3), lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    check_arguments(model, loss, forward, None, dropout)
    arguments.check_choices(rule, scheme, freedom, curvature, biases, residual, dropout)
    check_switches(dry_run=dry_run, strict=strict)
    aim, rate, kappa = arguments.read_target(lr, target)
    seed = check_whole("seed", seed, at_least=0)
    wish = _Wish(
        aim,
        rule,
        defaults.AUTO_SCHEME if scheme == "auto" else scheme,
        defaults.AUTO_FREEDOM if freedom == "auto" else freedom,
        biases,
        residual,
        check_tolerance(tolerance),
        arguments.read_measurements(max_measurements, rule),
        arguments.read_most_sharpening(most_sharpening),
    )
    inside = unwrap(model)
    check_present(inside)
    check_dropout(inside, dropout)
    named = layers if layers is None or isinstance(layers, str) else list(layers)
    setting = Setting(inside, loss, read_once(batch), named, forward, curvature, dropout, seed)
    targets = find_targets(inside, named)
    movable = [one for one in targets if not one.reason_to_leave_alone]
    if not movable:
        reasons = {one.name: one.reason_to_leave_alone for one in targets[:3]}
        raise ProblemError(
            f"no weight of two or more dimensions can be set{f' ({reasons})' if reasons else ''}; unfreeze "
            "one, or name others with layers=."
        )
    go_back = keep_all(movable)
    try:
        result = _initialize_(setting, movable, wish)
        result = replace(result, lr=rate, kappa=kappa, seed=seed, seconds=time.perf_counter() - started)
        if strict and not result.converged:
            raise ConvergenceError(result.reason)
    except BaseException:
        go_back()
        raise
    if dry_run:
        go_back()
    else:
        save = partial(save_model_weights, inside)
        result = replace(result, _go_back=go_back, _save_weights=save)
    if not result.converged:
        warnings.warn(result.reason, ConvergenceWarning, stacklevel=3)  # past the decorator
    return result


def _initialize_(setting: Setting, targets: list[Target], wish: _Wish) -> Initialization:
    every_layer = wish.rule == "layers"
    before, notes = _measure_before(setting, every_layer)
    as_found = keep_all(targets)
    plan = _start_(setting, targets, wish)
    bench = Workbench(setting, targets, wish.tolerance * defaults.SEARCH_SHARE)
    sites, remarks = _walk(setting)
    notes += remarks
    stuck = bench.unmovable()
    if stuck:
        notes.append(f"{', '.join(stuck)}: the parametrization takes the scale away again, so not scaled.")
    scalable = [one for one in targets if one.name not in stuck]
    # What the search allows itself leaves room for its own errors of measurement.
    tolerance = math.log1p(wish.tolerance) * (1 - 2 * defaults.SEARCH_SHARE)
    if wish.rule == "network":
        exponents = FREEDOMS[wish.freedom](scalable, sites)
        outcome = NetworkRule(bench, exponents, wish.target, tolerance, wish.most, wish.most_sharpening).run()
    else:
        met = {site.parameter for site in sites}
        names = [one.name for one in scalable if not met or one.key in met]
        outcome = LayersRule(bench, names, wish.target, tolerance, wish.most, wish.most_sharpening).run()
    after = bench.report(every_layer)
    scales = bench.scales
    if wish.rule == "layers" and before is not None and _is_worse(before, after, wish, outcome):
        as_found()
        after, scales = before, dict.fromkeys(scales, 1.0)
        outcome = replace(outcome, reason=f"{outcome.reason}; the weights as found were closer, and are back")
    converged, reason = judge(after, wish.rule, wish.target, wish.tolerance, outcome)
    return Initialization(
        before=before,
        after=after,
        scales=scales,
        target=wish.target,
        rule=wish.rule,
        scheme=wish.scheme,
        freedom=wish.freedom if wish.rule == "network" else None,
        tolerance=wish.tolerance,
        converged=converged,
        reason=reason,
        measurements=outcome.measurements,
        plan=plan,
        notes=tuple(notes),
    )


def _start_(setting: Setting, targets: list[Target], wish: _Wish) -> SchemePlan | None:
    """The scheme's weights, or those found; and the biases."""
    if wish.scheme == "keep":
        if wish.biases == "zero":
            with torch.no_grad():
                for bias in (bias for target in targets for bias in target.biases().values()):
                    bias.zero_()
        return None
    plan = apply_scheme_(
        setting.model,
        wish.scheme,
        sample=setting.sample,
        forward=setting.forward,
        layers=setting.layers,
        residual=wish.residual,
        biases="keep" if wish.biases == "keep" else "zero",
        generator=torch.Generator().manual_seed(setting.seed),
    )
    return replace(plan, _go_back=None)  # the way back of the whole holds one copy of the weights already


def _measure_before(setting: Setting, every_layer: bool) -> tuple[CurvatureReport | None, list[str]]:
    """None where what was found cannot be measured; what new weights do not cure comes up again later."""
    found = Workbench(setting, [], 0.1)
    try:
        if found.look().is_finite:
            return found.report(every_layer), []
    except ProblemError as failure:
        return None, [f"before: {failure}"]
    return None, ["before: the weights as found, or what the network gives with them, are not finite."]


def _walk(setting: Setting) -> tuple[tuple[Site, ...], list[str]]:
    """Where the weights are used; a forward that cannot be walked costs only that knowledge."""
    try:
        return find_sites(setting.model, setting.sample, setting.forward).sites, []
    except ProblemError as failure:
        return (), [f"the forward could not be walked ({failure}), so every weight is scaled."]


def _is_worse(before: CurvatureReport, after: CurvatureReport, wish: _Wish, outcome: Outcome) -> bool:
    left_out = outcome.unreachable
    return bool(outcome.reason) and worst_distance(before, wish.target, left_out) < worst_distance(
        after, wish.target, left_out
    )
