"""The curvature of examples that are spread over ranks: products are added up, rank 0 decides the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit.curvature import engines, operators, probes
from hessinit.curvature.evaluation import Evaluation, find_reduction
from hessinit.errors import ProblemError
from hessinit.problem.ranks import Ranks


def join_shares(ranks: Ranks, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Weight the evaluations by their share of all examples; returns loss, examples and batches of all.

    The same as several batches in one process. Refuses, on every rank, examples that see each
    other.
    """
    problem = evaluations[0].problem
    moments = evaluations[0].moments
    coupled = next(filter(None, map(_coupling, evaluations)), "")
    loss = sum(one.loss_value * one.weight for one in evaluations)
    own = (
        coupled,
        find_reduction(evaluations),
        problem.examples,
        problem.rows,
        loss,
        len(evaluations),
        moments,
    )
    reasons, reductions, sizes, rows, losses, batches, uses = zip(*ranks.exchange(own), strict=True)
    way = 'pass the whole batch on every rank, with distributed="layers"'
    if any(reasons):
        why = f'{max(reasons)}, so a share of them, as in distributed="batch", has another loss'
        raise ProblemError(f"{why}; {way}.")
    if len(known := set(reductions) - {None}) != 1:
        why = "the values of the loss do not tell whether it adds its examples up or averages them"
        raise ProblemError(
            f'{why}, so how to join the shares. Pass reduction="mean" or "sum", or {way}.'
        )
    fractions = [count / sum(rows) if known == {"mean"} else 1.0 for count in rows]
    for one in evaluations:
        one.weight *= fractions[ranks.rank]
    for name, moment in moments.items():
        if moment is None and any(one[name] is not None for one in uses):
            moments[name] = (
                1 << 62
            )  # used by examples of other ranks: last in the order, but not unused
    loss = sum(one * fraction for one, fraction in zip(losses, fractions, strict=True))
    return {"loss": loss, "examples": sum(sizes), "batches": sum(batches)}


class SharedEngine(engines.Engine):
    """The engine of all examples, on rank 0; the engines that the ranks have of their own make products."""

    def __init__(
        self, ranks: Ranks, own: Sequence[engines.Engine], number: int, unused: set[str]
    ) -> None:
        self._ranks = ranks
        self._own = own[number]
        self._number = number
        self._unused = unused
        self.name = self._own.name
        self.reason = self._own.reason
        self.ends = self._own.ends
        self._settings = self._own._settings
        # Bounds the rank of a semidefinite curvature; None if it may be indefinite, or is not
        # known.
        bounds = ranks.exchange(getattr(getattr(self._own, "_general", self._own), "_rank", None))
        self._rank = None if None in bounds else sum(bounds)

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        return SumOverRanks(self._ranks, self._own.operator(names), (self._number, list(names)))

    def extremes(self, names: Sequence[str]) -> engines.Extremes:
        if all(name in self._unused for name in names):
            return engines.Extremes(engines.UNUSED, engines.UNUSED, self.name, self.reason)
        return self._search(self._rank, self.operator(names))[0]


class SumOverRanks(operators.LinearOperator):
    """The sum of the ranks' operators, on rank 0; `block` tells the others which one is meant."""

    def __init__(
        self, ranks: Ranks, own: operators.LinearOperator, block: tuple[int, list[str]]
    ) -> None:
        self._ranks = ranks
        self._own = own
        self._block = block
        self.shape = own.shape
        self.dtype = own.dtype
        self.device = own.device

    def _product(self, vector: Tensor) -> Tensor:
        answers = self._ranks.ask(*self._block, vector.numpy(force=True))
        found = [self._own._product(vector).detach()]
        found += [torch.from_numpy(one).to(vector) for one in answers()]
        return operators.add_up(found)


def multiply(own: Sequence[engines.Engine], number: int, names: list[str], vector: Any) -> Any:
    """The answer of another rank to rank 0."""
    operator = own[number].operator(names)
    return operator._product(torch.from_numpy(vector).to(operator.device)).numpy(force=True)


def _coupling(evaluation: Evaluation) -> str:
    """Which part makes the examples of a batch depend on each other; "" if none does."""
    problem = evaluation.problem
    size = evaluation.batch.size
    output = evaluation.output
    modules = [one for one in problem.model.modules() if isinstance(one, _BatchNorm)]
    alone = evaluation.separable or not any(
        one.training or one.running_mean is None for one in modules
    )
    was_tried = problem.dropout != "freeze" or not evaluation.drew
    if size > 1 and was_tried and output.ndim and output.shape[0] == size:
        alone = evaluation.separable
    if not alone:
        return "the model's output for an example depends on others (as by BatchNorm in train mode)"
    return "" if _loss_is_apart(evaluation) else "the loss compares the examples of a batch"


def _loss_is_apart(evaluation: Evaluation) -> bool:
    """Whether `H_z` leaves the outputs of the other examples alone where some move.

    The first dimension counts examples, perhaps times positions in either order, or the second one
    does.
    """
    output = evaluation.output
    size = evaluation.batch.size
    rows, *others = output.shape or (1,)
    numbers = torch.arange(rows, device=output.device).view(-1, *[1] * len(others))
    ways = [numbers // (rows // size), numbers % size] if rows % size == 0 else []
    ways += (
        [torch.arange(size).to(numbers).view(-1, *[1] * len(others[1:]))]
        if others[:1] == [size]
        else []
    )
    direction = probes.random_like(output, evaluation.problem.seed)

    def is_apart(moving: Tensor) -> bool:
        product = evaluation.output_hessian(direction * moving).abs()
        return bool(
            (product * ~moving).max() <= torch.finfo(output.dtype).eps ** 0.6 * product.max()
        )

    bits = range((size - 1).bit_length())  # any two examples differ in some bit of their numbers
    return not ways or any(all(is_apart((way >> bit) % 2 == 0) for bit in bits) for way in ways)
