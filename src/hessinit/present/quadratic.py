"""Describe quadratic forms gᵀHg: exact, and by the paper's Theorem 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.estimates import Spread
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms

ERRORS = (0.5, 1.0, 1.5)  # the columns of the paper's Table 2
GOOD = 0.01  # "agree": within 1 %


def describe_forms(forms: QuadraticForms) -> doc.Document:
    cost = (
        f"{w.count(len(forms), 'layer')}{w.tell_time(forms.seconds)} on {w.count(forms.examples, 'example')}"
        f"{w.tell_batches(forms.batches)}; loss {w.format_number(forms.loss)}."
    )
    table, explained = doc.Table(_explain(forms), _columns(forms)), [_explain(forms), _conclude(forms)]
    blocks: list[doc.Block] = [table, doc.Paragraph(cost, "small"), *w.note_paragraphs(forms.notes)]
    section = doc.Section("Layers", blocks, "layers")
    return doc.Document(title="Quadratic forms", verdict=explained, sections=[section])


def _columns(forms: QuadraticForms) -> list[doc.Column]:
    columns = [
        w.name_column("layer", w.name_rows(forms)),
        w.name_column("weight", [str(row.shape) for row in forms], 4),
        doc.Column("exact", [_write_mean(row.exact) for row in forms], 9),
        doc.Column("Theorem 1", [_write_mean(row.theorem1) for row in forms], 9),
        doc.Column("ratio", [w.format_ratio(row.ratio) for row in forms], 8),
    ]
    for rtol in ERRORS if forms.draws > 1 else ():
        columns.append(doc.Column(f"≤{rtol:g}", [f"{100 * row.within(rtol):.0f} %" for row in forms], 7))
    return columns


def _write_mean(values: Sequence[float]) -> str:
    spread = Spread(tuple(values))
    error, mean = spread.standard_error, w.format_number(spread.mean)
    return mean if math.isnan(error) else f"{mean} ± {w.format_number(error, 2)}"


def _explain(forms: QuadraticForms) -> str:
    along = f"{forms.draws} {forms.directions} direction{'' if forms.draws == 1 else 's'} g"
    meaning = "exact, and by Theorem 1 (vᵀH_z v, v the first-order change of the output along g)"
    several = "; mean ± standard error. ≤0.5: the fraction of directions with at most that relative error"
    return f"gᵀHg in each layer along {along}: {meaning}{several if forms.draws > 1 else ''}."


def _conclude(forms: QuadraticForms) -> str:
    if all(row.within(GOOD) == 1 for row in forms):
        return "Theorem 1 and the exact form agree within 1 % on every layer."
    row = min(forms, key=lambda row: (row.within(ERRORS[0]), row.within(ERRORS[1]), -_distance(row)))
    if math.isnan(row.ratio):
        return f"The numbers of {w.call_layer(row.name)} overflow; pass dtype=torch.float64."
    within = f"within 50 % of it on {100 * row.within(ERRORS[0]):.0f} % of the directions"
    worst = f"The error of Theorem 1 is largest on {w.call_layer(row.name)}: the exact form is"
    return f"{worst} {within}, and {w.format_times(row.ratio)} times its value on average."


def _distance(row: QuadraticForm) -> float:
    """Return how far the ratio is from 1: 2 and 1/2 are equally far, a wrong sign is farther."""
    return abs(math.log(row.ratio)) if 0 < row.ratio < math.inf else math.inf
