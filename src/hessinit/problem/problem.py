"""`Problem`: a model, a loss and a batch, and how they are evaluated; every verb takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, argument, check_callable, choose
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.checks import (
    PRECISIONS,
    check_model,
    check_order,
    check_switches,
    check_whole,
    list_patterns,
)

Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, a loss and a batch, and how they are evaluated; `dataclasses.replace` makes another.

    `loss(output, targets)` is any callable. `batch` is `(inputs, targets)` or an iterable of such
    pairs, which are averaged over examples, or added up where the loss is a sum.

    Args:
        forward: `forward(model, inputs)`, for a model that is not called as `model(inputs)`.
        layers: names or globs of the weights to measure, such as `["fc1", "encoder.*"]`; by default
            every trainable parameter of two or more dimensions. "**" adds biases and norm gains.
        dropout: "freeze" keeps one draw of every random layer, drawn from the seed; "refuse" raises
            an error where dropout is active.
        reduction: "mean" or "sum", whichever the loss is; "auto" finds out from its values.
        dtype: torch.float32 or torch.float64 to convert to; by default the better of float32 and
            the model's own.
        precision: of the matrix products: "full", "tf32", "bf16", or "auto", which is TF32 on a GPU
            where the error of its rounding, which is measured, is below the tolerance.
        seed: of all random numbers.
        check: whether the derivatives are checked against finite differences of the plain model.

    >>> problem = Problem(nn.Linear(3, 1), nn.MSELoss(), (torch.eye(3), torch.zeros(3, 1)))
    >>> problem.dropout, problem.layers
    ('freeze', None)
    """

    model: nn.Module
    loss: Loss
    batch: Any
    _: KW_ONLY
    forward: Forward | None = None
    layers: str | Iterable[str] | None = None
    dropout: str = "freeze"
    reduction: str = "auto"
    dtype: torch.dtype | None = None
    precision: str = "auto"
    seed: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        check_model(self.model, self.forward)
        check_callable("loss", self.loss, "loss(output, target)")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ProblemError(
                argument("dtype", self.dtype),
                " is not supported; choose torch.float32, torch.float64, or "
                "None for the better of float32 and the model's own.",
            )
        choose("dropout", self.dropout, ["refuse", "freeze"])
        choose("reduction", self.reduction, ["auto", "mean", "sum"])
        choose("precision", self.precision, PRECISIONS)
        check_switches(check=self.check)
        check_order(self.model, self.loss)
        self._set("seed", check_whole("seed", self.seed, at_least=0))
        # An iterator can be read only once.
        patterns = list_patterns(self.layers)
        self._set("layers", None if patterns is None else tuple(patterns))
        if isinstance(self.batch, Iterator):
            pairs = [(batch.inputs, batch.targets) for _, batch in read_batches(self.batch)]
            self._set("batch", pairs)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches as they were passed, with their numbers of examples."""
        return tuple(batch for _, batch in read_batches(self.batch))


def as_problem(problem: Any, loss: Any = None, batch: Any = None) -> Problem:
    """The problem itself, or that of a model, a loss and a batch, with the defaults."""
    if isinstance(problem, Problem):
        if loss is not None or batch is not None:
            raise ProblemError(
                "a Problem already holds the loss and the batch; pass it alone, or change them by "
                "dataclasses.replace(problem, loss=..., batch=...)."
            )
        return problem
    check_model(problem, None)
    if loss is None:
        raise ProblemError(
            "the loss and the batch are missing; pass model, loss, batch, or one "
            "hessinit.Problem(model, loss, batch)."
        )
    return Problem(problem, loss, batch)
