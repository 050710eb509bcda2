"""What the tables and the picture both read off the recorded cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from contestants import YARDSTICK, contestants_for
from problems import RACE

RACES = [("gauss-newton", "relu", "Gauss-Newton, ReLU"), ("hessian", "tanh", "exact Hessian, tanh")]
RIGHT = 5e-3  # the largest relative error that counts as right at tolerance 1e-3
Cells = dict[str, dict]


def race_problems(cells: Cells, activation: str) -> list[str]:
    present = {key.split("/")[0] for key in cells}
    return [f"{name}-{activation}" for name in RACE if f"{name}-{activation}" in present]


def race_contestants(cells: Cells, curvature: str) -> list[str]:
    """Those that offer the curvature, less those that no installed library has."""
    ran = {key.split("/")[2] for key, cell in cells.items() if cell["status"] != "missing"}
    return [name for name in contestants_for(curvature, piecewise_linear=True) if name in ran | {"hessinit"}]


def gradient_seconds(cells: Cells, problem: str) -> float:
    """The fastest gradient seen on the problem in any process."""
    times = [
        second
        for key, cell in cells.items()
        if key.startswith(f"{problem}/")
        for second in cell.get("gradient_seconds", [])
    ]
    return min(times, default=math.nan)


def memory_ratio(cells: Cells, problem: str, curvature: str, contestant: str) -> float | None:
    """Peak memory above the start, in training steps."""
    cell = cells.get(f"{problem}/{curvature}/{contestant}", {})
    step = cells.get(f"{problem}/{curvature}/{YARDSTICK}", {})
    if "peak_mib" not in cell or not step.get("peak_mib"):
        return None
    return cell["peak_mib"] / step["peak_mib"]


def growth(cells: Cells, kind: str, curvature: str, contestant: str) -> list[tuple[int, float, float]]:
    """(depth or batch, seconds, seconds of one gradient), in rising order."""
    rows = []
    for key, cell in cells.items():
        problem, its_curvature, its_contestant = key.split("/")
        wanted = problem.startswith(kind + "-") and (its_curvature, its_contestant) == (curvature, contestant)
        if wanted and cell["status"] == "ok":
            rows.append((int(problem.split("-")[1]), min(cell["seconds"]), min(cell["gradient_seconds"])))
    return sorted(rows)


def count_text(count: float) -> str:
    """Three significant figures, never an exponent.

    >>> count_text(5043.2), count_text(21.34)
    ('5040', '21.3')
    """
    return f"{float(f'{count:.3g}'):g}"


def fitted_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds against log size: 1 is linear growth.

    >>> round(fitted_exponent([1, 2, 4], [3.0, 6.0, 12.0]), 6)
    1.0
    """
    x = [math.log(size) for size in sizes]
    y = [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    numerator = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return numerator / sum((a - mean_x) ** 2 for a in x)
