"""What was measured, as plain data: no tensors, nothing that needs torch."""

from __future__ import annotations

from hessinit.report.density import Density
from hessinit.report.layer import LayerCurvature
from hessinit.report.report import CurvatureReport
from hessinit.report.spread import Spread
from hessinit.report.store import load

__all__ = ["CurvatureReport", "Density", "LayerCurvature", "Spread", "load"]
