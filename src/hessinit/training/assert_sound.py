"""The verb `assert_sound`: a test that fails, with a table, when initial weights are unsound."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError
from hessinit.results.estimates import Estimate
from hessinit.measurement.measure import measure
from hessinit.present.table import render_text
from hessinit.present.words import call_layer, format_estimate, format_number, format_times, join_names
from hessinit.problem.determinism import find_bad_buffer, overflows_in_own_precision
from hessinit.problem.batches import read_batches
from hessinit.problem.validate import unwrap
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Loss
from hessinit.results.advice import DESCENTS, MOST_TIMES_STABLE, check_nonnegative, check_rate
from hessinit.results.curvature_report import LayerCurvature
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.curvature_report import EXPLODING_ABOVE, VANISHING_BELOW
from hessinit.training.advise import advise
from hessinit.training.optimizer_rules import require_known_optimizer

Finding = tuple[str, list[str]]  # what is wrong, and the ways out

_WIDTH = 100
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
    times_stable: float = MOST_TIMES_STABLE,
    **options: Any,
) -> CurvatureReport:
    """Raise an AssertionError with the report's table when a layer vanishes or explodes, or `lr` is too high.

    Every layer's ‖H‖ must lie between `smallest` and `largest` (1000 unless given; with a learning rate, what
    the rate allows). With `lr` or a torch optimizer, the learning rate may be at most `times_stable` times the
    stability limit of the optimizer, as in `advise`, parameter groups included; 1 insists on the limit.
    Weights, buffers, outputs (also in the model's own precision) and loss must be finite, and the norms
    converged. Biases are judged only when `layers` names them. `options` are those of `measure`. The model is
    not changed; for a sound one the report is returned.

    Costs what `measure` does; for Adam and AdamW about ten products and a few gradients more.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> report = assert_sound(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    rate = check_rate(lr)
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
            raise AssertionError(_write([str(refusal)], ways, "Nothing can be measured, so no table.")) from None
        judged = _judge_rate(report, model, loss, batch, optimizer, rate, options) if judges_rate else None
    found = [
        *_unconverged(report, judged, options.get("network", True)),
        *_as_trained(model, batch, options.get("forward")),
        *_layers(report, model, smallest, largest, _call(None if judged is None else judged.lr, optimizer)),
        *([] if judged is None else _rate(judged, times_stable, optimizer)),
    ]
    if not found:
        return report
    ways = list(dict.fromkeys(way for _, several in found for way in several))
    raise AssertionError(_write([failure for failure, _ in found], ways, render_text(report, _WIDTH)))


def _check_limits(smallest: Any, largest: Any, times_stable: Any) -> None:
    check_nonnegative("smallest", smallest)
    if isinstance(largest, bool | str) or not largest > smallest:
        raise ProblemError(f"largest={largest!r} must be a number above smallest={smallest!r}.")
    if isinstance(times_stable, bool | str) or not 0 < times_stable < math.inf:
        raise ProblemError(
            f"times_stable={times_stable!r} must be a finite number above 0; 1 insists on the stability limit."
        )


@dataclass(frozen=True)
class _JudgedRate:
    optimizer: str
    lr: float | None
    stable: float
    norm: Estimate
    is_adaptive: bool


def _judge_rate(
    report: CurvatureReport,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: str | torch.optim.Optimizer,
    rate: float | None,
    options: dict[str, Any],
) -> _JudgedRate:
    if isinstance(optimizer, str) and optimizer in DESCENTS:
        advice = report.advice(optimizer, lr=rate)
    else:
        shared = {name: options[name] for name in _SHARED_WITH_ADVISE if name in options}
        matrix = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
        # check=False: `measure` has checked the derivatives.
        advice = advise(
            model, loss, batch, optimizer=optimizer, lr=rate, curvature=matrix, check=False, **shared
        )
    is_adaptive = advice.optimizer.startswith("Adam")
    return _JudgedRate(advice.optimizer, advice.lr, advice.stable_learning_rate, advice.norm, is_adaptive)


def _unconverged(report: CurvatureReport, judged: _JudgedRate | None, with_network: bool) -> list[Finding]:
    rows = [*report.layers, *([report.network] if with_network else [])]
    doubtful = [
        (_name(report, row), row.reason) for row in rows if not row.converged and math.isfinite(row.norm)
    ]
    if not doubtful and judged is not None and not judged.norm.converged and math.isfinite(judged.norm.value):
        doubtful = [("the network", judged.norm.reason)]
    if not doubtful:
        return []
    names, reason = join_names([name for name, _ in doubtful]), doubtful[0][1].rstrip(".")
    failure = f"{names} did not reach tolerance={report.tolerance:g} ({reason})."
    return [(failure, ["raise max_iterations= or tolerance="])]


def _as_trained(model: nn.Module, batch: Any, forward: Any) -> list[Finding]:
    """What a measurement in float32, with the statistics of the batch, does not see."""
    found = []
    if buffer := find_bad_buffer(unwrap(model)):
        way = "reset it, as reset_running_stats() does for BatchNorm"
        found.append((f"the buffer {buffer} holds NaN or inf.", [way]))
    for _, one in read_batches(batch):
        if dtype := overflows_in_own_precision(model, one, forward):
            own = f"in the model's own {dtype} its output holds NaN or inf, though not in float32"
            found.append((f"{own}.", ["train in torch.bfloat16 or float32, or scale the weights down"]))
            break
    return found


def _layers(
    report: CurvatureReport, model: nn.Module, smallest: float, largest: float, call: str
) -> list[Finding]:
    fit = f"fit the weights: {call}"
    found: list[Finding] = []
    if zero := [row for row in report.layers if row.norm == 0 and smallest > 0]:
        weights = [
            call_layer(layer_name(name))
            for name, one in unwrap(model).named_parameters()
            if (one.ndim >= 2 or name.endswith("weight")) and not bool(one.any())
        ]
        verb, it = ("does", "it") if len(zero) == 1 else ("do", "them")
        asked, way = f"does the forward use {it}, or are the units around {it} dead?", fit
        if weights:
            be, weight = ("is", "the zero weight") if len(weights) == 1 else ("are", "the zero weights")
            asked = (
                f"{be} {weight} of {join_names(weights)} intended, as in residual branches or LoRA?"
            )
            way = f"if so, name the other layers in layers=, or pass smallest=0; if not, {fit}"
        names = join_names([call_layer(row.name) for row in zero])
        found.append((f"{names} {verb} not influence the loss (‖H‖ = 0): {asked}", [way]))
    if small := [row for row in report.layers if 0 < row.norm < smallest]:
        verb, they = ("vanishes", "it hardly influences") if len(small) == 1 else ("vanish", "they hardly influence")
        names = join_names([call_layer(row.name) for row in small])
        found.append((f"{names} {verb} ({_norms(small)} is below smallest={smallest:g}): {they} the loss.", [fit]))
    # nan is not at most anything, and inf is not allowed by any learning rate.
    rows = (*report.layers, report.network)
    if large := [row for row in rows if not row.norm <= largest or math.isinf(row.norm)]:
        verb = "explodes" if len(large) == 1 else "explode"
        most = "is not finite" if math.isinf(largest) else f"is above largest={largest:g}"
        names = join_names([_name(report, row) for row in large])
        found.append((f"{names} {verb}: {_norms(large)} {most}.", [fit]))
    return found


def _rate(
    judged: _JudgedRate, times_stable: float, optimizer: str | torch.optim.Optimizer
) -> list[Finding]:
    lr, stable = judged.lr, judged.stable
    if lr is None or lr <= times_stable * stable:
        return []
    times = f"{format_times(lr / stable)} times" if stable > 0 else "above"
    if times == f"{format_times(times_stable)} times":
        times = f"just above {times}"
    failure = (
        f"lr={lr:g} is {times} the stability limit of {judged.optimizer}, {format_number(stable)}; at most "
        f"times_stable={times_stable:g} times the limit is allowed."
    )
    ways = []
    if stable > 0:
        ways.append(f"lower lr to {round_down(times_stable * stable)} or less")
    if not judged.is_adaptive:  # the size of the weights does not change the length of Adam's steps
        ways.append(f"fit the weights: {_call(lr, optimizer)}")
    return [(failure, ways)]


def round_down(rate: float) -> str:
    """Two figures, never above `rate`.

    >>> round_down(0.0349), round_down(2.0), round_down(1234.0)
    ('0.034', '2', '1200')
    """
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return format_number(math.floor(rate / unit * (1 + 1e-9)) * unit, 2)


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    settings = ""
    if isinstance(optimizer, str):
        settings = f", optimizer={optimizer!r}" if optimizer != "sgd" else ""
    elif momentum := optimizer.param_groups[0].get("momentum"):
        name = "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
        settings = f", optimizer={name!r}, momentum={momentum:g}"
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{settings})"


def _write(failures: Sequence[str], ways: Sequence[str], table: str) -> str:
    said = ["not sound: " + " ".join(failures), f"Way out: {', or '.join(ways)}."]
    folded = [textwrap.fill(one, _WIDTH, break_long_words=False, break_on_hyphens=False) for one in said]
    return "\n".join((*folded, "", table))


def _norms(rows: list[LayerCurvature]) -> str:
    """‖H‖ of one row, or the range of several."""
    by_size = sorted(rows, key=lambda row: (math.isnan(row.norm), row.norm))
    shown = [format_estimate(row.estimate) for row in (by_size[0], by_size[-1])]
    return f"‖H‖ = {shown[0]}" if len(rows) == 1 or shown[0] == shown[1] else f"‖H‖ = {shown[0]} … {shown[1]}"


def _name(report: CurvatureReport, row: LayerCurvature) -> str:
    return "the network" if row is report.network else call_layer(row.name)
