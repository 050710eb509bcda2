"""What a measurement will cost, from one forward and backward: engine, gradients and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hessinit.curvature import engine_choice, gram
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.evaluation import (
    Evaluation,
    gradient_seconds,
    in_gradients,
    loss_gradient,
    unused_leaves,
)
from hessinit.curvature.hessian_engine import HessianEngine
from hessinit.curvature.krylov import MEMORY, random_like
from hessinit.curvature.progress import expected_products
from hessinit.errors import ProblemError, argument, choose, list_of
from hessinit.measurement.facts import notes_on, versions_of
from hessinit.problem.batches import tensors_in
from hessinit.problem.checks import check_switches, check_tolerance, check_whole
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.graph import nodes_behind
from hessinit.problem.in_place import InPlaceProblem
from hessinit.problem.preserve import memory_of, uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.results.curvature_report import MeasurementPlan

SPECTRUM_DETAILS = ("trace", "frobenius", "density")
LAYER_DETAILS = ("jacobians", "diagnostics")


@dataclass(frozen=True)
class Details:
    """What a report is to hold besides norms.

    >>> Details.read(["trace", "top-3"])
    Details(names=('trace',), top=3)
    """

    names: tuple[str, ...] = ()
    top: int = 0

    @classmethod
    def read(cls, details: Any) -> Details:
        """From names; "top-5" asks for the five largest eigenvalues."""
        names = [details] if isinstance(details, str) else list_of(details)
        if not names and details not in ((), []):
            raise ProblemError(f"details={details!r} must be names, such as {_EXAMPLE}.")
        top = 0
        plain = []
        for name in names:
            count = str(name).removeprefix("top-")
            if count != str(name) and count.isdecimal() and int(count) > 0:
                top = max(top, int(count))
            else:
                choose("details", name, [*SPECTRUM_DETAILS, *LAYER_DETAILS, "top-5"])
                plain.append(name)
        return cls(tuple(plain), top)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def spectrum(self) -> bool:
        return self.top > 0 or any(name in self.names for name in SPECTRUM_DETAILS)


_EXAMPLE = 'details=["trace", "top-5"]'


def check_choices(curvature: str, estimator: str) -> None:
    """Refuse a curvature or an estimator that there is not, or that do not go together."""
    choose("curvature", curvature, ["gauss-newton", "hessian", "both"])
    choose("estimator", estimator, ["auto", "gram", "lanczos", "plain"])
    if curvature == "hessian" and estimator == "gram":
        raise ProblemError(
            argument("estimator", estimator),
            " measures Gauss-Newton curvature only; for ",
            argument("curvature", curvature),
            " choose 'auto' or 'lanczos'.",
        )


@dataclass(frozen=True)
class CostModel:
    """How gradients, seconds and bytes add up.

    Fitted to the networks of benchmarks/plan_accuracy.py.
    """

    # In gradients: the checks of the forward and of the derivatives, the estimate of the rounding
    # error; a backward pass for each column of the loss Hessian's root; a product with all layers'
    # Gram matrices, or with the network's.
    checks: float = 8.0
    column: float = 0.4
    gram_product: float = 0.4
    # What a measurement takes beside gradients, in seconds and in passes over all weights, which
    # count where they are many and examples few; and the passes of a Lanczos run, over the square
    # of its products.
    start_seconds: float = 0.02
    passes: float = 20.0
    orthogonalization: float = 0.25
    # A product by Lanczos passes a tangent forward and a cotangent back through the part behind the
    # layer: the first for a layer at the very end, the sum for one at the very beginning, and for
    # the network.
    at_the_end: float = 0.1
    behind: float = 0.8
    # An exact Hessian differentiates the backward pass, and both ends of its spectrum have to
    # converge.
    exact: float = 2.0
    # Of the plain engine: two forwards and a backward of the graph that is kept; two gradients.
    plain_product: float = 1.6
    plain_exact_product: float = 2.0
    # Graphs that are held at a time, in the bytes that one forward saves: the recorded one with the
    # tangents or cotangents of a pass; for the exact Hessian that of the gradient, and its
    # derivative. Its check, and its repetition in float64, also take so many bytes for each weight.
    graphs: float = 1.5
    exact_graphs: float = 20.0
    exact_checks: int = 80
    # Vectors that a Lanczos run keeps, for each expected product: some take longer. Of large blocks
    # few stay.
    rows: float = 1.5
    exact_rows: float = 2.0
    rows_of_large_block: int = 12
    # What the process takes over what is held at a time: freed blocks that do not fit, and what
    # torch sets up.
    allocated: float = 1.3
    least_memory: int = 10**6


COST = CostModel()


def lanczos_gradients(shares: Sequence[float], products: float, exact: bool = False) -> float:
    """Gradients of one Lanczos run for each block, of which `shares` of the network lie behind.

    >>> lanczos_gradients([1.0, 0.5], products=10)  # 10 · 0.9 + 10 · 0.5
    14.0
    """
    if exact:
        products *= COST.exact
    return sum(products * (COST.at_the_end + COST.behind * share) for share in shares)


@uninterrupted
def plan(
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
) -> MeasurementPlan:
    """What a measurement would cost: engine, expected gradients, seconds and memory; nothing is
    measured.

    The arguments are those of `measure`. Costs one forward and backward, and the checks of the
    forward.

    >>> import torch
    >>> planned = plan(nn.Linear(3, 1), nn.MSELoss(), (torch.eye(3), torch.zeros(3, 1)))
    >>> planned.engine, planned.parameters
    ('gram', 3)
    """
    given_problem = as_problem(problem, loss, batch)
    check_choices(curvature, estimator)
    check_switches(network=network)
    max_iterations = check_whole("max_iterations", max_iterations, at_least=1)
    settings = LanczosSettings(check_tolerance(tolerance), max_iterations, given_problem.seed)
    asked_for = Details.read(details)

    def work(functional: FunctionalProblem) -> tuple[MeasurementPlan, tuple[str, ...]]:
        with functional.settings():
            evaluations = engine_choice.evaluate(functional)
            planned = plan_measurement(evaluations, curvature, estimator, settings, network)
            return planned, notes_on(functional, evaluations)

    planned, notes = engine_choice.exactly_or_plainly(given_problem, estimator, work)
    uncounted = [*asked_for.names]
    if asked_for.top:
        uncounted.append(f"top-{asked_for.top}")
    if uncounted:
        notes = (f"Not counted: {', '.join(uncounted)}.", *notes)
    return replace(planned, notes=notes)


def plan_measurement(
    evaluations: Sequence[Evaluation],
    curvature: str,
    estimator: str,
    settings: LanczosSettings,
    network: bool,
) -> MeasurementPlan:
    """The plan of a measurement of evaluated batches."""
    problem = evaluations[0].problem
    gram_pass = _GramPass(0, tuple(problem.leaves), HessianEngine.reason)
    if isinstance(problem, InPlaceProblem):
        gram_pass = _GramPass(0, tuple(problem.leaves), problem.reason)
        work: _Work = _PlainWork(evaluations, curvature, settings, network, gram_pass)
        loss_gradient(evaluations)  # of a compiled model the first one compiles
        gradient = loss_gradient(evaluations).seconds
    else:
        if curvature != "hessian":
            gram_pass = _plan_gram_pass(evaluations, estimator)
        work = _Work(evaluations, curvature, settings, network, gram_pass)
        gradient = gradient_seconds(problem)
    weights = sum(parameter.nbytes for parameter in problem.model.parameters())
    return MeasurementPlan(
        engine=work.engine,
        engine_reason=work.reason,
        curvature=curvature,
        layers=len(problem.leaves),
        parameters=work.weights,
        examples=problem.examples,
        batches=len(evaluations),
        tolerance=settings.tolerance,
        gradients=COST.checks + work.gradients + work.overhead(gradient),
        gradient_seconds=gradient,
        versions=versions_of(problem),
        memory=weights + int(COST.allocated * work.bytes_held + COST.least_memory),
        training_memory=2 * weights + max(work.saved_bytes),
    )


@dataclass(frozen=True)
class _GramPass:
    """The backward passes of the Gram engine, 0 without it.

    The leaves that go by Lanczos; and why.
    """

    columns: int
    by_lanczos: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class _Work:
    """What one measurement does, and what it holds."""

    evaluations: Sequence[Evaluation]
    curvature: str
    settings: LanczosSettings
    network: bool
    gram_pass: _GramPass

    @property
    def exact(self) -> bool:
        return self.curvature != "gauss-newton"

    @property
    def engine(self) -> str:
        return "gram" if self.gram_pass.columns and not self.exact else "lanczos"

    @property
    def reason(self) -> str:
        return HessianEngine.reason if self.exact else self.gram_pass.reason

    @cached_property
    def sizes(self) -> dict[str, int]:
        leaves = self.evaluations[0].problem.leaves
        return {name: leaf.numel() for name, leaf in leaves.items()}

    @property
    def weights(self) -> int:
        return sum(self.sizes.values())

    @property
    def products(self) -> float:
        return expected_products(self.settings.tolerance, self.settings.max_iterations)

    @property
    def most_repeated(self) -> int:
        """The size of a weight times its uses, as in a recurrent network; the largest."""
        return max(
            len(uses) * self.sizes[name]
            for evaluation in self.evaluations
            for name, uses in evaluation.uses.items()
        )

    @cached_property
    def blocks(self) -> list[int]:
        """The sizes of the blocks that go by Lanczos."""
        by_lanczos = self.gram_pass.by_lanczos
        sizes = [self.sizes[name] for name in by_lanczos]
        if self.network and by_lanczos:
            sizes.append(self.weights)
        return sizes

    @property
    def gradients(self) -> float:
        """The derivatives, in gradients; each of several batches is measured alone, too."""
        shares = _shares_behind(self.evaluations)
        whole_network = [1.0] * self.network
        total = 0.0
        if self.exact:
            total = lanczos_gradients([*shares.values(), *whole_network], self.products, exact=True)
        if self.curvature != "hessian":
            by_lanczos = self.gram_pass.by_lanczos
            behind = [shares[name] for name in by_lanczos]
            if by_lanczos:
                behind += whole_network
            total += lanczos_gradients(behind, self.products)
            total += self._gram_gradients
        return total * 2 if len(self.evaluations) > 1 else total

    @property
    def _gram_gradients(self) -> float:
        """The backward passes of the Gram engine, and its products for layers and network."""
        if not self.gram_pass.columns:
            return 0.0
        products = (1 + self.network) * self.products * COST.gram_product
        if self.most_repeated > max(self.sizes.values()):
            products *= 3  # a weight that is used again and again is added up in every product
        return self.gram_pass.columns * COST.column + products

    def overhead(self, gradient: float) -> float:
        """The time beside derivatives, in gradients."""
        problem = self.evaluations[0].problem
        started = problem.clock()
        for leaf in problem.leaves.values():
            random_like(leaf, problem.seed).double()
        one_pass = problem.clock() - started
        vectors = self.products**2 * sum(self.blocks) / self.weights
        passes = COST.passes + COST.orthogonalization * vectors
        return in_gradients(COST.start_seconds + passes * one_pass, gradient) or 0.0

    @cached_property
    def saved_bytes(self) -> list[int]:
        return [
            _saved_bytes(evaluation.loss, evaluation.problem) for evaluation in self.evaluations
        ]

    @property
    def bytes_held(self) -> float:
        """What is held at a time: graphs, vectors, and what the Gram engine keeps and passes on."""
        itemsize = self.evaluations[0].problem.dtype.itemsize
        rows_per_product = COST.exact_rows if self.exact else COST.rows
        rows = min(self.settings.max_iterations, self.products * rows_per_product)
        vectors = [
            size * (rows if size < MEMORY.size_of_large else COST.rows_of_large_block)
            for size in self.blocks
        ]
        numbers = max(vectors, default=0) + 2 * self.most_repeated
        graphs = COST.exact_graphs if self.exact else COST.graphs
        columns = self.gram_pass.columns
        kept_numbers, passed_numbers = _numbers_between(self.evaluations)
        passed = min(itemsize * columns * passed_numbers, gram.SIZES.signal_bytes)
        return (
            graphs * sum(self.saved_bytes)
            + max(self._bytes_of_checks, itemsize * numbers)
            + itemsize * self.weights
            + itemsize * columns * kept_numbers
            + passed
        )

    @property
    def _bytes_of_checks(self) -> int:
        """A direction or a product, and the weights moved or repeated in float64 with their
        gradient.
        """
        if self.exact:
            return COST.exact_checks * self.weights
        itemsize = self.evaluations[0].problem.dtype.itemsize
        return self.weights * (itemsize + 8) + max(16 * max(self.sizes.values()), 8 * self.weights)


class _PlainWork(_Work):
    """What the plain engine does on the model as it is trained, where no graph is looked at."""

    engine = "plain"

    @property
    def reason(self) -> str:
        return self.gram_pass.reason

    @property
    def gradients(self) -> float:
        per_product = {
            "gauss-newton": COST.plain_product,
            "hessian": COST.plain_exact_product,
            "both": COST.plain_product + COST.plain_exact_product,
        }
        total = len(self.blocks) * self.products * per_product[self.curvature]
        return total * 2 if len(self.evaluations) > 1 else total

    @cached_property
    def saved_bytes(self) -> list[int]:
        problem = self.evaluations[0].problem
        outputs = (problem.output(batch) for batch in problem.batches)
        return [_saved_bytes(output, problem) for output in outputs]

    @property
    def bytes_held(self) -> float:
        rows = min(self.settings.max_iterations, self.products * COST.exact_rows)
        itemsize = self.evaluations[0].problem.dtype.itemsize
        return sum(self.saved_bytes) + itemsize * (rows * max(self.blocks) + 2 * self.weights)


def _shares_behind(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """The share of the forward that runs after each leaf, counted in operations.

    0 for an unused one.
    """
    moments = evaluations[0].moments
    first = min((moment for moment in moments.values() if moment is not None), default=0)
    last = int(evaluations[0].loss.grad_fn._sequence_nr())
    span = max(1, last - first)
    return {
        name: 0.0 if moment is None else (last - moment) / span for name, moment in moments.items()
    }


def _plan_gram_pass(evaluations: Sequence[Evaluation], estimator: str) -> _GramPass:
    unused = unused_leaves(evaluations)
    used = tuple(name for name in evaluations[0].problem.leaves if name not in unused)
    refusal = None
    if estimator == "lanczos":
        refusal = "estimator='lanczos' was asked for"
    elif estimator == "auto":
        refusal = engine_choice.too_many_outputs(evaluations)
    factors = refusal or engine_choice.loss_factors(evaluations)
    if isinstance(factors, str):
        return _GramPass(0, used, factors)
    separable = set(used)
    for evaluation in evaluations:
        separable &= {call.name for call in gram.separable_calls(evaluation)}
    by_lanczos = tuple(name for name in used if name not in separable)
    columns = factors[0].columns.shape[0]
    reason = engine_choice.gram_reason(columns, len(by_lanczos), len(used))
    return _GramPass(columns if len(by_lanczos) < len(used) else 0, by_lanczos, reason)


def _numbers_between(evaluations: Sequence[Evaluation]) -> tuple[int, int]:
    """In the outputs of all calls that use a weight, or in its gradients where these are fewer; in
    all.
    """
    gradients = {
        use.node: evaluation.batch.size * evaluation.leaves[name].numel()
        for evaluation in evaluations
        for name, uses in evaluation.uses.items()
        for use in uses
    }
    outputs = [math.prod(node._input_metadata[0].shape) for node in gradients]
    return sum(map(min, outputs, gradients.values())), sum(outputs)


def _saved_bytes(end: Tensor, problem: FunctionalProblem) -> int:
    """What the graph of a batch saved for the backward, without weights and copies."""
    sizes: dict[int, int] = {}
    for node in nodes_behind(end.grad_fn):
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in tensors_in([*saved, *getattr(node, "saved_tensors", ())]):
            sizes[memory_of(tensor)] = tensor.untyped_storage().nbytes()
    for weight in (*problem.leaves.values(), *problem.constants.values()):
        sizes.pop(memory_of(weight), None)
    return sum(sizes.values())
