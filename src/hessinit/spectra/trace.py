"""The trace of an operator from random probes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hessinit.results.estimates import Estimate
from hessinit.spectra.dense import dense_columns
from hessinit.spectra.probes import ProbeStream
from hessinit.spectra.protocol import Operator, operator_size, require_at_least, require_tolerance
from hessinit.spectra.sampling import mean_and_error
from hessinit.spectra.scale import power_of_two_scale

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
