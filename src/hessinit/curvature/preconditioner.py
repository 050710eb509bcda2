"""Adam's rule, its diagonal preconditioner P = √v + eps, and the curvature P^-½ H P^-½."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hessinit.curvature import krylov, lanczos, operators
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import build_engine, evaluate
from hessinit.curvature.evaluation import Evaluation, find_reduction
from hessinit.curvature.plain_engine import PlainEvaluation
from hessinit.problem.batches import Batch, part_of
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.ranks import mean_over_ranks, on_any_rank, require_alike, smallest_over_ranks
from hessinit.results.advice import check_fraction, check_nonnegative
from hessinit.results.curvature_report import Estimate

# So many parts of a batch show its noise: seven degrees of freedom give a variance to a factor of
# about 1.5, and all parts together cost one gradient.
PARTS = 8


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Adam, or AdamW with `decoupled` weight decay, on a quadratic with a fixed preconditioner.

    With `a` the largest eigenvalue of `P^-½ H P^-½`, Adam is heavy ball with dampening β₁, stable
    up to `lr (1 − β₁) a = 2 + 2β₁` (Cohen et al. 2022); AdamW's decay adds `lr (1 + β₁) decay` on
    the left.

    >>> round(AdamRule().stability_limit(2.0), 9)
    19.0
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        check_fraction("betas[0]", self.beta1)
        check_fraction("betas[1]", self.beta2)
        check_nonnegative("eps", self.eps)
        check_nonnegative("weight_decay", self.weight_decay)

    @property
    def decoupled_decay(self) -> float:
        return self.weight_decay if self.decoupled else 0.0

    def best(self, norm: float) -> float:
        """The learning rate of the largest guaranteed decrease along a constant gradient."""
        return 1 / (norm + self.decoupled_decay) if norm else math.inf

    def stability_limit(self, norm: float) -> float:
        total = (1 - self.beta1) * norm + (1 + self.beta1) * self.decoupled_decay
        return (2 + 2 * self.beta1) / total if norm else math.inf

    def __str__(self) -> str:
        decay = f", weight_decay={self.weight_decay:g}" if self.weight_decay else ""
        name = "AdamW" if self.decoupled else "Adam"
        return f"{name}(betas=({self.beta1:g}, {self.beta2:g}), eps={self.eps:g}{decay})"


class ScaledCurvature(operators.LinearOperator):
    """`S^-½ H S^-½ + D` with diagonal S and D; entries with `S = inf` do not move.

    Costs one product with H.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> scale = torch.tensor([4.0, 1.0])
    >>> ScaledCurvature(matrix, scale, torch.tensor([0.0, 3.0])).to_dense()
    tensor([[0.5000, 0.5000],
            [0.5000, 5.0000]])
    """

    def __init__(
        self,
        curvature: operators.LinearOperator | Tensor,
        scale: Tensor,
        diagonal: Tensor | None = None,
    ) -> None:
        super().__init__((scale.numel(), scale.numel()), scale)
        self.ranks = krylov.ranks_of(curvature)
        self._curvature = curvature
        self._root = scale.rsqrt()
        self._diagonal = diagonal

    def _product(self, vector: Tensor) -> Tensor:
        scaled = self._root * (self._curvature @ (self._root * vector))
        return scaled if self._diagonal is None else scaled + self._diagonal * vector


def spectral_norm(
    operator: operators.LinearOperator, settings: LanczosSettings, *, semidefinite: bool
) -> Estimate:
    """The largest |eigenvalue|; of a semidefinite operator the largest eigenvalue suffices."""
    if semidefinite:
        norm = lanczos.run_together([settings.search(operator, "top")])[0].norm
        if norm.converged:
            return norm
    return lanczos.run_together([settings.search(operator, "both")])[0].norm


@dataclass(frozen=True)
class Preconditioner:
    """What an optimizer makes of the gradient: it sees the curvature S^-½ H S^-½ + D.

    `scale`, the diagonal of S, is inf where no weight moves. Where the first step is still to come,
    `step` is its opposite, per unit of the rate, and `gradient` what it descends.
    """

    scale: Tensor
    diagonal: Tensor | float = 0.0
    step: Tensor | None = None
    gradient: Tensor | None = None

    def norm(
        self,
        curvature: operators.LinearOperator,
        settings: LanczosSettings,
        *,
        semidefinite: bool,
        top_only: bool = False,
    ) -> Estimate:
        """Return the norm of the curvature that is seen, or its largest eigenvalue."""
        diagonal = self.diagonal * torch.isfinite(self.scale)
        operator = ScaledCurvature(curvature, self.scale, diagonal)
        # Not started from the last eigenvector: where the sharpest direction has changed since,
        # such a search often ends at the old one and cannot tell (see docs/tracking.md).
        if top_only:
            return settings.largest_eigenvalue(operator)
        return spectral_norm(operator, settings, semidefinite=semidefinite)

    def first_step(self, curvature: operators.LinearOperator, problem: FunctionalProblem) -> float:
        """Return where `−t slope + t²/2 curvature` is smallest; inf where it only falls."""
        if self.step is None or self.gradient is None:
            return math.inf
        products = [self.gradient @ self.step, self.step @ (curvature @ self.step)]
        slope, bend = problem.totals(torch.stack(products))
        if not math.isfinite(slope + bend):
            return 0.0
        return slope / bend if bend > 0 < slope else math.inf


def adam_preconditioner(moments: GradientMoments, eps: float) -> Preconditioner:
    """Return what Adam sees before it has a state: `P = √v + eps`, v the mean square gradient."""
    gradient = moments.gradient
    scale = torch.where(moments.square > 0, moments.square.sqrt() + eps, torch.inf)
    step = torch.where(gradient != 0, gradient / (gradient.abs() + eps), 0.0)
    return Preconditioner(scale, step=step, gradient=gradient)


def best_adam_rate(problem: FunctionalProblem, rule: AdamRule) -> float:
    """The learning rate of the largest guaranteed decrease of Adam, as in `advise`."""
    with problem.settings():
        evaluations = evaluate(problem)
        settings = LanczosSettings(1e-3, 200, problem.seed)
        engine = build_engine(evaluations, "gauss-newton", settings)
        seen = adam_preconditioner(gradient_moments(evaluations), rule.eps)
        operator = engine.operator(list(problem.leaves))
        norm = seen.norm(operator, settings, semidefinite=True)
        return min(rule.best(norm.value), seen.first_step(operator, problem))


class GradientMoments(NamedTuple):
    """The gradient and its mean square over mini-batches, both flat.

    `is_split` says whether the batches could be split.
    """

    gradient: Tensor
    square: Tensor
    is_split: bool


def gradient_moments(evaluations: Sequence[Evaluation]) -> GradientMoments:
    """The gradient and its mean square; costs two gradients.

    The mean square of a batch is never below its noise: a single gradient is close to 0 in some of
    many weights by chance, and these few would dominate P^-½ H P^-½ (4 to 75 times too large on
    digits).
    """
    is_sum = find_reduction(evaluations) == "sum"
    # A summed loss adds the batches up: a single one stands for all of them, times their number.
    factor = float(len(evaluations)) if is_sum else 1.0
    gradients = [_gradient(evaluation) for evaluation in evaluations]
    gradient = _weighted_sum(gradients, list(map(_weight_of_all, evaluations)))
    rows = evaluations[0].problem.rows
    fractions = [
        float(mean_over_ranks(torch.tensor(evaluation.batch.rows / rows)))
        for evaluation in evaluations
    ]
    squares = [(batch_gradient * factor).square() for batch_gradient in gradients]
    square = _weighted_sum(squares, fractions)
    noises = [
        noise * factor**2
        for noise in (_noise(evaluation, is_sum) for evaluation in evaluations)
        if noise is not None
    ]
    if len(noises) < len(evaluations):
        return GradientMoments(gradient, square, False)
    noise = _weighted_sum(noises, fractions)
    return GradientMoments(gradient, torch.maximum(square, noise), True)


def minibatch_gradients(evaluations: Sequence[Evaluation], most: int) -> list[Tensor]:
    """Return flat gradients with the noise of mini-batches, an odd number of at most `most`.

    Their mean is that of the batches, from each of which they differ as its parts do, over the
    square root of their number. A batch that cannot be split gives one.
    """
    factor = len(evaluations) if find_reduction(evaluations) == "sum" else 1
    gradients = []
    for evaluation in evaluations[:most]:
        gradient = _gradient(evaluation)
        parts = _gradients_of_parts(evaluation, factor > 1, most)
        deviations = torch.zeros_like(gradient)[None]
        if parts is not None:
            deviations = (parts - parts.mean(0)) / math.sqrt(len(parts))
        gradients += [factor * (gradient + deviation) for deviation in deviations]
    gradients = gradients[:most]
    return gradients[: len(gradients) - 1 + len(gradients) % 2]


def _gradient(evaluation: Evaluation, part: Batch | None = None) -> Tensor:
    """The gradient of the loss of a batch, or of a part of it, flat; that of all ranks together."""
    problem = evaluation.problem
    if isinstance(evaluation, PlainEvaluation):
        return operators.join(evaluation.loss_gradients(part)) / _weight_of_all(evaluation)
    loss = evaluation.loss if part is None else problem.loss_of(problem.output(part), part)
    leaves = list(problem.leaves.values())
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return operators.join(gradients).detach()


def _weight_of_all(evaluation: Evaluation) -> float:
    """The weight in the loss of all, with that of the batches of other ranks."""
    return sum(evaluation.problem.totals(torch.tensor([evaluation.weight])))


def _noise(evaluation: Evaluation, is_sum: bool) -> Tensor | None:
    """The variance of the batch's gradient; None if its parts cannot be evaluated alone."""
    gradients = _gradients_of_parts(evaluation, is_sum, PARTS)
    if gradients is None:
        return None
    noise = gradients.var(0) / len(gradients)
    return None if on_any_rank(not torch.isfinite(noise).all()) else noise


def _gradients_of_parts(evaluation: Evaluation, is_sum: bool, most: int) -> Tensor | None:
    size = evaluation.batch.size
    count = int(smallest_over_ranks(min(most, size)))
    if count < 2:
        return None
    gradients = []
    for first in range(count):
        part = part_of(evaluation.batch, torch.arange(first, size, count))
        try:
            gradient = _gradient(evaluation, part)
        except (RuntimeError, ValueError, IndexError, TypeError) as failure:
            require_alike(failure)
            return None  # the forward or the loss needs the whole batch
        gradients.append(gradient * (size / part.size) if is_sum else gradient)
    return torch.stack(gradients)


def _weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    weighted = [tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]
    return torch.stack(weighted).sum(0)
