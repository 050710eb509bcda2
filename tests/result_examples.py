"""Results and documents made by hand, at least one of every kind; no number in them was measured."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hessinit.present import document as doc
from hessinit.present.words import name_column
from hessinit.results.comparison import Comparison, Run
from hessinit.results.curvature_report import (
    CurvatureReport,
    Density,
    Diagnostics,
    Estimate,
    Finding,
    JacobianBounds,
    LayerCurvature,
    MeasurementPlan,
    Spread,
)
from hessinit.results.initialization import (
    Initialization,
    Measurement,
    PlannedWeight,
    SchemePlan,
    Symmetry,
    Trial,
)
from hessinit.results.result import Result
from hessinit.results.track_record import TrackedPoint, Tracking
from hessinit_paper.quadratic_forms import QuadraticForm, QuadraticForms
from hessinit_paper.reproduction import Curve, Findings, PaperCell, PaperFigure, PaperTable, Reproduction

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
LONG = "encoder" * 1400 + ".end"
Losses = Mapping[tuple[str, float], Sequence[float | None]]


def make_estimate(value: float, error: float = 0.0, converged: bool = True, products: int = 3) -> Estimate:
    reason = "converged" if converged else "stopped; raise max_iterations"
    return Estimate(value, error, converged, reason, products)


def make_layer(name: str = "a", norm: float = 1.0, **changes: Any) -> LayerCurvature:
    ends = {"top": make_estimate(norm), "bottom": make_estimate(0.0, products=0)}
    fields = {"name": name, "shape": (4, 3), "curvature": "gauss-newton", "engine": "gram", **ends}
    return LayerCurvature(**{**fields, **changes})


def make_report(
    *layers: LayerCurvature, network: float | LayerCurvature = 64.5, **changes: Any
) -> CurvatureReport:
    whole = network if isinstance(network, LayerCurvature) else make_layer("network", network, shape=(1234,))
    fields: dict[str, Any] = {
        "layers": layers, "network": whole, "curvature": "gauss-newton", "loss": 2.3, "examples": 32,
        "tolerance": 1e-3, "seed": 0, "engine": "gram", "seconds": 0.09, "gradients": 4.1,
        "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return CurvatureReport(**{**fields, **changes})


def make_three_layers() -> CurvatureReport:
    """A network whose first layer gets no gradient."""
    norms = {"fc1": (0.31, (256, 784)), "fc2": (1.84, (256, 256)), "fc3": (64.0, (10, 256))}
    layers = [make_layer(name, norm, shape=shape) for name, (norm, shape) in norms.items()]
    found = Finding(kind="no gradient", layers=("fc1",), message="fc1 gets no gradient.", way_out="Use it.")
    return make_report(*layers, findings=(found,))


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
    before, norms = make_three_layers(), {"fc1": 12.4, "fc2": 11.04, "fc3": 12.8}
    layers = tuple(replace(row, top=make_estimate(norms[row.name])) for row in before)
    after = replace(before, layers=layers, network=make_layer("network", 20.2, shape=(1234,)))
    search = Measurement(t=0.0, norm=9.3, loss=2.31), Measurement(t=0.191, norm=20.2, loss=2.34)
    fields: dict[str, Any] = {
        "before": before, "after": after, "scales": dict.fromkeys(norms, 1.21), "target": 20.0, "lr": 0.1,
        "kappa": 2.0, "rule": "network", "scheme": "lsuv", "scaling": "all", "converged": True,
        "reason": "‖H‖ = 20.2 is within 5 % of the target", "measurements": search, "seconds": 0.2,
    }  # fmt: skip
    return Initialization(**{**fields, **changes})


def make_trial(name: str, steps: int = 6, score: float = 0.5, **changes: Any) -> Trial:
    """A training whose loss falls from 2.4 to the score, or that diverges where the score is nan."""
    survived, ends = not math.isnan(score), 9.0 if math.isnan(score) else score
    losses = tuple(2.4 + (ends - 2.4) * step / max(1, steps - 1) for step in range(steps))
    reason = "" if survived else f"diverged at step {steps + 1}"
    fields = {"losses": losses if survived else (*losses, math.nan), "survived": survived, "reason": reason}
    return Trial(**{"name": name, "lr": 0.1, "steps": steps, "score": score, **fields, **changes})


def make_compared(*, searched: tuple[float, ...] = (), **changes: Any) -> Initialization:
    """The new weights led the user's own, at the rate 0.1; those had diverged at the largest other rate."""
    trials = [make_trial("hessinit", 6, 0.25), make_trial("your weights", 6, 1.9)]
    for rate in searched:
        ends = (3, math.nan) if rate == max(searched) else (2, 2.1)
        trials.append(make_trial("your weights", *ends, lr=rate))
    reason = (
        "the new weights were chosen: they came to 0.25 in 6 trial steps on fresh mini-batches, your own to "
        "1.9. The new ones: the network's ‖H‖ is within 5 % of 20"
    )
    given = {"lr": 0.1, "trials": tuple(trials), "reason": reason, "before": None, "after": None}
    return make_initialization(**{**given, **changes})


def make_symmetric(**changes: Any) -> Initialization:
    """Weights before normalizations, and a head that reads a gain; the norms are not reported."""
    free = dict.fromkeys(("0.weight", "4.weight", "8.weight", "0.bias"), 0.2)
    head = {"13.weight": 2.0, "9.weight": 0.5, "9.bias": 0.5}
    symmetries = (
        Symmetry(weights=tuple(free)[:3], scale_free=True, factors=free, norm_before=1.2, norm=30.0),
        Symmetry(weights=("13.weight",), scale_free=False, factors=head, norm_before=120.0, norm=29.9),
    )
    fields: dict[str, Any] = {
        "before": None, "after": None, "scales": {"0": 0.2, "4": 0.2, "8": 0.2, "13": 2.0}, "target": 30.0,
        "kappa": 3.0, "scaling": "symmetries", "measurements": (), "symmetries": symmetries,
        "survival": make_trial("present weights", 24, 0.3),
        "reason": "the scale-free weights have ‖H‖ = 30, within 5 % of 30",
    }  # fmt: skip
    return make_initialization(**{**fields, **changes})


def make_run(scheme: str, rate: float, seed: int, final: float | None, **changes: Any) -> Run:
    """A run that begins at 2 and ends at `final`; None: the scheme does not apply."""
    given: dict[str, Any] = {
        "losses": (), "first_loss": math.nan, "final_loss": math.nan, "steps_done": 0, "diverged": False,
        "norms": None, "note": "it needs residual branches", "seconds": 0.1,
    }  # fmt: skip
    if final is not None:
        finite = math.isfinite(final)
        given |= {
            "losses": (2.0, final if finite else 50.0), "first_loss": 2.0, "final_loss": final, "note": "",
            "steps_done": 20 if finite else 12, "diverged": not finite or final > 2.1,
            "norms": {"fc1": 3.0, "fc2": 1.0, "network": 4.0},
        }  # fmt: skip
    return Run(scheme=scheme, learning_rate=rate, seed=seed, **{**given, **changes})


def make_comparison(losses: Losses, **changes: Any) -> Comparison:
    """One entry of `losses` for each scheme and learning rate: the final losses by seed."""
    runs = tuple(
        make_run(scheme, rate, seed, final)
        for (scheme, rate), finals in losses.items()
        for seed, final in enumerate(finals)
    )
    given: dict[str, Any] = {
        "kind": "compare", "schemes": tuple(dict.fromkeys(scheme for scheme, _ in losses)),
        "learning_rates": tuple(dict.fromkeys(rate for _, rate in losses)), "runs": runs,
        "seeds": tuple(range(len(next(iter(losses.values()))))), "steps": 20, "batch_size": 8,
        "optimizer": "sgd", "examples": 100, "seconds": 1.5, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return Comparison(**{**given, **changes})


def two_schemes() -> Comparison:
    """he is lowest at 0.1 and diverges at 1; lsuv is lower at its best rate and trains at both."""
    losses = {("he", 0.1): (1.0, 1.2), ("he", 1.0): (0.9, math.inf)}
    return make_comparison({**losses, ("lsuv", 0.1): (1.4, 1.6), ("lsuv", 1.0): (0.5, 0.6)})


def make_sweep(losses: Mapping[float, Sequence[float]], norms: Mapping[float, float]) -> Comparison:
    """A sweep at the learning rate 0.1."""
    named = {(f"std {std!r}", 0.1): finals for std, finals in losses.items()}
    runs = tuple(
        make_run(f"std {std!r}", 0.1, seed, final, norms={"fc1": norms[std] / 2, "network": norms[std]})
        for std, finals in losses.items()
        for seed, final in enumerate(finals)
    )
    return make_comparison(named, kind="sweep", stds=tuple(losses), runs=runs)


def example_comparison() -> Comparison:
    """Four schemes at five rates with three seeds: he diverges at the largest rate, fixup does not apply."""
    norms = {"default": (2.1, 0.3), "he": (31.0, 1.0), "lsuv": (14.0, 1.1), "hessinit": (2.0, 1.2)}
    rates, runs = (0.003, 0.01, 0.03, 0.1, 0.3), []
    for rate in rates:
        for seed in range(3):
            for scheme, (norm, speed) in norms.items():
                sharpness = min(2 / rate, 60.0) if scheme == "hessinit" else norm
                runs.append(_descend(scheme, rate, seed, sharpness, speed))
            runs.append(make_run("fixup", rate, seed, None))
    losses = {(scheme, rate): (0.0,) * 3 for scheme in (*norms, "fixup") for rate in rates}
    return make_comparison(losses, runs=tuple(runs), steps=200, rate_dependent=("hessinit",))


def _descend(scheme: str, rate: float, seed: int, norm: float, speed: float) -> Run:
    first = math.log(10) * (1 + 0.02 * seed + norm / 300)
    diverges = rate * norm > 4 + seed
    fall = speed * (min(rate, 2 / norm) * 40 + 0.3 * min(rate * norm, 2))
    losses = [first * 3**point for point in range(12)]
    if not diverges:
        losses = [first * math.exp(-fall * point / 50) + 0.004 * (seed + 1) for point in range(1, 51)]
    norms = {"fc1": 0.6 * norm, "fc2": 0.3 * norm, "fc3": 0.5 * norm, "network": norm}
    ends = {"first_loss": first, "diverged": diverges, "losses": tuple(losses), "norms": norms}
    steps = {"steps_done": 4 * len(losses)}
    return make_run(scheme, rate, seed, math.inf if diverges else losses[-1], **ends, **steps)


def make_point(step: int, norm: float, ratio: float | None = None, **changes: Any) -> TrackedPoint:
    """A point whose learning rate, 0.1, is `ratio` times the stability limit."""
    lr = None if ratio is None else 0.1
    given: dict[str, Any] = {
        "seconds": 1.0, "measuring_seconds": 0.02, "error": 0.0, "loss": 1.0, "lr": lr,
        "lr_times_norm": None if lr is None else lr * norm, "lr_over_limit": ratio,
        "stable_learning_rate": 0.1 / ratio if ratio else math.inf, "converged": math.isfinite(norm),
    }  # fmt: skip
    return TrackedPoint(step=step, norm=norm, **{**given, **changes})


def example_tracking(points: int = 13, name: str = "", speed: float = 1.0) -> Tracking:
    """A network that sharpens until its learning rate reaches the stability limit, and stays there."""
    found, loss = [], [2.35 * math.exp(-step / 90) for step in range(20 * points)]
    for step in range(0, 20 * points, 20):
        norm = min(3.0 * math.exp(speed * step / 75), 20.0 + 0.6 * math.sin(step))
        layers = {"fc1": 0.2 * norm, "fc2": 0.3 * norm, "fc3": 0.8 * norm}
        losses = {"loss": loss[step], "training_loss": loss[step] if step else None}
        found.append(make_point(step, norm, norm / 20, layers=layers, **losses))
    return Tracking(
        points=tuple(found), losses=tuple(enumerate(loss))[1 : 20 * (points - 1) + 1], optimizer="SGD",
        curvature="gauss-newton", every=20, max_overhead=0.1, examples=256, seconds=0.4 + 0.2 * points,
        versions={"hessinit": "0.1.0", "torch": "2.6.0"}, name=name,
    )  # fmt: skip


def make_cell(row: str, column: str, ours: float, **changes: Any) -> PaperCell:
    return PaperCell(**{"row": row, "column": column, "ours": ours, "n": 5, **changes})


def make_table(*cells: PaperCell, **changes: Any) -> PaperTable:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in cells)) for name in ("row", "column"))
    given = {"title": "A table", "corner": "std", "rows": rows, "columns": columns}
    return PaperTable(cells=cells, **{**given, **changes})


def make_reproduction(*tables: PaperTable, **changes: Any) -> Reproduction:
    """A record of five seeds on mnist with these tables."""
    findings = {name: changes.pop(name) for name in ("figures", "sentences") if name in changes}
    given: dict[str, Any] = {
        "name": "table-4-mnist", "experiment": "table-4", "data": "mnist", "variant": "two-hidden",
        "title": "Table 4: the std of the weights, their Hessians and the training loss",
        "about_variant": "784–64–64–10 with ReLU.", "seeds": (0, 1, 2, 3, 4),
        "configuration": {"widths": [784, 64, 64, 10], "learning_rate": 0.01},
        "source": "60,000 images in the official idx files", "revision": "example",
        "versions": {"torch": "2.13.0"}, "hardware": {"processor": "made up"}, "seconds": 187.0,
        "results": {f"seed-{seed}": {"loss": "nan"} for seed in range(5)},
    }  # fmt: skip
    return Reproduction(findings=Findings(tables=tables, **findings), **{**given, **changes})


def example_reproduction(name: str = "table-4-mnist", **changes: Any) -> Reproduction:
    """Four standard deviations: five of six claims hold, one curve and three points diverge."""
    cells = []
    for row, column, paper, ours, error in (
        ("1.000", "Hessian 1", 24.48, 33.2, 2.13), ("1.000", "Training loss", 8.65, 0.9854, 0.012),
        ("0.100", "Hessian 1", 2.34, 1.852, 0.061), ("0.100", "Training loss", 0.32, 0.305, 0.0021),
        ("0.005", "Hessian 1", 0.005, 0.0042, 0.0001), ("0.005", "Training loss", 0.42, 0.4412, 0.0031),
        ("hessinit", "Hessian 1", None, 61.3, 4.1), ("hessinit", "Training loss", None, 0.291, 0.0019),
    ):  # fmt: skip
        rule = "within a factor of 10" if row == "1.000" else "within 50 %"
        judged = {} if paper is None else {"paper": paper, "rule": rule, "within": ours != 0.9854}
        cells.append(make_cell(row, column, ours, error=error, **judged))
    shares = [make_cell(f"Dense {n}", "rtol ≤ 1", 78.0, error=2.1, n=400, unit="%") for n in (1, 2)]
    gelu = make_table(*shares, title="The same with GELU", corner="layer", note="Relative errors.")
    findings = {"figures": _figures(), "sentences": ("The loss is lowest at 0.100.",)}
    table = make_table(*cells, title="As printed")
    return make_reproduction(table, gelu, name=name, **{**findings, **changes})


def _figures() -> tuple[PaperFigure, PaperFigure]:
    steps = tuple(float(62 * chunk + 31) for chunk in range(60))
    curves, points = [], []
    for place, name in enumerate(("1.000", "0.100", "0.005", "hessinit")):
        loss = [0.3 + 0.02 * place + 9 / (place + 1) * math.exp(-((step / 62) ** 0.5)) for step in steps]
        loss[40:] = [math.inf] * 20 if place == 0 else loss[40:]
        error = tuple(0.04 * each if math.isfinite(each) else math.nan for each in loss)
        curves.append(Curve(name=name, x=steps, y=tuple(loss), error=error))
    for dimension in (16, 64, 128):
        norms = tuple(dimension / 100 * 10.0**power for power in range(-4, 3))
        losses = (*(5.6 + 0.05 * math.log10(norm) ** 2 - dimension / 400 for norm in norms[:-1]), math.inf)
        points.append(Curve(name=f"dimension {dimension}", x=norms, y=losses, error=(0.02,) * 7))
    texts = {"title": "Loss", "x_label": "step", "y_label": "loss"}
    lines = PaperFigure(name="figure-1", curves=tuple(curves), log_y=True, **texts)  # type: ignore[arg-type]
    return lines, replace(lines, name="word2vec", curves=tuple(points), style="points", log_x=True)


# One result of every kind, with the numbers that JSON has no words for.
REPORT = make_report(
    make_layer("fc1", 0.1 + 0.2, aliases=("tied",), spread=Spread((1.0, math.inf)),
               eigenvalues=(make_estimate(1.0),) * 2),
    make_layer("fc2", math.nan, density=Density((0.0,), (1.0,), (0.0, 1.0), (0.5, 0.5), 0.1, 2, 9)),
    make_layer(
        "\ud800\x1b[2J",
        jacobians=JacobianBounds(forward=make_estimate(1.0), rigorous_bound=math.inf, reason="no chain"),
        diagnostics=Diagnostics(activation="relu", dead=0.25, gradient_std=math.inf),
    ),
    network=5e-324,
    notes=("inf",),
)  # fmt: skip
PLAN = SchemePlan(
    scheme="he",
    layers=(
        PlannedWeight(name="fc1", shape=(4, 3), fan_in=(3.0,), fan_out=(4.0,), std=(0.8,), gain=math.sqrt(2)),
        PlannedWeight(name="fc2", shape=(4, 4), unchanged="frozen"),
    ),
)
SEARCH = (Measurement(t=None, norm=math.inf, loss=math.nan, layer="fc1"),)
INITIALIZATION = make_initialization(before=None, after=REPORT, plan=PLAN, measurements=SEARCH)
COMPARISON = make_comparison(
    {("he", 0.1): (0.5,), ("lsuv", 0.1): (math.nan,)}, settings={"kappa": 4.0, "schemes": ["he"]}
)
POINT = make_point(3, 30.0, 1.5, measuring_seconds=0.1, layers={"fc1": math.inf})
TRACKING = Tracking(
    points=(POINT,), losses=((1, 2.5), (2, math.inf)), curvature="hessian", seconds=1.0,
    initialization=INITIALIZATION,
)  # fmt: skip
ADVICE = make_report(make_layer(), network=0.0).advice("momentum", lr=0.1)
FORMS = QuadraticForms(
    layers=(QuadraticForm(name="fc1", shape=(4, 3), exact=(3.0,), theorem1=(math.nan,), length=(1.0,)),),
    directions="random", draws=1, loss=2.3, examples=32, seed=0,
)  # fmt: skip
EXPECTED = MeasurementPlan(
    engine="gram", engine_reason="few outputs", curvature="both", layers=3, parameters=940, examples=32,
    tolerance=1e-3, gradients=21.0, gradient_seconds=0.01, memory=31_000_000, training_memory=10_000_000,
    notes=("jacobians=True is not counted.",),
)  # fmt: skip
REPRODUCTION = example_reproduction()
EVERY_KIND: dict[str, Result] = {
    result.KIND.removeprefix("hessinit "): result
    for result in (REPORT, EXPECTED, PLAN, INITIALIZATION, COMPARISON, TRACKING, ADVICE, FORMS, REPRODUCTION)
}


def every_block() -> doc.Document:
    """A document with every kind of block, and names that would like to be scripts in all of them."""
    evil, steps = HOSTILE[1], list(range(1, 51))
    curves = [
        doc.Series(evil, [1 / step for step in steps], steps, low=[0.5 / step for step in steps],
                   high=[2 / step for step in steps]),
        doc.Series("dashed", [math.nan if step > 20 else 1.0 for step in steps], steps, "ramp:0.5", True),
        doc.Series("broken off", [1.0], [20], "vermilion", points=True, symbol="cross", in_legend=False,
                   details=["2 of 3 seeds diverged here"]),
    ]  # fmt: skip
    norms = doc.Series("norms", [1.0, 0.0, math.inf, math.nan, None], details=[evil] * 5)
    depth = doc.LineChart(
        "depth", "depth", evil, [norms], evil, layers=["a", evil, "c", "d", "e"], log_y=True,
        bands=[doc.Band(0.1, 10.0, evil)], rules=[doc.ReferenceLine(2.0, evil)],
    )  # fmt: skip
    rules = [doc.ReferenceLine(10, evil, upright=True), doc.ReferenceLine(0.5, "half")]
    lines = doc.LineChart("lines", "lines", "three curves", curves, "loss", "step", log_y=True, rules=rules)
    heat = doc.HeatMap(
        "heat", "heat", "four cells", ["default", evil], ["0.1", "1"], [[2.0, math.nan], [0.1, 0.5]],
        [["2", "diverged"], ["0.1", evil]], "rate", "scheme", "loss", log_color=True,
        marked=[[False, False], [True, False]],
    )  # fmt: skip
    marks = [doc.ReferenceLine(0.1, evil, "blue"), doc.ReferenceLine(math.inf, "endless")]
    rates = doc.RateLine("rates", "rates", "four rates", 0.5, 1.0, marks)
    findings = ["", "no gradient", "", "signal lost", ""]
    columns = [
        name_column("name", ["a", evil, "c", "d", "mean"]),
        doc.Column("paper", ["~1,230", "9", "nan", "inf", "7"]),
        doc.Column("ours", ["3", "20", "100", "", "7"], marks=["yes", "no", "best", "diverged", ""]),
        doc.Column("finding", findings, is_number=False, marks=["no" if one else "" for one in findings]),
    ]
    texts = [doc.Paragraph(evil), doc.Paragraph("three", "strong"), doc.Paragraph("note", "note")]
    table = doc.Table(evil, columns, fixed=1, show_caption=True)
    first = doc.Section("One", [depth, lines, lines, heat, rates], "one")
    second = doc.Section("Two", [*texts, table, doc.Facts(evil, [(evil, evil)])], "two")
    number = doc.KeyNumber(evil, "64.5", evil)
    shown = {"verdict": [evil, "second"], "tone": "fair", "footer": evil, "numbers": [number]}
    return doc.Document(title=evil, sections=[first, second], **shown)  # type: ignore[arg-type]
