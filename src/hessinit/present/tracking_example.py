"""A made-up tracking, for the demos of the display modules and for tests; nothing was measured."""

from __future__ import annotations

import math

from hessinit.results.track_record import TrackedPoint, Tracking

LR = 0.1


def example_tracking(points: int = 13, name: str = "", speed: float = 1.0) -> Tracking:
    """A network that sharpens until it meets the edge of stability, and hovers there."""
    found = []
    for number in range(points):
        step = 20 * number
        norm = min(3.0 * math.exp(speed * step / 75), 20.0 + 0.6 * math.sin(step))
        found.append(
            TrackedPoint(
                step=step, seconds=0.4 + 0.2 * number, measuring_seconds=0.02,
                loss=2.3 * math.exp(-step / 90), lr=LR, norm=norm,
                training_loss=None if not step else 2.35 * math.exp(-step / 90),
                error=0.005 * norm, converged=True, lr_times_norm=LR * norm, stable_learning_rate=2 / norm,
                lr_over_limit=LR * norm / 2, layers={"fc1": 0.2 * norm, "fc2": 0.3 * norm, "fc3": 0.8 * norm},
                products=9,
            )
        )  # fmt: skip
    losses = tuple((step, 2.35 * math.exp(-step / 90)) for step in range(1, 20 * (points - 1) + 1))
    return Tracking(
        points=tuple(found),
        losses=losses,
        optimizer="SGD",
        curvature="gauss-newton",
        every=20,
        max_overhead=0.1,
        examples=256,
        seconds=0.4 + 0.2 * points,
        versions={"hessinit": "0.1.0", "torch": "2.6.0"},
        name=name,
    )
