"""Estimates from random vectors: spectral density (quadrature), trace (Hutch++), Frobenius norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.krylov import (
    NOT_FINITE,
    Array,
    LanczosProcess,
    Operator,
    power_of_two_scale,
    probe_stream,
    products_with,
)
from hessinit.problem.checks import check_whole
from hessinit.results.curvature_report import Density, Estimate

# Half-widths are two standard errors: about 95 % for normal samples, a little less for a handful of
# them.
STANDARD_ERRORS = 2.0


def mean_and_error(samples: Sequence[float]) -> tuple[float, float]:
    """The mean of the samples and two standard errors of it, computed without overflow.

    The error of a single sample is unknown: inf.

    >>> mean_and_error([-1e300, 1e300])
    (0.0, 2e+300)
    """
    count = len(samples)
    largest = max(abs(sample) for sample in samples)
    if not all(math.isfinite(sample) for sample in samples):
        return math.inf, math.inf
    scaled = [sample / (largest or 1.0) for sample in samples]
    mean = math.fsum(scaled) / count
    if count == 1:
        return mean * largest, math.inf
    variance = math.fsum((sample - mean) ** 2 for sample in scaled) / (count - 1)
    return mean * largest, STANDARD_ERRORS * math.sqrt(variance / count) * largest


def _dense(operator: Operator) -> Tensor:
    identity = torch.eye(operator.shape[0], dtype=operator.dtype, device=operator.device)
    return (operator @ identity).detach()


@dataclass(frozen=True)
class _DensityGrid:
    """The grid of a spectral density, and the Gaussian that smooths it."""

    # The standard deviation of the Gaussian, as a fraction of the range of the spectrum.
    width: float = 0.02
    bins: int = 256
    # The grid reaches this many standard deviations beyond the outermost nodes; 6e-5 of a Gaussian
    # lies outside.
    margin: float = 4.0
    # A matrix of at most this size is written out where that takes no more products than the
    # probes.
    largest_dense: int = 1024


_GRID = _DensityGrid()
Quadrature = tuple[Array, Array]  # nodes and weights


def spectral_density(
    operator: Operator, *, probes: int = 8, steps: int = 30, seed: int = 0
) -> Density:
    """The spectral density, by stochastic Lanczos quadrature.

    Each of `probes` random vectors takes `steps` Lanczos steps. The mean of f over the eigenvalues
    is about Σ weights·f(nodes). `values` on `grid` are smoothed by a Gaussian; `error` is the area
    under two standard errors over the probes. Costs probes·steps products; where n is no larger,
    the density is exact, from n products. A point mass has nodes but no curve.

    >>> density = spectral_density(torch.diag(torch.linspace(0.0, 1.0, 500, dtype=torch.float64)))
    >>> mean = np.dot(density.nodes, density.weights)
    >>> abs(sum(density.weights) - 1) < 1e-12, bool(abs(mean - 0.5) < 0.05)
    (True, True)
    """
    check_whole("probes", probes, at_least=2)
    check_whole("steps", steps, at_least=2)
    rules = _quadrature_rules(operator, probes, steps, seed)
    if not rules:
        return Density((), (), (), (), math.inf, probes, steps)
    nodes = np.concatenate([rule_nodes for rule_nodes, _ in rules])
    weights = np.concatenate([rule_weights for _, rule_weights in rules]) / len(rules)
    order = np.argsort(nodes, kind="stable")
    grid, values, error = _smooth(rules, nodes[order], torch.finfo(operator.dtype).eps)
    return Density(
        tuple(nodes[order].tolist()),
        tuple(weights[order].tolist()),
        tuple(grid.tolist()),
        tuple(values.tolist()),
        error,
        len(rules),
        max(len(rule_nodes) for rule_nodes, _ in rules),
    )


def _smooth(rules: Sequence[Quadrature], nodes: Array, eps: float) -> tuple[Array, Array, float]:
    largest = max(abs(float(nodes[0])), abs(float(nodes[-1])))
    # Eigenvalues that differ by rounding only are one point mass, which has no curve.
    if largest == 0 or float(nodes[-1] - nodes[0]) <= 100 * eps * largest:
        return np.empty(0), np.empty(0), 0.0
    # In units of the largest, nothing overflows.
    low = float(nodes[0] / largest)
    high = float(nodes[-1] / largest)
    width = _GRID.width * (high - low)
    margin = _GRID.margin * width
    grid = np.linspace(low - margin, high + margin, _GRID.bins)
    sums = []
    for rule_nodes, weights in rules:
        kernels = np.exp(-0.5 * ((grid[:, None] - rule_nodes / largest) / width) ** 2)
        sums.append((weights * kernels).sum(axis=1))
    curves = np.stack(sums) / (width * math.sqrt(2 * math.pi))
    errors = np.zeros(_GRID.bins)
    if len(rules) > 1:
        errors = STANDARD_ERRORS * curves.std(axis=0, ddof=1) / math.sqrt(len(rules))
    return grid * largest, curves.mean(axis=0) / largest, float(errors.sum() * (grid[1] - grid[0]))


def _quadrature_rules(operator: Operator, probes: int, steps: int, seed: int) -> list[Quadrature]:
    """The rule of every probe (Golub and Welsch 1969); none when a product is not finite."""
    stream = probe_stream(operator, seed)
    size = stream.size
    if size <= min(probes * steps, _GRID.largest_dense):
        # In fp64: fp32 eigensolvers can fail to converge on matrices of huge range.
        matrix = _dense(operator).double().cpu().numpy()
        if not np.isfinite(matrix).all():
            return []
        return [(np.linalg.eigvalsh((matrix + matrix.T) / 2), np.full(size, 1 / size))]
    rules = []
    for _ in range(probes):
        process = LanczosProcess(products_with([operator]), stream.draw().unsqueeze(0))
        while process.steps < steps and not process.exhausted[0]:
            process.step()
        (spectrum,) = process.ritz()
        if math.isinf(spectrum.scale):
            return []
        weights = spectrum.vectors[0] ** 2
        rules.append((spectrum.values * spectrum.scale, weights / weights.sum()))
    return rules


def hutch_plus_plus(operator: Operator, *, products: int = 48, seed: int = 0) -> Estimate:
    """The trace: its large part exactly, only the rest by probes (Meyer et al. 2021, algorithm 1).

    Unbiased; for decaying spectra the error, two standard errors of the sampled rest, shrinks as
    1/products. Costs `products` products and products/3 vectors of memory; exact when `products`
    reaches n.

    >>> factor = torch.arange(600.0, dtype=torch.float64).reshape(300, 2)   # rank 2
    >>> matrix = factor @ factor.T
    >>> estimate = hutch_plus_plus(matrix, products=9)
    >>> bool(abs(estimate.value / matrix.trace() - 1) < 1e-12), estimate.products
    (True, 9)
    """
    stream = probe_stream(operator, seed, "rademacher")
    size = stream.size
    sketched = products // 3
    check_whole("products", products, at_least=6)
    if products >= size:
        diagonal = _dense(operator).diagonal().double().tolist()
        if not all(math.isfinite(entry) for entry in diagonal):
            return Estimate(math.inf, math.inf, False, NOT_FINITE, size)
        error = 8 * torch.finfo(operator.dtype).eps * sum(abs(entry) for entry in diagonal)
        reason = "exact up to rounding: the diagonal was read off"
        return Estimate(math.fsum(diagonal), error, True, reason, size)
    image = (operator @ stream.draw_block(sketched)).detach()
    scale = power_of_two_scale(image)
    if math.isinf(scale):
        return Estimate(math.inf, math.inf, False, NOT_FINITE, sketched)
    if scale == 0:
        return Estimate(0.0, 0.0, True, "the operator is zero on random vectors", sketched)
    basis = torch.linalg.qr(image / scale).Q
    large = float((basis * (operator @ basis).detach()).sum(dtype=torch.float64))
    probes = stream.draw_block(products - 2 * sketched)
    probes -= basis @ (basis.T @ probes)
    samples = (probes * (operator @ probes).detach()).sum(dim=0, dtype=torch.float64).tolist()
    sampled, error = mean_and_error(samples)
    value = large + sampled
    error += 8 * torch.finfo(operator.dtype).eps * max(abs(sample) for sample in (large, *samples))
    if not math.isfinite(value):
        return Estimate(math.inf, math.inf, False, NOT_FINITE, products)
    sampling = f"the rest from {len(samples)} probes, error two standard errors"
    reason = f"{sketched} directions exactly, {sampling}"
    return Estimate(value, error, True, reason, products)


def frobenius_norm(operator: Operator, *, products: int = 64, seed: int = 0) -> Estimate:
    """‖A‖_F, the root of the sum of the squared eigenvalues.

    From ‖A‖_F² = E‖A g‖² over Rademacher probes g. The square is unbiased; `error` is two standard
    errors, carried through the root. Costs `products` products and one vector of memory; exact when
    `products` reaches n.

    >>> frobenius_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).value
    5.0
    """
    stream = probe_stream(operator, seed, "rademacher")
    check_whole("products", products, at_least=2)
    is_exact = products >= stream.size
    images = [_dense(operator)] if is_exact else (operator @ stream.draw() for _ in range(products))
    # Squares of 1e-25 vanish in fp32: all is in units of a power of two near the first nonzero
    # product.
    scale = 0.0
    squares: list[Tensor] = []
    for image in images:
        scale = scale or power_of_two_scale(image)
        if math.isinf(scale):
            return Estimate(math.inf, math.inf, False, NOT_FINITE, len(squares) + 1)
        squares.append((image.detach() / (scale or 1.0)).double().square().sum())
    samples = torch.stack(squares).tolist()
    spent = stream.size if is_exact else products
    if not all(math.isfinite(sample) for sample in samples):
        return Estimate(math.inf, math.inf, False, NOT_FINITE, len(squares))
    if scale == 0:
        vectors = "" if is_exact else " on random vectors"
        return Estimate(0.0, 0.0, True, f"the operator is zero{vectors}", spent)
    square = samples[0]
    square_error = 0.0
    reason = "exact up to rounding: all columns were taken"
    if not is_exact:
        square, square_error = mean_and_error(samples)
        reason = f"root mean square of {products} probes, error two standard errors"
    value = math.sqrt(square)
    error = square_error / (2 * value) + 8 * torch.finfo(operator.dtype).eps * value
    return Estimate(value * scale, error * scale, True, reason, spent)
