"""The rounding error of the operators: a product in float32, repeated in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hessinit.curvature import operators, probes
from hessinit.curvature.derivative_check import has_kinks
from hessinit.curvature.evaluation import Evaluation, evaluate_at, weights_in

# Of the estimate; on 2,000 random problems 99.9 % of the eigenvalues were within it.
CAUTION = 6.0
# A product that shrinks below this share of itself in float64 was rounding.
_NOTHING = 0.05
# The errors of many weights cancel in an eigenvalue, those of fewer than the square of this number
# may not.
_FEW = 10.0
# Some examples are enough to see that no layer rounds more than this.
_ORDINARY = 1e-5
# Of a number that is rounded, relative to it.
_LAST_DIGIT = {"full": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class RoundingError:
    """The error that rounding causes, over the eigenvalue; `is_all` where the product was rounding alone."""

    relative: float = 0.0
    is_all: bool = False
    unit: str = "float32"


class Difference(NamedTuple):
    """A product p, in float64 p + e: their squared lengths, and ⟨p, e⟩ as a whole and by rows and columns."""

    single: float
    double: float
    error: float
    along: float
    squares: float
    size: int

    @classmethod
    def of_each(
        cls, singles: Mapping[str, Tensor], doubles: Mapping[str, Tensor]
    ) -> dict[str, Difference]:
        compared = [_compared(single, doubles[name]) for name, single in singles.items()]
        rows = zip(singles.items(), torch.stack(compared).tolist(), strict=True)
        return {name: cls._make([*found, single.numel()]) for (name, single), found in rows}

    @classmethod
    def of_all(cls, layers: Sequence[Difference]) -> Difference:
        squares = sum(layer.along * layer.along for layer in layers)
        return cls(*map(sum, zip(*layers, strict=True)))._replace(squares=squares)

    def judge(self) -> RoundingError:
        """To first order an error E moves an eigenvalue by yᵀE y: only what is along the vector counts.

        So ⟨p, e⟩ is compared with ‖p‖², not ‖e‖ with ‖p‖. As a sum may be small by chance, the root
        of the sum of squares over rows or columns replaces it where larger, and for few weights
        ‖e‖.
        """
        length = max(self.single, self.double)
        if not math.isfinite(length + self.error):
            return RoundingError(math.inf)
        if not length:
            return RoundingError()
        few = min(1.0, _FEW / math.sqrt(self.size)) * math.sqrt(self.error / length)
        relative = max(few, abs(self.along) / length, math.sqrt(self.squares) / length)
        return RoundingError(relative, self.double < _NOTHING**2 * self.single)


@dataclass(frozen=True)
class Rounding:
    layers: Mapping[str, RoundingError]
    network: RoundingError

    @classmethod
    def of(
        cls, found: Mapping[str, Difference], evaluation: Evaluation, precision: str
    ) -> Rounding:
        unit = "float32" if precision == "full" else precision
        whole = replace(Difference.of_all(list(found.values())).judge(), unit=unit)
        layers = {
            name: replace(difference.judge(), unit=unit) for name, difference in found.items()
        }
        if precision != "full" and has_kinks(
            evaluation
        ):  # rough numbers cross them, which every layer feels
            least = 2 * whole.relative
            layers = {
                name: replace(one, relative=max(one.relative, least))
                for name, one in layers.items()
            }
        return cls(layers, whole)


def relative_rounding(
    evaluations: Sequence[Evaluation], curvature: str, precision: str | None = None
) -> Rounding:
    """The error that rounding causes, from a random product with the curvature and the same in float64.

    Cancellation in the forward (BatchNorm of inputs 300 ± 0.1) shows here, and nowhere in the
    residuals of an iteration. Costs a gradient in float64 for Gauss-Newton, about three for the
    exact Hessian. `precision` is that of the products, if it is not the problem's.
    """
    problem = evaluations[0].problem
    precision = precision or problem.precision
    drew = any(evaluation.drew for evaluation in evaluations)
    if problem.dtype == torch.float64:
        # A forward that casts its output to float32 rounds it all the same.
        own = RoundingError(
            float(torch.finfo(torch.float32).eps) if evaluations[0].casts_output else 0.0
        )
        return Rounding(dict.fromkeys(problem.leaves, own), own)
    full = precision == "full"
    if curvature == "gauss-newton" and (full or all(one.separable for one in evaluations)):
        # Float64 convolutions are several times as slow as float32 ones, and take more memory.
        # Examples that see each other, as with BatchNorm, see fewer here, and round alike.
        some = [
            Evaluation(problem, one.batch.take(one.sample()), one.weight) for one in evaluations
        ]
        for one in evaluations if problem.device.type == "cuda" else ():
            one.forget()
        with contextlib.suppress(Exception):  # a loss that needs the whole batch
            found = _compare(some, curvature, precision, drew)
            limit = _ORDINARY if full else math.inf
            if all(one.single > 0 and one.judge().relative < limit for one in found.values()):
                return Rounding.of(found, evaluations[0], precision)
    found = _compare(evaluations, curvature, precision, drew)
    return Rounding.of(found, evaluations[0], precision)


def _compare(
    evaluations: Sequence[Evaluation], curvature: str, precision: str, drew: bool
) -> dict[str, Difference]:
    found = [_repeat(evaluation, curvature, precision, drew) for evaluation in evaluations]
    if len(found) == 1:
        return Difference.of_each(*found[0])
    sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for evaluation, both in zip(evaluations, found, strict=True):
        for total, products in zip(sums, both, strict=True):
            for name, product in products.items():
                part = evaluation.weight * product.double()
                total[name] = total[name] + part if name in total else part
    return Difference.of_each(*sums)


def _repeat(
    evaluation: Evaluation, curvature: str, precision: str, drew: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    problem = evaluation.problem
    single = _product(evaluation, curvature)
    if not drew:  # torch draws other numbers in float64: that would be another function
        with contextlib.suppress(Exception):  # a forward that supports float32 only
            return single, _product(evaluate_at(evaluation), curvature)
    # Move the weights in their last digit instead.
    weights = weights_in(problem, problem.dtype)
    for name, leaf in problem.leaves.items():
        weights[name] = weights[name] * (
            1 + _LAST_DIGIT[precision] * _random(leaf, problem.seed).sign()
        )
    return single, _product(evaluate_at(evaluation, weights), curvature)


def _product(evaluation: Evaluation, curvature: str) -> dict[str, Tensor]:
    """The curvature times a vector that is the same in every precision."""
    problem = evaluation.problem
    names = list(evaluation.leaves)
    if curvature == "gauss-newton":
        output = evaluation.output
        leaves = [evaluation.leaves[name] for name in names]
        bent = evaluation.output_hessian(_random(output, problem.seed))
        evaluation.forget()
        # That in float64 is twice as large: the backward pass frees it. A copy may hold the other
        # one.
        keep = output.dtype == problem.dtype
        pulled = torch.autograd.grad(
            output, leaves, bent, retain_graph=keep, materialize_grads=True
        )
        return dict(zip(names, pulled, strict=True))
    operator = operators.HessianOperator([evaluation], names)
    vectors = [
        _random(leaf, problem.seed, number) * (1e-3 + leaf.detach().square().mean().sqrt())
        for number, leaf in enumerate(evaluation.leaves.values())
    ]
    product = operator._product(operators.join(vectors)) / evaluation.weight
    return dict(zip(names, operators.split(product, operator.shapes), strict=True))


def _random(like: Tensor, seed: int, number: int = 0) -> Tensor:
    return probes.random_like(like, (seed << 16) + number, torch.float32).to(like.dtype)


def _compared(single: Tensor, double: Tensor) -> Tensor:
    """The five numbers of `Difference`."""
    error = double.double() - single
    several = single, double, error
    lengths = [torch.linalg.vector_norm(one, dtype=torch.float64).square() for one in several]
    along = error.mul_(single).reshape(single.shape[0] if single.ndim else 1, -1)  # no further copy
    rows = along.sum(1)
    columns = along.sum(0)
    squares = torch.maximum(rows.square().sum(), columns.square().sum())
    return torch.stack([*lengths, rows.sum(), squares])
