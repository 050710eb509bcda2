"""The verb `advise`: which learning rates the curvature allows, for the optimizer at hand."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hessinit.curvature.cost import in_gradients, loss_gradient
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import build_engine
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.curvature.preconditioner import AdamRule
from hessinit.errors import ConvergenceError, ConvergenceWarning, DerivativeError
from hessinit.measurement.facts import (
    facts_of,
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
)
from hessinit.present import advice as say
from hessinit.present.words import format_number
from hessinit.problem.checks import check_switches, check_whole
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import on_all_ranks
from hessinit.results import advice as results
from hessinit.training import optimizer_rules as rules
from hessinit.training import rate_search
from hessinit.training.trial import LENGTHS, TrainingSetup, prepare_trials


@uninterrupted
@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def advise(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    optimizer: rules.AnyOptimizer = "sgd",
    lr: float | None = None,
    settings: Mapping[str, Any] | None = None,
    curvature: str = "gauss-newton",
    tolerance: float = 0.01,
    max_iterations: int = 200,
    trial_steps: int = LENGTHS.steps,
    strict: bool = False,
    distributed: str | None = None,
) -> results.LearningRateAdvice:
    """Return the learning rate to train with, the stability limit, and whether to warm up.

    Takes a `Problem`, or model, loss and batch for one with the defaults. `optimizer` is "sgd",
    "momentum", "nesterov", "adam" or "adamw", a torch optimizer, or a function `(parameters)` or
    `(parameters, lr)` that builds one. A name has torch's default settings but for those in
    `settings`: momentum, betas, eps, weight_decay. Groups may differ in learning rate and weight
    decay: the advice is for the one with the largest learning rate (or for `lr`), and the others
    keep their proportion to it. For Adam and AdamW the curvature is that of `P^-½ H P^-½` with P
    the root mean square of mini-batch gradients, so the batch should be what one training step
    sees. `curvature` ("gauss-newton" or "hessian"), `tolerance` and `max_iterations` are those of
    `measure`; `distributed` is that of `initialize_`: rank 0 works, and every rank gets its advice.

    The stability limit is exact for a quadratic with the curvature of these weights. The learning
    rate is found by trials: from the rate of the largest guaranteed decrease on, `trial_steps`
    steps on halves of the batch at rates a factor 2 apart (`advice.trials`). The advice is a
    geometric mean of the best of them, counted twice, and of the rate whose first step moves the
    weights by a fixed part of their length, within 0.25 to 0.6 times the best; nan where nothing
    learns. Without a curvature, as of a loss that has no second derivative, trials alone decide.
    The model is put back, bit for bit. With trial_steps=0 it is the rate of the largest guaranteed
    decrease. Above the advised rate, two longer trials decide whether `lr` is to be warmed up to.

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
    search = rules.read_lanczos_settings(curvature, tolerance, max_iterations, problem.seed)
    rule = rules.build_optimizer_rule(
        optimizer, problem.model, lr=lr, layers=problem.layers, settings=settings
    )
    measured = FunctionalProblem(replace(problem, layers=sorted(rule.rates) or problem.layers))
    with measured.settings():
        evaluations = evaluate(measured)
        limit = _find_limit(rule, evaluations, curvature, search, needed=not trial_steps)
        facts = _facts_of(measured, evaluations, curvature)
        uncounted = note_uncounted(measured, rule.moved)
        facts["notes"] += (*rule.notes, *uncounted, *limit.notes)
        gradient = loss_gradient(evaluations).seconds
    rates = None
    warmup = None
    if trial_steps:
        setup = TrainingSetup.of(problem, rules.optimizer_builder(rule, optimizer, problem.model))
        try:
            with prepare_trials(setup, measured.batches) as setting:
                rates = rate_search.search_rate(setting, rule, limit.best, trial_steps)
                if rule.lr is not None and rule.lr > rates.rate:
                    warmup = rate_search.try_warmup(setting, rule.lr)
        # What can be measured need not be trainable, as an RNN in eval mode.
        except Exception as failure:
            facts["notes"] += (
                f"No trial of the learning rate, as a training step failed: {failure}",
            )
    seconds = measured.clock() - started
    facts |= {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}
    advice = _advise_by_limit(rule, limit, facts)
    if rates is not None:
        advice = results.with_trials(advice, rates, warmup)
    if not advice.converged:
        message = f"the curvature did not reach tolerance={tolerance:g}: {advice.norm.reason}."
        if strict:
            raise ConvergenceError(message)
        warnings.warn(message, ConvergenceWarning, stacklevel=4)  # past the decorators
    return advice


def _find_limit(
    rule: rules.OptimizerRule,
    evaluations: Sequence[Evaluation],
    curvature: str,
    settings: LanczosSettings,
    *,
    needed: bool,
) -> rules.StabilityLimit:
    """Return the stability limit; an unknown one without a curvature, unless it is `needed`."""
    assert rule.rule is not None
    try:
        engine = build_engine(evaluations, curvature, settings)
        return rules.find_stability_limit(
            rule, engine, evaluations, settings, semidefinite=curvature == "gauss-newton"
        )
    except DerivativeError as failure:
        if needed:
            raise
        return rules.StabilityLimit.unknown(rule.rule, str(failure))


def _facts_of(
    problem: FunctionalProblem, evaluations: Sequence[Evaluation], curvature: str
) -> dict[str, Any]:
    """Return the fields of the advice that describe the problem."""
    shared = facts_of(problem, evaluations)
    layers = in_running_order(problem, evaluations)
    return {
        "curvature": curvature,
        **{name: shared[name] for name in ("loss", "examples", "versions")},
        "weights": tuple(layer.name for layer in layers),
        "parameters": sum(layer.size for layer in problem.layers),
        "notes": (*notes_on(problem, evaluations), *note_unchecked(problem.check)),
    }


def _advise_by_limit(
    rule: rules.OptimizerRule, limit: rules.StabilityLimit, facts: dict[str, Any]
) -> results.LearningRateAdvice:
    """Return the advice that follows from the stability limit alone."""
    lr = rule.lr or None
    if isinstance(limit.rule, AdamRule) or limit.ends is None:
        best_reason, stable_reason = _explain(limit)
        return results.LearningRateAdvice(
            optimizer=rule.name,
            lr=lr,
            learning_rate=limit.best,
            learning_rate_reason=best_reason,
            stable_learning_rate=limit.stable,
            stable_reason=stable_reason,
            norm=limit.norm,
            frozen=limit.frozen,
            warmup=results.untried_warmup(lr, limit.best),
            **facts,
        )
    advice = results.advise_descent(limit.rule, *limit.ends, lr=lr, **facts)
    return replace(advice, optimizer=rule.name)


def _explain(limit: rules.StabilityLimit) -> tuple[str, str]:
    """Return the reasons of the best and the stable rate of Adam, or of an unknown limit."""
    norm = limit.norm.value
    if math.isnan(norm):
        unknown = say.explain_unknown(limit.norm.reason)
        return unknown, unknown
    rule = limit.rule
    assert isinstance(rule, AdamRule)
    best = rule.best(norm)
    reasons = say.explain_adaptive(norm, best, limit.stable, rule.decoupled_decay)
    best_reason, stable_reason = reasons
    if limit.first_step < best:
        best_reason = (
            "The first step sets it: it lowers the quadratic model of the loss most at this rate."
        )
    later = rule.stability_limit(norm)
    if 2 * limit.first_step <= later < math.inf:
        stable_reason = (
            "Above it the first step, equally long in every weight, raises the quadratic model of "
            f"the loss; with P fixed, later steps grow above {format_number(later)}."
        )
    return best_reason, stable_reason
