"""The verb `assert_sound`: a test that fails, with a table, when initial weights are unsound."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError
from hessinit.measurement.measure import measure
from hessinit.present import to_text, words
from hessinit.problem.batches import read_batches
from hessinit.problem.determinism import find_bad_buffer
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Loss
from hessinit.problem.validate import unwrap
from hessinit.results import advice
from hessinit.results.curvature_report import (
    EXPLODING_ABOVE,
    VANISHING_BELOW,
    CurvatureReport,
    LayerCurvature,
)
from hessinit.training.optimizer_rules import require_known_optimizer

Finding = tuple[str, list[str]]  # what is wrong, and the ways out
WIDTH = 100

_SHARED_WITH_ADVISE = (
    "layers", "tolerance", "max_iterations", "seed", "forward", "dtype", "dropout", "reduction",
)  # fmt: skip


def assert_sound(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd",
    smallest: float = VANISHING_BELOW,
    largest: float | None = None,
    times_stable: float = advice.MOST_TIMES_STABLE,
    **options: Any,
) -> CurvatureReport:
    """Raise an AssertionError with the report's table when a layer vanishes or explodes, or `lr` is too high.

    Every layer's ‖H‖ must lie between `smallest` and `largest` (1000 unless given; with a learning rate, what
    the rate allows). With `lr` or a torch optimizer, the learning rate may be at most `times_stable` times
    the stability limit of the optimizer, parameter groups included; 1 insists on the limit.
    Weights, buffers, outputs (also in the model's own precision) and loss must be finite, and the norms
    converged. Biases are judged only when `layers` names them. `options` are those of `measure`. The model is
    not changed; for a sound one the report is returned.

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
        largest = math.inf if judges_rate else EXPLODING_ABOVE
    _check_limits(smallest, largest, times_stable)
    if judges_rate and options.get("network") is False:
        raise ProblemError(
            "network=False and a learning rate do not go together: the rate is judged by the network's ‖H‖. "
            "Leave out one of them."
        )
    if not isinstance(batch, tuple):
        batch = [(one.inputs, one.targets) for _, one in read_batches(batch)]  # it is read more than once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # not converged is a failure here
        try:
            report = measure(model, loss, batch, **options)
        except WeightsError as refusal:
            ways = [f"draw new weights: {_call(rate, 'sgd')}"]
            table = "There is no table: nothing can be measured."
            raise AssertionError(_write([(str(refusal), ways)], table)) from None
        judged = _judge_rate(report, model, loss, batch, optimizer, rate, options) if judges_rate else None
    found = [
        *_unconverged(report, judged, options.get("network", True)),
        *_buffers(model),
        *_layers(report, model, smallest, largest, _call(None if judged is None else judged.lr, optimizer)),
        *([] if judged is None else _rate(judged, times_stable, optimizer)),
    ]
    if found:
        raise AssertionError(_write(found, to_text(report, WIDTH)))
    return report


def _write(found: Sequence[Finding], table: str) -> str:
    """The message: what is wrong, the ways out, and the table."""
    ways = list(dict.fromkeys(way for _, several in found for way in several))
    texts = ["not sound: " + " ".join(failure for failure, _ in found), f"Way out: {', or '.join(ways)}."]
    folded = [textwrap.fill(one, WIDTH, break_long_words=False, break_on_hyphens=False) for one in texts]
    return "\n".join((*folded, "", table))


def _check_limits(smallest: Any, largest: Any, times_stable: Any) -> None:
    advice.check_nonnegative("smallest", smallest)
    if isinstance(largest, bool | str) or not largest > smallest:
        raise ProblemError(f"largest={largest!r} must be a number above smallest={smallest!r}.")
    if isinstance(times_stable, bool | str) or not 0 < times_stable < math.inf:
        raise ProblemError(f"times_stable={times_stable!r} must be a finite number above 0, such as 1.")


def _judge_rate(
    report: CurvatureReport, model: nn.Module, loss: Loss, batch: Any,
    optimizer: str | torch.optim.Optimizer, rate: float | None, options: dict[str, Any],
) -> advice.LearningRateAdvice:  # fmt: skip
    if isinstance(optimizer, str) and optimizer in advice.DESCENTS:
        return report.advice(optimizer, lr=rate)
    from hessinit.training.advise import advise  # not needed for the common case

    shared = {name: options[name] for name in _SHARED_WITH_ADVISE if name in options}
    matrix = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
    # check=False: `measure` has checked the derivatives.
    return advise(model, loss, batch, optimizer=optimizer, lr=rate, curvature=matrix, check=False, **shared)


def _unconverged(
    report: CurvatureReport, judged: advice.LearningRateAdvice | None, with_network: bool
) -> list[Finding]:
    rows = [*report.layers, *([report.network] if with_network else [])]
    found = [
        (_name(report, row), row.reason) for row in rows if not row.converged and math.isfinite(row.norm)
    ]
    if not found and judged is not None and not judged.converged and math.isfinite(judged.norm.value):
        found = [("the network", judged.norm.reason)]
    if not found:
        return []
    names, reason = words.join_names([name for name, _ in found]), words.unstopped(found[0][1])
    failure = f"{names} did not reach tolerance={report.tolerance:g} ({reason})."
    return [(failure, ["raise max_iterations= or tolerance="])]


def _buffers(model: nn.Module) -> list[Finding]:
    """What a measurement with the statistics of the batch does not see."""
    buffer = find_bad_buffer(unwrap(model))
    way = "reset it, as reset_running_stats() does for BatchNorm"
    return [(f"the buffer {buffer} holds NaN or inf.", [way])] if buffer else []


def _layers(
    report: CurvatureReport, model: nn.Module, smallest: float, largest: float, call: str
) -> list[Finding]:
    zeros = [
        layer_name(name)
        for name, one in unwrap(model).named_parameters()
        if (one.ndim >= 2 or name.endswith("weight")) and not bool(one.any())
    ]
    fit = f"fit the weights: {call}"
    found = []
    if without := [words.call_layer(row.name) for row in report.layers if row.norm == 0 and smallest > 0]:
        verb, it = ("does", "it") if len(without) == 1 else ("do", "them")
        asked, way = f"does the forward use {it}, or are the units around {it} dead?", fit
        if zeros:
            be, weights = ("is", "the zero weight") if len(zeros) == 1 else ("are", "the zero weights")
            names = words.join_names([words.call_layer(name) for name in zeros])
            asked = f"{be} {weights} of {names} after {it} intended, as in residual branches or LoRA?"
            way = f"if so, name the other layers in layers=, or pass smallest=0; if not, {fit}"
        found.append(
            (f"{words.join_names(without)} {verb} not change the loss at all (‖H‖ = 0): {asked}", [way])
        )
    if small := [row for row in report.layers if 0 < row.norm < smallest]:
        verb, change = ("vanishes", "changes") if len(small) == 1 else ("vanish", "change")
        limit = f"{_norms(small)} is below smallest={smallest:g}"
        names = words.join_names([words.call_layer(row.name) for row in small])
        found.append((f"{names} {verb} ({limit}) and hardly {change} the loss.", [fit]))
    # nan is not at most anything, and no rate allows inf.
    rows = (*report.layers, report.network)
    if large := [row for row in rows if not row.norm <= largest or math.isinf(row.norm)]:
        verb = "explodes" if len(large) == 1 else "explode"
        names = words.join_names([_name(report, row) for row in large])
        most = "is not finite" if math.isinf(largest) else f"is above largest={largest:g}"
        found.append((f"{names} {verb}: {_norms(large)} {most}.", [fit]))
    return found


def _rate(
    judged: advice.LearningRateAdvice, times_stable: float, optimizer: str | torch.optim.Optimizer
) -> list[Finding]:
    lr, stable = judged.lr, judged.stable_learning_rate
    if lr is None or lr <= times_stable * stable:
        return []
    times = f"{words.format_times(lr / stable)} times" if stable > 0 else "above"
    if times == f"{words.format_times(times_stable)} times":
        times = f"just above {times}"
    limit = f"the stable learning rate of {judged.optimizer}, {words.format_number(stable)}"
    failure = f"lr={lr:g} is {times} {limit}; at most times_stable={times_stable:g} times it is allowed."
    ways = [f"lower lr to {round_down(times_stable * stable)} or less"] if stable > 0 else []
    if not judged.optimizer.startswith("Adam"):  # the size of the weights does not change Adam's step length
        ways.append(f"fit the weights: {_call(lr, optimizer)}")
    return [(failure, ways)]


def round_down(rate: float) -> str:
    """Write two figures, never above: what is advised is allowed.

    >>> round_down(0.0349), round_down(2.0), round_down(1234.0)
    ('0.034', '2', '1200')
    """
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return words.format_number(math.floor(rate / unit * (1 + 1e-9)) * unit, 2)


def _norms(rows: list[LayerCurvature]) -> str:
    """‖H‖ of one, or the range of several."""
    by_size = sorted(rows, key=lambda row: (math.isnan(row.norm), row.norm))
    low, high = (words.format_estimate(row.estimate) for row in (by_size[0], by_size[-1]))
    return f"‖H‖ = {low}" if low == high else f"‖H‖ = {low} … {high}"


def _name(report: CurvatureReport, row: LayerCurvature) -> str:
    return "the network" if row is report.network else words.call_layer(row.name)


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    settings = ""
    if isinstance(optimizer, str):
        settings = f", optimizer={optimizer!r}" if optimizer != "sgd" else ""
    elif momentum := optimizer.param_groups[0].get("momentum"):
        name = "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
        settings = f", optimizer={name!r}, momentum={momentum:g}"
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{settings})"
