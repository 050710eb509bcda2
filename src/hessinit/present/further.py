"""The tables below the first one: each with a sentence that says what it shows."""

from __future__ import annotations

from dataclasses import dataclass

from hessinit.present.diagnostics_columns import diagnostics_columns
from hessinit.present.grid import Column
from hessinit.present.products_columns import products_columns
from hessinit.results.curvature_report import CurvatureReport

_PRODUCTS = (
    "Jacobian norms from the input to the layer (forward), of its activation (‖A‖) and from there to the "
    "output (backward), means over the examples; then ‖H‖ and its bounds (paper and Lipschitz leave out "
    "biases and f(0))."
)
_DIAGNOSTICS = (
    "What each layer gives on, behind its activation: mean and std, the loss gradient there, idle units, and "
    "how strongly loss and layer gradients are correlated (dependent: 5 % by chance)."
)


@dataclass(frozen=True)
class FurtherTable:
    """A caption and columns without a row for the network."""

    caption: str
    columns: list[Column]


def further_tables(report: CurvatureReport) -> list[FurtherTable]:
    """Those that were asked for."""
    tables = [
        FurtherTable(_PRODUCTS, products_columns(report)),
        FurtherTable(_DIAGNOSTICS, diagnostics_columns(report)),
    ]
    return [table for table in tables if table.columns]
