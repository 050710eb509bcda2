"""Initial weights on trial: made flatter until they survive, and compared with the user's own."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hessinit.init.fit import fit_weights_
from hessinit.init.options import NOT_SCALED, FitRequest
from hessinit.init.scales import ProblemFactory, ScaledModel
from hessinit.init.weights import Target
from hessinit.present import initialization as say
from hessinit.present.advice import WAYS_TO_LEARN
from hessinit.progress import OnProgress, StepCounter
from hessinit.results.advice import TriedRates
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import LEARNED, OURS, YOURS, Initialization, Trial
from hessinit.training.optimizer_rules import OptimizerRule, build_optimizer_rule
from hessinit.training.optimizers import Training
from hessinit.training.rate_search import search_rate
from hessinit.training.trial import (
    LENGTHS,
    ShortTraining,
    TrainingSetup,
    TrialSetting,
    lead_of,
    prepare_trials,
    try_weights,
)
from hessinit.training.trial_data import TrialData


@dataclass(frozen=True)
class SurvivalRules:
    """How fitted weights are tried; chosen with benchmarks/arena/trial_and_race.py."""

    steps: int = 24
    # The trial is at so many times the rate: weights that only just survive on one batch do not on
    # fresh ones.
    margin: float = 1.25
    # κ is divided by these in turn until the weights survive.
    flatter: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    # Weights that did not survive the first trial are tried at the rate itself, in so many random
    # orders of so many steps: at the edge of stability the order decides.
    orders: int = 4
    order_steps: int = 48
    # The old weights are tried at the rate divided by powers of 4, so many of them.
    quarters: int = 12


SURVIVAL = SurvivalRules()


@dataclass(frozen=True)
class FittedWeights:
    """Fits weights in place and tries them; the old weights are a `restore()` away."""

    factory: ProblemFactory
    targets: list[Target]
    restore: Callable[[], None]
    training: Training
    data: TrialData | None = None
    steps: int = 0  # of a trial on these
    report_step: OnProgress | None = None

    def fit_(self, request: FitRequest) -> Initialization:
        """Write weights that fit, from the old ones on."""
        self.restore()
        return fit_weights_(self.factory, self.targets, request, self.restore)

    @functools.cached_property
    def setup(self) -> TrainingSetup:
        """What trials share."""
        setup = TrainingSetup.of(self.factory.problem, self.training)
        return replace(setup, loss_range=self.factory.loss_range)

    def trial(
        self, lr: float, margin: float = SURVIVAL.margin, steps: int = SURVIVAL.steps
    ) -> Trial:
        """Train from the present weights on the batch, a little above the rate; put all back."""
        return try_weights(self.setup, self.factory.problem.batch, margin * lr, steps)

    @contextlib.contextmanager
    def trials(self) -> Iterator[TrialSetting]:
        """Prepare trials from the present weights, on the data or on the batch."""
        batches = self.factory.problem.batches
        with prepare_trials(self.setup, batches, self.data, self.counter) as setting:
            yield setting

    @functools.cached_property
    def counter(self) -> StepCounter:
        """Counts the steps of all trials."""
        return StepCounter("steps", self.report_step)

    def search_rate(self, start: float = math.nan) -> TriedRates:
        """Search a rate for the present weights, as `advise` does."""
        with self.trials() as setting:
            steps = self.steps if setting.is_fresh else LENGTHS.steps
            return search_rate(setting, self.rule, start, steps)

    @property
    def is_fresh(self) -> bool:
        """Whether trials see other examples at every step."""
        return self.data is not None and self.data.different > 1

    @functools.cached_property
    def rule(self) -> OptimizerRule:
        """How the optimizer updates the weights."""
        return build_optimizer_rule(self.training, self.factory.model, layers="**")

    def try_orders(self, lr: float) -> tuple[Trial, ...]:
        """Train from the present weights on halves of the batch, in several random orders."""
        batch = self.factory.problem.batch
        return tuple(
            try_weights(
                replace(self.setup, seed=self.setup.seed + order),
                batch,
                lr,
                SURVIVAL.order_steps,
                halves_only=True,
            )
            for order in range(SURVIVAL.orders)
        )

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
            orders=(),
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
    fitted, used, trial, orders = _flatter_until_survival_(weights, result, replace(request, lr=lr))
    if not trial.survived:
        fault = f"at lr = {lr:g} the loss blew up in most trials"
        return weights.old_weights_(result, used, fault), replace(used, flatter=1.0)
    change = _describe_change(fitted, used, request)
    reason = fitted.reason
    if change:
        reason = f"{reason}; with {change}, since without the loss blew up in a trial"
    fitted = replace(fitted, survival=trial, reason=reason)
    if request.lr == "auto" and trial.outcome != LEARNED:
        fitted = search_rate_(weights, fitted, request)
    elif orders or change:
        fitted = _with_orders(fitted, orders or weights.try_orders(lr))
    return fitted, used if change else request


def _flatter_until_survival_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> tuple[Initialization, FitRequest, Trial, tuple[Trial, ...]]:
    """Write the first weights that survive, else those that survive the rate in most orders.

    Returns how they were fitted, their trial, and the orders, if these were tried.
    """
    lr = _rate_of(result)
    trial = weights.trial(lr)
    keeps_draw = result.scheme == "keep" and request.fit.scheme == "auto"
    if trial.survived and not keeps_draw:
        return result, request, trial, ()
    requests = [request]
    if keeps_draw:
        drawn = replace(request, redraws=True)
        result = weights.fit_(drawn)
        trial_of_drawn = weights.trial(lr)
        if lead_of(trial_of_drawn, trial, weights.setup.loss_range) > CHOICE.lead_on_batch:
            return result, drawn, trial_of_drawn, ()
        if trial.survived:
            return weights.fit_(request), request, trial, ()
        requests = [drawn]
    for flatter in _flatter_requests(result, requests[0]):
        requests.append(flatter)
        result = weights.fit_(flatter)
        trial = weights.trial(lr)
        if trial.survived:
            return result, flatter, trial, ()
    best: tuple[Trial, ...] = ()
    for entry in requests:
        weights.fit_(entry)
        orders = weights.try_orders(lr)
        if _count_survivors(orders) > _count_survivors(best):
            best = orders
            request = entry
        if _count_survivors(best) == SURVIVAL.orders:
            break
    if 2 * _count_survivors(best) < SURVIVAL.orders:
        return result, requests[-1], trial, ()
    return weights.fit_(request), request, next(order for order in best if order.survived), best


def _count_survivors(trials: Sequence[Trial]) -> int:
    return sum(trial.survived for trial in trials)


def _with_orders(result: Initialization, orders: tuple[Trial, ...]) -> Initialization:
    """Return the result with these trials; it has not converged if the loss blew up in some."""
    survivors = _count_survivors(orders)
    trials = f"{len(orders)} trials of {SURVIVAL.order_steps} steps at lr = {result.lr:g}"
    reason = result.reason
    if survivors < len(orders):
        reason = (
            f"the weights survive {survivors} of {trials}, so this rate is at the edge, and a "
            f"lower one is safer; {reason}"
        )
    elif result.survival in orders:
        reason = (
            f"{reason}; at {SURVIVAL.margin:g} times the rate the loss blew up whatever κ, so this "
            "rate is near the edge"
        )
    converged = result.converged and survivors == len(orders)
    return replace(result, converged=converged, reason=reason, orders=orders)


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


def search_rate_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> Initialization:
    """Search a rate for the present weights, as `advise` does; put the old ones back if none is."""
    if weights.rule.tunes_itself:
        return replace(result, lr=1.0)
    lr = result.lr or math.nan
    rates = weights.search_rate(lr)
    if math.isnan(rates.rate):
        trials = [replace(trial, name=OURS) for trial in rates.trials]
        return weights.nothing_learned_(result, request, trials)
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


@dataclass(frozen=True)
class ChoiceRules:
    """When new weights replace the user's own; chosen with `benchmarks/untuned.py`.

    The lead is a part of what the better one has fallen below the loss of a constant output.
    """

    # Fresh mini-batches tell who ends lower after a full training in 9 of 10 cases, also where the
    # lead is small.
    lead: float = 0.01
    # Halves of one batch tell less: they can be learned by heart.
    lead_on_batch: float = 0.1
    steps_on_batch: int = 48


CHOICE = ChoiceRules()


def choose_start_(
    weights: FittedWeights, result: Initialization, request: FitRequest, own: Trial | None = None
) -> Initialization:
    """Train briefly from the new weights and from the user's own; write those that lead.

    `own` is the trial of the user's weights, if it was made and they learned: then the new ones get
    as many steps, and no more.
    """
    lr = _rate_of(result)
    new = [weight.detach().clone() for weight in weights.factory.model.parameters()]
    weights.restore()
    with weights.trials() as setting:
        steps = weights.steps
        least = CHOICE.lead
        if not setting.is_fresh:
            steps = CHOICE.steps_on_batch
            least = CHOICE.lead_on_batch
        if own is not None:
            steps = own.steps
        trainings = [setting.begin(lr, OURS, new)]
        if own is None:
            trainings.append(setting.begin(lr, YOURS))
        lengths = (steps,) if own else (steps, LENGTHS.times_longer * steps)
        ours, *rest = _try_starts(setting, trainings, lengths)
        yours = own or rest[0]
        is_new = lead_of(ours, yours, setting.setup.loss_range) > least
        if is_new:
            setting.state.choose(new)
    trials = (ours, yours) if is_new else (yours, ours)
    if not (ours.survived or yours.survived):
        fault = f"at lr = {lr:g} neither the new weights nor yours survive {steps} steps"
        result = replace(weights.old_weights_(result, request, fault), trials=trials)
    elif trials[0].outcome != LEARNED:
        result = weights.nothing_learned_(result, request, trials)
    else:
        reason = say.explain_choice(trials, setting.is_fresh, result.reason)
        if not is_new:
            survival = None if setting.is_fresh else yours
            result = replace(weights.describe(result, "keep", request), survival=survival)
        is_safe = all(trial.survived for trial in result.orders)
        result = replace(result, trials=trials, reason=reason, converged=is_safe)
    return result


def _try_starts(
    setting: TrialSetting, trainings: Sequence[ShortTraining], lengths: Sequence[int]
) -> list[Trial]:
    """Train all for some steps, and on where nobody has learned in them."""
    for length in lengths:
        for training in trainings:
            setting.go_on(training, length, goes_on=True)
            training.count_earlier_learning()
        if any(training.outcome == LEARNED for training in trainings):
            break
    return [training.trial() for training in trainings]
