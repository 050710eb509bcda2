"""The verb `advise`: the learning rate that short trials favour, and the stability limit."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import (
    build_engine,
    evaluate_everywhere,
    exactly_or_plainly,
    functional_form,
)
from hessinit.curvature.evaluation import LossGradient, in_gradients, loss_gradient
from hessinit.errors import (
    ConvergenceError,
    ConvergenceWarning,
    DerivativeError,
    ProblemError,
    argument,
    choose,
)
from hessinit.init.weights import reason_to_keep
from hessinit.measurement.facts import (
    facts_of,
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
)
from hessinit.present import advice as say
from hessinit.problem.batches import Batch
from hessinit.problem.checks import check_switches, check_tolerance, check_whole
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.in_place import InPlaceProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import length_over_ranks, on_all_ranks, require_alike
from hessinit.results import advice as results
from hessinit.results.advice import Descent, TriedRates, WarmupAdvice
from hessinit.results.curvature_report import MATRICES
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training import optimizer_rules as rules
from hessinit.training.optimizers import AnyOptimizer, Training
from hessinit.training.trial import LENGTHS, TrainingSetup, TrialSetting, prepare_trials


@uninterrupted
@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def advise(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    optimizer: AnyOptimizer = "sgd",
    lr: float | None = None,
    curvature: str = "gauss-newton",
    tolerance: float = 0.01,
    max_iterations: int = 200,
    trial_steps: int = LENGTHS.steps,
    strict: bool = False,
    distributed: str | None = None,
) -> results.LearningRateAdvice:
    """Return the learning rate to train with, the stability limit, and whether to warm up.

    Takes a `Problem`, or model, loss and batch for one with the defaults. `optimizer` is any: a
    name of a class in `torch.optim`, a torch optimizer, several, a function that builds them, or a
    `Training` with settings, clipping and accumulation. Groups may differ: the advice is for the
    one with the largest learning rate (or for `lr`), and the others keep their proportion to it.
    For Adam and AdamW the curvature is that of `P^-½ H P^-½` with P
    the root mean square of mini-batch gradients, so the batch should be what one training step
    sees. `curvature` ("gauss-newton" or "hessian"), `tolerance` and `max_iterations` are those of
    `measure`; `distributed` is that of `initialize_`: rank 0 works, and every rank gets its advice.

    The stability limit is exact for a quadratic with the curvature of these weights. That of an
    optimizer without a closed form follows from its own response to the gradient, or is nan where
    no rate of a quadratic is one, as of steps of bounded length. The learning rate is found by
    trials: from the rate of the largest guaranteed decrease on, `trial_steps` steps on halves of
    the batch at rates a factor 2 apart (`advice.trials`), three times as many without a closed
    form. The advice is a geometric mean of the best of them and of the rate at which a step moves
    the weights by a fixed part of their length, within 0.25 to 0.6 (or 1) times the best; beside
    frozen weights, as with adapters, it is 0.85 times the best. It is nan where nothing learns.
    Without a curvature, as of a loss that has no second derivative, trials alone decide. The model
    is put back, bit for bit. With trial_steps=0 it is the rate of the largest guaranteed decrease,
    or of the first step's. Above the advised rate, two longer trials decide whether `lr` is to be
    warmed up to.

    Costs what `measure` takes for the network alone (for Adam and AdamW about ten products and a
    few gradients), and about four trials of 32 steps on half the batch.

    >>> import torch
    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> advice = advise(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), optimizer="momentum")
    >>> round(advice.stable_learning_rate, 9)  # closed form: H = I
    3.8
    """
    started = time.perf_counter()
    check_switches(strict=strict)
    trial_steps = check_whole("trial_steps", trial_steps, at_least=0)
    problem = as_problem(problem, loss, batch)
    choose("curvature", curvature, MATRICES)
    search = LanczosSettings(
        check_tolerance(tolerance),
        check_whole("max_iterations", max_iterations, at_least=1),
        problem.seed,
    )
    training = Training.of(optimizer)
    rule = rules.build_optimizer_rule(training, problem.model, lr=lr, layers=problem.layers)
    held = replace(problem, layers=sorted(rule.rates) or problem.layers)
    work = partial(_measure, rule=rule, curvature=curvature, settings=search)
    try:
        measured, limit, facts, gradient = exactly_or_plainly(held, "auto", work)
    except DerivativeError as failure:
        if not trial_steps:
            raise
        measured, limit, facts, gradient = _measure_without_limit(held, work, failure)
    rates, warmup, fault = _try_rates(
        TrainingSetup.of(problem, training), measured.batches, rule, limit.best, trial_steps
    )
    facts["notes"] += fault
    if rates is not None and rates.trained_before and limit.frozen:
        facts["notes"] += (say.NO_GRADIENT_YET,)
    seconds = measured.clock() - started
    facts |= {"seconds": seconds, "gradients": in_gradients(seconds, gradient.seconds)}
    length = math.hypot(*(float(part.norm()) for part in gradient.by_leaf.values()))
    clipping = say.explain_clipping(training.clip_norm, length_over_ranks(length), limit.stable)
    advice = _advise(rule, limit, rates, warmup, clipping, facts)
    if not advice.converged:
        unreached = ConvergenceError(
            "the curvature did not reach ",
            argument("tolerance", tolerance),
            f": {advice.norm.reason}.",
        )
        if strict:
            raise unreached
        warnings.warn(str(unreached), ConvergenceWarning, stacklevel=4)  # past the decorators
    return advice


def _try_rates(
    setup: TrainingSetup,
    batches: Sequence[Batch],
    rule: rules.OptimizerRule,
    best: float,
    steps: int,
) -> tuple[TriedRates | None, WarmupAdvice | None, tuple[str, ...]]:
    """Return what trials say of rates and of a warmup, or a note why none could be made."""
    rates = None
    warmup = None
    fault: tuple[str, ...] = ()
    if not steps or rule.tunes_itself:
        return rates, warmup, fault
    try:
        with prepare_trials(setup, batches) as setting:
            rates = search_rate(setting, rule, best, steps)
            if rule.lr is not None and rule.lr > rates.rate:
                warmup = try_warmup(setting, rule.lr)
    except ProblemError:  # the optimizer
        raise
    # What can be measured need not be trainable, as an RNN in eval mode.
    except Exception as failure:
        require_alike(failure)
        fault = (f"No trial of the learning rate, as a training step failed: {failure}",)
    return rates, warmup, fault


# A problem, the limit of an optimizer on it, the facts of the advice, and the gradient.
_Measured = tuple[FunctionalProblem, rules.StabilityLimit, dict[str, Any], LossGradient]


def _measure(
    problem: FunctionalProblem,
    rule: rules.OptimizerRule,
    curvature: str,
    settings: LanczosSettings,
    unknown: str = "",
) -> _Measured:
    """Measure the stability limit, unless it is said why it stays unknown."""
    with problem.settings():
        evaluations, of_all = evaluate_everywhere(problem)
        if unknown:
            limit = rules.unknown_limit(unknown)
        else:
            limit = rules.find_stability_limit(
                rule,
                build_engine(evaluations, curvature, settings),
                evaluations,
                settings,
                semidefinite=curvature == "gauss-newton",
            )
        shared = {**facts_of(problem, evaluations), **of_all}
        facts = {
            "curvature": curvature,
            **{name: shared[name] for name in ("loss", "examples", "versions")},
            "weights": tuple(layer.name for layer in in_running_order(problem, evaluations)),
            "parameters": sum(layer.size for layer in problem.layers),
            "notes": (
                *notes_on(problem, evaluations),
                *note_unchecked(problem.check),
                *rule.notes,
                *note_uncounted(problem, rule.moved),
                *limit.notes,
            ),
        }
        return problem, limit, facts, loss_gradient(evaluations)


def _measure_without_limit(
    problem: Problem, measure: Callable[..., _Measured], failure: DerivativeError
) -> _Measured:
    """The facts alone, of what has no curvature: trials alone tell the rate."""
    unknown = str(failure)
    try:
        return measure(functional_form(problem), unknown=unknown)
    except DerivativeError:
        return measure(InPlaceProblem(problem, unknown), unknown=unknown)


def _advise(
    rule: rules.OptimizerRule,
    limit: rules.StabilityLimit,
    rates: TriedRates | None,
    warmup: WarmupAdvice | None,
    clipping: str,
    facts: dict[str, Any],
) -> results.LearningRateAdvice:
    """Return the advice that follows from trials, and without them from the limit alone."""
    best = limit.best
    best_reason, stable_reason = _explain(limit, rule.name)
    if isinstance(limit.rule, Descent):
        facts["notes"] += say.flat_initialization(limit.norm.value)
    if rule.tunes_itself:
        best = 1.0
        best_reason = say.explain_self_tuning(rule.name)
    if rates is not None:
        best = rates.rate
        best_reason = say.explain_trials(rates)
    trials = () if rates is None else rates.trials
    return results.LearningRateAdvice(
        optimizer=rule.name,
        lr=rule.lr or None,
        learning_rate=best,
        learning_rate_reason=best_reason,
        stable_learning_rate=limit.stable,
        stable_reason=say.explain_limit(stable_reason + clipping, limit.stable, trials),
        norm=limit.norm,
        frozen=limit.frozen,
        warmup=warmup or results.untried_warmup(rule.lr or None, best),
        trials=trials,
        **facts,
    )


def _explain(limit: rules.StabilityLimit, name: str) -> tuple[str, str]:
    """Return the reasons of the best and the stable rate."""
    norm = limit.norm.value
    rule = limit.rule
    if rule is None:
        stable_reason = say.explain_response(limit.norm, name)
        first_step = stable_reason if math.isnan(limit.best) else say.FIRST_STEP
        return first_step, stable_reason
    if isinstance(rule, Descent):
        return say.explain_descent(rule, norm)
    best_reason, stable_reason = say.explain_adaptive(
        norm, rule.best(norm), limit.stable, rule.decoupled_decay
    )
    if limit.first_step < rule.best(norm):
        best_reason = say.FIRST_STEP
    later = rule.stability_limit(norm)
    if 2 * limit.first_step <= later < math.inf:
        stable_reason = say.explain_first_step(later)
    return best_reason, stable_reason


@dataclass(frozen=True)
class StepRules:
    """How the rate of one kind of optimizer is searched."""

    # The trials are short and see one batch; the best rate of 300 steps lay between theirs and the
    # one whose first step is this part of the weights' length.
    part: float
    # The first trial, in rates of the largest guaranteed decrease; 0: where the part says.
    start: float = 2.0
    # The advice over the rate that trials favour is this power of the ratio of the two, and at most
    # the next: trials survive rates at which a training fails in the end.
    power: float = 1 / 3
    most_times: float = 0.6
    longer: int = 1  # than others' trials, by this factor


@dataclass(frozen=True)
class SearchRules:
    """How rates are searched; chosen on the development problems of `benchmarks/advice.py`."""

    sgd: StepRules = StepRules(0.05, start=1.0)
    momentum: StepRules = StepRules(0.003)
    adam: StepRules = StepRules(0.01)
    # Of optimizers without a closed form the first steps say little: the length that counts is the
    # usual one among so many moves.
    any: StepRules = StepRules(0.027, start=0.0, power=1 / 2, most_times=1.0, longer=3)
    moves: int = 48
    # The length of the first of these moves, as a part of that of the weights: next to none.
    small_move: float = 1e-5
    least_times: float = 0.25  # as most_times
    most_trials: int = 14
    # A loss that changes by less than this part of what could be gained stands still, and at lower
    # rates, too.
    still: float = 1e-3
    # Beside frozen weights, or with adapters, the length of what is trained says nothing, as B of
    # LoRA starts at 0; chosen on the development half of `benchmarks/finetuning.py`.
    adapter_times: float = 0.85
    # Warmup is tried over a third of a training of this length.
    warmup_trial: int = 96
    # Where the curvature sets no rate and no step moves the weights.
    fallback: float = 1e-3

    def of(self, rule: rules.Rule | None) -> StepRules:
        """Return those of an optimizer with this closed form."""
        if isinstance(rule, Descent):
            return self.momentum if rule.momentum else self.sgd
        return self.adam if rule else self.any


SEARCH = SearchRules()


def search_rate(
    setting: TrialSetting, optimizer: rules.OptimizerRule, best: float, steps: int
) -> TriedRates:
    """Search the rate by trials, from that of the largest guaranteed decrease, `best`, on.

    The rate is a geometric mean of the one that the trials favour and of the one at which a step
    moves the weights by a fixed part of their length; beside frozen weights, which were trained, it
    is a fixed part of the former. It is one that was tried, or lies between two.
    """
    stepping = SEARCH.of(optimizer.rule)
    # A step that is lost in the rounding of the weights has no length.
    moved = setting.first_move(best if 0 < best < math.inf else 1.0)
    if optimizer.rule is None and 0 < moved < math.inf:
        moved = setting.usual_move(SEARCH.small_move / moved, SEARCH.moves) or moved
    reach = stepping.part / moved if 0 < moved < math.inf else 0.0
    start = stepping.start * best if best < math.inf else 0.0
    search = RateSearch(setting, start or reach or SEARCH.fallback, stepping.longer * steps)
    chosen = search.run()
    trials = tuple(search.trials[exponent] for exponent in sorted(search.trials))
    if search.longer is not None:
        trials = (*trials, search.longer)
    tried = TriedRates(trials=trials, trained_before=bool(reason_to_keep(setting.setup.model)))
    if not search.learned:
        return tried
    favoured = search.interpolated(chosen)
    times = (reach / favoured) ** stepping.power
    times = min(max(times, SEARCH.least_times), stepping.most_times)
    if tried.trained_before:
        times = SEARCH.adapter_times
    survivors = [trial.lr for trial in trials if trial.survived]
    return replace(
        tried,
        rate=min(max(times * favoured, min(survivors)), max(survivors)),
        favoured=favoured,
        stopped_at_end=chosen in (min(search.trials), max(search.trials)),
    )


def try_warmup(setting: TrialSetting, lr: float) -> WarmupAdvice:
    """Find whether a warmup helps at this rate, by two trainings on the same batches."""
    steps = SEARCH.warmup_trial // 3
    without = setting.train(lr, steps=SEARCH.warmup_trial)
    warmed = setting.train(lr, steps=SEARCH.warmup_trial, warmup=steps)
    advised = warmed.survived and not warmed.score >= without.score  # a score of nan: diverged
    return WarmupAdvice(
        advised=advised,
        steps=steps if advised else 0,
        reason=say.explain_tried_warmup(advised, steps, without, warmed),
        trials=(without, warmed),
    )


@dataclass
class RateSearch:
    """Trials from `start` on, by factors of 2, until the loss is higher on both sides."""

    setting: TrialSetting
    start: float
    steps: int
    trials: dict[int, Trial] = field(default_factory=dict)
    longer: Trial | None = None

    def run(self) -> int:
        """Return the power of 2 of the best rate; `learned` says whether any trial learned."""
        best = 0
        while self._falls(0) and self._has_room and self._is_better(best + 1, best):
            best += 1
        # A network that a high rate has killed says nothing of lower rates.
        if not (best and self.learned):
            while not self._is_settled(best) and self._has_room:
                best -= 1
        if not self._has_room or not self.learned:
            best = min(self.trials, key=self._score)
        if self.trials[best].outcome not in (LEARNED, DIVERGED):
            rate = self.start * 2.0**best
            self.longer = self.setting.train(rate, steps=LENGTHS.times_longer * self.steps)
        return best

    @property
    def _has_room(self) -> bool:
        return len(self.trials) < SEARCH.most_trials

    def _is_settled(self, power: int) -> bool:
        """Whether the search may stop above this power.

        Some rate has learned, and half of this one is worse, yet lowers the loss; or nothing moves.
        Among rates that destroy the network at once, the differences mean nothing, and near them a
        dead network may end just below its first loss.
        """
        pair = [self._trial(power), self._trial(power - 1)]
        gain = self.setting.setup.loss_range.gain(pair[0].losses[0])
        still = SEARCH.still * gain
        if all(trial.survived and abs(trial.score - trial.losses[0]) < still for trial in pair):
            return True
        falls = self._falls(power) and self._falls(power - 1)
        return self.learned and falls and self._is_better(power, power - 1)

    @property
    def learned(self) -> bool:
        """Whether the network learned in any trial."""
        trials = (*self.trials.values(), self.longer)
        return any(trial is not None and trial.outcome == LEARNED for trial in trials)

    def interpolated(self, best: int) -> float:
        """Return the rate at the minimum of a parabola through the best trial and the next ones."""
        middle = self._score(best)
        falls = [trial.losses[0] - trial.score for trial in self.trials.values() if trial.survived]
        most = middle + 2 * max(falls, default=0.0)
        # A neighbour that was not tried, because there were too many trials, counts as an equal.
        below, above = (
            min(self._score(power) if power in self.trials else middle, most)
            for power in (best - 1, best + 1)
        )
        bend = below - 2 * middle + above
        shift = 0.5 * (below - above) / bend if bend > 0 else 0.0
        return self.start * 2.0 ** (best + min(max(shift, -0.5), 0.5))

    def _trial(self, power: int) -> Trial:
        if power not in self.trials:
            self.trials[power] = self.setting.train(self.start * 2.0**power, steps=self.steps)
        return self.trials[power]

    def _score(self, power: int) -> float:
        trial = self._trial(power)
        return trial.score if trial.survived else math.inf

    def _falls(self, power: int) -> bool:
        return self._score(power) < self._trial(power).losses[0]

    def _is_better(self, power: int, other: int) -> bool:
        return self._score(power) < self._score(other)
