"""Results and documents with a bit of everything; every number in them is chosen, none is measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from hessinit.present import document as doc
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, JacobianBounds, LayerCurvature
from hessinit.results.estimates import Density, Estimate
from hessinit.results.initialization import Initialization, Measurement

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


def make_estimate(value: float, error: float = 0.0, converged: bool = True) -> Estimate:
    return Estimate(value, error, converged, "converged" if converged else "stopped; raise max_iterations", 3)


def make_layer(name: str = "a", norm: float = 1.0, **changes: Any) -> LayerCurvature:
    ends = {"top": make_estimate(norm), "bottom": make_estimate(0.0)}
    fields = {"name": name, "shape": (4, 3), "curvature": "gauss-newton", "engine": "gram", **ends}
    return LayerCurvature(**{**fields, **changes})


def make_report(
    *layers: LayerCurvature, network: float | LayerCurvature = 64.5, **changes: Any
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


def three_layers() -> CurvatureReport:
    """A network whose last layer is too sharp."""
    shapes = {"fc1": (256, 784), "fc2": (256, 256), "fc3": (10, 256)}
    norms = {"fc1": 0.31, "fc2": 1.84, "fc3": 64.0}
    return make_report(*(make_layer(name, norms[name], shape=shape) for name, shape in shapes.items()))


def rich_report() -> CurvatureReport:
    """Three layers with all that can be measured: spectra, Jacobian norms and bounds, diagnostics."""
    grid = tuple(0.64 * step for step in range(101))
    density = Density((0.0, 64.0), (0.9, 0.1), grid, tuple(math.exp(-x) + 1e-4 for x in grid), 0.01, 4, 20)

    def layer(name: str, norm: float, std: float) -> LayerCurvature:
        jacobians = JacobianBounds(
            forward=make_estimate(norm / 10), forward_largest=norm / 5, backward=make_estimate(1 / norm),
            backward_largest=2 / norm, activation=1.0, paper_bound=norm / 2, rigorous_bound=3 * norm,
        )  # fmt: skip
        diagnostics = Diagnostics(activation="relu", activation_std=std, gradient_std=std / 100, dead=0.25)
        eigenvalues = tuple(make_estimate(norm / rank) for rank in (1, 2, 3))
        measured = {"density": density, "eigenvalues": eigenvalues}
        return make_layer(name, norm, **measured, jacobians=jacobians, diagnostics=diagnostics)

    return make_report(layer("fc1", 0.31, 1.0), layer("fc2", 1.84, 0.5), layer("fc3", 64.0, 0.2))


def hostile_report(layers: int = 200) -> CurvatureReport:
    """Many layers, names that would like to be scripts, and norms that no axis can hold."""
    draw = random.Random(1)
    odd = {50: 0.0, 51: math.inf, 77: math.nan, 130: 1e-200}
    evil = {20 * place: name for place, name in enumerate(HOSTILE)}
    rows = [
        make_layer(evil.get(place, f"encoder.blocks.{place}.mlp"), odd.get(place, 10 ** draw.gauss(0, 1.2)))
        for place in range(layers)
    ]
    return make_report(*rows, notes=HOSTILE, engine=HOSTILE[0], engine_reason=HOSTILE[1])


def make_initialization(**changes: Any) -> Initialization:
    """A network whose last layer was too sharp, and is no more."""
    before = three_layers()
    norms = {"fc1": 12.4, "fc2": 11.04, "fc3": 12.8}
    after = [replace(row, top=make_estimate(norms[row.name])) for row in before.layers]
    fields: dict[str, Any] = {
        "before": before,
        "after": replace(before, layers=tuple(after), network=make_layer("network", 20.2, shape=(1234,))),
        "scales": dict.fromkeys(norms, 1.21),
        "target": 20.0,
        "lr": 0.1,
        "kappa": 2.0,
        "rule": "network",
        "scheme": "lsuv",
        "scaling": "all",
        "converged": True,
        "reason": "‖H‖ = 20.2 is within 5 % of the target",
        "measurements": (Measurement(t=0.0, norm=9.3, loss=2.31), Measurement(t=0.191, norm=20.2, loss=2.34)),
        "seconds": 0.2,
    }
    return Initialization(**{**fields, **changes})


def every_block() -> doc.Document:
    """A document with every kind of block, and names that would like to be scripts in all of them."""
    evil = HOSTILE[1]
    steps = list(range(1, 51))
    curves = [
        doc.Series(name=evil, x=steps, y=[1 / step for step in steps], low=[0.5 / step for step in steps],
                   high=[2 / step for step in steps]),
        doc.Series(name="dashed", x=steps, y=[math.nan if step > 20 else 1.0 for step in steps], dashed=True,
                   color="ramp:0.5"),
        doc.Series(name="broken off", x=[20], y=[1.0], points=True, symbol="cross", in_legend=False,
                   color="vermilion", details=["2 of 3 seeds diverged here"]),
    ]  # fmt: skip
    depth = doc.LineChart(
        name="depth", caption="depth", description=evil, layers=["a", evil, "c", "d", "e"], y_label=evil,
        series=[doc.Series(name="norms", y=[1.0, 0.0, math.inf, math.nan, None], details=[evil] * 5)],
        log_y=True, bands=[doc.Band(0.1, 10.0, evil)], rules=[doc.Rule(2.0, evil)],
    )  # fmt: skip
    lines = doc.LineChart(
        name="lines", caption="lines", description="three curves", series=curves, x_label="step",
        y_label="loss", log_y=True, rules=[doc.Rule(10, evil, upright=True), doc.Rule(0.5, "half")],
    )  # fmt: skip
    heat = doc.HeatMap(
        name="heat", caption="heat", description="four cells", rows=["default", evil], columns=["0.1", "1"],
        values=[[2.0, math.nan], [0.1, 0.5]], texts=[["2", "diverged"], ["0.1", evil]], x_label="rate",
        y_label="scheme", value_label="loss", log_color=True, marked=[[False, False], [True, False]],
    )  # fmt: skip
    rates = doc.RateLine(
        name="rates", caption="rates", description="four rates", best=0.5, stable=1.0,
        marks=[doc.Rule(0.1, evil, "blue"), doc.Rule(math.inf, "endless")],
    )  # fmt: skip
    verdicts = ["ok", "sharp", "ok", "flat", "ok"]
    columns = [
        doc.Column("name", ["a", evil, "c", "d", "mean"], is_number=False,
                   links=["#two", "javascript:alert(6)", "", "", ""]),
        doc.Column("paper", ["~1,230", "9", "nan", "inf", "7"], group="both"),
        doc.Column("ours", ["3", "20", "100", "", "7"], group="both",
                   marks=["yes", "no", "best", "diverged", ""]),
        doc.Column("verdict", verdicts, is_number=False, marks=verdicts),
    ]  # fmt: skip
    texts = [doc.Text(evil), doc.Text("three", "heading"), doc.Text("note", "note")]
    blocks = [*texts, doc.Table(evil, columns, fixed=1), doc.Facts(evil, [(evil, evil)])]
    return doc.Document(
        title=evil,
        verdict=[evil, "second"],
        tone="fair",
        numbers=[doc.KeyNumber(evil, "64.5", evil)],
        sections=[
            doc.Section("One", [depth, lines, lines, heat, rates], "one", subtitle=evil),
            doc.Section("Two", blocks, "two"),
        ],
        footer=evil,
    )
