"""A made-up initialization, for the demos of the display modules and for tests; nothing was measured."""

from __future__ import annotations

from dataclasses import replace

from hessinit.present.example import example_report
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import Initialization, Measurement


def example_initialization() -> Initialization:
    """A network whose last layer was too sharp, and is no more."""
    before = example_report()
    after = _scaled(before, {"fc1": 40.0, "fc2": 6.0, "fc3": 0.2, "network": 20.2 / before.network.norm})
    return Initialization(
        before=before,
        after=after,
        scales={"fc1": 1.21, "fc2": 1.21, "fc3": 1.21},
        target=20.0,
        lr=0.1,
        kappa=2.0,
        rule="network",
        scheme="lsuv",
        scaling="gain",
        converged=True,
        reason="‖H‖ = 20.2 is within 5 % of the target",
        measurements=(
            Measurement(t=0.0, norm=9.3, loss=2.31),
            Measurement(t=0.191, norm=20.2, loss=2.34),
        ),
        seconds=0.2,
    )


def _scaled(report: CurvatureReport, factors: dict[str, float]) -> CurvatureReport:
    def scale(row: LayerCurvature) -> LayerCurvature:
        ends = {
            name: replace(end, value=end.value * factors[row.name], error=end.error * factors[row.name])
            for name, end in (("top", row.top), ("bottom", row.bottom))
        }
        return replace(row, top=ends["top"], bottom=ends["bottom"], approximation=None)

    return replace(report, layers=tuple(map(scale, report.layers)), network=scale(report.network))
