"""Quadratic forms `gᵀHg` of the layers, exact and by the paper's Theorem 1: plain data, shown as a table."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hessinit.results.curvature_report import check_choice
from hessinit.results.result import ByName, Plain, read_number, read_numbers, to_plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


KIND = "hessinit quadratic forms"
SCHEMA = 1
YARDSTICKS = ("approximation", "exact")


@dataclass(frozen=True, kw_only=True)
class QuadraticForm:
    """The curvature of one layer along one or more directions `g`, one entry for each.

    `exact` is `gᵀHg`; `theorem1` is `vᵀ H_z v`, where `v` is the first-order change of the output along `g`;
    `length` is `‖g‖`.

    >>> numbers = {"exact": (3.0, 9.0), "theorem1": (2.0, 8.0), "length": (1.0, 2.0)}
    >>> form = QuadraticForm(name="fc1", shape=(5, 4), **numbers)
    >>> form.error_to_approximation, form.within(0.2), form.rayleigh
    ((0.5, 0.125), 0.5, (3.0, 2.25))
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    exact: tuple[float, ...]
    theorem1: tuple[float, ...]
    length: tuple[float, ...]

    @property
    def draws(self) -> int:
        """How many directions there are."""
        return len(self.exact)

    @property
    def error_to_approximation(self) -> tuple[float, ...]:
        """`|exact − theorem1| / |theorem1|`, as the paper's tables have it; 0 where both are 0."""
        return tuple(map(_error, self.exact, self.theorem1, self.theorem1))

    @property
    def error_to_exact(self) -> tuple[float, ...]:
        """`|exact − theorem1| / |exact|`: how wrong Theorem 1 is; 0 where both are 0."""
        return tuple(map(_error, self.exact, self.theorem1, self.exact))

    @property
    def ratio(self) -> float:
        """The mean exact form over the mean of Theorem 1's; 1 when both are 0."""
        return _divide(math.fsum(self.exact), math.fsum(self.theorem1), otherwise=1.0)

    @property
    def rayleigh(self) -> tuple[float, ...]:
        """`gᵀHg / ‖g‖²`, which lies between the layer's lowest and highest eigenvalue; nan for `g = 0`."""
        pairs = zip(self.exact, self.length, strict=True)
        return tuple(exact / length / length if length else math.nan for exact, length in pairs)

    def within(self, rtol: float, relative_to: str = "approximation") -> float:
        """The share of the directions on which the two differ by at most `rtol`, relative to either."""
        check_choice("relative_to", relative_to, YARDSTICKS)
        if not rtol >= 0:
            raise ValueError(f"rtol={rtol!r} must be a relative error, 0 or more, such as 0.5.")
        errors = self.error_to_approximation if relative_to == "approximation" else self.error_to_exact
        return sum(error <= rtol for error in errors) / len(errors)


@dataclass(frozen=True, kw_only=True)
class QuadraticForms(ByName[QuadraticForm]):
    """The quadratic forms of every layer, in the order the layers run; `print` shows them as a table.

    `directions` is "random", "gradient" or "given".

    >>> form = QuadraticForm(name="fc1", shape=(5, 4), exact=(3.0,), theorem1=(2.0,), length=(1.0,))
    >>> forms = QuadraticForms(layers=(form,), directions="random", draws=1, loss=0.7, examples=32, seed=0)
    >>> forms["fc1"].ratio, len(forms)
    (1.5, 1)
    """

    layers: tuple[QuadraticForm, ...]
    directions: str
    draws: int
    loss: float
    examples: int
    batches: int = 1
    seed: int
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Plain]:
        """The forms as what strict JSON can hold."""
        return {"kind": KIND, "schema": SCHEMA, **to_plain(self)}

    def to_json(self) -> str:
        """The forms as strict JSON, inf and nan as strings; `from_json` gives equal ones back."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> QuadraticForms:
        """Rebuild the forms from what `to_json` gave."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("kind") != KIND or data.get("schema") != SCHEMA:
            raise ValueError(
                f"this is not {KIND!r} of schema {SCHEMA}; give what QuadraticForms.to_json wrote."
            )
        return cls(
            layers=tuple(map(_read_form, data["layers"])),
            directions=str(data["directions"]),
            draws=int(data["draws"]),
            loss=read_number(data["loss"]),
            examples=int(data["examples"]),
            batches=int(data["batches"]),
            seed=int(data["seed"]),
            seconds=None if data["seconds"] is None else read_number(data["seconds"]),
            notes=tuple(map(str, data["notes"])),
            versions={str(key): str(value) for key, value in data["versions"].items()},
        )

    def __repr__(self) -> str:
        count = f"{self.draws} draw{'' if self.draws == 1 else 's'}"
        return f"<QuadraticForms of {len(self)} layers: directions={self.directions!r}, {count}>"

    def __str__(self) -> str:
        from hessinit.present.quadratic_table import render_forms

        return render_forms(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.quadratic_table import form_renderables

        yield from form_renderables(self, options.max_width)


def _read_form(data: Plain) -> QuadraticForm:
    return QuadraticForm(
        name=str(data["name"]),
        aliases=tuple(map(str, data["aliases"])),
        shape=tuple(map(int, data["shape"])),
        exact=read_numbers(data["exact"]),
        theorem1=read_numbers(data["theorem1"]),
        length=read_numbers(data["length"]),
    )


def _error(exact: float, theorem1: float, yardstick: float) -> float:
    return _divide(abs(exact - theorem1), abs(yardstick), otherwise=0.0)


def _divide(one: float, other: float, otherwise: float) -> float:
    """A quotient that knows ±x/0; `otherwise` is what 0/0 means."""
    if other:
        return one / other
    return otherwise if one == 0 else one * math.inf
