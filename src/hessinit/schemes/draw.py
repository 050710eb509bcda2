"""Filling one block of a weight with random numbers of a wanted size.

Numbers are drawn in fp32 (fp64 for an fp64 block) on the generator's device and then copied, so a block in
bf16 or fp16, on any device, gets the rounded numbers of its fp32 twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from hessinit.errors import choose

Distribution = Literal["normal", "truncated normal", "uniform"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)

_CUT = 2.0  # a truncated normal ends at this many standard deviations of its parent
_MASS = math.erf(_CUT / math.sqrt(2))  # of the parent within the cuts
_DENSITY_AT_CUT = math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi)
TRUNCATED_STD = math.sqrt(1 - 2 * _CUT * _DENSITY_AT_CUT / _MASS)  # of a unit normal cut there: 0.8796


def draw_(
    view: Tensor, std: float, distribution: Distribution = "normal", generator: torch.Generator | None = None
) -> None:
    """Fill `view` with independent numbers of mean 0 and standard deviation `std`, whatever the distribution.

    "truncated normal" ends at two standard deviations of its parent (2.27 `std`), "uniform" at √3 `std`.
    Without a generator, the global one of the CPU is drawn from.

    >>> weight = torch.empty(1000, 100)
    >>> draw_(weight, 0.5, "truncated normal", torch.Generator().manual_seed(0))
    >>> round(float(weight.std()), 2), round(float(weight.max()), 2)
    (0.5, 1.14)
    """
    choose("distribution", distribution, list(DISTRIBUTIONS))
    dtype = torch.float64 if view.dtype == torch.float64 else torch.float32
    if distribution == "normal":
        block = _gaussian(view.shape, dtype, generator).mul_(std)
    else:
        even = torch.rand(view.shape, dtype=dtype, generator=generator, device=_device(generator))
        even.mul_(2).sub_(1)  # in [-1, 1)
        if distribution == "uniform":
            block = even.mul_(math.sqrt(3) * std)
        else:
            unit = even.mul_(_MASS).erfinv_().mul_(math.sqrt(2)).clamp_(-_CUT, _CUT)
            block = unit.mul_(std / TRUNCATED_STD)
    _fill_(view, block)


def draw_orthogonal_(view: Tensor, gain: float, generator: torch.Generator | None = None) -> None:
    """Fill `view` (out, in, *taps) with `gain` times a random semi-orthogonal matrix of shape (out, in·taps).

    Its rows are orthonormal, or its columns where it has more rows than columns, and it is uniform among
    such matrices (Haar). Costs a QR decomposition in fp64.

    >>> weight = torch.empty(3, 8, dtype=torch.bfloat16)
    >>> draw_orthogonal_(weight, 2.0, torch.Generator().manual_seed(0))
    >>> torch.allclose(weight.double() @ weight.double().T, 4 * torch.eye(3).double(), atol=0.05)
    True
    """
    rows, columns = view.shape[0], math.prod(view.shape[1:])
    tall = _gaussian((max(rows, columns), min(rows, columns)), torch.float64, generator)
    q, r = torch.linalg.qr(tall)
    # LAPACK's choice of signs is not uniform; a positive diagonal of R makes it so (Mezzadri 2007).
    q *= torch.where(r.diagonal() < 0, -1.0, 1.0)
    matrix = q if rows >= columns else q.T
    _fill_(view, matrix.mul_(gain).reshape(view.shape))


def draw_delta_orthogonal_(view: Tensor, gain: float, generator: torch.Generator | None = None) -> None:
    """Fill the middle tap of `view` (out, in, *taps) with `gain` times an orthogonal matrix, the rest with 0.

    The convolution then keeps norms, up to its borders, where it has no fewer outputs than inputs (Xiao et
    al. 2018). Without taps, the same as `draw_orthogonal_`.
    """
    with torch.no_grad():
        view.zero_()
        middle = view
        for taps in view.shape[2:]:
            middle = middle.select(2, taps // 2)
        draw_orthogonal_(middle, gain, generator)


def _gaussian(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=generator, device=_device(generator))


def _device(generator: torch.Generator | None) -> torch.device:
    # Named, because torch.set_default_device may have chosen another.
    return torch.device("cpu") if generator is None else generator.device


@torch.no_grad()
def _fill_(view: Tensor, block: Tensor) -> None:
    view.copy_(block)
