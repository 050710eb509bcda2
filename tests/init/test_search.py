"""The two searches on curves whose answers are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hessinit.init.search import CoupledSolve, GainSearch


def search(curve: object, ceiling: float = math.inf, most: int = 12) -> GainSearch:
    return GainSearch(curve, lambda t: t <= ceiling, lambda t: 2 * t, 0.01, most)  # type: ignore[arg-type]


def test_a_straight_line_takes_three_points_and_a_bent_one_few() -> None:
    for offset, slope in itertools.product((-9.0, -1.0, 0.3, 8.0), (0.7, 2.0, 58.0)):
        one = search(lambda t, slope=slope, offset=offset: slope * t + offset)
        found = one.run()
        assert found.reason == ""
        assert slope * found.t + offset == pytest.approx(0, abs=0.01)
        assert len(one.points) <= 4
    # Plain false position keeps one end: it takes 10 and 36.
    assert search(lambda t: (t + 1) ** 5 - 3, most=8).run().reason == ""
    assert search(lambda t: 0.1 - 3 * math.exp(-6 * max(t, -8))).run().reason == ""


def test_of_two_roots_the_smaller_one() -> None:
    """log λ = 1 − (t − 2)² rises through 0 at 1 and falls through it at 3."""
    for start in (0.0, 1.5):
        found = search(lambda t, start=start: 1 - (t + start - 2) ** 2).run()
        assert found.reason == ""
        assert found.t + start == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("curve", "ceiling", "reason", "least", "most"),
    [
        (lambda t: -1 - (t - 1) ** 2, math.inf, "rises no further", 0.4, 1.6),
        (lambda t: t - 5, 1.3, "saturate", 1.2, 1.3),
        (lambda t: t + 2 if t < -0.5 else math.inf, -0.2, "", -2.01, -1.99),  # not finite is too sharp
        (lambda t: 1 + 3 * math.exp(min(2 * t, 50)), math.inf, "falls no further", -math.inf, 0),
        (lambda t: math.inf, -1e9, "however small", 0, 0),
        (lambda t: -math.inf, math.inf, "no curvature", 0, 0),
    ],
)
def test_ceilings_floors_and_tops_are_said(curve, ceiling, reason, least, most) -> None:
    found = search(curve, ceiling=ceiling).run()
    assert (reason in found.reason) if reason else not found.reason
    assert least <= found.t <= most


def test_no_more_measurements_than_allowed() -> None:
    assert "3 measurements were not enough" in search(lambda t: 5 * (t - 1) ** 3, most=3).run().reason


def test_a_softmax_in_common_is_learned() -> None:
    """A homogeneous network whose norms also fall by half of what the output grows."""
    offsets = np.linspace(-3, 3, 8)

    def measure(x: np.ndarray) -> np.ndarray:
        return 2 * (x.sum() - x) + offsets - 0.5 * np.logaddexp(0, x.sum())

    solve = CoupledSolve(measure, lambda x: True, np.ones(8), 0.05, 6)
    solved = solve.run()
    assert solved.reason == ""
    assert np.abs(measure(solved.scales)).max() < 0.05
    assert len(solve.visited) <= 4


def test_a_row_that_nothing_moves_does_not_drag_the_others() -> None:
    """The last layer behind normalizations: only the others can be brought to the target."""

    def measure(x: np.ndarray) -> np.ndarray:
        return np.array([-2 * x[0] + 1, -2 * x[1] - 1, 0.7])

    solve = CoupledSolve(measure, lambda x: True, np.array([0.0, 0.0, 1.0]), 0.05, 6)
    solved = solve.run()
    assert solved.reason == "no scale of the weights brings 1 of 3 norms nearer to the target"
    assert solved.distances == pytest.approx([0, 0, 0.7], abs=1e-6)


def test_steps_stay_admissible() -> None:
    def measure(x: np.ndarray) -> np.ndarray:
        return 2 * (x.sum() - x) - 9

    solve = CoupledSolve(measure, lambda x: x.sum() < 2, np.ones(3), 0.05, 8)
    solved = solve.run()
    assert solved.reason
    assert all(x.sum() < 2 for x in solve.visited)
    assert solved.scales.sum() > 1.8
