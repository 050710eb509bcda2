"""What the diagnostics mean: one or two sentences, the gravest first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hessinit.present.diagnostics_columns import diagnosed_layers, format_share
from hessinit.present.words import begin_sentence, call_layer, format_times, join_names
from hessinit.results.curvature_report import CurvatureReport, Diagnostics

# A unit that is dead at the start may never learn: one in ten is worth a word. Saturated entries recover,
# slowly: one in four. A hundredfold over the depth is beyond what any scheme means to do.
DEAD_FROM = 0.1
SATURATED_FROM = 0.25
UNEVEN_FROM = 100.0
MOST_SENTENCES = 2

Rows = list[tuple[str, Diagnostics]]


def conclude_diagnostics(report: CurvatureReport) -> str:
    """Say what is wrong with activations and gradients, if anything is; "" without diagnostics.

    >>> from hessinit.present.example import example_report
    >>> conclude_diagnostics(example_report())
    ''
    """
    rows = [(call_layer(name), row) for name, row in diagnosed_layers(report)]
    if all(row.activation_std is None for _, row in rows):
        return ""
    found = [*_silent(rows), *_dead(rows), *_saturated(rows), *_uneven(rows)][:MOST_SENTENCES]
    if found:
        return " ".join(map(begin_sentence, found))
    judged = [
        f"no layer has {what}"
        for what, shares in (
            (f"{format_share(DEAD_FROM)} dead units", [row.dead for _, row in rows]),
            (f"{format_share(SATURATED_FROM)} saturated entries", [row.saturated for _, row in rows]),
        )
        if any(share is not None for share in shares)
    ]
    spread = "behind activations, sizes stay within a factor of 100 over the depth"
    sentence = "; ".join([*judged, spread])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _silent(rows: Rows) -> Iterator[str]:
    silent = [name for name, row in rows if row.weight_gradient_norm == 0]
    if silent:
        verb, pronoun = ("gets", "it") if len(silent) == 1 else ("get", "they")
        yield f"{join_names(silent)} {verb} no gradient: {pronoun} cannot learn from this batch."


def _dead(rows: Rows) -> Iterator[str]:
    shares = [(row.dead, name, row.activation) for name, row in rows if row.dead is not None]
    share, name, activation = max(shares, default=(0.0, "", ""), key=lambda one: one[0])
    if share >= DEAD_FROM:
        units = "ReLUs" if activation == "relu" else "units"
        others = _and_others(sum(other >= DEAD_FROM for other, _, _ in shares) - 1, DEAD_FROM)
        yield f"{name}: {format_share(share)} of its {units} are dead on this batch{others}."


def _saturated(rows: Rows) -> Iterator[str]:
    shares = [(row.saturated, name, row.activation) for name, row in rows if row.saturated is not None]
    share, name, activation = max(shares, default=(0.0, "", ""), key=lambda one: one[0])
    if share >= SATURATED_FROM:
        others = _and_others(sum(other >= SATURATED_FROM for other, _, _ in shares) - 1, SATURATED_FROM)
        yield f"{name}: {format_share(share)} of its {activation} entries are saturated{others}."


def _and_others(many: int, share: float) -> str:
    if many <= 0:
        return ""
    return f"; {format_share(share)} or more in {many} other layer{'' if many == 1 else 's'}"


def _uneven(rows: Rows) -> Iterator[str]:
    """Layers without an activation give on another kind of number (logits, a residual), and stay out."""
    inner = [(name, row) for name, row in rows if row.activation]
    for what, sizes in (
        ("activations", [(row.activation_std, name) for name, row in inner]),
        ("gradients", [(row.gradient_std, name) for name, row in inner]),
    ):
        finite = [(size, name) for size, name in sizes if size is not None and 0 < size < math.inf]
        if len(finite) < 2:
            continue
        (least, where_least), (most, where_most) = min(finite), max(finite)
        if most / least >= UNEVEN_FROM:
            times = format_times(most / least)
            yield f"{where_most}'s {what} are {times} times as large as {where_least}'s."
