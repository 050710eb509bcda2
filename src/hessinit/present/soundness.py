"""The sentences of `assert_sound`: what is wrong with an initialization, and what to do about it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from hessinit.present.words import (
    call_layer,
    format_estimate,
    format_number,
    format_times,
    join_names,
    unstopped,
)
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Estimate

WIDTH = 100
NO_TABLE = "There is no table: nothing can be measured."


@dataclass(frozen=True)
class JudgedRate:
    """A learning rate, the stable one of its optimizer, and the norm that sets it."""

    optimizer: str
    lr: float | None
    stable: float
    norm: Estimate
    is_adaptive: bool


def write_failure(failures: Sequence[str], ways: Sequence[str], table: str) -> str:
    """Return the message: what is wrong, the ways out, and the table."""
    texts = ["not sound: " + " ".join(failures), f"Way out: {', or '.join(ways)}."]
    folded = [textwrap.fill(one, WIDTH, break_long_words=False, break_on_hyphens=False) for one in texts]
    return "\n".join((*folded, "", table))


def name_unconverged(report: CurvatureReport, rate: JudgedRate | None, with_network: bool) -> list[str]:
    rows = [*report.layers, *([report.network] if with_network else [])]
    found = [
        (_name(report, row), row.reason) for row in rows if not row.converged and math.isfinite(row.norm)
    ]
    if not found and rate is not None and not rate.norm.converged and math.isfinite(rate.norm.value):
        found = [("the network", rate.norm.reason)]
    if not found:
        return []
    names = join_names([name for name, _ in found])
    return [f"{names} did not reach tolerance={report.tolerance:g} ({unstopped(found[0][1])})."]


def name_vanishing(report: CurvatureReport, smallest: float) -> list[str]:
    small = [row for row in report.layers if 0 < row.norm < smallest]
    if not small:
        return []
    verb, change = ("vanishes", "changes") if len(small) == 1 else ("vanish", "change")
    names = join_names([call_layer(row.name) for row in small])
    return [f"{names} {verb} ({_norms(small)} is below smallest={smallest:g}) and hardly {change} the loss."]


def name_without_curvature(report: CurvatureReport, smallest: float, zeros: Sequence[str]) -> list[str]:
    """Name layers with ‖H‖ = 0 exactly; `zeros` are weights that hold nothing but zeros."""
    found = [row for row in report.layers if row.norm == 0 and smallest > 0]
    if not found:
        return []
    names = join_names([call_layer(row.name) for row in found])
    verb, it = ("does", "it") if len(found) == 1 else ("do", "them")
    if zeros:
        be, weight = ("is", "the zero weight") if len(zeros) == 1 else ("are", "the zero weights")
        asked = (
            f"{be} {weight} of {join_names([call_layer(name) for name in zeros])} after {it} intended, as in "
            "residual branches or LoRA?"
        )
    else:
        asked = f"does the forward use {it}, or are the units around {it} dead?"
    return [f"{names} {verb} not change the loss at all (‖H‖ = 0): {asked}"]


def name_exploding(report: CurvatureReport, largest: float) -> list[str]:
    # nan is not at most anything, and no rate allows inf.
    rows = (*report.layers, report.network)
    large = [row for row in rows if not row.norm <= largest or math.isinf(row.norm)]
    if not large:
        return []
    verb = "explodes" if len(large) == 1 else "explode"
    most = "is not finite" if math.isinf(largest) else f"is above largest={largest:g}"
    return [f"{join_names([_name(report, row) for row in large])} {verb}: {_norms(large)} {most}."]


def name_too_fast(rate: JudgedRate, times_stable: float) -> list[str]:
    lr, stable = rate.lr, rate.stable
    if lr is None or lr <= times_stable * stable:
        return []
    times = f"{format_times(lr / stable)} times" if stable > 0 else "above"
    if times == f"{format_times(times_stable)} times":
        times = f"just above {times}"
    limit = f"the stable learning rate of {rate.optimizer}, {format_number(stable)}"
    return [f"lr={lr:g} is {times} {limit}; at most times_stable={times_stable:g} times it is allowed."]


def round_down(rate: float) -> str:
    """Write two figures, never above: what is advised is allowed.

    >>> round_down(0.0349), round_down(2.0), round_down(1234.0)
    ('0.034', '2', '1200')
    """
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return format_number(math.floor(rate / unit * (1 + 1e-9)) * unit, 2)


def _norms(rows: list[LayerCurvature]) -> str:
    """‖H‖ of one, or the range of several."""
    by_size = sorted(rows, key=lambda row: (math.isnan(row.norm), row.norm))
    low, high = (format_estimate(row.estimate) for row in (by_size[0], by_size[-1]))
    return f"‖H‖ = {low}" if low == high else f"‖H‖ = {low} … {high}"


def _name(report: CurvatureReport, row: LayerCurvature) -> str:
    return "the network" if row is report.network else call_layer(row.name)
