"""What a measurement will cost, from one forward and backward: engine, gradients and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hessinit.curvature import engines, gram
from hessinit.curvature.cost import clock, in_gradients, timed_gradient
from hessinit.curvature.evaluation import Evaluation, evaluate, unused_leaves
from hessinit.curvature.probes import random_like
from hessinit.curvature.progress import expected_products
from hessinit.measurement.facts import notes_on, versions_of
from hessinit.measurement.rows import Details, check_choices
from hessinit.problem.batches import tensors_in
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.graph import nodes_behind
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.validate import check_switches, check_tolerance, check_whole
from hessinit.results.curvature_report import MeasurementPlan

# In gradients, fitted to the networks of benchmarks/plan_accuracy.py. What every measurement does:
# the checks of the forward and of the derivatives, the estimate of the rounding error.
CHECKS = 8.0
# A backward pass for each column of the loss Hessian's root; a product with all layers' Gram
# matrices, or with the network's.
PER_COLUMN = PER_GRAM_PRODUCT = 0.4
# What a measurement takes beside gradients, in seconds and in passes over all weights, which count
# where they are many and examples few; and the passes of a Lanczos run, over the square of its
# products.
START = 0.02
PASSES = 20.0
ORTHOGONALIZATION = 0.25
# A product by Lanczos passes a tangent forward and a cotangent back through the part behind the
# layer: the first for a layer at the very end, the sum for one at the very beginning, and for the
# network.
AT_THE_END = 0.1
THE_REST = 0.8
# An exact Hessian differentiates the backward pass, and both ends of its spectrum have to converge.
EXACT = 2.0
# Graphs that are held at a time, in the bytes that one forward saves: the recorded one with the
# tangents or cotangents of a pass; for the exact Hessian that of the gradient, and its derivative.
# Its check, and its repetition in float64, also take so many bytes for each weight.
GRAPHS = 1.5
EXACT_GRAPHS = 20.0
EXACT_CHECKS = 80
# Vectors that a Lanczos run keeps, for each expected product: some take longer. Of large blocks few
# stay.
ROWS = 1.5
EXACT_ROWS = 2.0
ROWS_OF_LARGE = 12
# What the process takes over what is held at a time: freed blocks that do not fit, and what torch
# sets up.
ALLOCATED = 1.3
LEAST_MEMORY = 10**6


def lanczos_gradients(shares: Sequence[float], products: float, exact: bool = False) -> float:
    """Gradients of one Lanczos run for each block, of which `shares` of the network lie behind.

    >>> lanczos_gradients([1.0, 0.5], products=10)  # 10 · 0.9 + 10 · 0.5
    14.0
    """
    each = products * (EXACT if exact else 1.0)
    return sum(each * (AT_THE_END + THE_REST * share) for share in shares)


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
    """What a measurement would cost: engine, expected gradients, seconds and memory; nothing is measured.

    The arguments are those of `measure`. Costs one forward and backward, and the checks of the forward.

    >>> import torch
    >>> planned = plan(nn.Linear(3, 1), nn.MSELoss(), (torch.eye(3), torch.zeros(3, 1)))
    >>> planned.engine, planned.parameters
    ('gram', 3)
    """
    given = as_problem(problem, loss, batch)
    check_choices(curvature, estimator)
    check_switches(network=network)
    max_iterations = check_whole("max_iterations", max_iterations, at_least=1)
    settings = engines.LanczosSettings(check_tolerance(tolerance), max_iterations, given.seed)
    wanted = Details.read(details)
    functional = FunctionalProblem(given)
    with functional.settings():
        evaluations = evaluate(functional)
        planned = plan_measurement(evaluations, curvature, estimator, settings, network)
        notes = notes_on(functional, evaluations)
    if uncounted := [*wanted.names, *[f"top-{wanted.top}"] * bool(wanted.top)]:
        notes = (f"Not counted: {', '.join(uncounted)}.", *notes)
    return replace(planned, notes=notes)


def plan_measurement(
    evaluations: Sequence[Evaluation],
    curvature: str,
    estimator: str,
    settings: engines.LanczosSettings,
    network: bool,
) -> MeasurementPlan:
    problem = evaluations[0].problem
    products = expected_products(settings.tolerance, settings.max_iterations)
    shares = _shares_behind(evaluations)
    gradient = timed_gradient(problem).seconds
    sizes = {name: leaf.numel() for name, leaf in problem.leaves.items()}
    whole = sum(sizes.values())
    largest = max(sizes.values())
    itemsize = problem.dtype.itemsize
    repeated = max(
        len(uses) * sizes[name] for one in evaluations for name, uses in one.uses.items()
    )
    exact = curvature != "gauss-newton"
    columns = 0
    others = list(sizes)
    why = engines.HessianEngine.reason
    work = (
        lanczos_gradients([*shares.values(), *[1.0] * network], products, exact=True)
        if exact
        else 0.0
    )
    if curvature != "hessian":
        columns, others, reason = _gram_columns(evaluations, estimator)
        why = why if exact else reason
        behind = [*(shares[name] for name in others), *[1.0] * (network and bool(others))]
        work += lanczos_gradients(behind, products)
        # The backward passes of the Gram engine, and its products for layers and network. A weight
        # that is used again and again, as in a recurrent network, is added up in every product.
        grams = (1 + network) * products * PER_GRAM_PRODUCT * (3 if repeated > largest else 1)
        work += columns * PER_COLUMN + grams if columns else 0.0
    work *= 2 if len(evaluations) > 1 else 1  # each batch is measured alone, too
    blocks = [*(sizes[name] for name in others), *[whole] * (network and bool(others))]
    started = clock(problem)
    for leaf in problem.leaves.values():
        random_like(leaf, problem.seed).double()
    passes = PASSES + ORTHOGONALIZATION * products**2 * sum(blocks) / whole
    work += in_gradients(START + passes * (clock(problem) - started), gradient) or 0.0
    saved = [_saved_bytes(one) for one in evaluations]
    weights = sum(one.nbytes for one in problem.model.parameters())
    rows = min(settings.max_iterations, products * (EXACT_ROWS if exact else ROWS))
    longest = max([size * (rows if size < 2**24 else ROWS_OF_LARGE) for size in blocks], default=0)
    # A direction or a product, and the weights moved or repeated in float64 with their gradient.
    checks = (
        EXACT_CHECKS * whole if exact else whole * (itemsize + 8) + max(16 * largest, 8 * whole)
    )
    kept, passed = (itemsize * columns * numbers for numbers in _numbers_between(evaluations))
    held = (EXACT_GRAPHS if exact else GRAPHS) * sum(saved) + max(
        checks, itemsize * (longest + 2 * repeated)
    )
    held += itemsize * whole + kept + min(passed, gram.BYTES_AT_ONCE)
    return MeasurementPlan(
        engine="gram" if columns and not exact else "lanczos",
        engine_reason=why,
        curvature=curvature,
        layers=len(sizes),
        parameters=whole,
        examples=problem.examples,
        batches=len(evaluations),
        tolerance=settings.tolerance,
        gradients=CHECKS + work,
        gradient_seconds=gradient,
        versions=versions_of(problem),
        memory=weights + int(ALLOCATED * held + LEAST_MEMORY),
        training_memory=2 * weights + max(saved),
    )


def _shares_behind(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """The share of the forward that runs after each leaf, counted in operations; 0 for an unused one."""
    moments = {name: one for name, one in evaluations[0].moments.items() if one is not None}
    last = int(evaluations[0].loss.grad_fn._sequence_nr())  # type: ignore[union-attr]
    span = max(1, last - min(moments.values(), default=0))
    return {name: (last - moments.get(name, last)) / span for name in evaluations[0].moments}


def _gram_columns(evaluations: Sequence[Evaluation], estimator: str) -> tuple[int, list[str], str]:
    """The backward passes of the Gram engine, 0 without it; the leaves that go by Lanczos; and why."""
    unused = unused_leaves(evaluations)
    others = [name for name in evaluations[0].problem.leaves if name not in unused]
    refused = "estimator='lanczos' was asked for" if estimator == "lanczos" else None
    refused = engines.too_many_outputs(evaluations) if estimator == "auto" else refused
    roots = refused or engines.loss_roots(evaluations)
    if isinstance(roots, str):
        return 0, others, roots
    columns = roots[0].columns.shape[0]
    lost = set[str]()
    for one in evaluations:
        known = {call.name for call in gram.separable_calls(one)}
        lost |= {name for name in others if name not in known}
    reason = engines.gram_reason(columns, len(lost), len(others))
    return (
        columns if len(lost) < len(others) else 0,
        [name for name in others if name in lost],
        reason,
    )


def _numbers_between(evaluations: Sequence[Evaluation]) -> tuple[int, int]:
    """In the outputs of all calls that use a weight, or in its gradients where these are fewer; in all."""
    calls = {
        use.node: one.batch.size * one.leaves[name].numel()
        for one in evaluations
        for name, uses in one.uses.items()
        for use in uses
    }
    numbers = [math.prod(node._input_metadata[0].shape) for node in calls]
    return sum(map(min, numbers, calls.values())), sum(numbers)


def _saved_bytes(evaluation: Evaluation) -> int:
    """What the graph of a batch saved for the backward, without weights and copies."""
    sizes: dict[int, int] = {}
    for node in nodes_behind(evaluation.loss.grad_fn):
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in tensors_in([*saved, *getattr(node, "saved_tensors", ())]):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    problem = evaluation.problem
    for weight in (*problem.leaves.values(), *problem.constants.values()):
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
