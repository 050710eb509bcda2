"""The section of the diagnostics: sizes of activations and gradients, idle units, and the table."""

from __future__ import annotations

from hessinit.present.diagnostics_columns import diagnosed_layers, format_share
from hessinit.present.diagnostics_sentences import conclude_diagnostics
from hessinit.present.further import further_tables
from hessinit.present.page.columns import make_table
from hessinit.present.page.content import Block, DepthChart, DepthSeries, Section
from hessinit.results.curvature_report import CurvatureReport, Diagnostics


def diagnostics_section(report: CurvatureReport) -> Section | None:
    """None for a report without diagnostics."""
    if not any(layer.diagnostics for layer in report):
        return None
    rows = [row for _, row in diagnosed_layers(report)]
    blocks: list[Block] = [_sizes_chart(report, rows)]
    if any(share is not None for row in rows for share in (row.dead, row.saturated)):
        blocks.append(_idle_chart(report, rows))
    # The diagnostics come last of the further tables; with nothing but empty ones there is no table.
    found = [table for table in further_tables(report) if table.columns[1].heading != "forward"]
    blocks += [make_table(table.columns, table.caption) for table in found]
    return Section(heading="Activations and gradients", anchor="activations", blocks=blocks)


def _sizes_chart(report: CurvatureReport, rows: list[Diagnostics]) -> DepthChart:
    return DepthChart(
        caption="Size of activations and gradients",
        description=(
            "Standard deviation of what each layer gives on and of the loss gradient there, over depth. "
            f"{conclude_diagnostics(report)}"
        ),
        layers=list(report.names),
        series=[
            DepthSeries(
                name="activation std",
                values=[row.activation_std for row in rows],
                details=[row.activation for row in rows],
            ),
            DepthSeries(name="gradient std", values=[row.gradient_std for row in rows], color="vermilion"),
        ],
        y_label="standard deviation",
    )


def _idle_chart(report: CurvatureReport, rows: list[Diagnostics]) -> DepthChart:
    series = [
        DepthSeries(
            name=name,
            values=[None if share is None else 100 * share for share in shares],
            color=color,
            details=[format_share(share) for share in shares],
        )
        for name, color, shares in (
            ("dead units", "orange", [row.dead for row in rows]),
            ("saturated entries", "sky", [row.saturated for row in rows]),
        )
        if any(share is not None for share in shares)
    ]
    return DepthChart(
        caption="Idle units",
        description="Share of units that give 0 for every example, and of entries where the slope is gone.",
        layers=list(report.names),
        series=series,
        y_label="share, %",
        log=False,
    )
