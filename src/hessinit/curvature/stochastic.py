"""From independent samples to a mean with its error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.krylov import Array, LanczosProcess
from hessinit.curvature.probes import (
    Operator,
    ProbeStream,
    operator_size,
    power_of_two_scale,
    require_at_least,
    require_tolerance,
)
from hessinit.results.estimates import Estimate

# Half-widths are two standard errors: about 95 % for normal samples, a little less for a handful of them.
STANDARD_ERRORS = 2.0


def mean_and_error(samples: Sequence[float]) -> tuple[float, float]:
    """The mean and two standard errors of it, without overflow; a single sample has an unknown error, inf.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 2.0)
    >>> mean_and_error([-1e300, 1e300])
    (0.0, 2e+300)
    """
    count = len(samples)
    if not all(math.isfinite(sample) for sample in samples):
        return math.inf, math.inf
    largest = max(abs(sample) for sample in samples)
    if largest == 0:
        return 0.0, 0.0 if count > 1 else math.inf
    scaled = [sample / largest for sample in samples]
    mean = math.fsum(scaled) / count
    if count == 1:
        return mean * largest, math.inf
    variance = math.fsum((sample - mean) ** 2 for sample in scaled) / (count - 1)
    return mean * largest, STANDARD_ERRORS * math.sqrt(variance / count) * largest


_COLUMNS_AT_ONCE = 64


def dense_columns(operator: Operator) -> Iterator[Tensor]:
    """The columns of the operator in order, in blocks (n, up to 64); n products in all.

    >>> torch.cat(list(dense_columns(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))), dim=1).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    size = operator_size(operator)
    for first in range(0, size, _COLUMNS_AT_ONCE):
        count = min(_COLUMNS_AT_ONCE, size - first)
        block = torch.zeros((size, count), dtype=operator.dtype, device=operator.device)
        block[first : first + count].fill_diagonal_(1)
        yield (operator @ block).detach()


# The grid reaches this many kernel widths beyond the outermost points; 6e-5 of a Gaussian lies outside.
_MARGIN = 4.0


@dataclass(frozen=True)
class Curve:
    """Values on a grid, two standard errors of each, and the area under the errors."""

    grid: Array
    values: Array
    errors: Array
    width: float
    area_of_errors: float


def default_width(bins: int) -> float:
    """A fiftieth of the range, or what the grid can show.

    >>> default_width(256), default_width(20)
    (0.02, 0.1)
    """
    return max(0.02, 2 / bins)


def smooth(
    rules: Sequence[tuple[Array, Array]], *, share: float, bins: int, log: bool, floor: float
) -> Curve:
    """The mean over rules of Σ weight · Gaussian around node, of standard deviation share·range.

    With `log` the nodes are log10|node|, those below `floor` times the largest standing at that level. Points
    that all coincide have no curve.

    >>> rule = (np.array([0.0, 1.0]), np.array([0.5, 0.5]))
    >>> curve = smooth([rule], share=0.05, bins=64, log=False, floor=1e-16)
    >>> round(float(curve.values.sum() * (curve.grid[1] - curve.grid[0])), 3)
    1.0
    """
    points = np.concatenate([nodes for nodes, _ in rules])
    largest = float(np.abs(points).max())
    empty = np.empty(0)
    # Eigenvalues that differ by rounding only are one point mass.
    if largest == 0 or float(points.max() - points.min()) <= 100 * floor * largest:
        return Curve(empty, empty, empty, 0.0, 0.0)

    def place(nodes: Array) -> Array:
        # In units of the largest, so that nothing overflows on the way.
        relative: Array = nodes / largest
        return np.log10(np.maximum(np.abs(relative), floor)) if log else relative

    placed = [place(nodes) for nodes, _ in rules]
    low, high = min(float(nodes.min()) for nodes in placed), max(float(nodes.max()) for nodes in placed)
    if high == low:  # ±λ on a log axis
        return Curve(empty, empty, empty, 0.0, 0.0)
    width = share * (high - low)
    grid = np.linspace(low - _MARGIN * width, high + _MARGIN * width, bins)
    curves = np.stack(
        [
            (weights * np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2)).sum(axis=1)
            for nodes, (_, weights) in zip(placed, rules, strict=True)
        ]
    ) / (width * math.sqrt(2 * math.pi))
    values = curves.mean(axis=0)
    errors = np.zeros(bins)
    if len(rules) > 1:
        errors = STANDARD_ERRORS * curves.std(axis=0, ddof=1) / math.sqrt(len(rules))
    area = float(errors.sum() * (grid[1] - grid[0]))
    if log:
        return Curve(grid + math.log10(largest), values, errors, width, area)
    return Curve(grid * largest, values / largest, errors / largest, width * largest, area)


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


# The spread of fewer probes is too uncertain to stop by; also how often a result is fetched from the device.
_PROBES_PER_CHECK = 8
_NOT_FINITE = "a product was not finite (inf or nan); look for inf or nan in the weights and inputs"


def hutchinson(
    operator: Operator, *, probes: int = 64, tolerance: float | None = None, seed: int = 0
) -> Estimate:
    """The trace as the mean of gᵀAg over Rademacher probes g (Hutchinson 1989).

    Unbiased; `error` is two standard errors and shrinks as 1/√probes; costs at most `probes` products and one
    vector of memory. With a `tolerance` it stops as soon as the error is below tolerance·|trace|. When
    `probes` reaches n, the diagonal is read off exactly with n products instead.

    >>> matrix = torch.diag(torch.arange(1.0, 101.0))   # Rademacher probes are exact on a diagonal matrix
    >>> estimate = hutchinson(matrix, probes=10)
    >>> estimate.value, estimate.error < 0.01, estimate.products
    (5050.0, True, 10)
    """
    size = operator_size(operator)
    require_at_least("probes", probes, 2, "one probe has no spread to read an error from")
    if tolerance is not None:
        require_tolerance(tolerance)
    if probes >= size:
        return _exact_trace(operator)
    stream = _rademacher(operator, seed)
    samples: list[float] = []
    value = error = math.inf
    while len(samples) < probes:
        # Summed in fp64 on the device and fetched together: one synchronisation per check.
        count = min(_PROBES_PER_CHECK, probes - len(samples))
        chunk = [_quadratic_form(operator, stream.draw()) for _ in range(count)]
        samples.extend(torch.stack(chunk).tolist())
        value, error = mean_and_error(samples)
        if math.isinf(value):
            return Estimate(math.inf, math.inf, False, _NOT_FINITE, len(samples))
        error += _rounding(operator, samples)
        if tolerance is not None and error <= tolerance * abs(value):
            break
    if tolerance is None:
        reason = f"mean of {len(samples)} probes, error two standard errors"
        return Estimate(value, error, True, reason, len(samples))
    converged = error <= tolerance * abs(value)
    reason = f"two standard errors over {len(samples)} probes are within tolerance={tolerance:g}"
    if not converged:
        relative = error / abs(value) if value else math.inf
        reason = (
            f"stopped at probes={probes} with error {relative:.0e} of the trace; "
            "raise probes or tolerance, or use hutch_plus_plus"
        )
    return Estimate(value, error, converged, reason, len(samples))


def hutch_plus_plus(operator: Operator, *, products: int = 48, seed: int = 0) -> Estimate:
    """The trace: its large part exactly, only the rest by probes (Meyer et al. 2021, algorithm 1).

    Unbiased; for decaying spectra the error shrinks as 1/products rather than its root, and is zero when the
    rank is at most products/3. `error` is two standard errors of the sampled rest. Costs `products` products
    and products/3 vectors of memory. When `products` reaches n, the diagonal is read off exactly with n
    products.

    >>> factor = torch.arange(600.0, dtype=torch.float64).reshape(300, 2)   # rank 2
    >>> matrix = factor @ factor.T
    >>> estimate = hutch_plus_plus(matrix, products=9)
    >>> bool(abs(estimate.value / matrix.trace() - 1) < 1e-12), estimate.products
    (True, 9)
    """
    size = operator_size(operator)
    require_at_least("products", products, 6, "two thirds find the large part, the rest are probes")
    if products >= size:
        return _exact_trace(operator)
    stream = _rademacher(operator, seed)
    sketched = products // 3
    image = (operator @ stream.draw_block(sketched)).detach()
    scale = power_of_two_scale(image)
    if math.isinf(scale):
        return Estimate(math.inf, math.inf, False, _NOT_FINITE, sketched)
    if scale == 0:
        return Estimate(0.0, 0.0, True, "the operator is zero on random vectors", sketched)
    basis = torch.linalg.qr(image / scale).Q
    large = float((basis * (operator @ basis).detach()).sum(dtype=torch.float64))
    rest = stream.draw_block(products - 2 * sketched)
    rest -= basis @ (basis.T @ rest)
    samples = (rest * (operator @ rest).detach()).sum(dim=0, dtype=torch.float64).tolist()
    sampled, error = mean_and_error(samples)
    value = large + sampled
    if not math.isfinite(value):
        return Estimate(math.inf, math.inf, False, _NOT_FINITE, products)
    error += _rounding(operator, [large, *samples])
    reason = f"{sketched} directions exactly, the rest from {len(samples)} probes, error two standard errors"
    return Estimate(value, error, True, reason, products)


def _exact_trace(operator: Operator) -> Estimate:
    size, first, parts = operator_size(operator), 0, []
    for columns in dense_columns(operator):
        parts.append(columns[first : first + columns.shape[1]].diagonal().double())
        first += columns.shape[1]
    diagonal = torch.cat(parts).tolist()
    if not all(math.isfinite(entry) for entry in diagonal):
        return Estimate(math.inf, math.inf, False, _NOT_FINITE, size)
    error = _rounding(operator, [sum(abs(entry) for entry in diagonal)])
    return Estimate(math.fsum(diagonal), error, True, "exact up to rounding: the diagonal was read off", size)


def _rademacher(operator: Operator, seed: int) -> ProbeStream:
    size = operator_size(operator)
    return ProbeStream(size, seed=seed, kind="rademacher", dtype=operator.dtype, device=operator.device)


def _quadratic_form(operator: Operator, probe: Tensor) -> Tensor:
    return (probe * (operator @ probe).detach()).sum(dtype=torch.float64)


def _rounding(operator: Operator, samples: list[float]) -> float:
    return 8 * torch.finfo(operator.dtype).eps * max(abs(sample) for sample in samples)


def frobenius_norm(operator: Operator, *, products: int = 64, seed: int = 0) -> Estimate:
    """‖A‖_F, the root of the sum of the squared eigenvalues, from ‖A‖_F² = E‖A g‖² over Rademacher probes g.

    The square is unbiased; `error` is two standard errors, carried through the root, and shrinks as
    1/√products; costs `products` products and one vector of memory. When `products` reaches n, all n columns
    are taken instead and the norm is exact.

    >>> frobenius_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).value
    5.0
    >>> estimate = frobenius_norm(torch.diag(torch.arange(1.0, 101.0, dtype=torch.float64)), products=10)
    >>> abs(estimate.value - sum(i * i for i in range(1, 101)) ** 0.5) < 1e-9
    True
    """
    size = operator_size(operator)
    require_at_least("products", products, 2, "one product has no spread to read an error from")
    exact = products >= size
    stream = ProbeStream(size, seed=seed, kind="rademacher", dtype=operator.dtype, device=operator.device)
    blocks = dense_columns(operator) if exact else (operator @ stream.draw() for _ in range(products))
    # Squares of 1e-25 vanish in fp32: everything is in units of a power of two near the first nonzero
    # product.
    scale = 0.0
    squares: list[torch.Tensor] = []
    for block in blocks:
        scale = scale or power_of_two_scale(block)
        if math.isinf(scale):
            break
        squares.append((block.detach() / (scale or 1.0)).double().square().sum())
    samples = [] if math.isinf(scale) else torch.stack(squares).tolist()
    spent = size if exact else len(squares)
    if math.isinf(scale) or not all(math.isfinite(sample) for sample in samples):
        reason = "a product was not finite (inf or nan); look for inf or nan in the weights and inputs"
        return Estimate(math.inf, math.inf, False, reason, max(1, len(squares)))
    if scale == 0:
        reason = "the operator is zero" if exact else "the operator is zero on random vectors"
        return Estimate(0.0, 0.0, True, reason, spent)
    if exact:
        value, error = math.sqrt(math.fsum(samples)), 0.0
        reason = "exact up to rounding: all columns were taken"
    else:
        square, square_error = mean_and_error(samples)
        value = math.sqrt(square)
        error = square_error / (2 * value)
        reason = f"root mean square of {products} probes, error two standard errors"
    error += 8 * torch.finfo(operator.dtype).eps * value
    return Estimate(value * scale, error * scale, True, reason, spent)
