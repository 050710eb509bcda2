"""What is measured only when asked: leading eigenvalues, trace, Frobenius norm, spectral density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hessinit.engines.ends import Effort
from hessinit.operators.base import LinearOperator
from hessinit.results.estimates import Density
from hessinit.spectra.density import spectral_density
from hessinit.spectra.eigenpairs import top_eigenpairs
from hessinit.spectra.frobenius import frobenius_norm
from hessinit.spectra.trace import hutch_plus_plus


@dataclass(frozen=True)
class Wanted:
    """Which of them."""

    top: int = 0
    trace: bool = False
    frobenius: bool = False
    density: bool = False

    @property
    def anything(self) -> bool:
        return bool(self.top or self.trace or self.frobenius or self.density)


def measure_extras(operator: LinearOperator, wanted: Wanted, effort: Effort) -> dict[str, Any]:
    """The wanted ones, under the names of `LayerCurvature`'s fields."""
    found: dict[str, Any] = {}
    if wanted.top:
        count = min(wanted.top, operator.shape[0])
        found["eigenvalues"] = top_eigenpairs(operator, count, **effort.options).values
    if wanted.trace:
        found["trace"] = hutch_plus_plus(operator, seed=effort.seed)
    if wanted.frobenius:
        found["frobenius"] = frobenius_norm(operator, seed=effort.seed)
    if wanted.density:
        curve = spectral_density(operator, seed=effort.seed)
        found["density"] = Density(
            nodes=curve.nodes,
            weights=curve.weights,
            grid=curve.grid,
            values=curve.values,
            error=curve.error,
            probes=curve.probes,
            steps=curve.steps,
        )
    return found
