"""The verb `advise`: which learning rates the curvature allows, for the optimizer at hand."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hessinit.curvature.cost import in_gradients, loss_gradient
from hessinit.curvature.engine_choice import build_engine
from hessinit.curvature.evaluation import evaluate
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
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem
from hessinit.problem.ranks import on_all_ranks
from hessinit.problem.validate import check_switches, check_whole, unwrap
from hessinit.results import advice as results
from hessinit.training import optimizer_rules as rules
from hessinit.training import rate_search
from hessinit.training.trial import STEPS, prepare_trials

if TYPE_CHECKING:
    from typing_extensions import Unpack


@uninterrupted
@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def advise(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: rules.AnyOptimizer = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    trial_steps: int = STEPS,
    strict: bool = False,
    distributed: str | None = None,
    **options: Unpack[rules.CurvatureOptions],
) -> results.LearningRateAdvice:
    """The learning rate to train with, the stability limit, and whether to warm up.

    `optimizer` is "sgd", "momentum", "nesterov", "adam" or "adamw" with torch's default settings
    unless given, a torch optimizer, or a function `(parameters)` or `(parameters, lr)` that builds
    one. Its groups may differ in learning rate and weight decay: the advice is for the one with the
    largest learning rate (or for `lr`), and the others keep their proportion to it. For Adam and
    AdamW the curvature is that of `P^-½ H P^-½` with P the root mean square of mini-batch
    gradients, so `batch` should be what one training step sees. The other options are those of
    `measure`: curvature ("gauss-newton" or "hessian"), layers, tolerance, max_iterations, seed,
    forward, dtype, dropout ("freeze" here), reduction, check, precision. `distributed` is that of
    `initialize_`: rank 0 works, and every rank gets its advice.

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
    # One mask of dropout, as in `initialize_` and `track`: it is for a model that trains.
    usual: Any = {"dropout": "freeze", "tolerance": 0.01, **options}
    curvature, settings, given = rules.read_curvature_options(model, loss, usual)
    steps = rules.build_optimizer_rule(
        optimizer,
        model,
        lr=lr,
        layers=given["layers"],
        momentum=momentum,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
    )
    problem = FunctionalProblem(
        Problem(model, loss, batch, **{**given, "layers": sorted(steps.rates) or given["layers"]})
    )
    with problem.settings():
        evaluations = evaluate(problem)
        assert steps.rule is not None
        try:
            engine = build_engine(evaluations, curvature, settings)
            limit = rules.find_stability_limit(
                steps, engine, evaluations, settings, semidefinite=curvature == "gauss-newton"
            )
            del engine  # a gradient is timed: what the engine holds must not stand beside its graph
        except DerivativeError as failure:
            if not trial_steps:
                raise
            limit = rules.StabilityLimit.unknown(steps.rule, str(failure))
        notes = (*notes_on(problem, evaluations), *note_unchecked(problem.check))
        shared = facts_of(problem, evaluations)
        facts = {
            "curvature": curvature,
            **{name: shared[name] for name in ("loss", "examples", "versions")},
        }
        facts["weights"] = tuple(layer.name for layer in in_running_order(problem, evaluations))
        facts["parameters"] = sum(layer.size for layer in problem.layers)
        facts["notes"] = (*notes, *steps.notes, *note_uncounted(problem, steps.moved), *limit.notes)
        gradient = loss_gradient(evaluations).seconds
    tried = None
    warmup = None
    if trial_steps:
        build = rate_search.builder(steps, optimizer, unwrap(model))
        forward = given.get("forward")
        seed = given["seed"]
        try:
            with prepare_trials(
                unwrap(model), loss, problem.batches, forward=forward, seed=seed
            ) as setting:
                tried = rate_search.search_rate(setting, build, steps, limit.best, trial_steps)
                if steps.lr is not None and steps.lr > tried.rate:
                    warmup = rate_search.try_warmup(setting, build, steps.lr)
        except (
            Exception
        ) as failure:  # what can be measured need not be trainable, as an RNN in eval mode
            facts["notes"] += (
                f"No trial of the learning rate, as a training step failed: {failure}",
            )
    seconds = problem.clock() - started
    facts |= {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}
    advice = _advice(steps, limit, facts)
    if tried is not None:
        advice = results.with_trials(advice, tried, warmup)
    if not advice.converged:
        message = (
            f"the curvature did not reach tolerance={settings.tolerance:g}: {advice.norm.reason}."
        )
        if strict:
            raise ConvergenceError(message)
        warnings.warn(message, ConvergenceWarning, stacklevel=4)  # past the decorators
    return advice


def _advice(
    steps: rules.OptimizerRule, limit: rules.StabilityLimit, facts: dict[str, Any]
) -> results.LearningRateAdvice:
    rule = limit.rule
    lr = steps.lr or None
    if math.isnan(limit.norm.value):
        reason = say.explain_unknown(limit.norm.reason)
        return results.LearningRateAdvice(
            optimizer=steps.name,
            lr=lr,
            learning_rate=math.nan,
            learning_rate_reason=reason,
            stable_learning_rate=math.nan,
            stable_reason=reason,
            norm=limit.norm,
            warmup=results.untried_warmup(lr, math.nan),
            **facts,
        )
    if not isinstance(rule, AdamRule):
        assert limit.ends is not None
        return replace(
            results.advise_descent(rule, *limit.ends, lr=lr, **facts), optimizer=steps.name
        )
    norm = limit.norm.value
    first = limit.first_step
    best = rule.best(norm)
    why_best, why_stable = say.explain_adaptive(norm, best, limit.stable, rule.decoupled_decay)
    if first < best:
        why_best = (
            "The first step sets it: it lowers the quadratic model of the loss most at this rate."
        )
    if 2 * first <= rule.stability_limit(norm) < math.inf:
        why_stable = (
            "Above it the first step, equally long in every weight, raises the quadratic model of the loss; "
            f"with P fixed, later steps grow above {format_number(rule.stability_limit(norm))}."
        )
    return results.LearningRateAdvice(
        optimizer=steps.name,
        lr=lr,
        learning_rate=limit.best,
        learning_rate_reason=why_best,
        stable_learning_rate=limit.stable,
        stable_reason=why_stable,
        norm=limit.norm,
        frozen=limit.frozen,
        warmup=results.untried_warmup(lr, limit.best),
        **facts,
    )
