"""Fitted weights that survive a trial: flatter ones, else the old ones at a lower rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hessinit.init.fit import fit_weights_
from hessinit.init.options import NOT_SCALED, FitRequest
from hessinit.init.scales import ProblemFactory, ScaledModel
from hessinit.init.weights import Target
from hessinit.present.advice import WAYS_TO_LEARN
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import LEARNED, Initialization, Trial
from hessinit.training import loop
from hessinit.training.optimizer_rules import build_optimizer_rule
from hessinit.training.rate_search import search_rate
from hessinit.training.trial import LENGTHS, TrainingSetup, prepare_trials, try_weights


@dataclass(frozen=True)
class SurvivalRules:
    """How fitted weights are tried; chosen with benchmarks/arena/trial_and_race.py."""

    steps: int = 24
    # The trial is at so many times the rate: weights that only just survive on one batch do not on
    # fresh ones.
    margin: float = 1.25
    # κ is divided by these in turn until the weights survive.
    flatter: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    # The old weights are tried at the rate divided by powers of 4, so many of them.
    quarters: int = 12


SURVIVAL = SurvivalRules()


@dataclass(frozen=True)
class FittedWeights:
    """Fits weights in place and tries them; the old weights are a `restore()` away."""

    factory: ProblemFactory
    targets: list[Target]
    restore: Callable[[], None]
    optimizer: str | loop.MakeOptimizer
    momentum: float

    def fit_(self, request: FitRequest) -> Initialization:
        """Write weights that fit, from the old ones on."""
        self.restore()
        return fit_weights_(self.factory, self.targets, request, self.restore)

    @functools.cached_property
    def setup(self) -> TrainingSetup:
        """What trials and races share."""
        setup = TrainingSetup.of(
            self.factory.problem,
            lambda lr: loop.make_optimizer(self.optimizer, self.factory.model, lr, self.momentum),
        )
        return replace(setup, loss_range=self.factory.loss_range)

    def trial(
        self, lr: float, margin: float = SURVIVAL.margin, steps: int = SURVIVAL.steps
    ) -> Trial:
        """Train from the present weights on the batch, a little above the rate; put all back."""
        return try_weights(self.setup, self.factory.problem.batch, margin * lr, steps)

    def report(self, every_layer: bool = False) -> CurvatureReport:
        """Measure the present weights."""
        return ScaledModel(self.factory, [], 0.1).report(every_layer)

    def describe(self, result: Initialization, scheme: str, request: FitRequest) -> Initialization:
        """Return a result for present weights that were not fitted: drawn ones, or the old ones."""
        is_drawn = scheme != "keep" and request.reports
        return replace(
            result,
            after=self.report() if is_drawn else result.before,
            scales=dict.fromkeys(result.scales, 1.0),
            scheme=scheme,
            scaling=NOT_SCALED,
            symmetries=(),
            plan=None,
            measurements=(),
            kappa=None,
            target=None,
        )

    def nothing_learned_(
        self, result: Initialization, request: FitRequest, trials: Sequence[Trial]
    ) -> Initialization:
        """Put back the old weights, as no trial got below the loss of a constant output."""
        self.restore()
        steps = max(trial.steps for trial in trials)
        return replace(
            self.describe(result, "keep", request),
            converged=False,
            trials=tuple(trials),
            survival=None,
            lr=None if request.lr == "auto" else result.lr,
            reason=f"Nothing learned in trials of up to {steps} steps, and nothing was written. "
            f"What may help: {WAYS_TO_LEARN}",
        )

    def old_weights_(
        self, result: Initialization, request: FitRequest, fault: str
    ) -> Initialization:
        """Put back the old weights, with the largest rate at which they survive.

        Where they survive at none, the flattest weights are written.
        """
        lr = _rate_of(result)
        self.restore()
        rate, trial = self._largest_rate(lr)
        outcome = "so the old weights were put back; they"
        described = self.describe(result, "keep", request)
        if trial is None and result.kappa is not None:
            flattest = self.fit_(replace(request, lr=lr, flatter=SURVIVAL.flatter[-1]))
            rate, trial = self._largest_rate(lr)
            if trial is None:
                self.restore()
            else:
                outcome = "and the old weights survive at no rate; these"
                described = flattest
        survived = "at none that was tried" if trial is None else f"at lr = {rate:.3g}"
        return replace(
            described,
            converged=False,
            survival=trial,
            reason=f"{fault}, {outcome} survive {survived}",
            lr=rate,
        )

    def _largest_rate(self, lr: float) -> tuple[float, Trial | None]:
        """Return the largest of lr, lr/4, lr/16 … that the present weights survive, and its trial.

        Where they survive none of them, these are `lr` and None.
        """
        for power in range(SURVIVAL.quarters):
            rate = lr / 4**power
            trial = self.trial(rate)
            if trial.survived:
                return rate, trial
        return lr, None


def survive_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> tuple[Initialization, FitRequest]:
    """Make the weights flatter until they survive a trial; else put back the old ones.

    Returns the request that the weights were fitted to, too.
    """
    lr = _rate_of(result)
    fitted, used, trial = _flatter_until_survival_(weights, result, replace(request, lr=lr))
    if not trial.survived:
        fault = f"at lr = {lr:g} the loss blew up in every trial"
        return weights.old_weights_(result, used, fault), replace(used, flatter=1.0)
    change = _describe_change(fitted, used, request)
    reason = fitted.reason
    if change:
        reason = f"{reason}; with {change}, since without the loss blew up in a trial"
    fitted = replace(fitted, survival=trial, reason=reason)
    if request.lr == "auto" and trial.outcome != LEARNED:
        fitted = _search_rate_(weights, fitted, request)
    return fitted, used if change else request


def _flatter_until_survival_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> tuple[Initialization, FitRequest, Trial]:
    """Return the first weights that survive, how they were fitted, and their last trial."""
    lr = _rate_of(result)
    trial = weights.trial(lr)
    barely: FitRequest | None = None  # survives at the rate itself, without the margin
    for flatter in _flatter_requests(result, request):
        if trial.survived:
            break
        if barely is None and weights.trial(lr, margin=1.0).survived:
            barely = request
        request = flatter
        result = weights.fit_(request)
        trial = weights.trial(lr)
    if not trial.survived and barely is not None:
        request = barely
        result = weights.fit_(request)
        trial = weights.trial(lr, margin=1.0)
    return result, request, trial


def _flatter_requests(result: Initialization, request: FitRequest) -> list[FitRequest]:
    """Return what to try in turn where the weights do not survive."""
    flatter: list[FitRequest] = []
    if result.kappa is not None:
        flatter = [replace(request, flatter=divisor) for divisor in SURVIVAL.flatter]
    if result.scaling == "small-output":
        flatter.insert(0, request.with_options(scaling="last"))
    if has_branches(result) and request.fit.residual == "auto":
        small = [option.with_options(residual="small") for option in (request, *flatter)]
        flatter = [*flatter[:1], *small]
    return flatter


def _describe_change(result: Initialization, used: FitRequest, request: FitRequest) -> str:
    """Say how the weights were made flatter than requested; empty where they were not."""
    changes = []
    if used.fit.residual != request.fit.residual:
        changes.append("small residual branches")
    if used.fit.scaling != request.fit.scaling:
        changes.append("the last weight scaled")
    if used.flatter > 1 and result.kappa:
        changes.append(f"κ = {result.kappa:.3g}")
    return " and ".join(changes)


def _search_rate_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> Initialization:
    """Search a rate, as `advise` does, for weights that learn nothing at theirs in a long trial."""
    lr = _rate_of(result)
    longer = weights.trial(lr, margin=1.0, steps=LENGTHS.times_longer * SURVIVAL.steps)
    if longer.outcome == LEARNED:
        return replace(result, survival=longer)
    rule = build_optimizer_rule(
        request.optimizer, weights.factory.model, settings={"momentum": request.momentum or None}
    )
    with prepare_trials(weights.setup, weights.factory.problem.batches) as setting:
        rates = search_rate(setting, rule, lr, LENGTHS.steps)
    if math.isnan(rates.rate):
        return weights.nothing_learned_(result, request, rates.trials)
    learned = [trial for trial in rates.trials if trial.outcome == LEARNED]
    return replace(
        result,
        lr=rates.rate,
        kappa=result.kappa and result.kappa * rates.rate / lr,
        survival=min(learned, key=lambda trial: abs(math.log(trial.lr / rates.rate))),
    )


def has_branches(result: Initialization) -> bool:
    """Whether some weight closes a residual branch."""
    return any(row.closes_residual for row in result.plan or ())


def _rate_of(result: Initialization) -> float:
    assert result.lr is not None
    return result.lr
