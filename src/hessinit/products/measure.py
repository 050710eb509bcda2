"""Theorem 2 measured: the Jacobian products of every layer, and the bounds that they give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.singular_values import SingularValues
from hessinit.problem.problem import Problem
from hessinit.products.batch_products import BatchProducts, batch_products
from hessinit.results.curvature_report import JacobianBounds, no_products
from hessinit.results.estimates import Estimate


def measure_products(
    problem: Problem, evaluations: Sequence[Evaluation], effort: LanczosSettings
) -> dict[str, JacobianBounds]:
    """The products of every leaf, by its parameter's name; to be called within `problem.settings()`.

    Norms are right to ten times `effort.tolerance`, relative, in every example. Costs one forward; with few
    outputs a backward pass for each, with few inputs a pass for each; with many, some 30 to 100 passes for
    each layer's product. All in all 6 to 25 plain measurements (benchmarks/products_cost.py).
    """
    found: list[dict[str, BatchProducts]] = []
    reasons: dict[str, str] = {}
    for evaluation in evaluations:
        products, missing = batch_products(evaluation, effort)
        found.append(products)
        reasons |= missing
    return {
        name: no_products(reasons[name]) if name in reasons else _joined([one[name] for one in found])
        for name in problem.leaves
    }


def _joined(batches: Sequence[BatchProducts]) -> JacobianBounds:
    """Bounds add up (they carry their batch's weight already), means are over all examples."""
    forward = [one.forward for one in batches if one.forward is not None]
    complete = len(forward) == len(batches)
    backward = [one.backward for one in batches]
    return JacobianBounds(
        forward=_mean(forward) if complete else None,
        forward_largest=_largest(forward) if complete else None,
        backward=_mean(backward),
        backward_largest=_largest(backward),
        activation=max(one.activation for one in batches),
        paper_bound=_total([one.paper_bound for one in batches]),
        rigorous_bound=_total([one.rigorous_bound for one in batches]),
        lipschitz_bound=_total([one.lipschitz_bound for one in batches]),
        reason=_first([one.reason for one in batches]),
        lipschitz_reason=_first([one.lipschitz_reason for one in batches]),
        note=_first([one.note for one in batches]),
    )


def _mean(parts: Sequence[SingularValues]) -> Estimate:
    values, errors = (
        np.concatenate([one.values for one in parts]),
        np.concatenate([one.errors for one in parts]),
    )
    loose = [one for one in parts if not one.converged]
    reason = (loose or parts)[0].reason
    return Estimate(
        float(values.mean()), float(errors.mean()), not loose, reason, sum(one.products for one in parts)
    )


def _largest(parts: Sequence[SingularValues]) -> float:
    return float(max(one.values.max() for one in parts))


def _total(bounds: Sequence[float | None]) -> float | None:
    present = [bound for bound in bounds if bound is not None]
    return sum(present) if len(present) == len(bounds) else None


def _first(words: Sequence[str]) -> str:
    return next((one for one in words if one), "")
