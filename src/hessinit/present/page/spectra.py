"""The section of the eigenvalues: densities and the largest ones, where they were measured."""

from __future__ import annotations

import math

from hessinit.present.page.content import Block, LineChart, LineSeries, Rule, Section, Words
from hessinit.present.words import format_number, printable
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature

MOST_CHARTS = 9  # more small charts than this are a wall; the sharpest layers are shown
DECADES = 1e-6  # of a density: what is below that share of its peak is noise of the estimate


def spectrum_section(report: CurvatureReport) -> Section | None:
    """The network's spectrum and those of the sharpest layers; None where none was measured."""
    rows = [
        report.network,
        *sorted(report.layers, key=lambda row: -row.norm if row.norm == row.norm else -math.inf),
    ]
    densities = [row for row in rows if row.density is not None]
    listed = [row for row in rows if row.eigenvalues]
    if not densities and not listed:
        return None
    blocks: list[Block] = []
    if len(densities) > MOST_CHARTS:
        blocks.append(
            Words(text=f"Of {len(densities)} densities, those of the sharpest layers.", tone="small")
        )
    blocks += [_density_chart(row) for row in densities[:MOST_CHARTS]]
    if listed:
        blocks.append(_eigenvalue_chart(listed, report.network))
    return Section(heading="Spectrum", anchor="spectrum", blocks=blocks)


def _density_chart(row: LayerCurvature) -> LineChart:
    density = row.density
    assert density is not None  # only those with one are drawn
    peak = max(density.values, default=1.0)
    known = 0 < peak < math.inf
    values = [value if value > peak * DECADES else None for value in density.values] if known else []
    return LineChart(
        caption=f"Spectral density: {printable(row.name)}",
        description=(
            f"How the eigenvalues of {printable(row.name)} are spread, on a logarithmic axis: most are near "
            f"0, the largest is {format_number(row.top_eigenvalue)}, the smallest "
            f"{format_number(row.bottom_eigenvalue)}. Estimated with {density.probes} random vectors."
        ),
        series=[LineSeries(name="density", x=density.grid if known else [], y=values)],
        x_label="eigenvalue",
        y_label="density",
        log_y=True,
        rules=[
            Rule(
                value=row.top_eigenvalue,
                label=f"largest {format_number(row.top_eigenvalue)}",
                color="vermilion",
                upright=True,
            )
        ],
    )


def _eigenvalue_chart(rows: list[LayerCurvature], network: LayerCurvature) -> LineChart:
    shown = rows[: MOST_CHARTS - 2]
    positive = all(one.value > 0 for row in shown for one in row.eigenvalues)
    series = [
        LineSeries(
            name=printable(row.name),
            x=list(range(1, len(row.eigenvalues) + 1)),
            y=[one.value for one in row.eigenvalues],
            color="grey" if row is network else f"ramp:{place / max(1, len(shown) - 1):.3g}",
            dashed=row is network,
            details=["" if one.converged else "not converged" for one in row.eigenvalues],
        )
        for place, row in enumerate(shown)
    ]
    first = "; ".join(
        f"{printable(row.name)} {', '.join(format_number(one.value) for one in row.eigenvalues[:3])}"
        for row in shown
    )
    return LineChart(
        caption="Largest eigenvalues",
        description=f"The largest eigenvalues in falling order, the first three of each: {first}.",
        series=series,
        x_label="rank",
        y_label="eigenvalue",
        log_y=positive,
    )
