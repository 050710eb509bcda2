"""The Frobenius norm of an operator from random probes."""

from __future__ import annotations

import math

import torch

from hessinit.results.estimates import Estimate
from hessinit.spectra.dense import dense_columns
from hessinit.spectra.probes import ProbeStream
from hessinit.spectra.protocol import Operator, operator_size, require_at_least
from hessinit.spectra.sampling import mean_and_error
from hessinit.spectra.scale import power_of_two_scale


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
