"""Curvature of examples spread over ranks: products are added up, and rank 0 decides the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit.curvature import krylov, operators
from hessinit.curvature.engine import Engine, Extremes
from hessinit.curvature.evaluation import Evaluation, find_reduction
from hessinit.errors import ProblemError
from hessinit.problem.ranks import Ranks

_LAST_MOMENT = 1 << 62  # of a weight that only examples of other ranks use: last, but not unused


@dataclass(frozen=True)
class Share:
    """What a rank sends to the others about its share of the examples."""

    coupling: str  # the part that makes examples depend on each other, if any
    reduction: str | None
    examples: int
    rows: int
    loss: float
    batches: int
    moments: dict[str, int | None]


def _joined_reduction(shares: Sequence[Share]) -> str | None:
    """The reduction of the loss of all; refuses shares that cannot be joined."""
    advice = 'pass the whole batch on every rank, with distributed="layers"'
    coupling = max(share.coupling for share in shares)
    if coupling:
        raise ProblemError(
            f'{coupling}, so a share of them, as in distributed="batch", has another loss; '
            f"{advice}."
        )
    reductions = {share.reduction for share in shares} - {None}
    if len(reductions) != 1:
        raise ProblemError(
            "the values of the loss do not tell whether it adds its examples up or averages them, "
            f'so how to join the shares. Pass reduction="mean" or "sum", or {advice}.'
        )
    return reductions.pop()


def join_shares(
    ranks: Ranks, evaluations: Sequence[Evaluation]
) -> tuple[list[Evaluation], dict[str, Any]]:
    """The evaluations, weighted by their share of all examples; loss, examples and batches of all.

    The same as several batches in one process. Refuses, on every rank, examples that see each
    other. A loss that sums over the examples of a sharded model counts as its mean over the ranks:
    that is what training minimizes, as FSDP2 averages the gradients.
    """
    problem = evaluations[0].problem
    # Ranks in lockstep train on the mean of their own losses, whatever these make of a share.
    coupling = "" if ranks.sharded else next(filter(None, map(_coupling, evaluations)), "")
    share = Share(
        coupling=coupling,
        reduction=find_reduction(evaluations),
        examples=problem.examples,
        rows=problem.rows,
        loss=sum(evaluation.loss_value * evaluation.weight for evaluation in evaluations),
        batches=len(evaluations),
        moments=evaluations[0].moments,
    )
    shares = list(ranks.exchange(share))
    is_mean = _joined_reduction(shares) == "mean"
    rows = sum(share.rows for share in shares)
    used = {
        name for share in shares for name, moment in share.moments.items() if moment is not None
    }
    part_of_sum = 1.0 / ranks.size if ranks.sharded else 1.0
    fractions = [share.rows / rows if is_mean else part_of_sum for share in shares]
    moments = {
        name: _LAST_MOMENT if moment is None and name in used else moment
        for name, moment in share.moments.items()
    }
    first, *following = (
        evaluation.weighted(evaluation.weight * fractions[ranks.rank]) for evaluation in evaluations
    )
    facts = {
        "loss": sum(
            share.loss * fraction for share, fraction in zip(shares, fractions, strict=True)
        ),
        "examples": sum(share.examples for share in shares),
        "batches": sum(share.batches for share in shares),
    }
    return [first.weighted(first.weight, moments), *following], facts


class SharedEngine(Engine):
    """The engine of all examples, on rank 0; the ranks' own engines make the products."""

    def __init__(
        self, ranks: Ranks, engines: Sequence[Engine], number: int, unused: set[str]
    ) -> None:
        self._ranks = ranks
        self._engine = engines[number]
        self._number = number
        self._unused = unused
        self.name = self._engine.name
        self.reason = self._engine.reason
        self.ends = self._engine.ends
        self.settings = self._engine.settings
        bounds = ranks.exchange(self._engine.rank)
        self.rank = None if None in bounds else sum(bounds)

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        block = (self._number, list(names))
        return SumOverRanks(self._ranks, self._engine.operator(names), block)

    def extremes(self, names: Sequence[str]) -> Extremes:
        if all(name in self._unused for name in names):
            return self.unused()
        return self._search(self.rank, [self.operator(names)])[0]


class SumOverRanks(operators.LinearOperator):
    """The sum of the ranks' operators, on rank 0; `block` tells the others which one is meant."""

    def __init__(
        self, ranks: Ranks, operator: operators.LinearOperator, block: tuple[int, list[str]]
    ) -> None:
        super().__init__(operator.shape, operator)
        self._ranks = ranks
        self._operator = operator
        self._block = block

    def _product(self, vector: Tensor) -> Tensor:
        answers = self._ranks.ask(*self._block, vector.numpy(force=True))
        products = [self._operator._product(vector).detach()]
        products += [torch.from_numpy(answer).to(vector) for answer in answers()]
        return operators.add_up(products)


def multiply(engines: Sequence[Engine], number: int, names: list[str], vector: Any) -> Any:
    """The answer of another rank to rank 0."""
    operator = engines[number].operator(names)
    return operator._product(torch.from_numpy(vector).to(operator.device)).numpy(force=True)


def _coupling(evaluation: Evaluation) -> str:
    """Which part makes the examples of a batch depend on each other; "" if none does."""
    problem = evaluation.problem
    size = evaluation.batch.size
    output = evaluation.output
    norms = [module for module in problem.model.modules() if isinstance(module, _BatchNorm)]
    alone = evaluation.separable or not any(
        norm.training or norm.running_mean is None for norm in norms
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
    rows, *dimensions = output.shape or (1,)
    numbers = torch.arange(rows, device=output.device).view(-1, *[1] * len(dimensions))
    layouts = [numbers // (rows // size), numbers % size] if rows % size == 0 else []
    if dimensions[:1] == [size]:
        layouts.append(torch.arange(size).to(numbers).view(-1, *[1] * len(dimensions[1:])))
    direction = krylov.random_like(output, evaluation.problem.seed)

    def is_apart(moving: Tensor) -> bool:
        product = evaluation.output_hessian(direction * moving).abs()
        rounding = torch.finfo(output.dtype).eps ** 0.6
        return bool((product * ~moving).max() <= rounding * product.max())

    bits = range((size - 1).bit_length())  # any two examples differ in some bit of their numbers
    return not layouts or any(
        all(is_apart((example >> bit) % 2 == 0) for bit in bits) for example in layouts
    )
