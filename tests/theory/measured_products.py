"""The Jacobian products of a problem, as `measure` asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import evaluate
from hessinit.problem.problem import Problem
from hessinit.products.measure import measure_products
from hessinit.results.curvature_report import JacobianBounds


def measured_products(
    model: nn.Module, loss: Any, batch: Any, *, tolerance: float = 1e-3, **settings: Any
) -> dict[str, JacobianBounds]:
    """By layer name, in double precision unless told otherwise."""
    problem = Problem(model, loss, batch, **{"dtype": torch.float64, **settings})
    with problem.settings():
        found = measure_products(problem, evaluate(problem), LanczosSettings(tolerance, 200, 0))
    return {layer.name: found[layer.parameter] for layer in problem.layers}
