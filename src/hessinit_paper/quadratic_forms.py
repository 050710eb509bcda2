"""Quadratic forms `gᵀHg` of the layers, exact and by the paper's Theorem 1, and their document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hessinit import reporting
from hessinit.reporting import ByName, NamedLayer, Result
from hessinit_paper.checks import check_choice


@dataclass(frozen=True, kw_only=True)
class QuadraticForm(NamedLayer):
    """The curvature of one layer along one or more directions `g`, one entry for each.

    `exact` is `gᵀHg`; `theorem1` is `vᵀ H_z v`, where `v` is the first-order change of the output
    along `g`; `length` is `‖g‖`.

    >>> numbers = {"exact": (3.0, 9.0), "theorem1": (2.0, 8.0), "length": (1.0, 2.0)}
    >>> form = QuadraticForm(name="fc1", shape=(5, 4), **numbers)
    >>> form.error_to_approximation, form.within(0.2), form.rayleigh
    ((0.5, 0.125), 0.5, (3.0, 2.25))
    """

    exact: tuple[float, ...]
    theorem1: tuple[float, ...]
    length: tuple[float, ...]

    @property
    def draws(self) -> int:
        return len(self.exact)

    @property
    def error_to_approximation(self) -> tuple[float, ...]:
        """`|exact − theorem1| / |theorem1|`, as in the paper's tables; 0 where both are 0."""
        return tuple(map(_relative_error, self.exact, self.theorem1, self.theorem1))

    @property
    def error_to_exact(self) -> tuple[float, ...]:
        """`|exact − theorem1| / |exact|`: the relative error of Theorem 1; 0 where both are 0."""
        return tuple(map(_relative_error, self.exact, self.theorem1, self.exact))

    @property
    def ratio(self) -> float:
        """The mean exact form over the mean of Theorem 1's; 1 when both are 0."""
        exact = math.fsum(self.exact)
        theorem1 = math.fsum(self.theorem1)
        if theorem1 == 0:
            return 1.0 if exact == 0 else exact * math.inf
        return exact / theorem1

    @property
    def rayleigh(self) -> tuple[float, ...]:
        """`gᵀHg / ‖g‖²`, between the layer's extreme eigenvalues; nan for `g = 0`."""
        pairs = zip(self.exact, self.length, strict=True)
        return tuple(exact / length / length if length else math.nan for exact, length in pairs)

    def within(self, rtol: float, relative_to: str = "approximation") -> float:
        """Return the fraction of directions with a relative error of at most `rtol`."""
        check_choice("relative_to", relative_to, ["approximation", "exact"])
        if not rtol >= 0:
            raise ValueError(f"rtol={rtol!r} must be a relative error, 0 or more, such as 0.5.")
        is_exact = relative_to == "exact"
        errors = self.error_to_exact if is_exact else self.error_to_approximation
        return sum(error <= rtol for error in errors) / len(errors)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuadraticForms(ByName[QuadraticForm], Result):
    """The quadratic forms of every layer, in the order the layers run; `print` shows a table.

    `directions` is "random", "gradient" or "given".

    >>> form = QuadraticForm(name="fc1", shape=(5, 4), exact=(3.0,), theorem1=(2.0,), length=(1.0,))
    >>> about = {"directions": "random", "draws": 1, "loss": 0.7, "examples": 32, "seed": 0}
    >>> forms = QuadraticForms(layers=(form,), **about)
    >>> forms["fc1"].ratio, len(forms)
    (1.5, 1)
    """

    KIND: ClassVar[str] = "hessinit quadratic forms"

    layers: tuple[QuadraticForm, ...]
    directions: str
    draws: int
    loss: float
    examples: int
    batches: int = 1
    seed: int
    seconds: float | None = None
    gradients: float | None = field(default=None, metadata={"later": True})  # unknown to old files
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def describe(self) -> reporting.Document:
        """Return the document that print and pages show: both forms, and how well they agree."""
        verdict = [_explain(self), _conclude(self)]
        cost = (
            f"{reporting.count(len(self), 'layer')}"
            f"{reporting.tell_time(self.seconds, self.gradients)} on "
            f"{reporting.count(self.examples, 'example')}{reporting.tell_batches(self.batches)}; "
            f"loss {reporting.format_number(self.loss)}."
        )
        table = reporting.Table(verdict[0], _columns(self))
        blocks: list[reporting.Block] = [table, reporting.Paragraph(cost, "small")]
        blocks += reporting.note_paragraphs(self.notes)
        return reporting.Document(
            title=reporting.title("Quadratic forms", self.versions),
            verdict=verdict,
            sections=[reporting.Section("Layers", blocks, "layers")],
        )


def _relative_error(exact: float, theorem1: float, yardstick: float) -> float:
    difference = abs(exact - theorem1)
    if yardstick:
        return difference / abs(yardstick)
    return math.inf if difference else 0.0


TOLERANCES = (0.5, 1.0, 1.5)  # the columns of the paper's Table 2


def _explain(forms: QuadraticForms) -> str:
    plural = "" if forms.draws == 1 else "s"
    text = (
        f"gᵀHg in each layer along {forms.draws} {forms.directions} direction{plural} g: exact, "
        "and by Theorem 1 (vᵀH_z v, v the first-order change of the output along g)"
    )
    if forms.draws > 1:
        text += (
            "; mean ± standard error. ≤0.5: the fraction of directions with at most that relative "
            "error"
        )
    return f"{text}."


def _columns(forms: QuadraticForms) -> list[reporting.Column]:
    columns = [
        reporting.name_column("layer", reporting.name_rows(forms)),
        reporting.name_column("weight", [str(form.shape) for form in forms], 4),
        reporting.Column("exact", [_write_mean(form.exact) for form in forms], 9),
        reporting.Column("Theorem 1", [_write_mean(form.theorem1) for form in forms], 9),
        reporting.Column("ratio", [reporting.format_ratio(form.ratio) for form in forms], 8),
    ]
    for rtol in TOLERANCES if forms.draws > 1 else ():
        shares = [f"{100 * form.within(rtol):.0f} %" for form in forms]
        columns.append(reporting.Column(f"≤{rtol:g}", shares, 7))
    return columns


def _write_mean(values: Sequence[float]) -> str:
    """Return the mean, with its standard error where there is one."""
    spread = reporting.Spread(tuple(values))
    mean = reporting.format_number(spread.mean)
    if math.isnan(spread.standard_error):
        return mean
    return f"{mean} ± {reporting.format_number(spread.standard_error, 2)}"


def _conclude(forms: QuadraticForms) -> str:
    if all(form.within(0.01) == 1 for form in forms):
        return "Theorem 1 and the exact form agree within 1 % on every layer."
    worst = min(forms, key=lambda form: (form.within(0.5), form.within(1.0), -_distance(form)))
    layer = reporting.call_layer(worst.name)
    if math.isnan(worst.ratio):
        return f"The numbers of {layer} overflow; pass dtype=torch.float64."
    return (
        f"The error of Theorem 1 is largest on {layer}: the exact form is within 50 % of it on "
        f"{100 * worst.within(0.5):.0f} % of the directions, and "
        f"{reporting.format_times(worst.ratio)} times its value on average."
    )


def _distance(form: QuadraticForm) -> float:
    """Return how far the ratio is from 1: 2 and 1/2 are equally far, a wrong sign is farther."""
    return abs(math.log(form.ratio)) if 0 < form.ratio < math.inf else math.inf
