"""The section of the Jacobian products: their norms over depth, the bounds they give, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hessinit.present.further import further_tables
from hessinit.present.page.columns import make_table
from hessinit.present.page.content import DepthChart, DepthSeries, Rule, Section
from hessinit.present.products_columns import conclude_products
from hessinit.present.words import format_number
from hessinit.results.curvature_report import CurvatureReport, JacobianBounds


def products_section(report: CurvatureReport) -> Section | None:
    """None for a report without Jacobian products."""
    products = [layer.jacobians for layer in report]
    if not any(products):
        return None
    found = next(table for table in further_tables(report) if table.columns[1].heading == "forward")
    return Section(
        heading="Jacobian products and bounds",
        anchor="jacobians",
        blocks=[
            _products_chart(report, products),
            _bounds_chart(report, products),
            make_table(found.columns, found.caption),
        ],
    )


def _products_chart(report: CurvatureReport, products: Sequence[JacobianBounds | None]) -> DepthChart:
    series = []
    for name, color in (("forward", "orange"), ("backward", "purple")):
        means = [None if one is None else getattr(one, name) for one in products]
        largest = [None if one is None else getattr(one, f"{name}_largest") for one in products]
        values = [None if mean is None else mean.value for mean in means]
        details = ["" if value is None else f"largest {format_number(value)}" for value in largest]
        series.append(
            DepthSeries(name=name, values=values, low=values, high=largest, color=color, details=details)
        )
    return DepthChart(
        caption="What reaches a layer, and what leaves it",
        description=(
            "Norms of the Jacobian products from the input to each layer (forward) and from there to the "
            "output (backward), means over the examples, bars to the largest. Near 1 signals neither vanish "
            "nor explode."
        ),
        layers=list(report.names),
        series=series,
        y_label="‖product‖",
        rules=[Rule(value=1.0, label="1")],
    )


def _bounds_chart(report: CurvatureReport, products: Sequence[JacobianBounds | None]) -> DepthChart:
    kinds: tuple[tuple[str, str, Callable[[JacobianBounds], float | None]], ...] = (
        ("Lipschitz product", "grey", lambda one: one.lipschitz_bound),
        ("paper's bound", "vermilion", lambda one: one.paper_bound),
        ("rigorous bound", "green", lambda one: one.rigorous_bound),
    )
    series = []
    for name, color, read in kinds:
        values = [None if one is None else read(one) for one in products]
        if any(value is not None for value in values):
            series.append(DepthSeries(name=name, values=values, color=color))
    # The bounds are on the Gauss-Newton norm; an exact one may lie above them.
    norms: list[float | None] = [layer.norm for layer in report]
    if report.curvature != "gauss-newton":
        series.append(DepthSeries(name="exact ‖H‖", values=norms, hollow=True))
        norms = [None if row.approximation is None else abs(row.approximation.value) for row in report]
    if report.curvature != "hessian":
        series.append(DepthSeries(name="Gauss-Newton ‖H‖", values=norms))
    return DepthChart(
        caption="‖H‖ under its bounds",
        description=f"Each layer's norm and what bounds it. {conclude_products(report)}".strip(),
        layers=list(report.names),
        series=series,
        y_label="curvature ‖H‖",
    )
