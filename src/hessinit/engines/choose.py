"""Which engine measures what, and why."""

from __future__ import annotations

from collections.abc import Sequence

from hessinit.engines.ends import Effort, Engine
from hessinit.engines.gram import LayerGram
from hessinit.engines.gram_engine import GramEngine, GramLinearization
from hessinit.engines.hessian_engine import HessianEngine
from hessinit.engines.lanczos_engine import LanczosEngine
from hessinit.engines.output_root import OutputRoot, check_curved, output_root
from hessinit.engines.trace import trace_grams
from hessinit.errors import ProblemError
from hessinit.operators.blocks import GaussNewtonOperator
from hessinit.operators.derivative_check import check_gradients, check_loss, check_outputs
from hessinit.operators.evaluation import Evaluation, unused_leaves

# Rough costs, to choose by: a backward pass is less than half a gradient, a block by Lanczos about a dozen
# products of one to two gradients each.
_GRADIENTS_PER_COLUMN = 0.4
_GRADIENTS_PER_BLOCK = 18.0
# Lanczos keeps vectors of this length, and the rows of the inner products are squared: beyond, go
# matrix-free.
_MOST_ROWS = 16_384


def hessian_engine(evaluations: Sequence[Evaluation], effort: Effort) -> Engine:
    """The exact Hessian: always Lanczos at both ends."""
    for evaluation in evaluations:
        check_loss(evaluation)
        check_gradients(evaluation)
    return HessianEngine(evaluations, effort)


def gauss_newton_engine(evaluations: Sequence[Evaluation], effort: Effort, estimator: str) -> Engine:
    """The Gram engine where examples and outputs allow it and it is cheaper, Lanczos otherwise."""
    for evaluation in evaluations:
        check_loss(evaluation)
    reason = "estimator='lanczos' was asked for"
    if estimator != "lanczos":
        reason = _why_not_gram(evaluations) if estimator == "auto" else _why_impossible(evaluations)
        roots: list[OutputRoot] = []
        if not reason:
            for evaluation in evaluations:
                root = output_root(evaluation)
                if isinstance(root, str):
                    reason = root
                    break
                roots.append(root)
        if not reason:
            engine = _gram_engine(evaluations, roots, effort)
            if estimator == "auto" or isinstance(engine, GramEngine):
                return engine
            reason = engine.reason
        if estimator == "gram":
            raise ProblemError(
                f"estimator='gram' cannot measure this problem: {reason}. Use estimator='auto'."
            )
    for evaluation in evaluations:
        check_curved(evaluation)
        check_outputs(evaluation)
    return LanczosEngine(lambda names: GaussNewtonOperator(evaluations, names), effort, reason)


def _gram_engine(evaluations: Sequence[Evaluation], roots: Sequence[OutputRoot], effort: Effort) -> Engine:
    grams: list[dict[str, LayerGram]] = [
        trace_grams(evaluation, root) for evaluation, root in zip(evaluations, roots, strict=True)
    ]
    rank = sum(root.columns.shape[0] * root.columns.shape[1] for root in roots)
    unused = unused_leaves(evaluations)
    leaves = [name for name in evaluations[0].problem.leaves if name not in unused]
    others = [name for name in leaves if not all(name in found for found in grams)]
    cause = "calls mix the examples, or are none of dense, convolution, embedding"
    alone = len(others) == len(leaves)
    general = LanczosEngine(
        lambda names: GaussNewtonOperator(evaluations, names),
        effort,
        f"{'no layer is known: their' if alone else 'its'} {cause}",
        rank,
    )
    if alone:
        for evaluation in evaluations:
            check_outputs(evaluation)
        return general
    for evaluation, root, gram in zip(evaluations, roots, grams, strict=True):
        known = {name: one for name, one in gram.items() if name not in others}
        check_outputs(evaluation, GramLinearization(evaluation, root, known))
    columns = roots[0].columns.shape[0]
    reason = f"few outputs, {columns} shared backward pass{'' if columns == 1 else 'es'}"
    if others:
        reason += f"; {len(others)} of {len(leaves)} layers by Lanczos"
    return GramEngine(grams, unused, general, effort, reason)


def _why_impossible(evaluations: Sequence[Evaluation]) -> str:
    if any(evaluation.output.ndim < 1 for evaluation in evaluations):
        return "the output has no dimension that counts examples"
    return ""


def _why_not_gram(evaluations: Sequence[Evaluation]) -> str:
    impossible = _why_impossible(evaluations)
    if impossible:
        return impossible
    columns = max(evaluation.output[0].numel() for evaluation in evaluations)
    rows = sum(evaluation.output.numel() for evaluation in evaluations)
    blocks = len(evaluations[0].problem.leaves) + 1
    if rows > _MOST_ROWS:
        return f"{rows} outputs in all are too many for vectors of that length"
    if columns * _GRADIENTS_PER_COLUMN > blocks * _GRADIENTS_PER_BLOCK:
        return f"{columns} outputs per example are too many for one backward pass each"
    return ""
