"""The verb `assert_sound`: a test that fails, with a table, when training is expected to fail."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hessinit.errors import (
    ConvergenceWarning,
    ProblemError,
    WeightsError,
    check_names,
    check_positive,
)
from hessinit.measurement.loss_range import UNKNOWN, LossRange
from hessinit.measurement.measure import measure
from hessinit.measurement.soundness import REDRAW
from hessinit.present import to_text, words
from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.ranks import on_all_ranks
from hessinit.problem.validate import list_patterns, unwrap
from hessinit.results.advice import FLAT_INITIALIZATION, Descent
from hessinit.results.curvature_report import LEARN_ALL_THE_SAME, CurvatureReport, Estimate, Finding
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training import optimizer_rules as rules
from hessinit.training.advise import advise
from hessinit.training.trial import TrainingSetup, ever_rises, highest, learns_much, prepare_trials

WIDTH = 100
# Rates up to that many times the stability limit often train: the curvature falls in the first
# steps.
MOST_TIMES_STABLE = 8.0
# The decrease of the loss along the gradient in one step of descent, as a part of what can be
# gained.
LEAST_DECREASE = 3e-5
# Adam's steps do not shrink with the gradient: signals that are lost or uneven must be so by that
# much more.
ADAM_EXCESS = 1000.0
SIGNALS = ("signal lost", "activations grow", "activations shrink")


@uninterrupted
@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def assert_sound(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | None = None,
    optimizer: rules.AnyOptimizer = "sgd",
    times_stable: float = MOST_TIMES_STABLE,
    distributed: str | None = None,
    **options: Any,
) -> CurvatureReport:
    """Raise an AssertionError with the findings and the report's table when training is expected to fail.

    Found are layers without a gradient, examples that look the same after some layer, activations
    that grow or shrink with depth, a loss far above that of a constant output, and numbers that are
    not finite. With a learning rate, by `lr` or the optimizer's own, also one at which the loss
    rises in a trial, or that is above `times_stable` times the stability limit of the optimizer,
    and a gradient that is too small for it. `optimizer` is a name, a torch optimizer or a function
    that builds one, parameter groups included. The norms must converge. `options` are those of
    `measure`, but for plan. The model is not changed; for a sound one the report is returned.
    `distributed` is that of `initialize_`: rank 0 judges, and a `RankError` tells the others of a
    failure.

    How often it is right was measured: benchmarks/results/soundness.txt. Costs what `measure` does;
    with a learning rate 32 steps on halves of the batch more, and for Adam and AdamW about ten
    products.

    >>> import torch
    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> report = assert_sound(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    check_positive("times_stable", times_stable, "such as 1")
    check_names(options, [name for name in inspect.signature(measure).parameters if name != "plan"])
    options["layers"] = list_patterns(options.get("layers"))  # it is read more than once
    model = unwrap(model)
    rule = rules.build_optimizer_rule(optimizer, model, lr=lr, layers=options["layers"])
    if rule.lr is not None and options.get("network") is False:
        why = "the rate is judged by the network's ‖H‖. Leave out one of them"
        raise ProblemError(f"network=False and a learning rate do not go together: {why}.")
    if not isinstance(batch, tuple):
        batch = [
            (one.inputs, one.targets) for _, one in read_batches(batch)
        ]  # it is read more than once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # not converged is a failure here
        try:
            report = measure(model, loss, batch, distributed="each", **options)
        except WeightsError as refusal:
            raise AssertionError(f"not sound:\n{refusal} {REDRAW}.") from None
        judged = without_what_adam_tolerates(report, rule.rule)
        norm = None
        if rule.lr is not None:
            stable, norm = _find_limit(rule, report, optimizer, model, loss, batch, options)
            trial, loss_range = try_rate(
                model, loss, batch, optimizer, rule, options.get("forward")
            )
            judged = judge_rate(report, rule, stable, trial, loss_range, times_stable)
    failures = [*map(str, judged.findings or ()), *_name_unconverged(report, norm)]
    if failures:
        table = to_text(replace(judged, findings=judged.findings or None), WIDTH)
        raise AssertionError("\n".join(["not sound:", *failures, "", table]))
    return judged


def try_rate(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: rules.AnyOptimizer,
    rule: rules.OptimizerRule,
    forward: Forward | None,
) -> tuple[Trial | None, LossRange]:
    """A trial on the batch at the optimizer's rate, and the range of the loss; None if no step succeeds."""
    assert rule.lr is not None
    batches = [one for _, one in read_batches(batch)]
    inside = unwrap(model)
    setup = TrainingSetup(inside, loss, rules.optimizer_builder(rule, optimizer, inside), forward)
    with contextlib.suppress(RuntimeError), prepare_trials(setup, batches) as setting:
        return setting.train(rule.lr, patient=True), setting.loss_range
    return None, UNKNOWN


def without_what_adam_tolerates(
    report: CurvatureReport, rule: rules.Rule | None, *, learned: bool = False
) -> CurvatureReport:
    """The report with the findings that matter to an optimizer; only the hard ones if a trial `learned`."""

    def matters(finding: Finding) -> bool:
        if learned:
            return finding.excess == math.inf and finding.kind != "identical units"
        is_tolerable = finding.kind in SIGNALS and not isinstance(rule, Descent)
        return finding.excess >= (ADAM_EXCESS if is_tolerable else 1.0)

    findings = report.findings or ()
    overruled = [finding for finding in findings if learned and not matters(finding)]
    notes = [f"{finding} {LEARN_ALL_THE_SAME}" for finding in overruled]
    return replace(report, findings=tuple(filter(matters, findings)), notes=(*report.notes, *notes))


def judge_rate(
    report: CurvatureReport,
    rule: rules.OptimizerRule,
    stable: float,
    trial: Trial | None,
    loss_range: LossRange,
    times_stable: float = MOST_TIMES_STABLE,
) -> CurvatureReport:
    """The report with its findings as they hold at the optimizer's rate, after a trial at it.

    `stable` is the optimizer's stability limit.
    """
    lr = rule.lr
    assert lr is not None
    overruled = trial is not None and learns_much(trial, loss_range)
    report = without_what_adam_tolerates(report, rule.rule, learned=overruled)
    if not stable > 0:  # where the norm is not finite, that is a finding of its own
        return report
    findings = [
        *_judge_height(report, rule, stable, trial, loss_range, times_stable),
        *_judge_smallness(report, rule, loss_range),
    ]
    return replace(report, findings=(*(report.findings or ()), *findings))


def _judge_height(
    report: CurvatureReport,
    rule: rules.OptimizerRule,
    stable: float,
    trial: Trial | None,
    loss_range: LossRange,
    times_stable: float,
) -> list[Finding]:
    lr = rule.lr
    assert lr is not None
    limit = words.format_number(stable)
    lower = f"Lower lr below {limit}"
    # The size of the weights does not change the length of Adam's steps, and flat weights grow
    # sharper.
    if isinstance(rule.rule, Descent) and report.network.norm > FLAT_INITIALIZATION:
        lower += f", or fit the weights to it: hessinit.initialize_(model, loss, batch, lr={lr:g})"
    learned = trial is not None and trial.outcome == LEARNED
    if lr > times_stable * stable and (times_stable < MOST_TIMES_STABLE or not learned):
        times = words.format_times(lr / stable)
        message = (
            f"lr={lr:g} is {times} times the stability limit of {rule.rule}, which is {limit}."
        )
        return [Finding(kind="rate too high", message=message, way_out=f"{lower}.")]
    if trial is None or learned:
        return []
    if trial.outcome != DIVERGED and not ever_rises(trial.losses, loss_range):
        return []
    ending = (
        "" if trial.outcome == DIVERGED else ", and ended no lower than that of a constant output"
    )
    rose = f"from {words.format_number(trial.losses[0])} to {words.format_number(highest(trial.losses))}{ending}"
    message = f"In {trial.steps} trial steps on this batch at lr={lr:g} the loss rose {rose}."
    way_out = f"{lower}." if lr > stable else "Lower lr: hessinit.advise finds one."
    return [Finding(kind="rate too high", message=message, way_out=way_out)]


def _judge_smallness(
    report: CurvatureReport, rule: rules.OptimizerRule, loss_range: LossRange
) -> list[Finding]:
    """Whether steps along the gradient would take more than a training to lower the loss."""
    gain = loss_range.gain(report.loss)
    if (
        not isinstance(rule.rule, Descent)
        or not report.gradient_norm
        or not gain > 0
        or rule.lr is None
    ):
        return []
    decrease = rule.lr * rule.rule.lasting * report.gradient_norm**2 / gain
    if decrease >= LEAST_DECREASE:
        return []
    share = words.format_percent(1000 * decrease, 2)
    message = (
        f"At lr={rule.lr:g} the gradient is too small: 1,000 steps along it would lower the loss by {share} "
        "of what can be gained."
    )
    return [Finding(kind="gradient too small", message=message, way_out=f"Raise lr. {REDRAW}.")]


def _find_limit(
    rule: rules.OptimizerRule,
    report: CurvatureReport,
    optimizer: rules.AnyOptimizer,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    options: Mapping[str, Any],
) -> tuple[float, Estimate]:
    """The stability limit, and the norm that it follows from; that of a named descent is in the report."""
    if isinstance(rule.rule, Descent) and not rule.rates:
        norm = rule.rule.norm(report.network.top, report.network.bottom)
        return rule.rule.stability_limit(norm.value), norm
    given: Any = {
        name: options[name] for name in rules.CurvatureOptions.__annotations__ if name in options
    }
    given["curvature"] = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
    given |= {"check": False, "distributed": "each"}  # `measure` has checked the derivatives
    found = advise(model, loss, batch, optimizer=optimizer, lr=rule.lr, trial_steps=0, **given)
    return found.stable_learning_rate, found.norm


def _name_unconverged(report: CurvatureReport, norm: Estimate | None) -> list[str]:
    rows = [*report.layers, *([report.network] if report.network_measured else [])]
    some = [row for row in rows if not row.converged and math.isfinite(row.norm)]
    if some:
        names = [
            "the network" if row is report.network else words.call_layer(row.name) for row in some
        ]
        reason = words.unstopped(some[0].reason)
        return [
            f"{words.join_names(names)} did not reach tolerance={report.tolerance:g}: {reason}."
        ]
    if norm is not None and not norm.converged and math.isfinite(norm.value):
        return [
            f"the stability limit of the optimizer did not converge: {words.unstopped(norm.reason)}."
        ]
    return []
