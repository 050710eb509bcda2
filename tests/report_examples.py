"""Hand-made reports for the tests: every number in them is chosen, none is measured."""

from __future__ import annotations

from typing import Any

from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Estimate


def make_estimate(value: float, error: float = 0.0, converged: bool = True, products: int = 3) -> Estimate:
    reason = "residual below tolerance" if converged else "stopped after 3 products; raise max_products"
    return Estimate(value, error, converged, reason, products)


def make_layer(name: str = "fc1", norm: float = 1.0, **changes: Any) -> LayerCurvature:
    fields: dict[str, Any] = {
        "name": name,
        "shape": (4, 3),
        "curvature": "gauss-newton",
        "top": make_estimate(norm),
        "bottom": make_estimate(0.0, products=0),
        "engine": "gram",
    }
    return LayerCurvature(**{**fields, **changes})


def make_report(
    *layers: LayerCurvature, network: float | LayerCurvature = 64.0, **changes: Any
) -> CurvatureReport:
    whole = network if isinstance(network, LayerCurvature) else make_layer("network", network, shape=(1234,))
    fields: dict[str, Any] = {
        "layers": layers,
        "network": whole,
        "curvature": "gauss-newton",
        "loss": 2.3,
        "examples": 32,
        "tolerance": 1e-3,
        "seed": 0,
        "engine": "gram",
        "seconds": 0.09,
        "gradients": 4.1,
        "versions": {"torch": "2.13.0"},
    }
    return CurvatureReport(**{**fields, **changes})


def make_three_layers() -> CurvatureReport:
    return make_report(
        make_layer("fc1", 0.31, shape=(256, 784)),
        make_layer("fc2", 1.84, shape=(256, 256)),
        make_layer("fc3", 64.0, shape=(10, 256)),
        network=64.5,
    )
