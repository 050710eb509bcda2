"""The verb `assert_sound`: a test that fails, with a table, when a network starts from unsound weights."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import torch
from torch import nn

from hessinit.advising.advise import advise
from hessinit.advising.grouped_rate import grouped_rate, groups_differ
from hessinit.advising.reading import WORDS
from hessinit.curvature.engines import Effort
from hessinit.errors import ConvergenceWarning, ProblemError, choose
from hessinit.measurement.measure import measure
from hessinit.present import soundness_sentences as say
from hessinit.present.table import render_text
from hessinit.problem.batches import read_batches
from hessinit.problem.determinism import find_bad_buffer, overflows_in_own_precision
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Loss
from hessinit.problem.validate import unwrap
from hessinit.results.advice import DESCENTS, MOST_TIMES_STABLE, check_nonnegative, check_rate
from hessinit.results.curvature_report import EXPLODING_ABOVE, VANISHING_BELOW, CurvatureReport

Finding = tuple[str, list[str]]  # what is wrong, and the ways out

_SHARED_WITH_ADVISE = ("layers", "tolerance", "max_steps", "seed", "forward", "dtype", "dropout", "reduction")
# The refusals of `measure` that are about the start, not about how it was called.
_ABOUT_THE_START = re.compile(
    r"holds NaN or inf|^the loss is -?(?:nan|inf) though(?!.*the targets hold)|^the loss is saturated"
)


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
    """Fail with the table of the report when a layer vanishes, explodes, or the rate is too high for it.

    Every layer's ‖H‖ must lie between `smallest` and `largest` (1000 unless given; with a rate, what the rate
    allows). With `lr`, or an optimizer of torch, the rate may be at most `times_stable` times the stable one
    of `optimizer`; 1 insists on that one. Weights, buffers, outputs (in the model's own precision, too) and
    loss must be finite, and the norms converged. Judged are the weights that `measure` measures: biases only
    when `layers` names them. `options` are those of `measure`; the model is left as it was, and a sound one
    gets its report returned.

    Costs what `measure` does; for adaptive optimizers about ten products and a few gradients more.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> report = assert_sound(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), lr=1.5)  # closed form: H = I
    >>> round(report.network.norm, 9)
    1.0
    """
    rate = check_rate(lr)
    if isinstance(optimizer, str):
        choose("optimizer", optimizer, WORDS)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise ProblemError(
            f"optimizer is a {type(optimizer).__name__}; it must be a word such as 'adam', or a "
            "torch.optim.Optimizer."
        )
    judges_rate = rate is not None or not isinstance(optimizer, str)
    limit = _largest(largest, judges_rate)
    _check_limits(smallest, limit, times_stable)
    if judges_rate and options.get("network") is False:
        raise ProblemError(
            "network=False and a rate do not go together: the network's ‖H‖ judges it. Leave out one of them."
        )
    if not isinstance(batch, tuple):
        batch = [(one.inputs, one.targets) for _, one in read_batches(batch)]  # it is read more than once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what it warns of is a failure here
        try:
            report = measure(model, loss, batch, **options)
        except ProblemError as refusal:
            if not _ABOUT_THE_START.search(str(refusal)):
                raise
            ways = [f"draw new weights: {_call(rate, 'sgd')}"]
            raise AssertionError(say.write_failure([str(refusal)], ways, say.NO_TABLE)) from None
        judged = _judge(report, model, loss, batch, optimizer, rate, options) if judges_rate else None
    found = [
        *_as_trained(model, batch, options.get("forward")),
        *_layers(report, model, smallest, limit, _call(None if judged is None else judged.lr, optimizer)),
        *([] if judged is None else _rate(judged, times_stable, optimizer)),
    ]
    doubts = say.name_unconverged(report, judged, options.get("network", True))
    if doubts:
        found.insert(0, (doubts[0], ["raise max_steps= or tolerance="]))
    if not found:
        return report
    ways = list(dict.fromkeys(way for _, several in found for way in several))
    failures = [failure for failure, _ in found]
    raise AssertionError(say.write_failure(failures, ways, render_text(report, say.WIDTH)))


def _largest(largest: float | None, judges_rate: bool) -> float:
    """The limit of a layer. A layer is never sharper than the network, which a rate bounds by itself."""
    if largest is not None:
        return largest
    return math.inf if judges_rate else EXPLODING_ABOVE


def _check_limits(smallest: Any, largest: Any, times_stable: Any) -> None:
    check_nonnegative("smallest", smallest)
    if isinstance(largest, bool | str) or not largest > smallest:
        raise ProblemError(f"largest={largest!r} must be a number above smallest={smallest!r}.")
    if isinstance(times_stable, bool | str) or not 0 < times_stable < math.inf:
        raise ProblemError(
            f"times_stable={times_stable!r} must be a finite number above 0; 1 insists on the stable rate."
        )


def _judge(
    report: CurvatureReport,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: str | torch.optim.Optimizer,
    rate: float | None,
    options: dict[str, Any],
) -> say.JudgedRate:
    shared = {name: options[name] for name in _SHARED_WITH_ADVISE if name in options}
    shared["check"] = False  # `measure` has checked the derivatives
    matrix = "gauss-newton" if report.curvature == "gauss-newton" else "hessian"
    if isinstance(optimizer, str) and optimizer in DESCENTS:
        advice = report.advice(optimizer, lr=rate)
    elif isinstance(optimizer, str) or rate or not groups_differ(optimizer, model, shared.get("layers")):
        advice = advise(model, loss, batch, optimizer=optimizer, lr=rate, curvature=matrix, **shared)
    else:
        effort = Effort(report.tolerance, shared.pop("max_steps", 200), shared.pop("seed", 0))
        shared.pop("tolerance", None)
        found = grouped_rate(model, loss, batch, optimizer, matrix, effort, **shared)
        return say.JudgedRate(found.optimizer, found.lr, found.stable, found.norm, found.is_adaptive)
    adaptive = advice.first_step is not None
    return say.JudgedRate(advice.optimizer, advice.lr, advice.stable_learning_rate, advice.norm, adaptive)


def _as_trained(model: nn.Module, batch: Any, forward: Any) -> list[Finding]:
    """What measuring in float32, by the batch's own statistics, does not see."""
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
        *((failure, [meant]) for failure in say.name_still(report, smallest, zeros)),
        *((failure, [fit]) for failure in (*small, *large)),
    ]


def _rate(
    judged: say.JudgedRate, times_stable: float, optimizer: str | torch.optim.Optimizer
) -> list[Finding]:
    ways = []
    if judged.stable > 0:
        ways.append(f"lower lr to {say.round_down(times_stable * judged.stable)} or less")
    if not judged.is_adaptive:  # weights of another size do not make the steps of adaptive optimizers shorter
        ways.append(f"fit the weights: {_call(judged.lr, optimizer)}")
    return [(failure, ways) for failure in say.name_too_fast(judged, times_stable)]


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    settings = ""
    if isinstance(optimizer, str):
        settings = f", optimizer={optimizer!r}" if optimizer != "sgd" else ""
    elif momentum := optimizer.param_groups[0].get("momentum"):
        word = "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
        settings = f", optimizer={word!r}, momentum={momentum:g}"
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{settings})"
