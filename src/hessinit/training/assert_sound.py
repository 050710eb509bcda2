"""The verb `assert_sound`: a test that fails, with a table, when training is expected to fail."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError, check_positive
from hessinit.measurement.measure import measure
from hessinit.measurement.soundness import MOST_TIMES_STABLE, REDRAW, TRIAL_STEPS, judge_training
from hessinit.present import to_text, words
from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import untouched_model
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import unwrap
from hessinit.results.advice import Descent
from hessinit.results.curvature_report import CurvatureReport, Estimate
from hessinit.training import loop, rate_search
from hessinit.training import optimizer_rules as rules
from hessinit.training.advise import advise
from hessinit.training.data import copy_to, device_of

WIDTH = 100


def assert_sound(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | None = None,
    optimizer: rules.AnyOptimizer = "sgd",
    times_stable: float = MOST_TIMES_STABLE,
    **options: Any,
) -> CurvatureReport:
    """Raise an AssertionError with the findings and the report's table when training is expected to fail.

    Found are layers without a gradient, examples that look the same after some layer, activations that grow
    or shrink with depth, a loss far above that of a zero output, and numbers that are not finite. With a
    learning rate, by `lr` or the optimizer's own, also one that is above `times_stable` times the stability
    limit of the optimizer or raises the loss in trial steps, and a gradient that is too small for it.
    `optimizer` is a name, a torch optimizer or a function that builds one, parameter groups included. The
    norms must converge.
    `options` are those of `measure`. The model is not changed; for a sound one the report is returned.

    How often it is right was measured: benchmarks/results/soundness.txt. Costs what `measure` does;
    with a learning rate 32 training steps more, and for Adam and AdamW about ten products.

    >>> import torch
    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> report = assert_sound(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    check_positive("times_stable", times_stable, "such as 1")
    rule = rules.build_optimizer_rule(optimizer, model, lr=lr, layers=options.get("layers"))
    if rule.lr is not None and options.get("network") is False:
        why = "the rate is judged by the network's ‖H‖. Leave out one of them"
        raise ProblemError(f"network=False and a learning rate do not go together: {why}.")
    if not isinstance(batch, tuple):
        batch = [(one.inputs, one.targets) for _, one in read_batches(batch)]  # it is read more than once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # not converged is a failure here
        try:
            report = measure(model, loss, batch, **options)
        except WeightsError as refusal:
            raise AssertionError(f"not sound:\n{refusal} {REDRAW}.") from None
        judged, norm = judge_training(report, rule.rule), None
        if rule.lr is not None:
            stable, norm = _find_limit(rule, report, optimizer, model, loss, batch, options)
            trial = make_trial(model, loss, batch, optimizer, rule, options.get("forward"))
            judged = judge_training(report, rule.rule, rule.lr, stable, times_stable, *trial)
    failures = [*map(str, judged.findings or ()), *_name_unconverged(report, norm)]
    if failures:
        table = to_text(replace(judged, findings=judged.findings or None), WIDTH)
        raise AssertionError("\n".join(["not sound:", *failures, "", table]))
    return judged


@torch.inference_mode(False)
@torch.enable_grad()
def make_trial(
    model: nn.Module, loss: Loss, batch: Any, optimizer: rules.AnyOptimizer, rule: rules.OptimizerRule,
    forward: Forward | None,
) -> tuple[Sequence[float], float]:  # fmt: skip
    """The losses of some steps, and that of the best constant output; () and inf where there are none."""
    losses, constant = tuple[float, ...](), math.inf
    if rule.lr is None:
        return losses, constant
    batches = itertools.islice(itertools.cycle([one for _, one in read_batches(batch)]), TRIAL_STEPS)
    untouched = untouched_model(model, loss, forward)
    with contextlib.suppress(RuntimeError), untouched as state, state.with_stand_ins(seed=0):
        made = rate_search.builder(rule, optimizer, unwrap(model))(rule.lr)
        losses = rate_search.try_rate(model, loss, batches, made, rule.lr, math.inf, forward, 0).losses
        with contextlib.suppress(Exception):  # a loss may need the model, or more than one tensor
            inputs, targets = copy_to(read_batches(batch)[0][1], device_of(model))
            output = model(inputs) if forward is None else forward(model, inputs)
            constant = loop.constant_loss(loss, output.detach(), [(inputs, targets)])
    return losses, constant if math.isfinite(constant) else math.inf


def _find_limit(
    rule: rules.OptimizerRule, report: CurvatureReport, optimizer: rules.AnyOptimizer, model: nn.Module,
    loss: Loss, batch: Any, options: Mapping[str, Any],
) -> tuple[float, Estimate]:  # fmt: skip
    """The stability limit, and the norm that it follows from; that of a named descent is in the report."""
    if isinstance(rule.rule, Descent) and not rule.rates:
        norm = rule.rule.norm(report.network.top, report.network.bottom)
        return rule.rule.stability_limit(norm.value), norm
    given: Any = {name: options[name] for name in rules.CurvatureOptions.__annotations__ if name in options}
    given["curvature"] = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
    given["check"] = False  # `measure` has checked the derivatives
    found = advise(model, loss, batch, optimizer=optimizer, lr=rule.lr, trial_steps=0, **given)
    return found.stable_learning_rate, found.norm


def _name_unconverged(report: CurvatureReport, norm: Estimate | None) -> list[str]:
    rows = [*report.layers, *([report.network] if report.network_measured else [])]
    some = [row for row in rows if not row.converged and math.isfinite(row.norm)]
    if some:
        names = ["the network" if row is report.network else words.call_layer(row.name) for row in some]
        reason = words.unstopped(some[0].reason)
        return [f"{words.join_names(names)} did not reach tolerance={report.tolerance:g}: {reason}."]
    if norm is not None and not norm.converged and math.isfinite(norm.value):
        return [f"the stability limit of the optimizer did not converge: {words.unstopped(norm.reason)}."]
    return []
