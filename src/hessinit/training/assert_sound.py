"""The verb `assert_sound`: a test that fails, with a table, when initial weights are unsound."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError, check_positive
from hessinit.measurement.measure import measure
from hessinit.present import to_text, words
from hessinit.problem.batches import read_batches
from hessinit.problem.determinism import find_bad_buffer
from hessinit.problem.problem import Loss
from hessinit.problem.validate import unwrap
from hessinit.results import advice
from hessinit.results import curvature_report as reports
from hessinit.training.optimizer_rules import CurvatureOptions, require_known_optimizer

WIDTH = 100


def assert_sound(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd",
    smallest: float = reports.VANISHING_BELOW,
    largest: float | None = None,
    times_stable: float = advice.MOST_TIMES_STABLE,
    **options: Any,
) -> reports.CurvatureReport:
    """Raise an AssertionError with the report's table when a layer vanishes or explodes, or `lr` is too high.

    Every layer's ‖H‖ must lie between `smallest` and `largest` (1000 unless given; with a learning rate, what
    the rate allows). With `lr` or a torch optimizer, the learning rate may be at most `times_stable` times
    the stability limit of the optimizer, parameter groups included; 1 insists on the limit.
    Weights, buffers, outputs and loss must be finite, and the norms converged. Biases are judged only when
    `layers` names them. `options` are those of `measure`. The model is not changed; for a sound one the
    report is returned.

    Costs what `measure` does; for Adam and AdamW about ten products and a few gradients more.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> report = assert_sound(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    rate = advice.check_rate(lr)
    require_known_optimizer(optimizer)
    judges_rate = rate is not None or not isinstance(optimizer, str)
    if largest is None:  # a layer is never sharper than the network, which a learning rate bounds by itself
        largest = math.inf if judges_rate else reports.EXPLODING_ABOVE
    advice.check_nonnegative("smallest", smallest)
    if isinstance(largest, bool | str) or not largest > smallest:
        raise ProblemError(f"largest={largest!r} must be a number above smallest={smallest!r}.")
    check_positive("times_stable", times_stable, "such as 1")
    if judges_rate and options.get("network") is False:
        why = "the rate is judged by the network's ‖H‖. Leave out one of them"
        raise ProblemError(f"network=False and a learning rate do not go together: {why}.")
    if not isinstance(batch, tuple):
        batch = [(one.inputs, one.targets) for _, one in read_batches(batch)]  # it is read more than once
    judged = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # not converged is a failure here
        try:
            report = measure(model, loss, batch, **options)
        except WeightsError as refusal:
            way = f"Draw new weights: {_call(rate, optimizer)}."
            raise AssertionError(f"not sound:\n{refusal} {way}") from None
        if judges_rate and optimizer in advice.DESCENTS:
            judged = report.advice(str(optimizer), lr=rate)
        elif judges_rate:
            given: Any = {name: options[name] for name in CurvatureOptions.__annotations__ if name in options}
            given["curvature"] = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
            given["check"] = False  # `measure` has checked the derivatives
            from hessinit.training.advise import advise

            judged = advise(model, loss, batch, optimizer=optimizer, lr=rate, trial_steps=0, **given)
    fit = _call(rate if judged is None else judged.lr, optimizer)
    found = _judge_layers(report, smallest, largest, options.get("network", True), fit)
    if buffer := find_bad_buffer(unwrap(model)):  # a measurement with the batch's statistics does not see it
        found.append(f"the buffer {buffer} holds NaN or inf. Reset it, as reset_running_stats() does.")
    if judged is not None:
        found += _judge_rate(judged, times_stable, fit)
    if found:
        raise AssertionError("\n".join(["not sound:", *found, "", to_text(report, WIDTH)]))
    return report


def _judge_layers(
    report: reports.CurvatureReport, smallest: float, largest: float, with_network: bool, fit: str
) -> list[str]:
    rows = [*report.layers, *([report.network] if with_network else [])]
    found = []
    if some := [row for row in rows if not row.converged and math.isfinite(row.norm)]:
        reason = words.unstopped(some[0].reason)
        found.append(f"{_name_rows(report, some)} did not reach tolerance={report.tolerance:g}: {reason}.")
    if some := [row for row in report.layers if row.norm == 0 < smallest]:
        found.append(
            f"{_name_rows(report, some)}: the forward does not use it, its units are dead, or a zero weight "
            "follows, as in LoRA (if that is intended, pass smallest=0, or name the other layers in layers=)."
            f" Fit the weights: {fit}."
        )
    if some := [row for row in report.layers if 0 < row.norm < smallest]:
        found.append(f"{_name_rows(report, some)} is below smallest={smallest:g}. Fit the weights: {fit}.")
    # nan is not at most anything, and no rate allows inf.
    if some := [row for row in rows if not row.norm <= largest or math.isinf(row.norm)]:
        limit = "is not finite" if math.isinf(largest) else f"is above largest={largest:g}"
        found.append(f"{_name_rows(report, some)} {limit}. Fit the weights: {fit}.")
    return found


def _name_rows(report: reports.CurvatureReport, rows: list[reports.LayerCurvature]) -> str:
    names = ["the network" if row is report.network else words.call_layer(row.name) for row in rows]
    by_size = sorted(rows, key=lambda row: (math.isnan(row.norm), row.norm))
    low, high = (words.format_estimate(row.estimate) for row in (by_size[0], by_size[-1]))
    return f"{words.join_names(names)}: ‖H‖ = {low if low == high else f'{low} … {high}'}"


def _judge_rate(judged: advice.LearningRateAdvice, times_stable: float, fit: str) -> list[str]:
    lr, stable = judged.lr, judged.stable_learning_rate
    found = []
    if not judged.converged and math.isfinite(judged.norm.value):
        reason = words.unstopped(judged.norm.reason)
        found.append(f"the stability limit of {judged.optimizer} did not converge: {reason}.")
    if lr is not None and not lr <= times_stable * stable:
        # The size of the weights does not change the length of Adam's steps.
        other = "" if judged.optimizer.startswith("Adam") else f", or fit the weights: {fit}"
        found.append(
            f"lr={lr:g} is above times_stable={times_stable:g} times {words.format_number(stable)}, the "
            f"stable learning rate of {judged.optimizer}. Lower lr below "
            f"{words.format_number(times_stable * stable)}{other}."
        )
    return found


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    named = f", optimizer={optimizer!r}" if isinstance(optimizer, str) and optimizer != "sgd" else ""
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{named})"
