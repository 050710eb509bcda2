"""One hand-made result of every kind, with the numbers that JSON has no words for."""

from __future__ import annotations

import math

from hessinit.results.advice import LearningRateAdvice, WarmupAdvice
from hessinit.results.comparison import Comparison, Run
from hessinit.results.curvature_report import Diagnostics, JacobianBounds
from hessinit.results.estimates import Density, Spread
from hessinit.results.initialization import Initialization, Measurement, PlannedWeight, SchemePlan
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms
from hessinit.results.reproduction import Curve, Findings, PaperCell, PaperFigure, PaperTable, Reproduction
from hessinit.results.result import Result
from hessinit.results.track_record import TrackedPoint, Tracking
from report_examples import make_estimate, make_layer, make_report

one = make_estimate(1.0)
REPORT = make_report(
    make_layer("fc1", 0.1 + 0.2, aliases=("tied",), spread=Spread((1.0, math.inf)), eigenvalues=(one, one)),
    make_layer("fc2", math.nan, density=Density((0.0,), (1.0,), (0.0, 1.0), (0.5, 0.5), 0.1, 2, 9)),
    make_layer(
        "\ud800\x1b[2J",
        jacobians=JacobianBounds(
            forward=one, forward_largest=2.0, backward=None, backward_largest=None, activation=1.0,
            paper_bound=None, rigorous_bound=math.inf, reason="no chain",
        ),
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
INITIALIZATION = Initialization(
    before=None, after=REPORT, scales={"fc1": 0.5}, target=40.0, rule="network", scheme="he", scaling="last",
    lr=0.1, converged=True, reason="within 5 %", plan=PLAN,
    measurements=(Measurement(t=None, norm=math.inf, loss=math.nan, layer="fc1"),),
)  # fmt: skip


def make_run(scheme: str, rate: float, loss: float, seconds: float = 1.0) -> Run:
    return Run(
        scheme=scheme, learning_rate=rate, seed=0, losses=(2.0, loss), first_loss=2.3, final_loss=loss,
        steps_done=20, diverged=not math.isfinite(loss), norms={"fc1": 3.0, "network": 4.0}, seconds=seconds,
    )  # fmt: skip


COMPARISON = Comparison(
    kind="compare", schemes=("he", "lsuv"), learning_rates=(0.1,), seeds=(0,), steps=20, batch_size=8,
    optimizer="sgd", examples=100, runs=(make_run("he", 0.1, 0.5), make_run("lsuv", 0.1, math.nan)),
    settings={"kappa": 4.0, "schemes": ["he"]}, versions={"torch": "2.6"},
)  # fmt: skip
POINT = TrackedPoint(
    step=3, seconds=1.0, measuring_seconds=0.1, loss=2.3, norm=30.0, error=0.1, converged=True, lr=0.1,
    lr_times_norm=3.0, stable_learning_rate=2 / 30, lr_over_limit=1.5, layers={"fc1": math.inf},
)  # fmt: skip
TRACKING = Tracking(
    points=(POINT,), losses=((1, 2.5), (2, math.inf)), curvature="hessian", seconds=1.0,
    initialization=INITIALIZATION,
)  # fmt: skip
ADVICE = LearningRateAdvice(
    optimizer="SGD", learning_rate=0.1, learning_rate_reason="1/‖H‖", stable_learning_rate=math.inf,
    stable_reason="2/‖H‖", warmup=WarmupAdvice(advised=False, steps=0, reason="stable"),
    norm=make_estimate(10.0),
    curvature="gauss-newton", loss=2.3, examples=32, weights=("fc1",), parameters=12,
)  # fmt: skip
FORMS = QuadraticForms(
    layers=(QuadraticForm(name="fc1", shape=(4, 3), exact=(3.0,), theorem1=(math.nan,), length=(1.0,)),),
    directions="random", draws=1, loss=2.3, examples=32, seed=0,
)  # fmt: skip
FIGURE = PaperFigure(
    name="figure-1", title="Loss", x_label="step", y_label="loss",
    curves=(Curve(name="he", x=(0.0, 1.0), y=(2.0, math.inf), error=(0.1, 0.1)),),
)  # fmt: skip
REPRODUCTION = Reproduction(
    name="table-4-mnist", experiment="table-4", title="Table 4", data="mnist", variant="plain",
    about_variant="As printed.",
    findings=Findings(
        tables=(
            PaperTable(
                title="‖H‖", corner="std", rows=("0.1",), columns=("dense1", "dense2"),
                cells=(
                    PaperCell(row="0.1", column="dense1", ours=1.5, n=3, paper=1.4, rule="10 %", within=True),
                    PaperCell(row="0.1", column="dense2", ours=1.5, n=1),
                ),
            ),
        ),
        figures=(FIGURE,),
        sentences=("It holds.",),
    ),
    seeds=(0, 1), configuration={"widths": [1, 2]}, source="there", revision="0123456789ab", versions={},
    hardware={}, seconds=2.0, results={"0": {"loss": "nan"}, "1": [1, 2]},
)  # fmt: skip

EVERY_KIND: dict[str, Result] = {
    result.KIND.removeprefix("hessinit "): result
    for result in (REPORT, PLAN, INITIALIZATION, COMPARISON, TRACKING, ADVICE, FORMS, REPRODUCTION)
}
