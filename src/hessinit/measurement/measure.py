"""The verb `measure`: extreme eigenvalues of the curvature of every layer and of the network."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from hessinit.curvature import derivative_check, operators, rounding_error, shares
from hessinit.curvature import progress as progress_of
from hessinit.curvature.engine import (
    Engine,
    Extremes,
    LanczosEngine,
    LanczosSettings,
    measure_spectrum,
    with_rounding,
)
from hessinit.curvature.engine_choice import (
    build_engine,
    evaluate,
    evaluate_everywhere,
    exactly_or_plainly,
)
from hessinit.curvature.evaluation import Evaluation, in_gradients, loss_gradient, unused_leaves
from hessinit.curvature.operators import GaussNewtonOperator, HessianOperator, JacobianOperator
from hessinit.errors import (
    ConvergenceError,
    ConvergenceWarning,
    ProblemError,
    argument,
    check_callable,
)
from hessinit.measurement.diagnostics import diagnose
from hessinit.measurement.facts import (
    facts_of,
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
)
from hessinit.measurement.jacobians import jacobian_bounds
from hessinit.measurement.plan import LAYER_DETAILS, Details, check_choices, plan_measurement
from hessinit.measurement.soundness import judge_signals
from hessinit.problem.checks import Layer, check_switches, check_tolerance, check_whole
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.in_place import InPlaceProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import Ranks, calling_ranks, on_all_ranks
from hessinit.problem.substitutes import matrix_products
from hessinit.progress import OnProgress
from hessinit.results.curvature_report import (
    ONLY_BOUNDED,
    CurvatureReport,
    Diagnostics,
    Estimate,
    JacobianBounds,
    LayerCurvature,
    Spread,
)


class Rows:
    """The engines that one measurement needs, and the rows of the report that they fill."""

    def __init__(
        self,
        problem: FunctionalProblem,
        evaluations: list[Evaluation],
        curvature: str,
        estimator: str,
        settings: LanczosSettings,
        details: Details | None = None,
    ) -> None:
        self.problem = problem
        self.evaluations = evaluations
        self._details = details or Details()
        self._settings = settings
        self._rounding: dict[str, list[rounding_error.Rounding]] = {}  # of each rank
        self._curvature = curvature
        self._kind = "gauss-newton" if curvature == "gauss-newton" else "hessian"
        self._both = curvature == "both"
        self._estimator = estimator
        self._precision = ""
        self.main = self._build(self._kind, evaluations)

    def _build(self, kind: str, evaluations: list[Evaluation]) -> Engine:
        return build_engine(evaluations, kind, self._settings, self._estimator)

    @property
    def reason(self) -> str:
        """Why the main engine, and the precision of its products if it was lowered."""
        return self.main.reason + self._precision

    @cached_property
    def _engines(self) -> list[Engine]:
        engines_used = [self.main]
        if self._both:
            engines_used.append(self._build("gauss-newton", self.evaluations))
        if len(self.evaluations) > 1:
            # Each batch alone: how much does the answer depend on the batch?
            for evaluation in self.evaluations:
                engines_used.append(self._build(self._kind, [evaluation.weighted(1.0)]))
        return engines_used

    @cached_property
    def whole(self) -> Extremes:
        """The extremes of the network, by the main engine."""
        return self.main.extremes([layer.parameter for layer in self.problem.layers])

    def layers(self, layers: Sequence[Layer]) -> dict[str, LayerCurvature]:
        """The rows of these layers, by parameter."""
        names = [layer.parameter for layer in layers]
        by_engine = [engine.extremes_of_each(names) for engine in self._engines]
        rows = {}
        for layer in layers:
            name = layer.parameter
            rows[name] = self._row(layer, [name], [extremes[name] for extremes in by_engine])
        return rows

    def network(self) -> LayerCurvature:
        names = [layer.parameter for layer in self.problem.layers]
        network = Layer("network", "", (), (sum(layer.size for layer in self.problem.layers),))
        extremes = [self.whole]
        for engine in self._engines[1:]:
            self._settings.report_done(progress_of.NETWORK)
            extremes.append(engine.extremes(names))
        return self._row(network, names, extremes)

    def fill(
        self, layers: Sequence[Layer], network: bool, ranks: Ranks | None
    ) -> dict[str, LayerCurvature]:
        """The rows by parameter.

        "" is the network, if asked for. In a distributed job: of all ranks.
        """

        def find(names: Collection[str]) -> dict[str, LayerCurvature]:
            rows = self.layers([layer for layer in layers if layer.parameter in names])
            if "" in names:
                rows[""] = self.network()
            return rows

        sizes = {layer.parameter: layer.size for layer in layers}
        if network:
            sizes[""] = sum(sizes.values())
        if ranks is None or ranks.sharded:
            return find(sizes)
        if ranks.split == "layers":
            return ranks.divide(sizes, find)
        own_engines = self._engines[: 1 + self._both]
        for kind in (self._kind, "gauss-newton")[: len(own_engines)]:
            rounding = rounding_error.relative_rounding(self.evaluations, kind)
            self._rounding[kind] = ranks.exchange(rounding)
        unused = unused_leaves(self.evaluations)
        shared = [
            shares.SharedEngine(ranks, own_engines, number, unused)
            for number in range(len(own_engines))
        ]
        self.main = shared[0]
        self._engines = [*shared]
        return ranks.lead(lambda: find(sizes), partial(shares.multiply, own_engines))

    @contextlib.contextmanager
    def faster(self) -> Iterator[None]:
        """TF32 in matrix products, where the error of its rounding is below the tolerance."""
        by_lanczos = isinstance(self.main, LanczosEngine)
        problem = self.problem
        has_tf32 = problem.device.type == "cuda" and problem.dtype == torch.float32
        # Kinks magnify rounding.
        if has_tf32 and by_lanczos and not derivative_check.has_kinks(self.evaluations[0]):
            with matrix_products(tf32=True):
                rounding = rounding_error.relative_rounding(self.evaluations, self._kind, "tf32")
                errors = [rounding.network, *rounding.layers.values()]
                largest = max(error.relative for error in errors)
                if rounding_error.ROUNDING.caution * largest <= self._settings.tolerance:
                    self._rounding[self._kind] = [rounding]
                    self._precision = "; matrix products in TF32"
                    yield
                    return
        yield

    def bounded_network(self, rows: Sequence[LayerCurvature]) -> LayerCurvature:
        """Bounds of the network's norm by the layers': at least the largest, at most their sum."""
        if len(rows) == 1:  # it is the network
            return replace(rows[0], name="network", aliases=(), shape=(rows[0].parameters,))
        norms = sorted(row.norm for row in rows)
        semidefinite = self._kind == "gauss-newton" and all(row.bottom.value >= 0 for row in rows)
        error_of_top = math.inf  # not inf - inf
        error_of_bottom = math.inf
        if semidefinite:
            error_of_top = sum(norms[:-1])
            error_of_bottom = 0.0
        size = sum(layer.size for layer in self.problem.layers)
        return LayerCurvature(
            name="network",
            shape=(size,),
            curvature=self._kind,
            top=Estimate(norms[-1], error_of_top, False, ONLY_BOUNDED, 0),
            bottom=Estimate(0.0, error_of_bottom, semidefinite, ONLY_BOUNDED, 0),
            engine=self.main.name,
            engine_reason=self.reason,
        )

    def report(
        self, layers: tuple[LayerCurvature, ...], network: LayerCurvature
    ) -> CurvatureReport:
        """The rows with what the problem and the main engine say about them."""
        return CurvatureReport(
            layers=layers,
            network=network,
            curvature=self._curvature,
            tolerance=self._settings.tolerance,
            engine=self.main.name,
            engine_reason=self.reason,
            **facts_of(self.problem, self.evaluations),
        )

    def _rounded(self, extremes: Extremes, curvature: str, parameter: str) -> Extremes:
        """The extremes with the operator's rounding error; of the network without a parameter."""
        if self.main.states_rounding:
            return extremes
        if curvature not in self._rounding:
            rounding = rounding_error.relative_rounding(self.evaluations, curvature)
            self._rounding[curvature] = [rounding]
        errors = [
            rounding.layers[parameter] if parameter else rounding.network
            for rounding in self._rounding[curvature]
        ]
        largest = max(errors, key=lambda error: (not error.is_all, error.relative))
        return with_rounding(extremes, largest, self._settings.tolerance)

    def _row(
        self, layer: Layer, names: Sequence[str], by_engine: Sequence[Extremes]
    ) -> LayerCurvature:
        """A row of the report from the extremes that each engine found."""
        extremes = self._rounded(by_engine[0], self._kind, layer.parameter)
        approximation = None
        of_batches = by_engine[1:]
        if self._both:
            approximation = self._rounded(by_engine[1], "gauss-newton", layer.parameter).norm
            of_batches = by_engine[2:]
        norms = tuple(batch_extremes.norm.value for batch_extremes in of_batches)
        row = LayerCurvature(
            name=layer.name,
            aliases=layer.aliases,
            shape=layer.shape,
            curvature=self._kind,
            top=extremes.top,
            bottom=extremes.bottom,
            approximation=approximation,
            spread=Spread(norms) if norms else None,
            engine=extremes.engine,
            engine_reason=extremes.reason + self._precision,
        )
        if self._details.spectrum:
            row = replace(row, **self._measure_spectrum(names))
        return row

    def _measure_spectrum(self, names: Sequence[str]) -> Mapping[str, Any]:
        operator = self._settings.watched(self.main.operator(names), [progress_of.SPECTRUM])
        return measure_spectrum(
            operator,
            self._settings,
            top=self._details.top,
            trace="trace" in self._details,
            frobenius="frobenius" in self._details,
            density="density" in self._details,
        )


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
    between them). `estimator` is "auto", "gram" (few outputs, independent examples), "lanczos" or
    "plain": from forwards and ordinary backwards of the model as it is trained, compiled or with
    kernels that have no second derivative; "auto" takes it where no other engine can go.

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
            f'details="top-{wanted.top}" with max_iterations={max_iterations}: every eigenvalue '
            f"takes a step; pass max_iterations={wanted.top} or more."
        )
    if ranks is not None and ranks.split == "batch":
        _refuse_details(
            wanted,
            'with distributed="batch" needs all examples at once; pass the whole batch on every '
            'rank, with distributed="layers".',
        )
    measurement = _Measurement(
        curvature=curvature,
        estimator=estimator,
        settings=settings,
        details=wanted,
        network=network,
        may_lower_precision=given.precision == "auto",
        started=started,
        progress=progress,
        ranks=ranks,
    )
    report = exactly_or_plainly(given, estimator, measurement.run)
    rows = (*report.layers, report.network) if network else report.layers
    _complain(rows, tolerance, strict)
    return report


def _refuse_details(wanted: Details, reason: str) -> None:
    """Refuse details that need the values inside the network."""
    for name in LAYER_DETAILS:
        if name in wanted:
            raise ProblemError(f"details={name!r} {reason}")


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


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    """What is to be measured; `run` measures it on a problem."""

    curvature: str
    estimator: str
    settings: LanczosSettings
    details: Details
    network: bool
    may_lower_precision: bool
    started: float
    progress: OnProgress | None
    ranks: Ranks | None

    def run(self, problem: FunctionalProblem) -> CurvatureReport:
        """The report, on every rank that of the first."""
        if isinstance(problem, InPlaceProblem):
            _refuse_details(
                self.details,
                "needs a model that can be taken apart, and the plain engine runs it as it is; "
                "leave it out.",
            )
            if problem.ranks is not None and self.details.spectrum:
                raise ProblemError(
                    "details of a spectrum need whole vectors, and those of a sharded model lie on "
                    "several ranks; leave details out."
                )
        observed = self
        if self.progress is not None:
            observer = _observe(self.progress, problem, self.curvature, self.settings, self.network)
            observed = replace(self, settings=replace(self.settings, progress=observer))
        with problem.settings():
            report = observed._measure(problem)
            if self.ranks is not None:
                report = self.ranks.first(lambda: report, last=True)
            if observed.settings.progress is not None:
                observed.settings.progress.finish()
        return report

    def _expect(self, evaluations: Sequence[Evaluation]) -> None:
        """Tell `progress` how long this will take, where that is worth while."""
        observer = self.settings.progress
        slow = time.perf_counter() - self.started > LONG_EVALUATION
        is_planned = self.ranks is None and not evaluations[0].problem.runs_as_trained
        if slow and observer is not None and is_planned:
            planned = plan_measurement(
                evaluations, self.curvature, self.estimator, self.settings, self.network
            )
            observer.expect(planned.seconds)

    def _measure(self, problem: FunctionalProblem) -> CurvatureReport:
        """The report; notes, checks and findings included."""
        is_shared = self.ranks is not None and self.ranks.split == "batch"
        is_whole = self.ranks is None and not problem.runs_as_trained
        evaluations, facts = evaluate_everywhere(problem, self.ranks if is_shared else None)
        self._expect(evaluations)
        notes = notes_on(problem, evaluations)
        measuring = Rows(
            problem, evaluations, self.curvature, self.estimator, self.settings, self.details
        )
        layers = in_running_order(problem, evaluations)
        lower: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.may_lower_precision and is_whole:
            lower = measuring.faster()
        with lower:
            by_name = measuring.fill(layers, self.network, self.ranks)
        rows = tuple(by_name[layer.parameter] for layer in layers)
        whole = by_name[""] if self.network else measuring.bounded_network(rows)
        rows, diagnostics = self._with_details(problem, evaluations, layers, rows)
        notes = (*notes, *note_unchecked(problem.check), *note_uncounted(problem))
        report = replace(measuring.report(rows, whole), notes=notes, **facts)
        vector = measuring.whole.vector if self.network and is_whole else None
        del measuring  # what the engines hold must not stand beside the backward pass
        gradient = loss_gradient(evaluations)
        derivative_check.check_answer(evaluations, vector, whole)
        if problem.runs_as_trained:
            note = "Signals through the layers were not judged: the plain engine sees none of them."
            report = replace(report, notes=(*report.notes, note))
        elif not is_shared:  # of a share, no rank knows all activations
            judged = judge_signals(problem, evaluations, rows, gradient, diagnostics or None)
            report = replace(report, **judged)
        seconds = problem.clock() - self.started
        cost = in_gradients(seconds, gradient.seconds)
        return replace(report, seconds=seconds, gradients=cost)

    def _with_details(
        self,
        problem: FunctionalProblem,
        evaluations: Sequence[Evaluation],
        layers: Sequence[Layer],
        rows: Sequence[LayerCurvature],
    ) -> tuple[tuple[LayerCurvature, ...], Mapping[str, Diagnostics]]:
        """The rows with what is wanted of the layers besides norms; and their diagnostics."""
        jacobians: Mapping[str, JacobianBounds] = {}
        if "jacobians" in self.details:
            jacobians = jacobian_bounds(problem, evaluations, self.settings)
        diagnostics: Mapping[str, Diagnostics] = {}
        if "diagnostics" in self.details:
            diagnostics = diagnose(problem, evaluations)
        detailed = tuple(
            replace(
                row,
                jacobians=jacobians.get(layer.parameter),
                diagnostics=diagnostics.get(layer.parameter),
            )
            for row, layer in zip(rows, layers, strict=True)
        )
        return detailed, diagnostics


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
    reached = argument("tolerance", tolerance)
    failure = ConvergenceError(f"{shown} did not reach ", reached, f": {reason}.")
    if strict:
        raise failure
    warnings.warn(str(failure), ConvergenceWarning, stacklevel=5)  # past the decorators


Operator = TypeVar("Operator", bound=operators.WeightOperator)


@uninterrupted
def hessian(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> HessianOperator:
    """The exact Hessian of the loss by the problem's weights, as an operator on flat vectors.

    >>> import torch
    >>> model, data = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> hessian(model, nn.MSELoss(), (data, torch.zeros(2, 1))).to_dense()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    return _operator(HessianOperator, as_problem(problem, loss, batch))


@uninterrupted
def gauss_newton(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> GaussNewtonOperator:
    """The Gauss-Newton matrix `Jᵀ H_z J` by the problem's weights, as an operator."""
    return _operator(GaussNewtonOperator, as_problem(problem, loss, batch))


@uninterrupted
def jacobian(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> JacobianOperator:
    """The derivative of the model's outputs by the problem's weights, (outputs, weights).

    The loss only serves to check the problem; the outputs of several batches follow one another.
    """
    return _operator(JacobianOperator, as_problem(problem, loss, batch))


def _operator(kind: type[Operator], problem: Problem) -> Operator:
    functional = FunctionalProblem(problem)
    with functional.settings():
        evaluations = evaluate(functional)
        for evaluation in evaluations:
            derivative_check.check_loss(evaluation)
            if kind is HessianOperator:
                derivative_check.check_gradients(evaluation)
            else:
                derivative_check.check_outputs(evaluation)
        # A product may come at any time, under any settings of the caller.
        return kind(evaluations, list(functional.leaves), settings=functional.settings)
