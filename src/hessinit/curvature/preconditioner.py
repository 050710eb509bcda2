"""What an optimizer sees: its diagonal preconditioner S, and the curvature S^-½ H S^-½.

Of Adam it is the closed form P = √v + eps. Of others it is their response to the gradient: where
steps are linear in small changes of the gradient, training on a quadratic leaves stability as a
step answers a change of the weights that alternates in sign by twice that change: the root z = −1
of the closed forms of momentum, Nesterov and Adam. So the optimizer is asked. It steps on copies of
the parameters with the gradients of mini-batches, and a second copy with (−1)ᵗ s v added to them;
the difference of their updates, over s v and the learning rate, is the response.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    return Preconditioner(
        torch.where(moments.square > 0, moments.square.sqrt() + eps, torch.inf),
        step=torch.where(gradient != 0, gradient / (gradient.abs() + eps), 0.0),
        gradient=gradient,
    )


def best_adam_rate(problem: FunctionalProblem, rule: AdamRule) -> float:
    """The learning rate of the largest guaranteed decrease of Adam, as in `advise`."""
    with problem.settings():
        evaluations = evaluate(problem)
        settings = LanczosSettings(1e-3, 200, problem.seed)
        engine = build_engine(evaluations, "gauss-newton", settings)
        preconditioner = adam_preconditioner(gradient_moments(evaluations), rule.eps)
        operator = engine.operator(list(problem.leaves))
        norm = preconditioner.norm(operator, settings, semidefinite=True)
        return min(rule.best(norm.value), preconditioner.first_step(operator, problem))


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


@dataclass(frozen=True)
class ResponseRules:
    """How an optimizer is asked; chosen with benchmarks/optimizer_limits.py."""

    # An odd number of gradients that come again in one order is orthogonal to what alternates, so
    # that this does not move the second moments.
    most_gradients: int = 7
    warm_steps: int = 56  # of a new optimizer, whose moments begin at 0
    steps: int = 56  # of the response: a multiple of twice the gradients
    averaged: int = 14  # of them, the last
    size: float = 1e-3  # of the change, over the root mean square of each entry's gradients
    # The response is measured twice, later along another direction, of another size and at another
    # rate: together the two must agree to these factors, and the entries to their root mean square.
    times_larger: float = 4.0
    least: float = 0.5
    most: float = 1.15
    spread: float = 0.1


RESPONSE = ResponseRules()


class OptimizerCopy:
    """Optimizers on copies of their parameters, in double precision: steps leave these unmoved."""

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> None:
        groups = [group for part in optimizers for group in part.param_groups]
        held = {id(weight): weight for group in groups for weight in group["params"]}
        held |= {id(weight): weight for weight in parameters}
        copies = {
            key: nn.Parameter(weight.detach().double(), requires_grad=weight.requires_grad)
            for key, weight in held.items()
        }
        self.optimizers = [_transplant(part, copies) for part in optimizers]
        self.parameters = [copies[id(weight)] for weight in parameters]
        self._all = list(copies.values())
        self._start = [weight.detach().clone() for weight in self._all]

    def scale_rates(self, factor: float) -> None:
        for group in (group for part in self.optimizers for group in part.param_groups):
            group["lr"] = group["lr"] * factor

    def update(self, gradient: Tensor) -> Tensor:
        """Step with this flat gradient; return the flat update, which is then undone."""
        sizes = [weight.numel() for weight in self.parameters]
        for weight, piece in zip(self.parameters, gradient.double().split(sizes), strict=True):
            weight.grad = piece.view_as(weight).clone()
        before = [weight.detach().clone() for weight in self.parameters]
        for part in self.optimizers:
            part.step()
        moved = [weight.detach() - old for weight, old in zip(self.parameters, before, strict=True)]
        with torch.no_grad():
            for weight, start in zip(self._all, self._start, strict=True):
                weight.copy_(start)
        return operators.join(moved)


def _transplant(optimizer: Optimizer, copies: dict[int, nn.Parameter]) -> Optimizer:
    """Return the optimizer with its state, over copies of its parameters (by their ids)."""
    memo: dict[int, Any] = dict(copies)
    replaced = {"state", "step", *(name for name in vars(optimizer) if name.endswith("_hooks"))}
    attributes = {
        name: copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in replaced
    }
    new: Optimizer = type(optimizer).__new__(type(optimizer))
    new.__setstate__({**attributes, "state": collections.defaultdict(dict)})
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new


def measure_response(
    stepping: OptimizerCopy, gradients: Sequence[Tensor], seed: int, size: float = RESPONSE.size
) -> Tensor:
    """Return the response of each entry, flat; `stepping` steps on. 0 where no gradient is."""
    generator = torch.Generator().manual_seed(seed)
    mean_square = torch.stack(list(gradients)).double().square().mean(0)
    signs = torch.randint(2, mean_square.shape, generator=generator).to(mean_square) * 2 - 1
    change = size * signs * mean_square.sqrt()
    changed = OptimizerCopy(stepping.optimizers, stepping.parameters)
    response = torch.zeros_like(change)
    for step in range(RESPONSE.steps):
        sign = (-1) ** step
        gradient = gradients[step % len(gradients)].double()
        update = stepping.update(gradient)
        difference = changed.update(gradient + sign * change) - update
        if step >= RESPONSE.steps - RESPONSE.averaged:
            response -= sign * difference / RESPONSE.averaged
    return torch.where(change != 0, response / change, 0.0)


def warm_up(stepping: OptimizerCopy, gradients: Sequence[Tensor], steps: int) -> Tensor:
    """Step with the gradients in turn; return the first update."""
    first = stepping.update(gradients[0])
    for step in range(1, steps):
        stepping.update(gradients[step % len(gradients)])
    return first


def is_descent(response: Tensor) -> bool:
    """Whether every weight steps against a change of its gradient."""
    return bool(response.any()) and not bool(
        (response < -RESPONSE.spread * response.abs().mean()).any()
    )


def disagreement(first: Tensor, second: Tensor) -> str:
    """Say why two responses are not those of one linear, diagonal rule; empty if they are."""
    ratio = float(first @ second) / float(first.square().sum())
    spread = float((second / ratio - first).norm() / first.norm())
    if spread > RESPONSE.spread:
        return "its steps are not linear, weight by weight, in a change of the gradient"
    if not RESPONSE.least <= ratio <= RESPONSE.most:
        return "its response to the gradient depends on the rate or on the steps before"
    return ""
