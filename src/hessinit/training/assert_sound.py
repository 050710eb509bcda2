"""The verb `assert_sound`: a test that fails, with a table, when training is expected to fail."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError, check_positive
from hessinit.measurement.loss_range import UNKNOWN, LossRange
from hessinit.measurement.measure import measure
from hessinit.measurement.soundness import REDRAW
from hessinit.present import to_text, words
from hessinit.problem.checks import unwrap
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import on_all_ranks, tolerating
from hessinit.results.advice import FLAT_INITIALIZATION, Descent, LearningRateAdvice
from hessinit.results.curvature_report import (
    LEARN_ALL_THE_SAME,
    CurvatureReport,
    Estimate,
    Finding,
    OptimizerRates,
)
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training import optimizer_rules as rules
from hessinit.training.advise import advise
from hessinit.training.optimizers import AnyOptimizer, Training
from hessinit.training.trial import (
    LENGTHS,
    TrainingSetup,
    ever_rises,
    highest,
    learns_much,
    prepare_trials,
)

SIGNALS = ("signal lost", "activations grow", "activations shrink")


@dataclass(frozen=True)
class SoundnessRules:
    """When training is expected to fail; chosen with benchmarks/soundness.py."""

    # Rates up to that many times the stability limit often train: the curvature falls in the first
    # steps.
    times_stable: float = 8.0
    # The decrease of the loss along the gradient in one step of descent, as a part of what can be
    # gained.
    least_decrease: float = 3e-5
    # Adam's steps do not shrink with the gradient: signals that are lost or uneven must be so by
    # that much more.
    adam_excess: float = 1000.0
    width: int = 100  # of the table, in characters


SOUNDNESS = SoundnessRules()


@uninterrupted
@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def assert_sound(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    lr: float | None = None,
    optimizer: AnyOptimizer = "sgd",
    times_stable: float = SOUNDNESS.times_stable,
    estimator: str = "auto",
    tolerance: float | None = None,
    max_iterations: int = 200,
    details: str | Iterable[str] = (),
    network: bool = True,
    distributed: str | None = None,
) -> CurvatureReport:
    """Raise an AssertionError, with the findings and a table, when training is expected to fail.

    Takes a `Problem`, or model, loss and batch for one with the defaults. Found are layers without
    a gradient, examples that look the same after some layer, activations that grow or shrink with
    depth, a loss far above that of a constant output, and numbers that are not finite. With a
    learning rate, by `lr` or the optimizer's own, also one at which the loss rises in a trial, or
    that is above `times_stable` times the stability limit of the optimizer, and a gradient that is
    too small for it. `optimizer` is any as in `advise`, parameter groups included; without a
    stability limit trials judge alone. The norms must converge: to `tolerance`, by default 0.001,
    and 0.01 for the optimizer's limit. `estimator`, `max_iterations`, `details` and `network` are
    those of `measure`. The model is not changed; for a sound one the report is returned.
    `distributed` is that of `initialize_`: rank 0 judges, and a `RankError` tells the others of a
    failure.

    How often it is right was measured: benchmarks/results/soundness.txt. Costs what `measure` does;
    with a learning rate 32 steps on halves of the batch more, and for Adam and AdamW about ten
    products.

    >>> import torch
    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> batch = (inputs, torch.zeros(2, 1))
    >>> report = assert_sound(model, nn.MSELoss(), batch, lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    check_positive("times_stable", times_stable, "such as 1")
    problem = as_problem(problem, loss, batch)
    # The ranks of a wrapped model have agreed that this one judges.
    problem = replace(problem, model=unwrap(problem.model))
    rule = rules.build_optimizer_rule(optimizer, problem.model, lr=lr, layers=problem.layers)
    if rule.lr is not None and network is False:
        raise ProblemError(
            "network=False and a learning rate do not go together: the rate is judged by the "
            "network's ‖H‖. Leave out one of them."
        )
    measuring = {
        "estimator": estimator,
        "max_iterations": max_iterations,
        "details": details,
        "network": network,
        "distributed": "each",
    }
    if tolerance is not None:
        measuring["tolerance"] = tolerance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # not converged is a failure here
        try:
            judged = measure_and_judge(
                problem, measuring, optimizer=optimizer, lr=lr, times_stable=times_stable
            )
        except WeightsError as refusal:
            raise AssertionError(f"not sound:\n{refusal} {REDRAW}.") from None
    report = judged.report
    failures = [*map(str, report.findings or ()), *_name_unconverged(report, judged.norm)]
    if failures:
        table = to_text(replace(report, findings=report.findings or None), SOUNDNESS.width)
        raise AssertionError("\n".join(["not sound:", *failures, "", table]))
    return report


@dataclass(frozen=True)
class Judgement:
    """A measured problem, with the findings as they hold for an optimizer at its rate.

    `norm` is what the stability limit follows from.
    """

    report: CurvatureReport
    advice: LearningRateAdvice | None = None
    trial: Trial | None = None
    norm: Estimate | None = None


def measure_and_judge(
    problem: Problem,
    measuring: Mapping[str, Any],
    *,
    optimizer: AnyOptimizer = "sgd",
    lr: float | None = None,
    times_stable: float = SOUNDNESS.times_stable,
    with_rates: bool = False,
) -> Judgement:
    """Measure a problem, advise on the optimizer where it is needed, try its rate, and judge.

    `measuring` are options of `measure`. With `with_rates`, the report has the rates that trials
    favour for the optimizer.
    """
    if not isinstance(problem.batch, tuple):  # it is read more than once, and a loader may shuffle
        pairs = [(batch.inputs, batch.targets) for batch in problem.batches]
        problem = replace(problem, batch=pairs)
    report = measure(problem, **measuring)
    rule = rules.build_optimizer_rule(optimizer, problem.model, lr=lr, layers=problem.layers)
    advice = None
    if with_rates:
        advice = _advise(problem, report, measuring, optimizer, lr, LENGTHS.steps)
        rates = OptimizerRates(
            optimizer=advice.optimizer,
            learning_rate=advice.learning_rate,
            lr=advice.lr,
            stable_learning_rate=advice.stable_learning_rate,
            converged=advice.converged,
        )
        report = replace(report, rates=rates)
    if rule.lr is None or not report.network_measured:
        return Judgement(_with_findings_for(rule, report), advice)
    if advice is None and (rule.rates or not isinstance(rule.rule, Descent)):
        advice = _advise(problem, report, measuring, optimizer, rule.lr, trial_steps=0)
    if advice is not None:
        norm = advice.norm
        stable = advice.stable_learning_rate
    else:  # that of a named descent is in the report
        assert isinstance(rule.rule, Descent)
        norm = rule.rule.norm(report.network.top, report.network.bottom)
        stable = rule.rule.stability_limit(norm.value)
    trial, loss_range = _try_rate(problem, optimizer, rule)
    overruled = trial is not None and learns_much(trial, loss_range)
    report = _with_findings_for(rule, report, overruled=overruled)
    # Where the norm is not finite, that is a finding of its own; some optimizers have no limit.
    if stable > 0 or rule.rule is None:
        findings = [
            *_judge_height(report, rule, stable, times_stable, trial, loss_range),
            *_judge_smallness(report, rule, loss_range),
        ]
        if findings:
            report = replace(report, findings=(*(report.findings or ()), *findings))
    return Judgement(report, advice, trial, norm)


def _judge_height(
    report: CurvatureReport,
    rule: rules.OptimizerRule,
    stable: float,
    times_stable: float,
    trial: Trial | None,
    loss_range: LossRange,
) -> list[Finding]:
    """Find a rate that is too far above the limit, or at which the loss rises in the trial."""
    assert rule.lr is not None
    way_out = _lower_rate(report, rule, stable)
    learned = trial is not None and trial.outcome == LEARNED
    # A trial that learned overrules the default, not a stricter limit.
    is_strict = times_stable < SOUNDNESS.times_stable
    if rule.lr > times_stable * stable and (is_strict or not learned):
        times = words.format_times(rule.lr / stable)
        message = (
            f"lr = {rule.lr:g} is {times} times the stability limit of {rule.name}, which is "
            f"{words.format_number(stable)}."
        )
        return [Finding(kind="rate too high", message=message, way_out=way_out)]
    if trial is None or learned:
        return []
    if trial.outcome == DIVERGED or ever_rises(trial.losses, loss_range):
        return [_risen(rule, trial, stable, way_out)]
    return []


def _advise(
    problem: Problem,
    report: CurvatureReport,
    measuring: Mapping[str, Any],
    optimizer: AnyOptimizer,
    lr: float | None,
    trial_steps: int,
) -> LearningRateAdvice:
    """Advise on a problem whose derivatives `measure` has checked."""
    accuracy = {"tolerance": measuring["tolerance"]} if "tolerance" in measuring else {}
    return advise(
        replace(problem, check=False),
        optimizer=optimizer,
        lr=lr,
        curvature="gauss-newton" if report.curvature == "gauss-newton" else "hessian",
        trial_steps=trial_steps,
        distributed="each",
        **accuracy,
    )


def _try_rate(
    problem: Problem, optimizer: AnyOptimizer, rule: rules.OptimizerRule
) -> tuple[Trial | None, LossRange]:
    """Return a trial at the optimizer's rate (None if no step succeeds), and the loss's range."""
    assert rule.lr is not None
    setup = TrainingSetup.of(problem, Training.of(optimizer))
    result: tuple[Trial | None, LossRange] = (None, UNKNOWN)
    with tolerating(RuntimeError), prepare_trials(setup, problem.batches) as setting:
        result = (setting.train(rule.lr, patient=True), setting.setup.loss_range)
    return result


def _with_findings_for(
    rule: rules.OptimizerRule, report: CurvatureReport, *, overruled: bool = False
) -> CurvatureReport:
    """Keep the findings that matter to the optimizer; only the certain ones if `overruled`."""

    def matters(finding: Finding) -> bool:
        if overruled:
            return finding.excess == math.inf and finding.kind != "identical units"
        is_tolerable = finding.kind in SIGNALS and not isinstance(rule.rule, Descent)
        return finding.excess >= (SOUNDNESS.adam_excess if is_tolerable else 1.0)

    if report.findings is None:  # nothing was judged
        return report
    dropped = [finding for finding in report.findings if overruled and not matters(finding)]
    notes = (*report.notes, *(f"{finding} {LEARN_ALL_THE_SAME}" for finding in dropped))
    return replace(report, findings=tuple(filter(matters, report.findings)), notes=notes)


def _lower_rate(report: CurvatureReport, rule: rules.OptimizerRule, stable: float) -> str:
    """Say how to get below the stability limit."""
    lower = f"Lower lr below {words.format_number(stable)}"
    # The size of the weights does not change the length of Adam's steps, and flat weights grow
    # sharper.
    if isinstance(rule.rule, Descent) and report.network.norm > FLAT_INITIALIZATION:
        lower += (
            f", or fit the weights to it: hessinit.initialize_(model, loss, batch, lr={rule.lr:g})"
        )
    return f"{lower}."


def _risen(rule: rules.OptimizerRule, trial: Trial, stable: float, way_out: str) -> Finding:
    first, top = (words.format_number(loss) for loss in (trial.losses[0], highest(trial.losses)))
    ending = ", and ended no lower than that of a constant output"
    if trial.outcome == DIVERGED:
        ending = ""
    is_above = rule.lr is not None and rule.lr > stable
    return Finding(
        kind="rate too high",
        message=f"In {trial.steps} trial steps on this batch at lr = {rule.lr:g} the loss rose "
        f"from {first} to {top}{ending}.",
        way_out=way_out if is_above else "Lower lr: hessinit.advise finds one.",
    )


def _judge_smallness(
    report: CurvatureReport, rule: rules.OptimizerRule, loss_range: LossRange
) -> list[Finding]:
    """Find a gradient along which a training would hardly lower the loss."""
    gain = loss_range.gain(report.loss)
    if not isinstance(rule.rule, Descent) or not report.gradient_norm or not gain > 0:
        return []
    assert rule.lr is not None
    decrease = rule.lr * rule.rule.lasting * report.gradient_norm**2 / gain
    if decrease >= SOUNDNESS.least_decrease:
        return []
    message = (
        f"At lr = {rule.lr:g} the gradient is too small: 1,000 steps along it would lower the loss "
        f"by {words.format_percent(1000 * decrease, 2)} of what can be gained."
    )
    return [Finding(kind="gradient too small", message=message, way_out=f"Raise lr. {REDRAW}.")]


def _name_unconverged(report: CurvatureReport, norm: Estimate | None) -> list[str]:
    """Say which norms did not reach their tolerance."""
    rows = [*report.layers, *([report.network] if report.network_measured else [])]
    missed = [row for row in rows if not row.converged and math.isfinite(row.norm)]
    if missed:
        names = [
            "the network" if row is report.network else words.call_layer(row.name) for row in missed
        ]
        reason = words.unstopped(missed[0].reason)
        return [
            f"{words.join_names(names)} did not reach tolerance={report.tolerance:g}: {reason}."
        ]
    if norm is not None and not norm.converged and math.isfinite(norm.value):
        reason = words.unstopped(norm.reason)
        return [f"the stability limit of the optimizer did not converge: {reason}."]
    return []
