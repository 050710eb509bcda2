"""The reports before and after: as `measure` gives them, without the layers where these are dear."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hessinit.curvature.engines import LanczosSettings, SpectrumOptions
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.measurement.measure import Rows, in_running_order, note_uncounted, notes_on, versions_of
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import CurvatureReport

TOLERANCE = 1e-3
DEAR_TOLERANCE = 5e-3
# Every block costs the Lanczos engine a dozen products of one to two gradients.
_FEW_BLOCKS = 3
# Backward passes, one for each output, that the Gram engine may take: a Lanczos run costs about as much.
_FEW_OUTPUTS = 40


def make_report(problem: Problem, curvature: str, every_layer: bool) -> CurvatureReport:
    """Inside `problem.settings()`. Layers are measured where asked for, where few, and by the Gram engine."""
    started = time.perf_counter()
    evaluations = evaluate(problem)
    estimator = "auto" if every_layer else network_estimator(evaluations)
    tolerance = TOLERANCE if estimator == "auto" else DEAR_TOLERANCE
    rows = Rows(
        problem,
        evaluations,
        curvature,
        estimator,
        LanczosSettings(tolerance, 200, problem.seed),
        SpectrumOptions(),
    )
    cheap = rows.main.name == "gram" or len(problem.layers) <= _FEW_BLOCKS
    layers = rows.layers(in_running_order(problem, evaluations)) if every_layer or cheap else ()
    notes = (*notes_on(problem, evaluations), *note_uncounted(problem))
    if not layers:
        notes = (*notes, "The layers were not measured one by one: each would cost a dozen products.")
    return CurvatureReport(
        layers=layers,
        network=rows.network(),
        curvature=curvature,
        loss=sum(one.loss_value * one.weight for one in evaluations),
        examples=problem.examples,
        batches=len(problem.batches),
        tolerance=tolerance,
        seed=problem.seed,
        engine=rows.main.name,
        engine_reason=rows.main.reason if layers else "the network's norm alone was measured",
        seconds=time.perf_counter() - started,
        notes=notes,
        versions=versions_of(problem),
    )


def network_estimator(evaluations: Sequence[Evaluation]) -> str:
    """The cheaper way to the network's norm alone; the engines choose by the cost of all layers."""
    outputs = max(one.output[0].numel() if one.output.ndim else 1 for one in evaluations)
    return "auto" if outputs <= _FEW_OUTPUTS else "lanczos"
