"""From a wish to weights: measure, start, solve, measure again."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hessinit.errors import DerivativeError, ProblemError
from hessinit.initializing import defaults
from hessinit.initializing.calm import calm_stds
from hessinit.initializing.freedoms import FREEDOMS, is_homogeneous
from hessinit.initializing.judging import distance, judge, worst_distance
from hessinit.initializing.nature import Nature, nature_of
from hessinit.initializing.rules import LayersRule, NetworkRule, Outcome
from hessinit.initializing.wish import Aim, Wish
from hessinit.initializing.workbench import Setting, Workbench, keep_all
from hessinit.measurement.measure import note_unchecked
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization, Measurement, SchemePlan
from hessinit.schemes.applying import apply_scheme_
from hessinit.schemes.site import Site
from hessinit.schemes.targets import Target
from hessinit.schemes.walk import find_sites
from hessinit.training.advise import advise

# In the place of a freedom: what was left as gentle as the scheme made it.
UNSHARPENED = "none"


def carry_out(setting: Setting, targets: list[Target], wish: Wish) -> Initialization:
    """The weights are written; whoever calls puts them back if anything is raised."""
    every_layer = wish.rule == "layers"
    before, notes = _measure_before(setting, every_layer)
    as_found, sizes = keep_all(targets), _sizes(targets)
    sites, remarks = _walk(setting)
    plan = _start_(setting, targets, sites, wish)
    bench = Workbench(setting, targets, wish.tolerance * defaults.SEARCH_SHARE)
    nature, asked = nature_of(sites, bench.loss_is_quadratic()), wish
    if nature.quadratic:  # it does not saturate
        wish = replace(wish, most_sharpening=math.inf)
    stuck = bench.unmovable()
    if stuck:
        remarks.append(f"{', '.join(stuck)}: the parametrization takes the scale away again, so not scaled.")
    scalable = [one for one in targets if one.name not in stuck]
    if wish.rule == "network":
        aim, outcome, freedom = _solve_network(bench, scalable, sites, nature, wish)
    else:
        (aim, outcome), freedom = _solve_layers(bench, scalable, sites, nature, wish), None
    after = bench.report(every_layer)
    scales = bench.scales
    why_back = "" if before is None else _why_back(before, after, aim, outcome, asked, sizes, _sizes(targets))
    if before is not None and why_back:
        as_found()
        after, scales = before, dict.fromkeys(scales, 1.0)
        put_back = f"{why_back}, so the weights as found were put back"
        reason = "; ".join(filter(None, (outcome.reason, put_back)))
        outcome = replace(outcome, reason=reason)
    if wish.scheme_alone and not why_back:
        aim = replace(aim, target=after.network.norm)
        converged, reason = True, outcome.reason
    else:
        converged, reason = judge(after, wish.rule, aim.target, wish.tolerance, outcome)
    return Initialization(
        before=before,
        after=after,
        scales=scales,
        target=aim.target,
        lr=aim.lr,
        kappa=aim.kappa,
        rule=wish.rule,
        scheme=_scheme_of(wish),
        scaling=freedom,
        tolerance=wish.tolerance,
        converged=converged,
        reason=reason,
        measurements=outcome.measurements,
        plan=plan,
        notes=(*notes, *remarks, *note_unchecked(setting.check.wanted)),
        seed=setting.seed,
    )


def _solve_network(
    bench: Workbench, targets: list[Target], sites: tuple[Site, ...], nature: Nature, wish: Wish
) -> tuple[Aim, Outcome, str]:
    look = bench.look()
    # A rate of our own needs a norm in any case; else a saturated start is only too sharp.
    too_loud = look.is_saturated(wish.most_sharpening) and wish.lr != "auto"
    norm = bench.network_norm() if look.is_finite and not too_loud else math.inf
    rows: tuple[Measurement, ...] = (Measurement(t=0.0, norm=norm, loss=look.loss),)
    if wish.scheme_alone:
        reason = f"steps of {wish.optimizer} do not grow with the gradient, so the rate asks for no curvature"
        return Aim(norm, _rate_of_adaptive(bench.setting, wish)), Outcome(rows, reason), UNSHARPENED
    as_it_is = wish.lr == "auto" and not is_homogeneous(targets, sites, bench)
    aim = wish.aim(nature, norm, as_it_is)
    too_gentle = norm <= aim.target
    calm = nature.reason_not_to_sharpen if wish.by_rate and wish.freedom == "auto" else ""
    if too_gentle and calm and norm > 0 and norm < aim.target * (1 - wish.tolerance):
        reason = f"it is gentle enough for the rate, and since {calm}, it would learn no faster if sharpened"
        return aim, Outcome(rows, reason), UNSHARPENED
    if wish.freedom != "auto":
        freedoms = [wish.freedom]
    elif 0 < norm <= aim.target:
        freedoms = ["quiet"]
    elif 0 < norm <= defaults.QUIET_UP_TO * aim.target and is_homogeneous(targets, sites, bench):
        freedoms = ["quiet", "gain"]
    else:
        freedoms = ["gain"]
    for freedom in freedoms:
        bench.scale_({})
        path = FREEDOMS[freedom](targets, sites, bench, aim.target)
        if not wish.by_rate or wish.freedom != "auto":  # whoever names the norm or the freedom means it
            path = replace(path, lowest=-math.inf)
        known = norm if not path.offsets and 0 < norm < math.inf else None
        outcome = NetworkRule(
            bench, path, aim.target, _search_tolerance(wish), wish.most, wish.most_sharpening, known
        ).run()
        rows += outcome.measurements[known is not None :]
        if not outcome.reason:
            break
    return aim, replace(outcome, measurements=rows), path.name


def _solve_layers(
    bench: Workbench, targets: list[Target], sites: tuple[Site, ...], nature: Nature, wish: Wish
) -> tuple[Aim, Outcome]:
    norm = bench.network_norm() if wish.lr == "auto" and bench.look().is_finite else math.inf
    aim = wish.aim(nature, norm, as_it_is=True)
    met = {site.parameter for site in sites}
    names = [one.name for one in targets if not met or one.key in met]
    rule = LayersRule(bench, names, aim.target, _search_tolerance(wish), wish.most, wish.most_sharpening)
    return aim, rule.run()


def _search_tolerance(wish: Wish) -> float:
    """What the search allows itself leaves room for its own errors of measurement."""
    return math.log1p(wish.tolerance) * (1 - 2 * defaults.SEARCH_SHARE)


def _scheme_of(wish: Wish) -> str:
    return defaults.AUTO_SCHEME if wish.scheme == "auto" else wish.scheme


def _start_(
    setting: Setting, targets: list[Target], sites: tuple[Site, ...], wish: Wish
) -> SchemePlan | None:
    """The scheme's weights, or those found; and the biases."""
    if wish.scheme == "keep":
        if wish.biases == "zero":
            with torch.no_grad():
                for bias in (bias for target in targets for bias in target.biases().values()):
                    bias.zero_()
        return None
    normalized = nature_of(sites, quadratic=False).normalized
    scaled = normalized if wish.residual == "auto" else wish.residual == "scaled"
    plan = apply_scheme_(
        setting.model,
        _scheme_of(wish),
        sample=setting.sample,
        forward=setting.forward,
        layers=setting.layers,
        gains=_calm_gains(targets, sites) if wish.scheme == "auto" else None,
        residual="scaled" if scaled else "plain",
        biases="keep" if wish.biases == "keep" else "zero",
        generator=torch.Generator().manual_seed(setting.seed),
    )
    return replace(plan, _go_back=None)  # the way back of the whole holds one copy of the weights already


def _calm_gains(targets: list[Target], sites: tuple[Site, ...]) -> dict[str, float]:
    names = {target.key: target.name for target in targets}
    return {names[key]: std for key, std in calm_stds(sites).items() if key in names}


def _rate_of_adaptive(setting: Setting, wish: Wish) -> float | None:
    if not isinstance(wish.lr, str):
        return wish.lr
    advice = advise(
        setting.model, setting.loss, setting.batch, optimizer=wish.optimizer, layers=setting.layers,
        forward=setting.forward, dropout=setting.dropout, reduction=setting.reduction, check=False,
        seed=setting.seed,
    )  # fmt: skip
    return advice.learning_rate if math.isfinite(advice.learning_rate) else None


def _measure_before(setting: Setting, every_layer: bool) -> tuple[CurvatureReport | None, list[str]]:
    """None where what was found cannot be measured; what new weights do not cure comes up again later."""
    found = Workbench(setting, [], 0.1)
    try:
        if found.look().is_finite:
            return found.report(every_layer), []
    except DerivativeError:
        raise
    except ProblemError as failure:
        return None, [f"before: {failure}"]
    return None, ["before: the weights as found, or what the network gives with them, are not finite."]


def _walk(setting: Setting) -> tuple[tuple[Site, ...], list[str]]:
    """Where the weights are used; a forward that cannot be walked costs only that knowledge."""
    try:
        return find_sites(setting.model, setting.sample, setting.forward).sites, []
    except ProblemError as failure:
        return (), [f"the forward could not be walked ({failure}), so every weight is scaled."]


def _sizes(targets: list[Target]) -> dict[str, float]:
    """The root mean square of every weight."""
    return {one.name: float(one.value.double().square().mean().sqrt()) for one in targets}


def _why_back(
    before: CurvatureReport,
    after: CurvatureReport,
    aim: Aim,
    outcome: Outcome,
    wish: Wish,
    sizes: dict[str, float],
    new_sizes: dict[str, float],
) -> str:
    """Why the new weights must not stay: farther from the target than those found, or not to be trained."""
    largest = max(new_sizes, key=lambda name: new_sizes[name])
    if new_sizes[largest] > max(defaults.ABSURD_SIZE, defaults.ABSURD_GROWTH * sizes[largest]):
        return f"{largest} would have a standard deviation of {new_sizes[largest]:.2g}"
    # Who lifts the cap on the loss means it.
    most = max(defaults.ABSURD_GROWTH, wish.most_sharpening)
    if not after.loss <= most * max(abs(before.loss), 1.0):
        return f"the loss would be {after.loss:.3g}, and was {before.loss:.3g}"
    if wish.scheme_alone or not outcome.reason:
        return ""
    if wish.rule == "layers":
        left_out = outcome.unreachable
        distances = [worst_distance(report, aim.target, left_out) for report in (before, after)]
        return "the layers would be farther from it than they were" if distances[1] > distances[0] else ""
    near, far = (distance(report.network.norm, aim.target) for report in (before, after))
    return f"‖H‖ = {before.network.norm:.3g}, as found, is closer to it" if far > 2 * near else ""
