"""Adam's diagonal preconditioner P = √v + eps: its update rule, its second moments, and P^-½ H P^-½."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.curvature import engines, lanczos, operators
from hessinit.curvature.evaluation import Evaluation, evaluate, find_reduction
from hessinit.problem.batches import Batch, map_tensors
from hessinit.problem.functional import FunctionalProblem
from hessinit.results.advice import check_fraction, check_nonnegative
from hessinit.results.curvature_report import Estimate

# Seven degrees of freedom give a variance to a factor of about 1.5, and all parts cost one gradient
# together.
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
        """The learning rate of the largest guaranteed decrease, for steps along a constant gradient."""
        return 1 / (norm + self.decoupled_decay) if norm else math.inf

    def stability_limit(self, norm: float) -> float:
        total = (1 - self.beta1) * norm + (1 + self.beta1) * self.decoupled_decay
        return (2 + 2 * self.beta1) / total if norm else math.inf

    def __str__(self) -> str:
        decay = f", weight_decay={self.weight_decay:g}" if self.weight_decay else ""
        name = "AdamW" if self.decoupled else "Adam"
        return f"{name}(betas=({self.beta1:g}, {self.beta2:g}), eps={self.eps:g}{decay})"


class ScaledCurvature(operators.LinearOperator):
    """`S^-½ H S^-½ + D` with diagonal S and D; entries with `S = inf` do not move. Costs one product with H.

    >>> matrix, scale = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([4.0, 1.0])
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
        self._curvature = curvature
        self._root = scale.rsqrt()
        self._diagonal = diagonal
        self.shape = (scale.numel(), scale.numel())
        self.dtype = scale.dtype
        self.device = scale.device

    def _product(self, vector: Tensor) -> Tensor:
        scaled = self._root * (self._curvature @ (self._root * vector))
        return scaled if self._diagonal is None else scaled + self._diagonal * vector


def spectral_norm(
    operator: operators.LinearOperator, settings: engines.LanczosSettings, *, semidefinite: bool
) -> Estimate:
    """The largest |eigenvalue|; of a semidefinite operator the largest eigenvalue suffices."""
    found = lanczos.lanczos(
        operator, which="top" if semidefinite else "both", **settings.options
    ).norm
    if semidefinite and not found.converged:
        return lanczos.lanczos(operator, which="both", **settings.options).norm
    return found


@dataclass(frozen=True)
class AdamCurvature:
    """The norm of P^-½ H P^-½, and the learning rate that is best for Adam's very first step."""

    norm: Estimate
    first_step: float
    frozen: int  # entries without a gradient
    notes: tuple[str, ...] = ()

    def best(self, rule: AdamRule) -> float:
        return min(rule.best(self.norm.value), self.first_step)

    def stability_limit(self, rule: AdamRule) -> float:
        """Where the first step, or the later ones with this preconditioner, stop being stable."""
        return min(rule.stability_limit(self.norm.value), 2 * self.first_step)


def measure_adam(
    rule: AdamRule,
    engine: engines.Engine,
    evaluations: Sequence[Evaluation],
    settings: engines.LanczosSettings,
    *,
    semidefinite: bool,
    relative_rates: Tensor | None = None,
    diagonal: Tensor | None = None,
) -> AdamCurvature:
    """Measure the curvature that Adam sees before it has a state of its own.

    `P = √v + eps` with `v` the mean square of mini-batch gradients. `relative_rates` are the
    learning rates of parameter groups over the largest one; `diagonal` is added to P^-½ H P^-½ for
    decays that differ.
    """
    operator = engine.operator(list(evaluations[0].problem.leaves))
    gradient, square, is_split = gradient_moments(evaluations)
    notes = []
    if not is_split:
        notes.append("The batch could not be split, so P is the size of this one gradient.")
    if rule.weight_decay and not rule.decoupled:
        # Where the decay alone moves a weight, P shrinks with the weight: there is no fixed P.
        notes.append("Adam's weight decay, a part of the gradient, is not included in the advice.")
    moves = square > 0
    rates = 1.0 if relative_rates is None else relative_rates
    scale = torch.where(moves, square.sqrt() + rule.eps, torch.inf) / rates
    frozen = int((~moves).sum())
    if frozen == moves.numel():
        norm = Estimate(0.0, 0.0, True, "the gradient is zero: no weight moves", 0)
        return AdamCurvature(norm, math.inf, frozen, tuple(notes))
    diagonal = None if diagonal is None else torch.where(moves, diagonal, 0.0)
    norm = spectral_norm(
        ScaledCurvature(operator, scale, diagonal), settings, semidefinite=semidefinite
    )
    step = torch.where(
        gradient != 0, gradient / (gradient.abs() + rule.eps), torch.zeros_like(gradient)
    )
    step = step * rates
    slope = float(gradient @ step)
    bend = float(step @ (operator @ step))
    # Where `−t slope + t²/2 bend` is smallest; inf where it only falls, 0 where it overflows.
    best = 0.0 if not math.isfinite(slope + bend) else slope / bend if bend > 0 else math.inf
    return AdamCurvature(norm, best, frozen, tuple(notes))


def best_adam_rate(problem: FunctionalProblem, rule: AdamRule) -> float:
    """The learning rate of the largest guaranteed decrease of Adam, as in `advise`."""
    with problem.settings():
        evaluations = evaluate(problem)
        settings = engines.LanczosSettings(1e-3, 200, problem.seed)
        engine = engines.build_engine(evaluations, "gauss-newton", settings)
        return measure_adam(rule, engine, evaluations, settings, semidefinite=True).best(rule)


def gradient_moments(evaluations: Sequence[Evaluation]) -> tuple[Tensor, Tensor, bool]:
    """The gradient, its mean square over mini-batches, both flat, and whether the batches could be split.

    The mean square of a batch is never below its noise: a single gradient is close to 0 in some of
    many weights by chance, and these few would dominate P^-½ H P^-½ (4 to 75 times too large on
    digits). Costs two gradients.
    """
    sums = find_reduction(evaluations) == "sum"
    # A summed loss adds the batches up: a single one stands for all of them, times their number.
    factor = float(len(evaluations)) if sums else 1.0
    gradients = [_gradient(one.loss, one) for one in evaluations]
    gradient = _weighted(gradients, [one.weight for one in evaluations])
    fractions = [one.batch.rows / evaluations[0].problem.rows for one in evaluations]
    square = _weighted([(g * factor).square() for g in gradients], fractions)
    noises = [_noise(one, sums) for one in evaluations]
    known = [noise * factor**2 for noise in noises if noise is not None]
    if len(known) < len(noises):
        return gradient, square, False
    return gradient, torch.maximum(square, _weighted(known, fractions)), True


def _gradient(loss: Tensor, evaluation: Evaluation) -> Tensor:
    leaves = list(evaluation.problem.leaves.values())
    found = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return operators.join(found).detach()


def _noise(evaluation: Evaluation, sums: bool) -> Tensor | None:
    problem = evaluation.problem
    size = evaluation.batch.size
    count = min(PARTS, size)
    if count < 2:
        return None
    found = []
    for first in range(count):
        part = part_of(evaluation.batch, torch.arange(first, size, count))
        try:
            gradient = _gradient(problem.loss_of(problem.output(part), part), evaluation)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None  # the forward or the loss needs the whole batch
        found.append(gradient * (size / part.size) if sums else gradient)
    noise = torch.stack(found).var(0) / count
    return noise if bool(torch.isfinite(noise).all()) else None


def part_of(batch: Batch, examples: Tensor) -> Batch:
    """Some of the examples; targets may be flat, with several in a row for each example, as in text."""

    def pick(tensor: Tensor) -> Tensor:
        each, rest = divmod(len(tensor), batch.size) if tensor.ndim else (0, 1)
        if rest or each < 2:
            return tensor
        return tensor.unflatten(0, (batch.size, each))[examples.to(tensor.device)].flatten(0, 1)

    taken = batch.take(examples)
    return Batch(taken.inputs, map_tensors(pick, taken.targets), taken.size)


def _weighted(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack(
        [tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]
    ).sum(0)
