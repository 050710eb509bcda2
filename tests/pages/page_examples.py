"""Reports and pages with a bit of everything; every number in them is chosen, none is measured."""

from __future__ import annotations

import math
import random

from hessinit.present.page.content import (
    Band,
    DepthChart,
    DepthSeries,
    Details,
    HeatMap,
    KeyNumber,
    LineChart,
    LineSeries,
    Page,
    RateLine,
    RateMark,
    Rule,
    Section,
    Table,
    TableColumn,
    Words,
)
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, JacobianBounds, LayerCurvature
from hessinit.results.estimates import Density, Estimate

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "<!--",
    '" onfocus="alert(4)" autofocus x="',
    "a\u2028b\u202ec\x1b[2J",
    "{{ 7 * 7 }}${alert(5)}`",
    "x" * 300,
)


def make_estimate(value: float, converged: bool = True) -> Estimate:
    return Estimate(value, 0.0, converged, "residual below tolerance" if converged else "stopped", 3)


def make_layer(name: str, norm: float, **changes: object) -> LayerCurvature:
    fields: dict[str, object] = {
        "name": name,
        "shape": (4, 3),
        "curvature": "gauss-newton",
        "top": make_estimate(norm),
        "bottom": make_estimate(0.0),
        "engine": "gram",
    }
    return LayerCurvature(**{**fields, **changes})  # type: ignore[arg-type]


def make_report(*layers: LayerCurvature, network: float = 64.5, **changes: object) -> CurvatureReport:
    fields: dict[str, object] = {
        "layers": layers,
        "network": make_layer("network", network, shape=(1234,)),
        "curvature": "gauss-newton",
        "loss": 2.3,
        "examples": 32,
        "tolerance": 1e-3,
        "seed": 0,
        "engine": "gram",
        "versions": {"torch": "2.13.0"},
    }
    return CurvatureReport(**{**fields, **changes})  # type: ignore[arg-type]


def rich_report() -> CurvatureReport:
    """Three layers with all that can be measured: spectra, Jacobian products, diagnostics."""
    grid = tuple(0.64 * step for step in range(101))
    density = Density((0.0, 64.0), (0.9, 0.1), grid, tuple(math.exp(-x) + 1e-4 for x in grid), 0.01, 4, 20)

    def layer(name: str, norm: float, std: float) -> LayerCurvature:
        products = JacobianBounds(
            make_estimate(norm / 10),
            norm / 5,
            make_estimate(1 / norm),
            2 / norm,
            1.0,
            norm / 2,
            3 * norm,
            math.inf,
        )
        diagnostics = Diagnostics(activation="relu", activation_std=std, gradient_std=std / 100, dead=0.25)
        eigenvalues = tuple(make_estimate(norm / rank) for rank in (1, 2, 3))
        return make_layer(
            name, norm, density=density, eigenvalues=eigenvalues, jacobians=products, diagnostics=diagnostics
        )

    return make_report(layer("fc1", 0.31, 1.0), layer("fc2", 1.84, 0.5), layer("fc3", 64.0, 0.2))


def hostile_report(layers: int = 200) -> CurvatureReport:
    """Many layers, names that would like to be scripts, and norms that no axis can hold."""
    draw = random.Random(1)
    odd = {50: 0.0, 51: math.inf, 77: math.nan, 130: 1e-200}
    rows = [
        make_layer(
            HOSTILE[place // 20]
            if place % 20 == 0 and place // 20 < len(HOSTILE)
            else f"encoder.blocks.{place}.mlp",
            odd.get(place, 10 ** draw.gauss(0, 1.2)),
        )
        for place in range(layers)
    ]
    return make_report(*rows, notes=HOSTILE, engine=HOSTILE[0], engine_reason=HOSTILE[1])


def every_block() -> Page:
    """A page with every kind of block, and names that would like to be scripts in all of them."""
    evil = HOSTILE[1]
    steps = list(range(1, 51))
    curves = [
        LineSeries(name=evil, x=steps, y=[1 / step for step in steps], low=[0.5 / step for step in steps],
                   high=[2 / step for step in steps]),
        LineSeries(name="dashed", x=steps, y=[math.nan if step > 20 else 1.0 for step in steps], dashed=True,
                   color="ramp:0.5"),
        LineSeries(name="broken off", x=[20], y=[1.0], points=True, symbol="cross", in_legend=False,
                   color="vermilion", details=["2 of 3 seeds diverged here"]),
    ]  # fmt: skip
    depth = DepthChart(
        caption="depth", description=evil, layers=["a", evil, "c", "d", "e"], y_label=evil,
        series=[DepthSeries(name="norms", values=[1.0, 0.0, math.inf, math.nan, None], details=[evil] * 5)],
        bands=[Band(low=0.1, high=10.0, label=evil)], rules=[Rule(value=2.0, label=evil)],
    )  # fmt: skip
    lines = LineChart(
        caption="lines", description="three curves", series=curves, x_label="step", y_label="loss",
        log_y=True, rules=[Rule(value=10, label=evil, upright=True), Rule(value=0.5, label="half")],
    )  # fmt: skip
    heat = HeatMap(
        caption="heat", description="four cells", rows=["default", evil], columns=["0.1", "1"],
        values=[[2.0, math.nan], [0.1, 0.5]], texts=[["2", "diverged"], ["0.1", evil]], x_label="rate",
        y_label="start", value_label="loss", log_color=True, marked=[[False, False], [True, False]],
    )  # fmt: skip
    rates = RateLine(
        caption="rates", description="four rates", best=0.5, stable=1.0,
        marks=[RateMark(value=0.1, label=evil, color="blue"), RateMark(value=math.inf, label="endless")],
    )  # fmt: skip
    table = Table(
        caption=evil, fixed=1,
        columns=[
            TableColumn(heading="name", cells=["a", evil, "c", "d", "mean"], is_number=False,
                        links=["#two", "javascript:alert(6)", "", "", ""]),
            TableColumn(heading="paper", cells=["~1,230", "9", "nan", "inf", "7"], group="both"),
            TableColumn(heading="ours", cells=["3", "20", "100", "", "7"], group="both",
                        marks=["yes", "no", "best", "diverged", ""]),
            TableColumn(heading="verdict", cells=["ok", "sharp", "ok", "flat", "ok"], is_number=False,
                        marks=["ok", "sharp", "ok", "flat", "ok"]),
        ],
    )  # fmt: skip
    return Page(
        title=evil,
        verdict=[evil, "second"],
        tone="fair",
        numbers=[KeyNumber(label=evil, text="64.5", note=evil)],
        sections=[
            Section(heading="One", anchor="one", subtitle=evil, blocks=[depth, lines, lines, heat, rates]),
            Section(heading="Two", anchor="two", blocks=[
                Words(text=evil), Words(text="three", tone="heading"), Words(text="note", tone="note"), table,
                Details(summary=evil, pairs=[(evil, evil)]),
            ]),
        ],
        footer=evil,
    )  # fmt: skip
