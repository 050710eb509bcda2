"""`measure`: the extreme eigenvalues of every layer and of the network; the same matrices as operators."""

from __future__ import annotations

import contextlib
import copy
import math
import platform
import time
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit._version import __version__
from hessinit.curvature import derivative_check, engines, operators, rounding_error, shares
from hessinit.curvature import progress as progress_of
from hessinit.curvature.evaluation import Evaluation, evaluate, unused_leaves
from hessinit.curvature.operators import GaussNewtonOperator, HessianOperator, JacobianOperator
from hessinit.errors import (
    ConvergenceError,
    ConvergenceWarning,
    ProblemError,
    check_callable,
    check_names,
    choose,
)
from hessinit.problem import validate
from hessinit.problem.double_backward import matrix_products
from hessinit.problem.functional import FunctionalProblem, ProblemOptions
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.ranks import Ranks, on_all_ranks
from hessinit.problem.validate import (
    EVERYTHING,
    Layer,
    check_switches,
    check_tolerance,
    check_whole,
)
from hessinit.results.curvature_report import (
    ONLY_BOUNDED,
    CurvatureReport,
    Estimate,
    LayerCurvature,
    Spread,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Kind = TypeVar("Kind", bound=operators.WeightOperator)
LONG_EVALUATION = 0.5  # seconds: then `progress` is first told the time that the plan expects
SOFTWARE = {
    "hessinit": __version__,
    "torch": str(torch.__version__),
    "python": platform.python_version(),
}


def in_running_order(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> list[Layer]:
    """The measured layers in the order in which the first batch's forward used them; unused ones last."""
    moments = {
        name: math.inf if one is None else one for name, one in evaluations[0].moments.items()
    }
    return sorted(problem.layers, key=lambda layer: moments[layer.parameter])


def notes_on(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Notes for the report: unused, frozen and random parts of the model, and what training would not do."""
    notes = [*_note_batch_norm(problem.model)]
    notes += [
        said for one in problem.batches[:1] if (said := validate.name_large_inputs(one.inputs))
    ]
    leaves = unused_leaves(evaluations)
    unused = [
        layer.name for layer in in_running_order(problem, evaluations) if layer.parameter in leaves
    ]
    if unused:
        notes.append(f"Not used by the forward, so without curvature: {', '.join(unused)}.")
    others = [one for name, one in problem.model.named_parameters() if name not in problem.leaves]
    frozen = [one for one in others if not one.requires_grad and one.ndim >= 2]
    if frozen:
        notes.append(
            f"{len(frozen)} frozen {'weight was' if len(frozen) == 1 else 'weights were'} left out."
        )
    if problem.dropout == "freeze" and any(one.drew for one in evaluations):
        notes.append(f"Random layers were frozen to one draw (seed {problem.seed}).")
    return tuple(notes)


def _note_batch_norm(model: nn.Module) -> Iterator[str]:
    norms = [
        one
        for one in model.named_modules()
        if isinstance(one[1], _BatchNorm) and not one[1].training
    ]
    for name, first in norms[:1]:
        counted = first.num_batches_tracked
        new = ", still 0 and 1," if counted is not None and not counted else ""
        yield (
            f"BatchNorm is in eval mode ({name or 'the model'}{' …' if len(norms) > 1 else ''}): ‖H‖ is that "
            f"with its running statistics{new} as constants. Training uses the batch's: model.train() "
            "measures that, and takes longer, since examples then depend on one another."
        )


def note_unchecked(check: bool) -> tuple[str, ...]:
    return (
        ()
        if check
        else ("The derivatives were not checked against finite differences (check=False).",)
    )


def note_uncounted(
    problem: FunctionalProblem, moved: Container[str] | None = None
) -> tuple[str, ...]:
    """The note on trained parameters, such as biases, that the network's ‖H‖ does not include.

    `moved` are the names of the parameters that training moves; by default all that are not frozen.
    """
    trained = [name for name, one in problem.model.named_parameters() if one.requires_grad]
    others = [
        one for one in trained if one not in problem.leaves and (moved is None or one in moved)
    ]
    if not others:
        return ()
    several = len(others) > 1
    count = f"{len(others)} trained parameter{'s' if several else ''}"
    them = "them" if several else "it"
    shown = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    return (
        f'Not counted in the network\'s ‖H‖: {count} ({shown}); layers="{EVERYTHING}" counts {them}.',
    )


def versions_of(problem: FunctionalProblem) -> dict[str, str]:
    """What the numbers were made with; also the model's class, which titles name."""
    kind = {
        "dtype": str(problem.dtype).removeprefix("torch."),
        "model": type(problem.model).__name__,
    }
    return {**SOFTWARE, "device": str(problem.device), **kind}


def facts_of(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The fields that the results of all measurements share."""
    return {
        "loss": sum(one.loss_value * one.weight for one in evaluations),
        "examples": problem.examples,
        "batches": len(problem.batches),
        "seed": problem.seed,
        "versions": versions_of(problem),
    }


class Rows:
    """The engines that one measurement needs, and the rows of the report that they fill."""

    def __init__(
        self,
        problem: FunctionalProblem,
        evaluations: list[Evaluation],
        curvature: str,
        estimator: str,
        settings: engines.LanczosSettings,
        spectrum: Mapping[str, Any] | None = None,
    ) -> None:
        self.problem = problem
        self.evaluations = evaluations
        self._spectrum = spectrum or {}
        self._settings = settings
        self._rounding: dict[str, list[rounding_error.Rounding]] = {}  # of each rank
        self._kind = "gauss-newton" if curvature == "gauss-newton" else "hessian"
        self._both = curvature == "both"
        self._estimator = estimator
        self.main = self._build(self._kind, evaluations)

    def _build(self, kind: str, evaluations: list[Evaluation]) -> engines.Engine:
        return engines.build_engine(evaluations, kind, self._settings, self._estimator)

    @cached_property
    def _engines(self) -> list[engines.Engine]:
        found = [self.main]
        if self._both:
            found.append(self._build("gauss-newton", self.evaluations))
        # With several batches, each is also measured alone: how much does the answer depend on the
        # batch?
        for one in map(copy.copy, self.evaluations if len(self.evaluations) > 1 else []):
            one.weight = 1.0
            found.append(self._build(self._kind, [one]))
        return found

    @cached_property
    def whole(self) -> engines.Extremes:
        """The extremes of the network, by the main engine."""
        return self.main.extremes([layer.parameter for layer in self.problem.layers])

    def layers(self, layers: Sequence[Layer]) -> tuple[LayerCurvature, ...]:
        names = [layer.parameter for layer in layers]
        found = [engine.extremes_of_each(names) for engine in self._engines]
        columns = zip(layers, names, strict=True)
        return tuple(
            self._row(one, [name], [each[name] for each in found]) for one, name in columns
        )

    def network(self) -> LayerCurvature:
        names = [layer.parameter for layer in self.problem.layers]
        whole = Layer("network", "", (), (sum(layer.size for layer in self.problem.layers),))
        found = [self.whole]
        for engine in self._engines[1:]:
            self._settings.done(progress_of.NETWORK)
            found.append(engine.extremes(names))
        return self._row(whole, names, found)

    def fill(
        self, layers: Sequence[Layer], network: bool, ranks: Ranks | None
    ) -> dict[str, LayerCurvature]:
        """The rows by parameter; "" is the network, if asked for.

        With ranks, those of all of them.
        """

        def find(names: Collection[str]) -> dict[str, LayerCurvature]:
            some = [layer for layer in layers if layer.parameter in names]
            found = dict(zip([one.parameter for one in some], self.layers(some), strict=True))
            return found | ({"": self.network()} if "" in names else {})

        sizes = {layer.parameter: layer.size for layer in layers}
        sizes |= {"": sum(sizes.values())} if network else {}
        if ranks is None:
            return find(sizes)
        if ranks.split == "layers":
            return ranks.divide(sizes, find)
        own = self._engines[: 1 + self._both]
        for kind in (self._kind, "gauss-newton")[: len(own)]:
            self._rounding[kind] = ranks.exchange(
                rounding_error.relative_rounding(self.evaluations, kind)
            )
        unused = unused_leaves(self.evaluations)
        shared = [shares.SharedEngine(ranks, own, number, unused) for number in range(len(own))]
        self.main = shared[0]
        self._engines = [*shared]
        return ranks.lead(lambda: find(sizes), partial(shares.multiply, own))

    @contextlib.contextmanager
    def faster(self) -> Iterator[None]:
        """TF32 in matrix products, where the error of its rounding is below the tolerance."""
        problem = self.problem
        long = isinstance(self.main, engines.LanczosEngine)
        single = problem.device.type == "cuda" and problem.dtype == torch.float32
        # Kinks magnify rounding.
        if single and long and not derivative_check.has_kinks(self.evaluations[0]):
            with matrix_products(tf32=True):
                problem.precision = "tf32"
                rounding = rounding_error.relative_rounding(self.evaluations, self._kind)
                worst = max(one.relative for one in [rounding.network, *rounding.layers.values()])
                if rounding_error.CAUTION * worst <= self._settings.tolerance:
                    self._rounding[self._kind] = [rounding]
                    self.main.reason += "; matrix products in TF32"
                    yield
                    return
            problem.precision = "full"
        yield

    def bounded_network(self, rows: Sequence[LayerCurvature]) -> LayerCurvature:
        """Bounds of the network's norm by the layers': at least the largest, at most their sum."""
        if len(rows) == 1:  # it is the network
            return replace(rows[0], name="network", aliases=(), shape=(rows[0].parameters,))
        norms = [row.norm for row in rows]
        semidefinite = self._kind == "gauss-newton" and all(row.bottom.value >= 0 for row in rows)
        others = sum(sorted(norms)[:-1]) if semidefinite else math.inf  # not inf - inf
        size = sum(layer.size for layer in self.problem.layers)
        return LayerCurvature(
            name="network",
            shape=(size,),
            curvature=self._kind,
            top=Estimate(max(norms), others, False, ONLY_BOUNDED, 0),
            bottom=Estimate(0.0, 0.0 if semidefinite else math.inf, semidefinite, ONLY_BOUNDED, 0),
            engine=self.main.name,
            engine_reason=self.main.reason,
        )

    def report(
        self,
        layers: tuple[LayerCurvature, ...],
        network: LayerCurvature,
        curvature: str,
        **details: Any,
    ) -> CurvatureReport:
        """The rows with what the problem and the main engine say about them."""
        return CurvatureReport(
            layers=layers,
            network=network,
            curvature=curvature,
            tolerance=self._settings.tolerance,
            engine=self.main.name,
            **{
                **facts_of(self.problem, self.evaluations),
                "engine_reason": self.main.reason,
                **details,
            },
        )

    def _rounded(
        self, extremes: engines.Extremes, curvature: str, parameter: str
    ) -> engines.Extremes:
        """The extremes with the rounding error of the operator; of the whole network without a parameter."""
        if curvature not in self._rounding:
            self._rounding[curvature] = [
                rounding_error.relative_rounding(self.evaluations, curvature)
            ]
        found = [
            one.layers[parameter] if parameter else one.network for one in self._rounding[curvature]
        ]
        error = max(found, key=lambda one: (not one.is_all, one.relative))
        return engines.with_rounding(extremes, error, self._settings.tolerance)

    def _row(
        self, layer: Layer, names: Sequence[str], found: Sequence[engines.Extremes]
    ) -> LayerCurvature:
        """A row of the report from the extremes that each engine found."""
        extremes = self._rounded(found[0], self._kind, layer.parameter)
        approximate = (
            self._rounded(found[1], "gauss-newton", layer.parameter) if self._both else None
        )
        norms = tuple(single.norm.value for single in found[2 if self._both else 1 :])
        spectrum: dict[str, Any] = {}
        if any(self._spectrum.values()):
            operator = self._settings.watched(self.main.operator(names), [progress_of.SPECTRUM])
            spectrum = engines.measure_spectrum(operator, self._settings, **self._spectrum)
        return LayerCurvature(
            name=layer.name,
            aliases=layer.aliases,
            shape=layer.shape,
            curvature=self._kind,
            top=extremes.top,
            bottom=extremes.bottom,
            approximation=approximate.norm if approximate else None,
            spread=Spread(norms) if norms else None,
            engine=extremes.engine,
            engine_reason=extremes.reason,
            **spectrum,
        )


@uninterrupted
@on_all_ranks()
def measure(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    curvature: str = "gauss-newton",
    layers: str | Iterable[str] | None = None,
    estimator: str = "auto",
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    precision: str = "auto",
    top: int = 0,
    trace: bool = False,
    frobenius: bool = False,
    density: bool = False,
    jacobians: bool = False,
    diagnostics: bool = False,
    network: bool = True,
    strict: bool = False,
    distributed: str | None = None,
    progress: progress_of.OnProgress | None = None,
    plan: bool = False,
) -> CurvatureReport:
    """Measure the curvature of every layer and of the network; the model stays bit for bit as it was.

    `loss(output, target)` is any callable; `batch` is `(inputs, targets)` or an iterable of such
    pairs, which are averaged over examples, or added up where the loss is a sum (found from its
    values, or told by `reduction`). Models that are not called as `model(inputs)` pass
    `forward(model, inputs)`. `curvature` is "gauss-newton" (the paper's approximation; fast),
    "hessian" (exact) or "both" (with the gap between them). `layers` takes names or globs; by
    default every trainable weight of two or more dimensions, and with "**" the biases and norm
    gains, too.

    Norms are right to `tolerance`, relative; a value that did not get there says so and warns, or
    raises with `strict=True`. The derivatives are checked against finite differences of the plain
    model unless `check=False`. `top`, `trace`, `frobenius` and `density` ask for more of the
    spectrum, `jacobians` for the Jacobians around each layer and the paper's Theorem 2,
    `diagnostics` for activations and gradients, dead and saturated units. `network=False` bounds
    the network's norm by the layers' instead of measuring it. `precision` is "full", "tf32",
    "bf16", or "auto": TF32 in the matrix products of a GPU where the error of its rounding, which
    is measured, is below the tolerance. The stated errors include it.

    In a job of several processes, each makes the call: distributed="batch" takes its share of the
    examples, "layers" the same batch from all, which share the layers out. Every rank gets the
    report of one process. "each" measures in this process alone; one of several that says nothing
    is refused.

    `progress` is called with a `ProgressState` (layers done, products, seconds, seconds left) a few
    times a second, if it takes longer than two, at first with the time that is planned; what it
    raises ends the measurement. `plan=True` measures nothing and returns a `MeasurementPlan`:
    engine, expected gradients, seconds and memory.

    Costs 20 to 50 gradients for a classifier with ten outputs, all layers and the network together;
    with diagnostics up to 1.5 times, with Jacobian products 6 to 25 times as much.

    >>> model = nn.Linear(3, 1, bias=False).double()
    >>> inputs = torch.eye(3, dtype=torch.float64)
    >>> report = measure(model, nn.MSELoss(), (inputs, torch.zeros(3, 1)))
    >>> round(report.network.norm, 9)  # closed form: the largest eigenvalue of 2/3 XᵀX
    0.666666667
    """
    started = time.perf_counter()
    choose("curvature", curvature, ["gauss-newton", "hessian", "both"])
    choose("estimator", estimator, ["auto", "gram", "lanczos"])
    if curvature == "hessian" and estimator == "gram":
        way = "for curvature='hessian' choose 'auto' or 'lanczos'"
        raise ProblemError(f"estimator='gram' measures Gauss-Newton curvature only; {way}.")
    check_switches(
        trace=trace,
        frobenius=frobenius,
        density=density,
        jacobians=jacobians,
        diagnostics=diagnostics,
        network=network,
        strict=strict,
        plan=plan,
    )
    if progress is not None:
        check_callable("progress", progress, "progress(state)")
    settings = engines.LanczosSettings(
        check_tolerance(tolerance), check_whole("max_iterations", max_iterations, at_least=1), seed
    )
    top = check_whole("top", top, at_least=0)
    spectrum: dict[str, Any] = {
        "top": top,
        "trace": trace,
        "frobenius": frobenius,
        "density": density,
    }
    if top > max_iterations:
        why = f"top={top} with max_iterations={max_iterations}: every eigenvalue takes a step"
        raise ProblemError(f"{why}; pass max_iterations={top} or more.")
    problem = FunctionalProblem(
        Problem(
            model,
            loss,
            batch,
            layers=layers,
            forward=forward,
            dtype=dtype,
            dropout=dropout,
            reduction=reduction,
            check=check,
            seed=seed,
            precision=precision,
        )
    )
    ranks: Ranks | None = cast(Any, distributed)  # by the decorator
    if ranks is not None and ranks.split == "batch" and (jacobians or diagnostics):
        why = f'{jacobians=} and {diagnostics=} with distributed="batch": they need all examples at once'
        raise ProblemError(f'{why}; pass the whole batch on every rank, with distributed="layers".')
    if progress is not None:
        passes = (
            1 + (curvature == "both") + (len(problem.batches) if len(problem.batches) > 1 else 0)
        )
        watching = progress_of.Progress(
            progress,
            len(problem.layers),
            network=network,
            passes=passes,
            typical=progress_of.expected_products(tolerance, max_iterations),
        )
        settings = replace(settings, progress=watching)
    with problem.settings():
        evaluations = evaluate(problem)
        facts = dict[str, Any]()
        slow = time.perf_counter() - started > LONG_EVALUATION
        told = settings.progress
        if plan or (slow and told is not None and ranks is None):
            from hessinit.measurement.plan import plan_measurement

            asked = {**spectrum, "jacobians": jacobians, "diagnostics": diagnostics}
            more = [name for name, wanted in asked.items() if wanted]
            planned = plan_measurement(evaluations, curvature, estimator, settings, network)
            if told is None or plan:
                uncounted = (f"Not counted: {', '.join(more)}.",) if more else ()
                return cast(
                    Any, replace(planned, notes=(*uncounted, *notes_on(problem, evaluations)))
                )
            told.expect(planned.seconds)
        if ranks is not None and ranks.split == "batch":
            facts = shares.join_shares(ranks, evaluations)
        notes = notes_on(problem, evaluations)
        measuring = Rows(problem, evaluations, curvature, estimator, settings, spectrum)
        ordered = in_running_order(problem, evaluations)
        with (
            measuring.faster()
            if precision == "auto" and ranks is None
            else contextlib.nullcontext()
        ):
            found = measuring.fill(ordered, network, ranks)
        rows = tuple(found[layer.parameter] for layer in ordered)
        whole = found[""] if network else measuring.bounded_network(rows)
        further: dict[str, Mapping[str, Any]] = {}
        if jacobians:
            from hessinit.measurement.bounds import jacobian_bounds

            further["jacobians"] = jacobian_bounds(problem, evaluations, settings)
        if diagnostics:
            from hessinit.measurement.diagnostics import diagnose

            further["diagnostics"] = diagnose(problem, evaluations)
        details = [
            {field: some[one.parameter] for field, some in further.items()} for one in ordered
        ]
        rows = tuple(replace(row, **more) for row, more in zip(rows, details, strict=True))
        notes = (*notes, *note_unchecked(check), *note_uncounted(problem))
        report = measuring.report(rows, whole, curvature, notes=notes, **facts)
        vector = measuring.whole.vector if network and ranks is None else None
        del measuring  # a gradient is timed: what the engines hold must not stand beside its graph
        for one in evaluations:
            one.forget()
        derivative_check.check_answer(evaluations, vector, whole)
        gradient = progress_of.timed_gradient(problem, [one.weight for one in evaluations])
        if ranks is None or ranks.split != "batch":  # of a share, no rank knows all activations
            from hessinit.measurement.soundness import judge_signals

            judged = judge_signals(problem, evaluations, rows, gradient, further.get("diagnostics"))
            report = replace(report, **judged)
        report = replace(
            report, **progress_of.cost_of(problem, evaluations, started, gradient.seconds)
        )
        report = report if ranks is None else ranks.first(lambda: report, last=True)
        if settings.progress is not None:
            settings.progress.finish()
    _complain((*report.layers, report.network) if network else report.layers, tolerance, strict)
    return report


def _complain(rows: Sequence[LayerCurvature], tolerance: float, strict: bool) -> None:
    loose = [(row.name, row.estimate) for row in rows if not row.converged]
    approximations = [
        (row.name, row.approximation) for row in rows if row.approximation is not None
    ]
    loose += [(f"{name} (Gauss-Newton)", one) for name, one in approximations if not one.converged]
    if not loose:
        return
    shown = ", ".join(name for name, _ in loose[:4]) + (" …" if len(loose) > 4 else "")
    message = f"{shown} did not reach tolerance={tolerance:g}: {loose[0][1].reason}."
    if strict:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=5)  # past the decorators


@uninterrupted
def hessian(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> HessianOperator:
    """The exact Hessian of the loss by the chosen weights (all by default), as an operator on flat vectors.

    The options are those of `measure`: layers, forward, dtype, dropout, reduction, check, seed,
    precision.

    >>> model, data = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> hessian(model, nn.MSELoss(), (data, torch.zeros(2, 1))).to_dense()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    return _operator(HessianOperator, model, loss, batch, options)


@uninterrupted
def gauss_newton(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> GaussNewtonOperator:
    """The Gauss-Newton matrix `Jᵀ H_z J` of the chosen weights; the arguments are those of `hessian`."""
    return _operator(GaussNewtonOperator, model, loss, batch, options)


@uninterrupted
def jacobian(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> JacobianOperator:
    """The derivative of the model's outputs by the chosen weights, (outputs, weights).

    The loss only serves to check the problem; the outputs of several batches follow one another.
    """
    return _operator(JacobianOperator, model, loss, batch, options)


def _operator(kind: type[Kind], model: Any, loss: Any, batch: Any, options: ProblemOptions) -> Kind:
    check_names(options, ProblemOptions.__annotations__)
    problem = FunctionalProblem(Problem(model, loss, batch, **options))
    with problem.settings():
        evaluations = evaluate(problem)
        for evaluation in evaluations:
            derivative_check.check_loss(evaluation)
            if kind is HessianOperator:
                derivative_check.check_gradients(evaluation)
            else:
                derivative_check.check_outputs(evaluation)
        operator = kind(evaluations, list(problem.leaves))
    operator.settings = (
        problem.settings
    )  # a product may come at any time, under any settings of the caller
    return operator
