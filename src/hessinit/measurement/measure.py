"""The verb `measure`: the extreme eigenvalues of the curvature of every layer and of the network."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hessinit.curvature import derivative_check, shares
from hessinit.curvature import progress as progress_of
from hessinit.curvature.cost import in_gradients, loss_gradient
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError, check_callable
from hessinit.measurement.bounds import jacobian_bounds
from hessinit.measurement.diagnostics import diagnose
from hessinit.measurement.facts import in_running_order, note_unchecked, note_uncounted, notes_on
from hessinit.measurement.plan import plan_measurement
from hessinit.measurement.rows import LAYER_DETAILS, Details, Rows, check_choices
from hessinit.measurement.soundness import judge_signals
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import Ranks, calling_ranks, on_all_ranks
from hessinit.problem.validate import check_switches, check_tolerance, check_whole
from hessinit.progress import OnProgress
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature

LONG_EVALUATION = 0.5  # seconds: then `progress` is first told the time that the plan expects


@uninterrupted
@on_all_ranks()
def measure(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    curvature: str = "gauss-newton",
    estimator: str = "auto",
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    details: str | Iterable[str] = (),
    network: bool = True,
    strict: bool = False,
    distributed: str | None = None,
    progress: OnProgress | None = None,
) -> CurvatureReport:
    """Measure the curvature of every layer and of the network.

    The model stays bit for bit as it was.

    Takes a `Problem`, or model, loss and batch for one with the defaults. `curvature` is
    "gauss-newton" (the paper's approximation; fast), "hessian" (exact) or "both" (with the gap
    between them). `estimator` is "auto", "gram" (few outputs, independent examples) or "lanczos".

    Norms are right to `tolerance`, relative; a value that did not get there says so and warns, or
    raises with `strict=True`. The derivatives are checked against finite differences of the plain
    model unless the problem says check=False. The stated errors include rounding.

    `details` names what is wanted besides norms: "trace", "frobenius" and "density" of the
    spectrum, its largest eigenvalues ("top-5"), "jacobians" for the Jacobians around each layer and
    the paper's Theorem 2, "diagnostics" for activations and gradients, dead and saturated units.
    `network=False` bounds the network's norm by the layers' instead of measuring it.

    In a job of several processes, each makes the call: distributed="batch" takes its share of the
    examples, "layers" the same batch from all, which share the layers out. Every rank gets the
    report of one process. "each" measures in this process alone; one of several that says nothing
    is refused.

    `progress` is called with a `ProgressState` (layers done, products, seconds left) a few
    times a second, if it takes longer than two, at first with the time that is planned; what it
    raises ends the measurement.

    Costs 20 to 50 gradients for a classifier with ten outputs, all layers and the network together;
    with diagnostics up to 1.5 times, with Jacobian products 6 to 25 times as much.

    >>> import torch
    >>> model = nn.Linear(3, 1, bias=False).double()
    >>> inputs = torch.eye(3, dtype=torch.float64)
    >>> report = measure(model, nn.MSELoss(), (inputs, torch.zeros(3, 1)))
    >>> round(report.network.norm, 9)  # closed form: the largest eigenvalue of 2/3 XᵀX
    0.666666667
    """
    started = time.perf_counter()
    given = as_problem(problem, loss, batch)
    ranks = calling_ranks()
    wanted = Details.read(details)
    check_choices(curvature, estimator)
    check_switches(network=network, strict=strict)
    if progress is not None:
        check_callable("progress", progress, "progress(state)")
    max_iterations = check_whole("max_iterations", max_iterations, at_least=1)
    settings = LanczosSettings(check_tolerance(tolerance), max_iterations, given.seed)
    if wanted.top > max_iterations:
        raise ProblemError(
            f'details="top-{wanted.top}" with max_iterations={max_iterations}: every eigenvalue takes '
            f"a step; pass max_iterations={wanted.top} or more."
        )
    if ranks is not None and ranks.split == "batch":
        for name in LAYER_DETAILS:
            if name in wanted:
                raise ProblemError(
                    f'details={name!r} with distributed="batch" needs all examples at once; pass '
                    'the whole batch on every rank, with distributed="layers".'
                )
    functional = FunctionalProblem(given)
    if progress is not None:
        observer = _observe(progress, functional, curvature, settings, network)
        settings = replace(settings, progress=observer)
    with functional.settings():
        evaluations = evaluate(functional)
        slow = time.perf_counter() - started > LONG_EVALUATION
        if slow and settings.progress is not None and ranks is None:
            planned = plan_measurement(evaluations, curvature, estimator, settings, network)
            settings.progress.expect(planned.seconds)
        work = _Measurement(functional, evaluations, settings, wanted, started)
        report = work.run(curvature, estimator, network, given.precision == "auto", ranks)
        if ranks is not None:
            report = ranks.first(lambda: report, last=True)
        if settings.progress is not None:
            settings.progress.finish()
    rows = (*report.layers, report.network) if network else report.layers
    _complain(rows, tolerance, strict)
    return report


def _observe(
    progress: OnProgress,
    problem: FunctionalProblem,
    curvature: str,
    settings: LanczosSettings,
    network: bool,
) -> progress_of.Progress:
    passes = 2 if curvature == "both" else 1
    if len(problem.batches) > 1:
        passes += len(problem.batches)
    return progress_of.Progress(
        progress,
        len(problem.layers),
        network=network,
        passes=passes,
        typical=progress_of.expected_products(settings.tolerance, settings.max_iterations),
    )


@dataclass
class _Measurement:
    """One measurement of evaluated batches."""

    problem: FunctionalProblem
    evaluations: list[Evaluation]
    settings: LanczosSettings
    details: Details
    started: float

    def run(
        self,
        curvature: str,
        estimator: str,
        network: bool,
        may_lower_precision: bool,
        ranks: Ranks | None,
    ) -> CurvatureReport:
        """The report; notes, checks and findings included."""
        problem = self.problem
        evaluations = self.evaluations
        facts: dict[str, Any] = {}
        by_examples = ranks is not None and ranks.split == "batch"
        if ranks is not None and by_examples:
            evaluations, facts = shares.join_shares(ranks, evaluations)
        notes = notes_on(problem, evaluations)
        measuring = Rows(problem, evaluations, curvature, estimator, self.settings, self.details)
        layers = in_running_order(problem, evaluations)
        lower: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if may_lower_precision and ranks is None:
            lower = measuring.faster()
        with lower:
            by_name = measuring.fill(layers, network, ranks)
        rows = tuple(by_name[layer.parameter] for layer in layers)
        whole = by_name[""] if network else measuring.bounded_network(rows)
        further = self._measure_layers()
        rows = tuple(
            replace(row, **{field: values[layer.parameter] for field, values in further.items()})
            for row, layer in zip(rows, layers, strict=True)
        )
        notes = (*notes, *note_unchecked(problem.check), *note_uncounted(problem))
        report = replace(measuring.report(rows, whole), notes=notes, **facts)
        vector = measuring.whole.vector if network and ranks is None else None
        del measuring  # what the engines hold must not stand beside the backward pass
        gradient = loss_gradient(evaluations)
        derivative_check.check_answer(evaluations, vector, whole)
        if not by_examples:  # of a share, no rank knows all activations
            diagnostics = further.get("diagnostics")
            judged = judge_signals(problem, evaluations, rows, gradient, diagnostics)
            report = replace(report, **judged)
        seconds = problem.clock() - self.started
        cost = in_gradients(seconds, gradient.seconds)
        return replace(report, seconds=seconds, gradients=cost)

    def _measure_layers(self) -> dict[str, Mapping[str, Any]]:
        """Further fields of the rows, by parameter."""
        fields: dict[str, Mapping[str, Any]] = {}
        if "jacobians" in self.details:
            fields["jacobians"] = jacobian_bounds(self.problem, self.evaluations, self.settings)
        if "diagnostics" in self.details:
            fields["diagnostics"] = diagnose(self.problem, self.evaluations)
        return fields


def _complain(rows: Sequence[LayerCurvature], tolerance: float, strict: bool) -> None:
    """Warn of rows that did not converge, or raise."""
    unconverged = {row.name: row.estimate for row in rows if not row.converged}
    for row in rows:
        if row.approximation is not None and not row.approximation.converged:
            unconverged[f"{row.name} (Gauss-Newton)"] = row.approximation
    if not unconverged:
        return
    names = [*unconverged]
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    reason = unconverged[names[0]].reason
    message = f"{shown} did not reach tolerance={tolerance:g}: {reason}."
    if strict:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=5)  # past the decorators
