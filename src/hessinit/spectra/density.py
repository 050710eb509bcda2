"""How the eigenvalues are spread: stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hessinit.results.estimates import Estimate
from hessinit.spectra.dense import dense_columns
from hessinit.spectra.krylov import Array, LanczosProcess
from hessinit.spectra.probes import ProbeStream
from hessinit.spectra.protocol import Operator, operator_size, require_at_least
from hessinit.spectra.sampling import mean_and_error
from hessinit.spectra.smoothing import default_width, smooth

Axis = Literal["linear", "log"]

# Above this size writing the matrix out is refused even where it would take fewer products: n² numbers in
# fp64.
_LARGEST_DENSE = 1024
_EXACT = "exact up to rounding: the matrix was written out"


@dataclass(frozen=True)
class Density:
    """The share of eigenvalues near each point.

    `nodes` (ascending) and `weights` (which sum to 1) are the quadrature: the mean of f over the eigenvalues
    is about Σ weights·f(nodes), exactly for polynomials of low degree up to the choice of probes. `values` is
    that quadrature smoothed by a Gaussian of standard deviation `width`, on `grid`; it integrates to 1, and
    `errors` are two standard errors over the probes. On the log axis, grid and width are in log10|λ| and
    values are per decade. `mean` estimates trace/n. `error` is the area under `errors`, of a total area of 1.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    grid: tuple[float, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]
    width: float
    axis: Axis
    mean: Estimate
    error: float
    converged: bool
    reason: str
    probes: int
    steps: int
    products: int


def spectral_density(
    operator: Operator,
    *,
    probes: int = 8,
    steps: int = 30,
    seed: int = 0,
    bins: int = 256,
    width: float | None = None,
    axis: Axis = "linear",
    tolerance: float = 0.2,
) -> Density:
    """The spectral density from `steps` Lanczos steps with each of `probes` gaussian vectors.

    The ends of the spectrum are sharp, the bulk is resolved to about its width/`steps`; the error shrinks as
    1/√(probes·n). Costs probes·steps products and one vector of memory per step. Where n is no larger than
    that, the matrix is written out with n products and the density is exact. `width` is the kernel's standard
    deviation as a share of the whole range on the axis (default 1/50). On a linear axis a spectrum that spans
    decades shows its small eigenvalues as one peak at 0: axis="log" takes log10|λ| instead, zeros standing at
    the rounding level of the norm, and `nodes` and `weights` are the unsmoothed numbers in either case. A
    multiple of the identity or the zero operator is a point mass, which has nodes but no curve: grid, values
    and errors are empty. `converged` means that all products were finite and `error` is within `tolerance`.

    >>> density = spectral_density(torch.diag(torch.linspace(0.0, 1.0, 500, dtype=torch.float64)))
    >>> abs(sum(density.weights) - 1) < 1e-12, density.products
    (True, 240)
    >>> abs(density.mean.value - 0.5) < density.mean.error
    True
    """
    size = operator_size(operator)
    if axis not in ("linear", "log"):
        raise ValueError(f"axis={axis!r} is unknown; choose from 'linear', 'log'.")
    require_at_least("probes", probes, 2, "one probe has no spread to read an error from")
    require_at_least("steps", steps, 2, "one step sees only the mean eigenvalue")
    require_at_least("bins", bins, 16, "a curve needs more points")
    share = default_width(bins) if width is None else width
    if not 2 / bins <= share <= 1:
        raise ValueError(
            f"width={share:g} does not fit bins={bins}: it is a share of the range, "
            f"between 2/bins = {2 / bins:.2g} and 1. Pass a larger width or more bins."
        )
    dense = size <= min(probes * steps, _LARGEST_DENSE)
    rules = _dense_rule(operator) if dense else _lanczos_rules(operator, probes, steps, seed)
    products = size if dense else sum(len(nodes) for nodes, _ in rules)
    if not rules:
        return _not_finite(axis, probes, steps)
    floor = torch.finfo(operator.dtype).eps
    curve = smooth(rules, share=share, bins=bins, log=axis == "log", floor=floor)
    nodes = np.concatenate([rule_nodes for rule_nodes, _ in rules])
    weights = np.concatenate([rule_weights for _, rule_weights in rules]) / len(rules)
    order = np.argsort(nodes, kind="stable")
    mean = _mean(rules, products, 8 * floor * float(np.abs(nodes).max()))
    converged = curve.area_of_errors <= tolerance
    reason = f"{len(rules)} probes differ by {curve.area_of_errors:.0e} of the area, tolerance={tolerance:g}"
    if dense:
        reason = _EXACT
    elif not converged:
        reason += "; raise probes, width or tolerance"
    return Density(
        nodes=tuple(nodes[order].tolist()),
        weights=tuple(weights[order].tolist()),
        grid=tuple(curve.grid.tolist()),
        values=tuple(curve.values.tolist()),
        errors=tuple(curve.errors.tolist()),
        width=curve.width,
        axis=axis,
        mean=mean,
        error=curve.area_of_errors,
        converged=converged,
        reason=reason,
        probes=len(rules),
        steps=max(len(rule_nodes) for rule_nodes, _ in rules),
        products=products,
    )


def _lanczos_rules(operator: Operator, probes: int, steps: int, seed: int) -> list[tuple[Array, Array]]:
    """Nodes and weights for every probe (Golub and Welsch 1969); none when a product is not finite."""
    size = operator_size(operator)
    stream = ProbeStream(size, seed=seed, dtype=operator.dtype, device=operator.device)
    rules = []
    for _ in range(probes):
        process = LanczosProcess(operator, stream.draw())
        while not process.exhausted and process.steps < steps:
            process.step()
            if not process.finite:
                return []
        values, vectors = process.ritz()
        weights = vectors[0] ** 2
        rules.append((values * process.scale, weights / weights.sum()))
    return rules


def _dense_rule(operator: Operator) -> list[tuple[Array, Array]]:
    # In fp64: fp32 eigensolvers can fail to converge on matrices of huge range.
    matrix = torch.cat([block.double().cpu() for block in dense_columns(operator)], dim=1).numpy()
    if not np.isfinite(matrix).all():
        return []
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    return [(values, np.full(len(values), 1 / len(values)))]


def _mean(rules: list[tuple[Array, Array]], products: int, rounding: float) -> Estimate:
    samples = [float(nodes @ weights) for nodes, weights in rules]
    if len(rules) == 1:
        return Estimate(samples[0], rounding, True, _EXACT, products)
    value, error = mean_and_error(samples)
    reason = f"mean of {len(rules)} probes, error two standard errors"
    return Estimate(value, error + rounding, True, reason, products)


def _not_finite(axis: Axis, probes: int, steps: int) -> Density:
    reason = "a product was not finite (inf or nan); look for inf or nan in the weights and inputs"
    mean = Estimate(math.inf, math.inf, False, reason, 0)
    return Density((), (), (), (), (), 0.0, axis, mean, math.inf, False, reason, probes, steps, 0)
