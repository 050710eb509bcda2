"""The verb `assert_sound`: a test that fails, with a table, when initial weights are unsound."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceWarning, ProblemError, WeightsError
from hessinit.measurement.measure import measure
from hessinit.present import soundness as say
from hessinit.present import to_text
from hessinit.problem.batches import read_batches
from hessinit.problem.determinism import find_bad_buffer, overflows_in_own_precision
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Loss
from hessinit.problem.validate import unwrap
from hessinit.results.advice import DESCENTS, MOST_TIMES_STABLE, check_nonnegative, check_rate
from hessinit.results.curvature_report import (
    EXPLODING_ABOVE,
    VANISHING_BELOW,
    CurvatureReport,
)
from hessinit.training.advise import advise
from hessinit.training.optimizer_rules import require_known_optimizer

Finding = tuple[str, list[str]]  # what is wrong, and the ways out

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
            raise AssertionError(say.write_failure([str(refusal)], ways, say.NO_TABLE)) from None
        judged = _judge_rate(report, model, loss, batch, optimizer, rate, options) if judges_rate else None
    doubts = say.name_unconverged(report, judged, options.get("network", True))
    found = [
        *((doubt, ["raise max_iterations= or tolerance="]) for doubt in doubts),
        *_as_trained(model, batch, options.get("forward")),
        *_layers(report, model, smallest, largest, _call(None if judged is None else judged.lr, optimizer)),
        *([] if judged is None else _rate(judged, times_stable, optimizer)),
    ]
    if not found:
        return report
    ways = list(dict.fromkeys(way for _, several in found for way in several))
    raise AssertionError(
        say.write_failure([failure for failure, _ in found], ways, to_text(report, say.WIDTH))
    )


def _check_limits(smallest: Any, largest: Any, times_stable: Any) -> None:
    check_nonnegative("smallest", smallest)
    if isinstance(largest, bool | str) or not largest > smallest:
        raise ProblemError(f"largest={largest!r} must be a number above smallest={smallest!r}.")
    if isinstance(times_stable, bool | str) or not 0 < times_stable < math.inf:
        raise ProblemError(
            f"times_stable={times_stable!r} must be a finite number above 0; 1 insists on the limit."
        )


def _judge_rate(
    report: CurvatureReport,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: str | torch.optim.Optimizer,
    rate: float | None,
    options: dict[str, Any],
) -> say.JudgedRate:
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
    return say.JudgedRate(advice.optimizer, advice.lr, advice.stable_learning_rate, advice.norm, is_adaptive)


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
    zeros = [
        layer_name(name)
        for name, one in unwrap(model).named_parameters()
        if (one.ndim >= 2 or name.endswith("weight")) and not bool(one.any())
    ]
    fit = f"fit the weights: {call}"
    meant = f"if so, name the other layers in layers=, or pass smallest=0; if not, {fit}" if zeros else fit
    small, large = say.name_vanishing(report, smallest), say.name_exploding(report, largest)
    return [
        *((failure, [meant]) for failure in say.name_without_curvature(report, smallest, zeros)),
        *((failure, [fit]) for failure in (*small, *large)),
    ]


def _rate(
    judged: say.JudgedRate, times_stable: float, optimizer: str | torch.optim.Optimizer
) -> list[Finding]:
    ways = []
    if judged.stable > 0:
        ways.append(f"lower lr to {say.round_down(times_stable * judged.stable)} or less")
    if not judged.is_adaptive:  # the size of the weights does not change the length of Adam's steps
        ways.append(f"fit the weights: {_call(judged.lr, optimizer)}")
    return [(failure, ways) for failure in say.name_too_fast(judged, times_stable)]


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    settings = ""
    if isinstance(optimizer, str):
        settings = f", optimizer={optimizer!r}" if optimizer != "sgd" else ""
    elif momentum := optimizer.param_groups[0].get("momentum"):
        name = "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
        settings = f", optimizer={name!r}, momentum={momentum:g}"
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{settings})"
