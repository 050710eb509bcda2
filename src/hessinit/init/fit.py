"""Draw a scheme's weights; scale them, along symmetries or by gains, until the curvature fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit.curvature.preconditioner import AdamRule, best_adam_rate
from hessinit.errors import DerivativeError, ProblemError
from hessinit.init import apply_scheme, mean_field, search, symmetries, weights
from hessinit.init.draws import DrawingJob
from hessinit.init.options import (
    NOT_SCALED,
    SCALING,
    SYMMETRIES,
    FitGoal,
    FitRequest,
    NetworkTraits,
)
from hessinit.init.scales import (
    OutputStatistics,
    ProblemFactory,
    ScaledModel,
    ScalingPath,
    ScalingPaths,
)
from hessinit.init.symmetries import SymmetryScaler
from hessinit.init.trace import WeightUse, parametrized_name
from hessinit.init.weights import Target, TracedWeights, find_weight_uses
from hessinit.problem.checks import layer_name
from hessinit.problem.ranks import length_over_ranks
from hessinit.problem.shards import local_part
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import Initialization, Measurement, SchemePlan, Symmetry


@dataclass(frozen=True)
class Solution:
    """The goal, how it was sought, and why it was missed; `reason` is empty where it was met.

    `unreachable` are layers whose norm no scale changes. `met` is a sentence where symmetries met
    the goal.
    """

    goal: FitGoal
    scaling: str | None
    measurements: tuple[Measurement, ...] = ()
    reason: str = ""
    unreachable: tuple[str, ...] = ()
    symmetries: tuple[Symmetry, ...] = ()
    met: str = ""


@dataclass(frozen=True)
class _WeightState:
    """The report and the loss at some weights, and the weights' root mean squares by name."""

    report: CurvatureReport | None
    loss: float
    sizes: Mapping[str, float]
    note: str = ""


def fit_weights_(
    factory: ProblemFactory, targets: list[Target], request: FitRequest, restore: Callable[[], None]
) -> Initialization:
    """Measure, draw, find the scales, measure again; the caller restores the weights on errors."""
    fit = request.fit
    every_layer = fit.rule == "layers" or fit.report is True
    # Every fit of a call starts from the same weights.
    before = factory.values.once(
        ("before", every_layer, request.reports),
        lambda: _measure_old(factory, targets, every_layer, request),
    )
    blocks = None
    if fit.scheme == "auto" and not request.redraws:
        blocks = _find_blocks_of_own(factory, targets, request)
        if blocks is not None:
            request = request.with_options(scheme="keep")
            fit = request.fit
    traced, trace_note = _find_uses(factory, fit.scheme)
    plan = _draw_scheme_(factory, targets, traced, request)
    model = ScaledModel(factory, targets, request.norm_tolerance)
    shrunk = _embedding_logs(model, targets, traced.uses) if fit.scheme == "auto" else {}
    if shrunk:
        model.scale_(shrunk)
        model = ScaledModel(factory, targets, request.norm_tolerance)
    traits = NetworkTraits.of(traced.uses, model.loss_is_quadratic())
    stuck = model.unscalable()
    scalable = [target for target in targets if target.name not in stuck]
    notes = [before.note, trace_note]
    if stuck:
        notes.append(f"{', '.join(stuck)}: the parametrization removes the scale, so not scaled.")
    if request.fits_symmetries:
        notes += _note_fixed_statistics(factory.model)
    solution = _Fitting(model, scalable, traced.uses, traits, request, blocks).solve_()
    after = _present_state(model, targets, every_layer, request)
    factors = _factors(model.scales, shrunk, solution.symmetries)
    unit = model.loss_unit(before.loss)
    if reason := _reason_to_restore(before, after, solution, request, unit):
        restore()
        after = before
        factors = dict.fromkeys(factors, 1.0)
        reasons = filter(None, [solution.reason, f"{reason}, so the old weights were put back"])
        solution = replace(solution, reason="; ".join(reasons), symmetries=(), met="")
    converged, reason = _judge_fit(after.report, solution, request)
    return Initialization(
        before=before.report,
        after=after.report,
        scales=factors,
        target=solution.goal.target,
        lr=solution.goal.lr,
        kappa=solution.goal.kappa,
        optimizer=request.optimizer,
        rule=fit.rule,
        scheme=request.scheme_name,
        scaling=solution.scaling,
        tolerance=fit.tolerance,
        converged=converged,
        reason=reason,
        measurements=solution.measurements,
        symmetries=solution.symmetries,
        plan=plan,
        notes=tuple(filter(None, notes)),
        seed=factory.problem.seed,
    )


def _measure_old(
    factory: ProblemFactory, targets: list[Target], every_layer: bool, request: FitRequest
) -> _WeightState:
    """The state of the old weights; errors that new weights do not cure come again later."""
    model = ScaledModel(factory, [], 0.1)
    note = "before: the old weights, or the network's output with them, are not finite."
    try:
        if model.output().is_finite:
            return _present_state(model, targets, every_layer, request)
    except DerivativeError:
        raise
    except ProblemError as failure:
        note = f"before: {failure}"
    return _WeightState(None, math.nan, _root_mean_squares(targets), note)


def _present_state(
    model: ScaledModel, targets: list[Target], every_layer: bool, request: FitRequest
) -> _WeightState:
    report = model.report(every_layer) if request.reports else None
    return _WeightState(report, model.output().loss, _root_mean_squares(targets))


def _root_mean_squares(targets: list[Target]) -> dict[str, float]:
    sizes = {target.name: math.sqrt(target.value.numel()) for target in targets}
    return {target.name: _length(target) / sizes[target.name] for target in targets}


def _length(target: Target) -> float:
    return length_over_ranks(float(local_part(target.value).double().norm()))


def _find_blocks_of_own(
    factory: ProblemFactory, targets: list[Target], request: FitRequest
) -> symmetries.Blocks | None:
    """The blocks of the user's own weights, if symmetries can fit them to the rate.

    These keep what the network computes. Weights whose output is loud are better drawn anew.
    """
    if not request.fits_symmetries:
        return None
    model = ScaledModel(factory, [], 0.1)
    output = model.output()
    if not output.is_finite or _is_loud(output, model.loss_unit()):
        return None
    return _find_blocks(factory, targets)


def _find_blocks(factory: ProblemFactory, targets: list[Target]) -> symmetries.Blocks | None:
    names = {id(weight): name for name, weight in factory.model.named_parameters()}
    stored = [names[id(part)] for target in targets for part in target.stored]
    biases_only = factory.problem.layers is not None
    return symmetries.find_blocks(factory.functional(), stored, biases_only=biases_only)


def _is_loud(output: OutputStatistics, unit: float) -> bool:
    """Whether the loss is far above that of a zero output."""
    return output.loss > output.zero_loss + (SCALING.loud - 1) * unit


def _find_uses(factory: ProblemFactory, scheme: str) -> tuple[TracedWeights, str]:
    """Where the weights are used, and a note where that is unknown."""
    try:
        return find_weight_uses(factory.model, factory.sample, factory.problem.forward), ""
    except ProblemError as failure:
        if scheme != "keep":
            raise
        note = f"the forward could not be traced ({failure}), so every weight is scaled."
        return TracedWeights(()), note


def _draw_scheme_(
    factory: ProblemFactory, targets: list[Target], traced: TracedWeights, request: FitRequest
) -> SchemePlan | None:
    fit = request.fit
    if fit.scheme == "keep":
        if fit.biases == "zero":
            for target in targets:
                for bias in target.biases().values():
                    bias.detach().zero_()
        return None
    residual = fit.residual
    if residual == "auto":
        normalized = NetworkTraits.of(traced.uses).normalized
        residual = "scaled" if normalized and not request.is_adaptive else "plain"
    gains = None
    if fit.scheme == "auto":
        names = {target.key: target.name for target in targets}
        stds = mean_field.preactivation_stds(traced.uses)
        gains = {names[key]: std for key, std in stds.items() if key in names}
    scheme = apply_scheme.Scheme(
        request.scheme_name, gains=gains, residual=residual, biases=fit.biases
    )
    problem = factory.problem
    generator = torch.Generator().manual_seed(problem.seed)
    job = DrawingJob(factory.model, factory.sample, problem.forward, generator)
    # Also those that cannot be written: the plan says why.
    named = weights.find_targets(factory.model, problem.layers)
    plan = apply_scheme.write_scheme_(job, scheme, named, traced)
    return replace(plan, _go_back=None)  # `initialize_` itself holds one copy of the old weights


def _embedding_logs(
    model: ScaledModel, targets: list[Target], uses: Sequence[WeightUse]
) -> dict[str, float]:
    """Shrink embeddings that are factors of the output, as in skip-gram, to vectors of length 1.

    Vectors of unit variance would have products of size √dimension, which training must first
    unlearn.
    """
    keys = {use.parameter for use in uses if use.kind == "embedding"}
    logs = {
        target.name: 0.5 * math.log(math.prod(target.value.shape[:-1]) / _length(target) ** 2)
        for target in targets
        if target.key in keys
    }
    if not logs or not 0 < (size := model.output().size) < math.inf:
        return {}
    model.scale_(dict.fromkeys(logs, -math.log(2)))
    factors = math.log2(size / max(model.output().size, 1e-300))
    model.scale_({})
    is_product = abs(factors - round(factors)) < 0.01 and 1 <= round(factors) <= len(logs)
    return logs if is_product else {}


def _note_fixed_statistics(model: nn.Module) -> Iterator[str]:
    fixed = [
        name
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and not norm.training and norm.running_mean is not None
    ]
    if fixed:
        suffix = f" and {len(fixed) - 1} more" if fixed[1:] else ""
        yield (
            f"{fixed[0]}{suffix}: BatchNorm in eval mode, so the weights before it are not "
            "scale-free; call model.train() first if you train so."
        )


def _factors(
    scales: Mapping[str, float], shrunk: Mapping[str, float], applied: Sequence[Symmetry]
) -> dict[str, float]:
    """The factor of every weight on top of the scheme, by embeddings, gains and symmetries."""
    factors = {name: factor * math.exp(shrunk.get(name, 0.0)) for name, factor in scales.items()}
    for symmetry in applied:
        for name, factor in symmetry.factors.items():
            layer = layer_name(parametrized_name(name))
            if layer in factors:
                factors[layer] *= factor
    return factors


@dataclass
class _Fitting:
    """The scaling of one draw of the weights; it ends with the weights at their final scales."""

    model: ScaledModel
    targets: list[Target]  # those whose scale the parametrization keeps
    uses: Sequence[WeightUse]
    traits: NetworkTraits
    request: FitRequest
    blocks: symmetries.Blocks | None = None  # of the user's own weights

    def __post_init__(self) -> None:
        if self.traits.quadratic:  # it does not saturate
            self.request = self.request.with_options(max_sharpening=math.inf)

    @cached_property
    def paths(self) -> ScalingPaths:
        return ScalingPaths(self.model, self.targets, self.uses)

    def solve_(self) -> Solution:
        if self.request.fit.rule == "layers":
            return self._solve_layers_()
        blocks = self.blocks
        if blocks is None and self.request.fits_symmetries and self.model.output().is_finite:
            blocks = _find_blocks(self.model.factory, self.targets)
        if blocks is not None:
            return self._solve_symmetries_(blocks)
        if self.request.is_adaptive and self.request.lr is not None:
            return self._leave_scheme()
        return self._solve_network_()

    def _solve_layers_(self) -> Solution:
        norm = self.model.network_norm() if self.request.lr == "auto" else math.inf
        goal = self.request.goal(self.traits.kappa, norm, unscaled=True)
        assert goal.target is not None
        used = {use.parameter for use in self.uses}
        layers = [target.name for target in self.targets if not used or target.key in used]
        outcome = search.solve_layers(self.model, layers, goal.target, self.request)
        return Solution(goal, None, outcome.measurements, outcome.reason, outcome.unreachable)

    def _solve_symmetries_(self, blocks: symmetries.Blocks) -> Solution:
        """Bring scale-free weights to the target, and others to at most that."""
        model = self.model
        request = self.request
        tolerance = request.fit.tolerance
        kappa = self.traits.symmetry_kappa(request.is_adaptive)
        goal = request.goal(kappa, math.nan, unscaled=True)
        size = model.output().size
        if request.fit.scheme == "auto" and size > SCALING.small_output_scale_free:
            log = math.log(SCALING.small_output_scale_free / size)
            model.scale_(dict.fromkeys(self.paths.last, log))
        if request.lr != "auto" and not request.is_adaptive:
            self._lower_(
                [target for target in self.targets if target.key in blocks.remaining], goal
            )
        adam = AdamRule() if request.is_adaptive else None
        scaler = SymmetryScaler(model.factory, blocks, adam, tolerance, self._readout())
        fitted = scaler.fit_blocks_(None if request.lr == "auto" else goal.target)
        if request.lr == "auto":
            goal = request.goal(kappa, fitted.target, unscaled=True)
        seen_by = "as Adam sees it" if request.is_adaptive else "of their own"
        unmoved = "smaller gains before an activation changed the function"
        if all(symmetry.exact for symmetry in fitted.symmetries):
            unmoved = (
                "the function is unchanged (the output moved by "
                f"{100 * fitted.output_change:.2g} %)"
            )
        met = (
            f"the scale-free weights have ‖H‖ = {fitted.symmetries[0].norm:.3g} {seen_by}, within "
            f"{100 * tolerance:.3g} % of {goal.target:.3g}, and no other weights are sharper; "
            f"{unmoved}"
        )
        reason = f"{fitted.reason}; {unmoved}" if fitted.reason else ""
        return Solution(goal, SYMMETRIES, reason=reason, symmetries=fitted.symmetries, met=met)

    def _readout(self) -> list[str]:
        """The weights that make the output; none where a sharp readout of tokens learns noise."""
        if self.traits.tokens and not self.request.is_adaptive:
            return []
        return [target.key for target in self.targets if target.name in self.paths.last]

    def _lower_(self, remaining: list[Target], goal: FitGoal) -> None:
        """Scale down weights that no symmetry reaches, if that brings the norm to the target."""
        if not remaining or goal.target is None:
            return
        tolerance = self.request.fit.tolerance
        factory = self.model.factory.of_layers([weight.key for weight in remaining])
        model = ScaledModel(factory, remaining, tolerance / 5)
        if model.network_norm() > goal.target * (1 + tolerance):
            path = ScalingPath("all", dict.fromkeys((weight.name for weight in remaining), 1.0))
            lowest = math.log(SCALING.smallest_gain_normalized)
            if search.solve_network(model, path, goal.target, self.request, lowest).reason:
                model.scale_({})

    def _leave_scheme(self) -> Solution:
        """For adaptive optimizers without symmetries, and those of other steps: the scheme."""
        request = self.request
        decoupled = request.optimizer == "adamw"
        is_given = request.fit.scheme == "keep"
        source = "the given weights are kept"
        if not is_given:
            source = f"the weights were drawn by {request.scheme_name}"
        size = self.model.output().size
        if self.traits.quadratic and request.fit.scheme == "auto" and 0 < size < math.inf:
            log = math.log(SCALING.small_output_quadratic / size)
            self.model.scale_(dict.fromkeys(self.paths.last, log))
            source = f"{source}, with a small output"
        optimizer = {"adamw": "AdamW", "adam": "Adam"}.get(request.optimizer, request.optimizer)
        # That of other optimizers is searched by trials.
        rate = math.nan if request.lr == "auto" else request.lr
        if request.lr == "auto" and request.is_adam_like:
            rule = AdamRule(decoupled=decoupled, weight_decay=0.01 * decoupled)
            rate = best_adam_rate(self.model.factory.functional(), rule)
        goal = FitGoal(None, rate if math.isfinite(rate) else None)
        cause = f"steps of {optimizer} do not grow with the gradient"
        if not request.is_adam_like:
            cause = f"none is known that suits a rate of {optimizer}"
        met = f"no curvature was fitted, as {cause}: {source}"
        return Solution(goal, NOT_SCALED, met=met)

    def _solve_network_(self) -> Solution:
        """Scale by gains until the network's norm meets the target."""
        model = self.model
        request = self.request
        tolerance = request.fit.tolerance
        output = model.output()
        cap = search.LossCap(request.fit.max_sharpening, model.loss_unit())
        # lr="auto" needs a norm in any case; else saturated weights are just too sharp.
        needed = request.lr == "auto" or cap.admits(output)
        norm = model.network_norm() if needed else math.inf
        first = Measurement(t=0.0, norm=norm, loss=output.loss)
        unscaled = request.lr == "auto" and not self.paths.is_homogeneous
        goal = request.goal(self.traits.kappa, norm, unscaled)
        assert goal.target is not None
        hint = self.traits.reason_not_to_sharpen
        if hint and not request.insists and 0 < norm < goal.target * (1 - tolerance):
            reason = (
                f"the weights are flat enough for the rate; since {hint}, sharper ones would not "
                "learn faster"
            )
            return Solution(goal, NOT_SCALED, (first,), reason)
        path = self.paths.path(self._choose_scaling(norm, goal.target), goal.target)
        lowest = -math.inf
        if self.traits.normalized and path.name == "all" and not request.insists:
            lowest = math.log(SCALING.smallest_gain_normalized)
        outcome = search.solve_network(model, path, goal.target, request, lowest)
        loud = _is_loud(replace(model.output(), zero_loss=output.zero_loss), model.loss_unit())
        if request.fit.scaling == "auto" and path.name == "last" and (outcome.reason or loud):
            path, outcome = self._try_small_output_(path, outcome, goal.target)
        measurements = tuple(dict.fromkeys((first, *outcome.measurements)))
        met = f"the network's ‖H‖ is within {100 * tolerance:.3g} % of {goal.target:.3g}"
        return Solution(goal, path.name, measurements, outcome.reason, met=met)

    def _choose_scaling(self, norm: float, target: float) -> str:
        if self.request.fit.scaling != "auto":
            return self.request.fit.scaling
        ratio = norm / target
        flat = ratio <= 1 or (ratio <= SCALING.small_output_up_to and self.paths.is_homogeneous)
        return "small-output" if norm > 0 and flat else "all"

    def _try_small_output_(
        self, path: ScalingPath, outcome: search.Outcome, target: float
    ) -> tuple[ScalingPath, search.Outcome]:
        """Search along the path of small outputs, too; keep the weights of the better search."""
        model = self.model
        scales = dict(model.scales)
        distance = abs(search.log_ratio(model.network_norm(), target))
        model.scale_({})
        small = self.paths.path("small-output", target, nearly=True)
        second = search.solve_network(model, small, target, self.request)
        measurements = (*outcome.measurements, *second.measurements)
        if not second.reason or (
            outcome.reason and abs(search.log_ratio(model.network_norm(), target)) < distance
        ):
            return small, replace(second, measurements=measurements)
        model.scale_({name: math.log(factor) for name, factor in scales.items()})
        return path, replace(outcome, measurements=measurements)


def _reason_to_restore(
    before: _WeightState, after: _WeightState, solution: Solution, request: FitRequest, unit: float
) -> str:
    """Why the old weights come back: the new ones miss the target by more, or cannot be trained."""
    if math.isnan(before.loss):
        return ""
    largest = max(after.sizes, key=after.sizes.__getitem__)
    growth = SCALING.largest_growth
    size = after.sizes[largest]
    if size > max(SCALING.largest_deviation, growth * before.sizes[largest]):
        return f"{largest} would have a standard deviation of {size:.2g}"
    # A larger max_sharpening asks for a larger loss.
    most = max(growth, request.fit.max_sharpening) * unit
    if not after.loss <= before.loss + most:
        return f"the loss would be {after.loss:.3g}, and was {before.loss:.3g}"
    missed = solution.reason and not solution.symmetries and solution.scaling != NOT_SCALED
    target = solution.goal.target
    if before.report is None or after.report is None or target is None or not missed:
        return ""
    allowed = 2 if request.fit.rule == "network" else 1
    old = _farthest(before.report, target, solution, request)
    new = _farthest(after.report, target, solution, request)
    return "the new weights are farther from the target" if new > allowed * old else ""


def _farthest(
    report: CurvatureReport, target: float, solution: Solution, request: FitRequest
) -> float:
    """How far the farthest row that is judged is from the target, in log ‖H‖."""
    rows = _judged_rows(report, solution, request)
    return max((abs(search.log_ratio(row.norm, target)) for row in rows), default=math.inf)


def _judge_fit(
    after: CurvatureReport | None, solution: Solution, request: FitRequest
) -> tuple[bool, str]:
    """Whether the goal was met, and a sentence that says so or why not."""
    target = solution.goal.target
    if after is None or target is None or solution.scaling == SYMMETRIES:
        return not solution.reason, solution.reason or solution.met
    rows = _judged_rows(after, solution, request)
    if not rows:
        return False, solution.reason
    tolerance = request.fit.tolerance
    limit = f"{100 * tolerance:.3g} %"
    missed = [row for row in rows if not abs(row.norm / target - 1) <= tolerance]
    reason = solution.reason or after.network.reason
    reason = reason or "the search met the target, the final report does not"
    if request.fit.rule == "network":
        norm = f"the network's ‖H‖ = {after.network.norm:.3g}"
        if missed:
            return False, f"{norm}, not {target:.3g}: {reason}"
        return True, f"{norm} is within {limit} of {target:.3g}"
    if not missed:
        return True, f"all {len(rows)} layers have ‖H‖ within {limit} of {target:.3g}"
    worst = max(rows, key=lambda row: abs(search.log_ratio(row.norm, target)))
    count = f"{len(missed)} of {len(rows)} layers are not within {limit} of {target:.3g}"
    return False, f"{count}, the farthest {worst.name} with ‖H‖ = {worst.norm:.3g}: {reason}"


def _judged_rows(
    report: CurvatureReport, solution: Solution, request: FitRequest
) -> Sequence[LayerCurvature]:
    if request.fit.rule == "network":
        return [report.network]
    return [row for row in report if row.name not in solution.unreachable]
