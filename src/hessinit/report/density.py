"""How the eigenvalues are spread: a spectral density, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Density:
    """An estimated spectral density: a quadrature rule, and the smooth curve drawn from it.

    `nodes` and `weights` are the rule (the weights add up to 1), `grid` and `values` the curve, `error` its
    estimated error. It took `probes` random vectors and `steps` Lanczos steps for each.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    grid: tuple[float, ...]
    values: tuple[float, ...]
    error: float
    probes: int
    steps: int

    def __post_init__(self) -> None:
        for one, other in (("nodes", "weights"), ("grid", "values")):
            lengths = len(getattr(self, one)), len(getattr(self, other))
            if lengths[0] != lengths[1]:
                raise ValueError(
                    f"{one} has {lengths[0]} numbers and {other} has {lengths[1]}; they come in pairs, "
                    "so pass as many of one as of the other."
                )
