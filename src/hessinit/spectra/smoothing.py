"""A smooth curve with error bars from weighted points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hessinit.spectra.krylov import Array
from hessinit.spectra.sampling import STANDARD_ERRORS

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
