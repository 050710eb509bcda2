"""Which engine measures a problem: Gram, Lanczos, the exact Hessian or the plain one, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hessinit.curvature import derivative_check, lanczos
from hessinit.curvature.engine import Engine, LanczosEngine, LanczosSettings
from hessinit.curvature.evaluation import Evaluation, join_evaluations, unused_leaves
from hessinit.curvature.gram import trace_grams
from hessinit.curvature.gram_engine import GramEngine, GramLinearization
from hessinit.curvature.hessian_engine import HessianEngine
from hessinit.curvature.loss_hessian import LossFactor, check_curved
from hessinit.curvature.plain_engine import PlainEvaluation, plain_engine
from hessinit.curvature.shares import join_shares
from hessinit.errors import DerivativeError, ProblemError, argument
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.in_place import InPlaceProblem
from hessinit.problem.problem import Problem
from hessinit.problem.ranks import Ranks, calling_ranks, lockstep_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class EngineCosts:
    """Rough costs, in gradients, by which the Gram engine and Lanczos are compared."""

    column: float = 0.4  # a backward pass is less than half a gradient
    block: float = 5.0  # a dozen products of 0.4 by Lanczos
    most_rows: int = 16_384  # Lanczos keeps vectors of this length, and inner products are squared


COSTS = EngineCosts()

_UNKNOWN_CALLS = "calls mix the examples, or are none of dense, convolution, embedding"


def exactly_or_plainly(
    problem: Problem, estimator: str, work: Callable[[FunctionalProblem], T]
) -> T:
    """The result of the work on a problem in functional form, or else on the model in place.

    A model that cannot be differentiated twice or taken apart is run as it is trained, and so is a
    sharded one. What the plain engine refuses as well is refused for the first reason.
    """
    ranks = calling_ranks()
    if estimator == "plain":
        if ranks is not None and not ranks.sharded:
            raise ProblemError(
                argument("estimator", estimator),
                " with several ranks measures models that FSDP2 has sharded; pass another "
                'estimator, or distributed="each".',
            )
        return work(InPlaceProblem(problem, "estimator='plain' was asked for"))
    try:
        return work(functional_form(problem))
    except DerivativeError as refusal:
        if estimator != "auto" or ranks is not None:
            raise
        reason = re.split(r"[:;]|\.\s", str(refusal), maxsplit=1)[0]
        try:
            return work(InPlaceProblem(problem, f"not by the exact engines, as {reason}"))
        except Exception:
            raise refusal from None


def functional_form(problem: Problem) -> FunctionalProblem:
    """The problem in functional form; that of a sharded model in place."""
    if lockstep_ranks() is None:
        return FunctionalProblem(problem)
    return InPlaceProblem(problem, "the weights are sharded")


def evaluate_everywhere(
    problem: FunctionalProblem, ranks: Ranks | None = None
) -> tuple[list[Evaluation], dict[str, Any]]:
    """The evaluations, and the loss and examples of all `ranks` (or those in lockstep), if any."""
    ranks = ranks or lockstep_ranks()
    return (evaluate(problem), {}) if ranks is None else join_shares(ranks, evaluate(problem))


def evaluate(problem: FunctionalProblem) -> list[Evaluation]:
    """One evaluation for each batch, weighted by its examples if the loss is a mean."""
    kind: Any = PlainEvaluation if isinstance(problem, InPlaceProblem) else Evaluation
    return join_evaluations([kind(problem, batch) for batch in problem.batches])


def build_engine(
    evaluations: Sequence[Evaluation],
    curvature: str,
    settings: LanczosSettings,
    estimator: str = "auto",
) -> Engine:
    """The engine of "gauss-newton" or "hessian", after the check of the derivatives.

    Gauss-Newton goes by Gram matrices where examples and outputs allow it and it is cheaper, else
    by Lanczos.
    """
    if isinstance(evaluations[0].problem, InPlaceProblem):
        return plain_engine(evaluations, curvature, settings)
    for evaluation in evaluations:
        derivative_check.check_loss(evaluation)
        if curvature == "hessian":
            derivative_check.check_gradients(evaluation)
    if curvature == "hessian":
        return HessianEngine(evaluations, settings)
    if estimator == "lanczos":
        return _lanczos_engine(evaluations, settings, "estimator='lanczos' was asked for", "both")
    costly = too_many_outputs(evaluations) if estimator == "auto" else None
    if costly:
        return _lanczos_engine(evaluations, settings, costly, "norm")
    engine = _gram_engine(evaluations, settings)
    if estimator == "gram" and not isinstance(engine, GramEngine):
        reason = engine if isinstance(engine, str) else engine.reason
        raise ProblemError(
            f"estimator='gram' cannot measure this problem: {reason}. Use estimator='auto'."
        )
    if isinstance(engine, str):
        return _lanczos_engine(evaluations, settings, engine, "both")
    return engine


def _lanczos_engine(
    evaluations: Sequence[Evaluation], settings: LanczosSettings, reason: str, ends: lanczos.Which
) -> LanczosEngine:
    for evaluation in evaluations:
        check_curved(evaluation)
        derivative_check.check_outputs(evaluation)
    # A cross-entropy is convex in the output.
    convex = ends == "norm" and all(evaluation.softmax is not None for evaluation in evaluations)
    rank = sum(evaluation.output.numel() for evaluation in evaluations) if convex else None
    return LanczosEngine(evaluations, settings, reason, rank, ends)


def too_many_outputs(evaluations: Sequence[Evaluation]) -> str | None:
    """Why Lanczos is cheaper than a backward pass for every output, or None if it is not."""
    outputs = [evaluation.output for evaluation in evaluations]
    columns = max((output[:1].numel() for output in outputs if output.ndim), default=0)
    rows = sum(output.numel() for output in outputs)
    blocks = len(evaluations[0].problem.leaves) + 1
    if rows > COSTS.most_rows:
        return f"{rows} outputs in all are too many for vectors of that length"
    if columns * COSTS.column > blocks * COSTS.block:
        return f"{columns} outputs per example are too many for one backward pass each"
    return None


def loss_factors(evaluations: Sequence[Evaluation]) -> list[LossFactor] | str:
    """The factorization of each batch's `H_z`, for the Gram engine; or why there is none."""
    if any(evaluation.output.ndim < 1 for evaluation in evaluations):
        return "the output has no dimension that counts examples"
    factors: list[LossFactor] = []
    for evaluation in evaluations:
        if isinstance(evaluation.factor, str):
            return evaluation.factor
        factors.append(evaluation.factor)
    return factors


def _gram_engine(evaluations: Sequence[Evaluation], settings: LanczosSettings) -> Engine | str:
    """The Gram engine, or Lanczos where it knows no layer; or why there is none."""
    factors = loss_factors(evaluations)
    if isinstance(factors, str):
        return factors
    grams = [
        trace_grams(evaluation, factor)
        for evaluation, factor in zip(evaluations, factors, strict=True)
    ]
    rank = sum(factor.columns.shape[0] * factor.columns.shape[1] for factor in factors)
    unused = unused_leaves(evaluations)
    leaves = [name for name in evaluations[0].problem.leaves if name not in unused]
    unknown = [name for name in leaves if not all(name in of_batch for of_batch in grams)]
    none_known = len(unknown) == len(leaves)
    reason = gram_reason(factors[0].columns.shape[0], len(unknown), len(leaves))
    why_lanczos = reason if none_known else f"its {_UNKNOWN_CALLS}"
    general = LanczosEngine(evaluations, settings, why_lanczos, rank, factors=factors)
    for evaluation, factor, of_batch in zip(evaluations, factors, grams, strict=True):
        linear = None
        if not none_known:
            of_all = {name: gram for name, gram in of_batch.items() if name not in unknown}
            linear = GramLinearization(evaluation, factor.columns, of_all)
        derivative_check.check_outputs(evaluation, linear)
    return general if none_known else GramEngine(grams, unused, general, reason)


def gram_reason(columns: int, unknown: int, leaves: int) -> str:
    """Why the Gram engine, or why Lanczos where it knows no layer."""
    if unknown == leaves:
        return f"no layer is known: their {_UNKNOWN_CALLS}"
    reason = f"few outputs, {columns} shared backward pass{'' if columns == 1 else 'es'}"
    return f"{reason}; {unknown} of {leaves} layers by Lanczos" if unknown else reason
