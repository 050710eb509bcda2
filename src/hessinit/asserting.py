"""The verb `assert_sound`: a test that fails, with a table, when a network starts from unsound weights."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from typing import Any

import torch
from torch import nn

from hessinit.advising.advise import advise
from hessinit.advising.reading import WORDS
from hessinit.errors import ConvergenceWarning, ProblemError, choose
from hessinit.measuring import measure
from hessinit.present.numbers import call_layer, format_estimate, format_number, format_times, join_names
from hessinit.present.table import render_text
from hessinit.problem.batches import read_batches
from hessinit.problem.problem import Loss
from hessinit.report.advice import LearningRateAdvice
from hessinit.report.descent import DESCENTS, MOST_TIMES_STABLE, check_nonnegative, check_rate
from hessinit.report.layer import LayerCurvature
from hessinit.report.report import CurvatureReport
from hessinit.report.verdict import EXPLODING_ABOVE, VANISHING_BELOW

WIDTH = 100
_SHARED_WITH_ADVISE = ("layers", "tolerance", "max_steps", "seed", "forward", "dtype", "dropout")
# The refusals of `measure` that are about the start, not about how it was called.
_NOT_FINITE = re.compile(r"holds NaN or inf|^the loss is -?(?:nan|inf) though")


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
    of `optimizer`; 1 insists on that one. Weights, outputs and loss must be finite, and the norms converged.
    `options` are those of `measure`; the model is left as it was, and a sound one gets its report returned.

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
        batch = [
            (one.inputs, one.targets) for _, one in read_batches(batch)
        ]  # an adaptive rate reads it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what it warns of is a failure here
        try:
            report = measure(model, loss, batch, **options)
        except ProblemError as refusal:
            if not _NOT_FINITE.search(str(refusal)):
                raise
            raise AssertionError(_explain_not_finite(refusal, rate)) from None
        advice = _advise(report, model, loss, batch, optimizer, rate, options) if judges_rate else None
    doubts = _unconverged(report, advice, options.get("network", True))
    layers = [*_vanishing(report, smallest), *_exploding(report, limit)]
    rates = _too_fast(advice, times_stable) if advice is not None else []
    if not (doubts or layers or rates):
        return report
    ways = ["raise max_steps= or tolerance="] if doubts else []
    if advice is not None and rates and advice.stable_learning_rate > 0:
        ways.append(f"lower lr to {_round_down(times_stable * advice.stable_learning_rate)} or less")
    # Weights of another size do not make the steps of adaptive optimizers shorter.
    if layers or (rates and advice is not None and advice.first_step is None):
        ways.append(f"fit the weights: {_call(advice.lr if advice is not None else None, optimizer)}")
    raise AssertionError(_message([*doubts, *layers, *rates], ways, render_text(report, WIDTH)))


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


def _advise(
    report: CurvatureReport,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: str | torch.optim.Optimizer,
    rate: float | None,
    options: dict[str, Any],
) -> LearningRateAdvice:
    if isinstance(optimizer, str) and optimizer in DESCENTS:
        return report.advice(optimizer, lr=rate)
    shared = {name: options[name] for name in _SHARED_WITH_ADVISE if name in options}
    exact = report.curvature != "gauss-newton"
    matrix = "hessian" if exact else "gauss-newton"
    return advise(model, loss, batch, optimizer=optimizer, lr=rate, curvature=matrix, **shared)


def _unconverged(report: CurvatureReport, advice: LearningRateAdvice | None, with_network: bool) -> list[str]:
    rows = [*report.layers, *([report.network] if with_network else [])]
    doubtful = [
        (_name(report, row), row.reason) for row in rows if not row.converged and math.isfinite(row.norm)
    ]
    if not doubtful and advice is not None and not advice.converged and math.isfinite(advice.norm.value):
        doubtful = [("the network", advice.norm.reason)]
    if not doubtful:
        return []
    names = join_names([name for name, _ in doubtful])
    return [f"{names} did not reach tolerance={report.tolerance:g} ({doubtful[0][1].rstrip('.')})."]


def _vanishing(report: CurvatureReport, smallest: float) -> list[str]:
    small = [row for row in report.layers if row.norm < smallest]
    if not small:
        return []
    verb, they = ("vanishes", "it hardly moves") if len(small) == 1 else ("vanish", "they hardly move")
    least = f"is below smallest={smallest:g}"
    names = join_names([call_layer(row.name) for row in small])
    return [f"{names} {verb} ({_norms(small)} {least}): {they} the loss."]


def _exploding(report: CurvatureReport, largest: float) -> list[str]:
    # nan is not at most anything, and inf is not allowed by any rate.
    large = [
        row
        for row in (*report.layers, report.network)
        if not row.norm <= largest or math.isinf(row.norm)
    ]  # fmt: skip
    if not large:
        return []
    verb = "explodes" if len(large) == 1 else "explode"
    most = "is not finite" if math.isinf(largest) else f"is above largest={largest:g}"
    return [f"{join_names([_name(report, row) for row in large])} {verb}: {_norms(large)} {most}."]


def _too_fast(advice: LearningRateAdvice, times_stable: float) -> list[str]:
    rate, stable = advice.lr, advice.stable_learning_rate
    if rate is None or rate <= times_stable * stable:
        return []
    times = f"{format_times(rate / stable)} times" if stable > 0 else "above"
    edge = f"the stable rate of {advice.optimizer}, {format_number(stable)}"
    return [f"lr={rate:g} is {times} {edge}; at most times_stable={times_stable:g} times it is allowed."]


def _message(failures: list[str], ways: list[str], table: str) -> str:
    said = ["not sound: " + " ".join(failures), f"Way out: {', or '.join(ways)}."]
    folded = [textwrap.fill(one, WIDTH, break_long_words=False, break_on_hyphens=False) for one in said]
    return "\n".join((*folded, "", table))


def _round_down(rate: float) -> str:
    """Two figures, never above: what is advised is allowed.

    >>> _round_down(0.0349), _round_down(2.0), _round_down(1234.0)
    ('0.034', '2', '1200')
    """
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return format_number(math.floor(rate / unit * (1 + 1e-9)) * unit, 2)


def _call(rate: float | None, optimizer: str | torch.optim.Optimizer) -> str:
    settings = ""
    if isinstance(optimizer, str):
        settings = f", optimizer={optimizer!r}" if optimizer != "sgd" else ""
    elif momentum := optimizer.param_groups[0].get("momentum"):
        word = "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
        settings = f", optimizer={word!r}, momentum={momentum:g}"
    return f"hessinit.initialize_(model, loss, batch, lr={'…' if rate is None else f'{rate:g}'}{settings})"


def _explain_not_finite(refusal: ProblemError, rate: float | None) -> str:
    ways = [f"draw new weights: {_call(rate, 'sgd')}"]
    return _message([str(refusal)], ways, "There is no table: nothing can be measured there.")


def _norms(rows: list[LayerCurvature]) -> str:
    """‖H‖ of one, or the range of several."""
    by_size = sorted(rows, key=lambda row: (math.isnan(row.norm), row.norm))
    shown = [format_estimate(row.estimate) for row in (by_size[0], by_size[-1])]
    return f"‖H‖ = {shown[0]}" if len(rows) == 1 or shown[0] == shown[1] else f"‖H‖ = {shown[0]} … {shown[1]}"


def _name(report: CurvatureReport, row: LayerCurvature) -> str:
    return "the network" if row is report.network else call_layer(row.name)
