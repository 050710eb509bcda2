"""The verb `advise`: the learning rate that short trials favour, and the stability limit."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from hessinit.training import optimizer_rules as rules
from hessinit.training.optimizers import AnyOptimizer, Training
from hessinit.training.rate_search import search_rate, try_warmup
from hessinit.training.trial import LENGTHS, TrainingSetup, prepare_trials, read_trials
from hessinit.training.trial_data import TrialData, note_trial_data

MAX_ITERATIONS = 200  # of Lanczos; a norm that has not converged by then says so


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
    data: Any = None,
    steps: int | None = None,
    trial_steps: int | None = None,
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
    sees. `curvature` ("gauss-newton" or "hessian") and `tolerance` are those of `measure`;
    `distributed` is that of `initialize_`: rank 0 works, and every rank gets its advice.

    The stability limit is exact for a quadratic with the curvature of these weights. That of an
    optimizer without a closed form follows from its own response to the gradient, or is nan where
    no rate of a quadratic is one, as of steps of bounded length. The learning rate is found by
    trials at rates a factor 2 apart (`advice.trials`), from the rate of the largest guaranteed
    decrease on. `data`, a DataLoader, a list of batches or `(inputs, targets)` of all examples,
    gives them fresh mini-batches, and `steps` is the length of your training: the trials have 48
    steps for one of 300, 65 for one of 1,000, and the advice is the best rate among them. Without
    data they train for 32 steps on halves of the batch, three times as many without a closed form,
    and the advice is a geometric mean of the best rate and of the one at which a step moves the
    weights by a fixed part of their length, within 0.25 to 0.6 (or 1) times the best; beside frozen
    weights, as with adapters, it is 0.85 times the best. It is nan where nothing learns.
    `trial_steps` sets their length.
    Without a curvature, as of a loss that has no second derivative, trials alone decide. The model
    is put back, bit for bit. With trial_steps=0 it is the rate of the largest guaranteed decrease,
    or of the first step's. Above the advised rate, two longer trials decide whether `lr` is to be
    warmed up to.

    Costs what `measure` takes for the network alone (for Adam and AdamW about ten products and a
    few gradients), and about four trials of 32 steps on half the batch; with data, about four of
    48 to 65 steps.

    >>> import torch
    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> advice = advise(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), optimizer="momentum")
    >>> round(advice.stable_learning_rate, 9)  # closed form: H = I
    3.8
    """
    started = time.perf_counter()
    check_switches(strict=strict)
    if trial_steps is not None:
        trial_steps = check_whole("trial_steps", trial_steps, at_least=0)
    problem = as_problem(problem, loss, batch)
    choose("curvature", curvature, MATRICES)
    search = LanczosSettings(check_tolerance(tolerance), MAX_ITERATIONS, problem.seed)
    training = Training.of(optimizer)
    length, fresh = read_trials(problem, training, data, steps, trial_steps)
    if trial_steps is None and (fresh is None or fresh.different == 1):
        length = LENGTHS.steps
    rule = rules.build_optimizer_rule(training, problem.model, lr=lr, layers=problem.layers)
    held = replace(problem, layers=sorted(rule.rates) or problem.layers)
    work = partial(_measure, rule=rule, curvature=curvature, settings=search)
    try:
        measured, limit, facts, gradient = exactly_or_plainly(held, "auto", work)
    except DerivativeError as failure:
        if not length:
            raise
        measured, limit, facts, gradient = _measure_without_limit(held, work, failure)
    rates, warmup, fault = _try_rates(
        TrainingSetup.of(problem, training), measured.batches, fresh, rule, limit.best, length
    )
    facts["notes"] += (*fault, *note_trial_data(fresh, steps))
    if rates is not None and rates.trained_before and limit.frozen:
        facts["notes"] += (say.NO_GRADIENT_YET,)
    seconds = measured.clock() - started
    facts |= {"seconds": seconds, "gradients": in_gradients(seconds, gradient.seconds)}
    steepness = math.hypot(*(float(part.norm()) for part in gradient.by_leaf.values()))
    clipping = say.explain_clipping(training.clip_norm, length_over_ranks(steepness), limit.stable)
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
    data: TrialData | None,
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
        with prepare_trials(setup, batches, data) as setting:
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
