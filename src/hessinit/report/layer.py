"""The curvature of one layer: its numbers, how far to trust them, and what they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches

from hessinit.estimate import Estimate
from hessinit.report.density import Density
from hessinit.report.diagnostics import Diagnostics
from hessinit.report.json_form import to_plain
from hessinit.report.products import JacobianBounds
from hessinit.report.spread import Spread
from hessinit.report.verdict import Verdict, judge

MATRICES = ("gauss-newton", "hessian")
# The reason that stands in place of a measurement of the network where none was asked for.
ONLY_BOUNDED = "network=False: only bounded, from below by the sharpest layer"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCurvature:
    """The curvature of the loss in one weight (or, as `report.network`, in all of them together).

    `top` and `bottom` are the largest and smallest eigenvalue, signed, of the matrix that `curvature` names;
    `approximation` is the Gauss-Newton norm beside an exact one; `aliases` are a tied weight's other names.
    `jacobians` and `diagnostics` are there when they were asked for.

    >>> top, bottom = Estimate(3.0, 0.001, True, "converged", 9), Estimate(-4.0, 0.001, True, "converged", 0)
    >>> layer = LayerCurvature(name="fc1", shape=(10, 4), curvature="hessian", top=top, bottom=bottom)
    >>> layer.norm, layer.top_eigenvalue, layer.products, layer.verdict
    (4.0, 3.0, 9, 'ok')
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    curvature: str
    top: Estimate
    bottom: Estimate
    approximation: Estimate | None = None
    trace: Estimate | None = None
    frobenius: Estimate | None = None
    eigenvalues: tuple[Estimate, ...] = ()
    density: Density | None = None
    spread: Spread | None = None
    jacobians: JacobianBounds | None = None
    diagnostics: Diagnostics | None = None
    engine: str = ""
    engine_reason: str = ""

    def __post_init__(self) -> None:
        check_choice("curvature", self.curvature, MATRICES)

    # Compared in plain form, where nan is the text "nan": a report with a nan in it equals its own copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerCurvature):
            return NotImplemented
        return bool(to_plain(self) == to_plain(other))

    def __hash__(self) -> int:
        return hash((self.name, self.aliases, self.shape, self.curvature))

    @property
    def estimate(self) -> Estimate:
        """The norm: the end of the spectrum that is larger in absolute value.

        Both ends are needed to know it, so it costs the products of both, and an end that is still uncertain
        leaves the norm uncertain if it could be the larger one.
        """
        ends = sorted((self.top, self.bottom), key=lambda end: _nan_last(abs(end.value)))
        lesser, greater = ends
        norm = abs(greater.value)
        products = self.top.products + self.bottom.products
        reach = abs(lesser.value) + lesser.error
        if not lesser.converged and not reach <= norm:
            error = max(greater.error, reach - norm) if math.isfinite(norm) else greater.error
            blamed = lesser if greater.converged else greater
            return Estimate(norm, error, False, blamed.reason, products)
        return replace(greater, value=norm, products=products)

    @property
    def norm(self) -> float:
        """‖H‖: the largest absolute eigenvalue."""
        return self.estimate.value

    @property
    def error(self) -> float:
        """The absolute error of the norm."""
        return self.estimate.error

    @property
    def converged(self) -> bool:
        """Whether the norm reached the tolerance."""
        return self.estimate.converged

    @property
    def reason(self) -> str:
        """Why the computation of the norm stopped, and what to try if it did not converge."""
        return self.estimate.reason

    @property
    def products(self) -> int:
        """Matrix-vector products spent on the norm."""
        return self.estimate.products

    @property
    def top_eigenvalue(self) -> float:
        """The largest eigenvalue, signed."""
        return self.top.value

    @property
    def bottom_eigenvalue(self) -> float:
        """The smallest eigenvalue, signed."""
        return self.bottom.value

    @property
    def indefinite(self) -> bool:
        """Whether the loss curves down by more than the error and by more than 1 % of the norm."""
        return self.bottom.value < -max(self.bottom.error, 0.01 * self.norm)

    @property
    def gap(self) -> float | None:
        """The exact norm over the Gauss-Newton one; None without the latter, 1 when both are 0."""
        if self.approximation is None:
            return None
        exact, approximate = self.norm, abs(self.approximation.value)
        if approximate == 0:
            return math.nan if math.isnan(exact) else 1.0 if exact == 0 else math.inf
        return exact / approximate

    @property
    def verdict(self) -> Verdict:
        """One of vanishing, flat, ok, sharp, exploding; `report/verdict.py` says where each begins."""
        return judge(self.norm)

    @property
    def parameters(self) -> int:
        """How many numbers the weight holds."""
        return math.prod(self.shape)


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    near = get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what}={value!r} is unknown; choose from {', '.join(map(repr, choices))}.{hint}")


def _nan_last(number: float) -> tuple[bool, float]:
    return math.isnan(number), number
