"""A made-up report, for the demos of the display modules and for doctests; nothing in it was measured."""

from __future__ import annotations

from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Estimate


def example_report() -> CurvatureReport:
    """A three-layer network whose last layer is too sharp."""

    def layer(name: str, shape: tuple[int, ...], norm: float, approximation: float) -> LayerCurvature:
        return LayerCurvature(
            name=name,
            shape=shape,
            curvature="hessian",
            top=_exact(norm),
            bottom=_exact(-norm / 500),
            approximation=_exact(approximation),
            engine="lanczos",
        )

    return CurvatureReport(
        layers=(
            layer("fc1", (256, 784), 0.31, 0.119),
            layer("fc2", (256, 256), 1.84, 1.62),
            layer("fc3", (10, 256), 64.0, 64.0),
        ),
        network=layer("network", (268_800,), 64.5, 64.3),
        curvature="both",
        loss=2.31,
        examples=32,
        tolerance=1e-3,
        seed=0,
        engine="lanczos",
        engine_reason="the exact Hessian is asked for",
        seconds=0.09,
        gradients=41.0,
        versions={"hessinit": "example"},
    )


def _exact(value: float) -> Estimate:
    return Estimate(value, 1e-3 * abs(value), True, "residual below tolerance", 12)
