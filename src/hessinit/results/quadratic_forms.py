"""Quadratic forms `gᵀHg` of the layers: exact, and by the paper's Theorem 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from hessinit.errors import choose
from hessinit.results.result import LATER, ByName, NamedLayer, Result


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
        """`gᵀHg / ‖g‖²`, which lies between the layer's lowest and highest eigenvalue.

        Nan for `g = 0`.
        """
        pairs = zip(self.exact, self.length, strict=True)
        return tuple(exact / length / length if length else math.nan for exact, length in pairs)

    def within(self, rtol: float, relative_to: str = "approximation") -> float:
        """Return the fraction of directions on which the two differ by at most `rtol`, relative to
        either.
        """
        choose("relative_to", relative_to, ["approximation", "exact"])
        if not rtol >= 0:
            raise ValueError(f"rtol={rtol!r} must be a relative error, 0 or more, such as 0.5.")
        errors = (
            self.error_to_approximation if relative_to == "approximation" else self.error_to_exact
        )
        return sum(error <= rtol for error in errors) / len(errors)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuadraticForms(ByName[QuadraticForm], Result):
    """The quadratic forms of every layer, in the order the layers run.

    `print` shows them as a table.

    `directions` is "random", "gradient" or "given".

    >>> form = QuadraticForm(name="fc1", shape=(5, 4), exact=(3.0,), theorem1=(2.0,), length=(1.0,))
    >>> forms = QuadraticForms(layers=(form,), directions="random", draws=1, loss=0.7, examples=32, seed=0)
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
    gradients: float | None = field(default=None, metadata=LATER)
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


def _relative_error(exact: float, theorem1: float, yardstick: float) -> float:
    difference = abs(exact - theorem1)
    return difference / abs(yardstick) if yardstick else math.inf if difference else 0.0
