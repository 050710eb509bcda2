"""The verb `quadratic_form`: a layer's curvature along a direction, exact and by the paper's Theorem 1."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.directions import (
    Directions,
    as_patterns,
    by_parameter,
    check_directions,
    draw_random,
    inner_products,
    normalize,
    read_given,
)
from hessinit.errors import ProblemError
from hessinit.operators.derivative_check import check_gradients, check_loss
from hessinit.operators.evaluation import Evaluation, evaluate
from hessinit.operators.setting import in_running_order, note_unchecked, notes_on, versions_of
from hessinit.problem.checks import check_arguments, check_whole
from hessinit.problem.layers import Layer
from hessinit.problem.memory import explained_memory
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms

# So many directions at most go through one batched pass.
_MOST_AT_ONCE = 16
_BYTES_AT_ONCE = 2**25


def quadratic_form(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    directions: str | Mapping[str, Tensor] = "random",
    draws: int = 1,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    seed: int = 0,
) -> QuadraticForms:
    """`gᵀHg` in every layer's own Hessian block, exact and by Theorem 1: `vᵀ H_z v`, `v` the output's change.

    `directions` is "random" (`draws` of them in each layer, of unit length), "gradient" (the loss gradient by
    the layer), or your own: a mapping from layer names to tensors of the weight's shape, or (draws, *shape)
    for several, which then chooses the layers. The other arguments are those of `measure`.

    Both numbers are right to rounding. They come from one forward and one backward pass shared by all layers,
    and one more pass for each through the layers behind it: for all layers of a five-layer MLP the arithmetic
    of 2.3 gradients, and the time of four (batch 128) to eight (batch 32). The check of the derivatives takes
    another 8 (batch 128) to 16 gradients (batch 32).

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> along = {"weight": torch.tensor([[3.0, 4.0]])}
    >>> forms = quadratic_form(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), directions=along)
    >>> round(forms["weight"].exact[0], 9)  # closed form: H = 2/n XᵀX = I
    25.0
    """
    started = time.perf_counter()
    draws = check_whole("draws", draws, at_least=1)
    seed = check_whole("seed", seed, at_least=0)
    check_arguments(model, loss, forward, dtype, dropout)
    check_directions(directions, draws)
    own: dict[str, tuple[str, Tensor]] = {}
    if not isinstance(directions, str):
        if layers is not None:
            raise ProblemError(
                f"layers={layers!r} and the keys of directions both choose layers; leave layers out."
            )
        own = by_parameter(model, directions)
        layers = as_patterns(own)
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    with problem.settings(), explained_memory(problem):
        given, draws = read_given(problem, own, draws) if own else ({}, draws)
        passes = [SharedPass(evaluation) for evaluation in evaluate(problem)]

        def along(layer: Layer) -> Iterator[Directions]:
            at_once = min(one.at_once(layer) for one in passes)
            if directions == "random":
                return draw_random(problem, layer, draws, at_once)
            if directions == "gradient":
                return normalize(_gradient(passes, layer).unsqueeze(0), at_once)
            return normalize(given[layer.parameter], at_once)

        evaluations = [one.evaluation for one in passes]
        ordered = in_running_order(problem, evaluations)
        return QuadraticForms(
            layers=tuple(_form(passes, layer, along(layer)) for layer in ordered),
            directions=directions if isinstance(directions, str) else "given",
            draws=draws,
            loss=sum(one.loss_value * one.weight for one in evaluations),
            examples=problem.examples,
            batches=len(problem.batches),
            seed=seed,
            seconds=time.perf_counter() - started,
            notes=(*notes_on(problem, evaluations), *note_unchecked(check)),
            versions=versions_of(problem),
        )


class SharedPass:
    """One batch's `q(u, w) = J(w)ᵀu` at `u = ∂L/∂z`, for all layers at once.

    It is linear in `u`, so its derivative by `u` along `g` is `v = J g`; its derivative by the layer's own
    weight is `Σ u_c ∇²z_c g`, what the exact Hessian has beyond Gauss-Newton. One pass gives both.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        check_loss(evaluation)
        check_gradients(evaluation)
        _, gradient = evaluation.output_gradient
        self._leaves = evaluation.problem.leaves
        self._cotangent = gradient.detach().requires_grad_()
        found = torch.autograd.grad(
            evaluation.output,
            list(self._leaves.values()),
            self._cotangent,
            create_graph=True,
            allow_unused=True,
        )
        self._adjoint: dict[str, Tensor | None] = dict(zip(self._leaves, found, strict=True))
        nodes = [use.node for uses in evaluation.uses.values() for use in uses]
        self._bytes_between = sum(map(_output_bytes, nodes))

    def gradient(self, parameter: str) -> Tensor:
        """The loss gradient by a leaf."""
        found = self._adjoint[parameter]
        return torch.zeros_like(self._leaves[parameter]) if found is None else found.detach()

    def at_once(self, layer: Layer) -> int:
        """How many directions a batched pass may take along without needing much memory."""
        each = layer.size * self._cotangent.element_size() + self._bytes_between
        return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // each))

    def forms(self, parameter: str, directions: Tensor) -> tuple[list[float], list[float]]:
        """`vᵀ H_z v` for every direction, and what the exact form has beyond it."""
        zeros = [0.0] * len(directions)
        adjoint = self._adjoint[parameter]
        if adjoint is None:
            return zeros, zeros  # the forward does not use it
        changes, bent = _pull_each(adjoint, [self._cotangent, self._leaves[parameter]], directions)
        beyond = zeros if bent is None else inner_products(directions, bent)
        cut, gradient = self.evaluation.output_gradient
        if changes is None or not gradient.requires_grad:
            return zeros, beyond  # a loss that is linear in the output
        (curved,) = _pull_each(gradient, [cut], changes)
        # In double: the product of two changes of 1e-22, as vanishing networks have, is 0 in float32.
        return zeros if curved is None else inner_products(changes.double(), curved.double()), beyond


def _pull_each(output: Tensor, inputs: list[Tensor], cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """A backward pass for each cotangent, all in one where torch can; None for what the output ignores."""
    if len(cotangents) > 1:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a missing batching rule is only a warning, and slow
                return torch.autograd.grad(
                    output, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except (RuntimeError, UserWarning):
            pass
    pulled = [
        torch.autograd.grad(output, inputs, cotangent, retain_graph=True, allow_unused=True)
        for cotangent in cotangents
    ]
    return tuple(map(_stack, zip(*pulled, strict=True)))


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    first, *others = parts
    if first is None:
        return None
    return torch.stack([first, *(part for part in others if part is not None)]) if others else first[None]


def _output_bytes(node: Any) -> int:
    made = node._input_metadata[0]
    return int(torch.Size(made.shape).numel()) * int(made.dtype.itemsize)


def _gradient(passes: Sequence[SharedPass], layer: Layer) -> Tensor:
    first, *others = passes
    total = first.gradient(layer.parameter) * first.evaluation.weight
    for one in others:
        total += one.gradient(layer.parameter) * one.evaluation.weight
    return total


def _form(passes: Sequence[SharedPass], layer: Layer, along: Iterator[Directions]) -> QuadraticForm:
    exact: list[float] = []
    theorem1: list[float] = []
    lengths: list[float] = []
    for some in along:
        approximate, beyond = [0.0] * len(some.factors), [0.0] * len(some.factors)
        for one in passes:
            parts = one.forms(layer.parameter, some.tensor)
            for total, part in zip((approximate, beyond), parts, strict=True):
                for index, value in enumerate(part):
                    total[index] += one.evaluation.weight * value * some.factors[index]
        theorem1 += approximate
        exact += map(float.__add__, approximate, beyond)
        lengths += some.lengths
    return QuadraticForm(
        name=layer.name,
        aliases=layer.aliases,
        shape=layer.shape,
        exact=tuple(exact),
        theorem1=tuple(theorem1),
        length=tuple(lengths),
    )
