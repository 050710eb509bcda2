"""The verb `advise`: which learning rate the start allows, for the optimizer at hand."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.looking_ahead import look_ahead as take_trial_steps
from hessinit.advising.rates import MOMENTS, AdaptiveRates, adaptive_rates, build_engine
from hessinit.advising.reading import Reading, read_optimizer, read_word
from hessinit.curvature.engines import Effort, Ends
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError, choose
from hessinit.measurement.measure import (
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
    versions_of,
)
from hessinit.present import advice_sentences as say
from hessinit.problem.layers import find_layers
from hessinit.problem.problem import Forward, Loss, Problem, explained_memory
from hessinit.problem.validate import check_arguments, check_switches, check_tolerance, check_whole, unwrap
from hessinit.results.advice import (
    Descent,
    LearningRateAdvice,
    LookAhead,
    advise_descent,
    check_rate,
    judge_warmup,
)


def advise(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: str | torch.optim.Optimizer = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    betas: tuple[float, float] | None = None,
    alpha: float | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    second_moment: str = "mini-batches",
    look_ahead: int = 0,
    curvature: str = "gauss-newton",
    layers: str | Iterable[str] | None = None,
    tolerance: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    strict: bool = False,
) -> LearningRateAdvice:
    """The best guaranteed rate, the edge of stability and whether to warm up to `lr`; nothing is changed.

    `optimizer` is "sgd", "momentum", "nesterov", "adam", "adamw" or "rmsprop" with torch's usual settings
    unless given, or an optimizer of torch, whose rate and settings are read. `batch` should be what one
    training step sees: adaptive optimizers divide by the size of such a gradient. For these the curvature
    is that of `P^-½ H P^-½`; `second_moment="first step"` takes P from this one gradient, exactly as it
    stands after the first step, where a few weights with a gradient near 0 rule it. `look_ahead` takes so
    many trial steps on copies and says what becomes of the loss and the stable rate. The rest is as in
    `measure`.

    The numbers are right for a quadratic of the curvature at the start, in the measured weights. Costs
    what `measure` takes for the network alone; for adaptive optimizers about ten products and a few
    gradients.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> advice = advise(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), optimizer="momentum", lr=8.0)
    >>> round(advice.stable_learning_rate, 9), advice.warmup.advised  # closed form: H = I
    (3.8, True)
    """
    started = time.perf_counter()
    choose("curvature", curvature, ["gauss-newton", "hessian"])
    choose("second_moment", second_moment, MOMENTS)
    check_switches(strict=strict)
    steps = check_whole("look_ahead", look_ahead, at_least=0)
    seed = check_whole("seed", seed, at_least=0)
    effort = Effort(check_tolerance(tolerance), check_whole("max_steps", max_steps, at_least=1), seed)
    check_arguments(model, loss, forward, dtype, dropout)
    given = {
        "momentum": momentum, "dampening": dampening, "betas": betas, "alpha": alpha, "eps": eps,
        "weight_decay": weight_decay,
    }  # fmt: skip
    layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
    reading = _read(optimizer, unwrap(model), layers, check_rate(lr), given)
    if reading.parameters is not None:
        layers = sorted(reading.parameters)
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    with problem.settings(), explained_memory(problem):
        evaluations = evaluate(problem)
        start = sum(one.loss_value * one.weight for one in evaluations)
        facts: dict[str, Any] = {
            "curvature": curvature,
            "loss": start,
            "examples": problem.examples,
            "weights": tuple(layer.name for layer in in_running_order(problem, evaluations)),
            "parameters": sum(layer.size for layer in problem.layers),
            "notes": (
                *notes_on(problem, evaluations),
                *note_unchecked(check),
                *reading.notes,
                *note_uncounted(problem, reading.moved),
            ),
            "versions": versions_of(problem),
        }
        measuring = _Measuring(reading, curvature, second_moment, effort)
        found = measuring.measure(evaluations)
        advice = measuring.advise(found, None, facts)
        if steps and 0 < advice.learning_rate < math.inf:
            del evaluations  # the trial steps move the weights beneath them
            problem.check = False  # once is enough
            rate = min(advice.learning_rate, reading.lr or math.inf)
            ahead = take_trial_steps(problem, reading.rule, rate, steps, measuring.stable_rate)
            advice = measuring.advise(found, ahead, facts)
    advice = replace(advice, seconds=time.perf_counter() - started)
    _complain(advice, tolerance, strict)
    return advice


class _Measuring:
    """What is measured for a rule, at the start and after trial steps, and the advice that it gives."""

    def __init__(self, reading: Reading, curvature: str, second_moment: str, effort: Effort) -> None:
        self._reading = reading
        self._curvature = curvature
        self._second_moment = second_moment
        self._gradients = "mini-batch gradients" if second_moment == "mini-batches" else "this gradient"
        self._effort = effort

    def measure(self, evaluations: list[Evaluation]) -> Ends | AdaptiveRates:
        rule = self._reading.rule
        if isinstance(rule, Adaptive):
            moment, lr = self._second_moment, self._reading.lr
            return adaptive_rates(rule, lr, evaluations, self._curvature, moment, self._effort)
        engine = build_engine(evaluations, self._curvature, self._effort)
        return engine.ends(list(evaluations[0].problem.leaves))

    def stable_rate(self, evaluations: list[Evaluation]) -> float:
        rule, found = self._reading.rule, self.measure(evaluations)
        if isinstance(rule, Descent):
            assert isinstance(found, Ends)
            return rule.edge(rule.norm(found.top, found.bottom).value)
        assert isinstance(found, AdaptiveRates)
        return found.stable_rate(rule)

    def advise(
        self, found: Ends | AdaptiveRates, ahead: LookAhead | None, facts: dict[str, Any]
    ) -> LearningRateAdvice:
        rule, lr = self._reading.rule, self._reading.lr
        if isinstance(rule, Descent):
            assert isinstance(found, Ends)
            return advise_descent(rule, found.top, found.bottom, lr=lr, ahead=ahead, **facts)
        assert isinstance(found, AdaptiveRates)
        norm, first = found.norm.value, found.first_step
        best, frozen = rule.best(norm), rule.edge(norm)
        stable = found.stable_rate(rule)
        return LearningRateAdvice(
            optimizer=str(rule),
            lr=lr,
            learning_rate=min(best, first),
            learning_rate_reason=say.why_best_adaptive(
                norm, best, first, rule.decoupled_decay, rule.lasting, self._gradients
            ),
            stable_learning_rate=stable,
            stable_reason=say.why_edge_adaptive(norm, frozen, first),
            warmup=judge_warmup(lr, min(best, first), stable, ahead, flat=found.gentle),
            norm=found.norm,
            first_step=first,
            frozen=found.still,
            ahead=ahead,
            **{**facts, "notes": (*facts["notes"], *found.notes)},
        )


def _read(
    optimizer: Any,
    model: nn.Module,
    layers: str | list[str] | None,
    lr: float | None,
    given: dict[str, Any],
) -> Reading:
    if isinstance(optimizer, str):
        return read_word(optimizer, lr, given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = " Pass an instance, not the class." if isinstance(optimizer, type) else ""
        raise ProblemError(
            f"optimizer is a {type(optimizer).__name__}; it must be a word such as 'adam', or a "
            f"torch.optim.Optimizer.{hint}"
        )
    for name, value in given.items():
        if value is not None:
            raise ProblemError(
                f"{name}={value!r} was given, and the optimizer has its own; leave it out, or pass a word "
                "such as 'adam'."
            )
    reading = read_optimizer(optimizer, model, find_layers(model, layers))
    return reading if lr is None else replace(reading, lr=lr)


def _complain(advice: LearningRateAdvice, tolerance: float, strict: bool) -> None:
    if advice.converged:
        return
    message = f"the curvature did not reach tolerance={tolerance:g}: {advice.norm.reason}."
    if strict:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=3)
