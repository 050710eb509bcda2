"""The rounding error of the curvature, from a product in float32 that is repeated in float64."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hessinit.curvature import krylov, operators
from hessinit.curvature.derivative_check import has_kinks
from hessinit.curvature.evaluation import BatchGraph, Evaluation, graphs_of, weights_in


@dataclass(frozen=True)
class RoundingRule:
    """How a rounding error is estimated and judged."""

    # Times the estimate; on 2,000 random problems 99.9 % of the eigenvalues were within it.
    caution: float = 6.0
    # A product that shrinks below this share of itself in float64 was rounding.
    vanishing: float = 0.05
    # The errors of many weights cancel in an eigenvalue, those of fewer than the square of this
    # number may not.
    root_of_few: float = 10.0
    # Some of the examples are enough to see that no layer rounds more than this.
    ordinary: float = 1e-5


ROUNDING = RoundingRule()
# Of a number that is rounded, relative to it.
_LAST_DIGIT = {"full": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class RoundingError:
    """The error that rounding causes, relative to the eigenvalue.

    `is_all` says that the product was rounding alone.
    """

    relative: float = 0.0
    is_all: bool = False
    unit: str = "float32"


class Difference(NamedTuple):
    """How a product p differs from p + e, its value in float64.

    `single`, `double` and `error` are the squared lengths of p, p + e and e. `along` is ⟨p, e⟩, and
    `squares` the sum of its squares by rows or by columns, whichever is larger.
    """

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
        compared = [_compare(single, doubles[name]) for name, single in singles.items()]
        rows = zip(singles.items(), torch.stack(compared).tolist(), strict=True)
        return {name: cls._make([*row, single.numel()]) for (name, single), row in rows}

    @classmethod
    def of_all(cls, layers: Sequence[Difference]) -> Difference:
        squares = sum(layer.along * layer.along for layer in layers)
        return cls(*map(sum, zip(*layers, strict=True)))._replace(squares=squares)

    def judge(self, unit: str = "float32") -> RoundingError:
        """The error that e causes in an eigenvalue.

        To first order an error E moves an eigenvalue by yᵀE y: only what is along the vector
        counts. So ⟨p, e⟩ is compared with ‖p‖², not ‖e‖ with ‖p‖. As a sum may be small by chance,
        the root of the sum of squares over rows or columns replaces it where larger, and for few
        weights ‖e‖.
        """
        length = max(self.single, self.double)
        if not math.isfinite(length + self.error):
            return RoundingError(math.inf, unit=unit)
        if not length:
            return RoundingError(unit=unit)
        share = min(1.0, ROUNDING.root_of_few / math.sqrt(self.size))
        uncancelled = share * math.sqrt(self.error / length)
        relative = max(uncancelled, abs(self.along) / length, math.sqrt(self.squares) / length)
        return RoundingError(relative, self.double < ROUNDING.vanishing**2 * self.single, unit)


@dataclass(frozen=True)
class Rounding:
    """The rounding errors of every layer and of the network."""

    layers: Mapping[str, RoundingError]
    network: RoundingError

    @classmethod
    def of(
        cls, differences: Mapping[str, Difference], evaluation: Evaluation, precision: str
    ) -> Rounding:
        unit = "float32" if precision == "full" else precision
        network = Difference.of_all(list(differences.values())).judge(unit)
        layers = {name: difference.judge(unit) for name, difference in differences.items()}
        if precision != "full" and has_kinks(evaluation):
            # Rough numbers cross kinks, which every layer feels.
            least = 2 * network.relative
            for name, layer in layers.items():
                layers[name] = replace(layer, relative=max(layer.relative, least))
        return cls(layers, network)


def relative_rounding(
    evaluations: Sequence[Evaluation], curvature: str, precision: str | None = None
) -> Rounding:
    """The error that rounding causes, relative to the eigenvalues.

    From a random product with the curvature and the same product in float64. Cancellation in the
    forward (BatchNorm of inputs 300 ± 0.1) shows here, and nowhere in the residuals of an
    iteration. Costs a gradient in float64 for Gauss-Newton, about three for the exact Hessian.
    `precision` is that of the products, if it is not the problem's.
    """
    problem = evaluations[0].problem
    precision = precision or problem.precision
    if problem.dtype == torch.float64:
        # A forward that casts its output to float32 rounds it all the same.
        eps = float(torch.finfo(torch.float32).eps) if evaluations[0].casts_output else 0.0
        error = RoundingError(eps)
        return Rounding(dict.fromkeys(problem.leaves, error), error)
    repeat = _Repetition(
        curvature, precision, has_drawn=any(evaluation.drew for evaluation in evaluations)
    )
    are_separable = all(evaluation.separable for evaluation in evaluations)
    differences = None
    if curvature == "gauss-newton" and (precision == "full" or are_separable):
        differences = _differences_of_samples(evaluations, repeat)
    if differences is None:
        differences = repeat.differences(evaluations)
    return Rounding.of(differences, evaluations[0], precision)


def _differences_of_samples(
    evaluations: Sequence[Evaluation], repeat: _Repetition
) -> dict[str, Difference] | None:
    """The differences for some of the examples; None if these do not tell enough.

    Float64 convolutions are several times as slow as float32 ones, and take more memory. Examples
    that see each other, as with BatchNorm, see fewer here, and round alike.
    """
    problem = evaluations[0].problem
    samples = [
        BatchGraph(problem, evaluation.batch.take(evaluation.sample), evaluation.weight)
        for evaluation in evaluations
    ]
    limit = ROUNDING.ordinary if repeat.precision == "full" else math.inf
    with contextlib.ExitStack() as stack:
        if problem.device.type == "cuda":
            stack.enter_context(graphs_of(evaluations, anew=True))
        stack.enter_context(contextlib.suppress(Exception))  # a loss that needs all examples
        differences = repeat.differences(samples)
        layers = differences.values()
        if all(layer.single > 0 and layer.judge().relative < limit for layer in layers):
            return differences
    return None


@dataclass(frozen=True)
class _Repetition:
    """A product with the curvature, and the same product in float64."""

    curvature: str
    precision: str
    has_drawn: bool  # whether the forward draws random numbers

    def differences(self, evaluations: Sequence[BatchGraph]) -> dict[str, Difference]:
        """The difference between the two products, by layer."""
        pairs = [self._products(evaluation) for evaluation in evaluations]
        if len(pairs) == 1:
            return Difference.of_each(*pairs[0])
        weights = [evaluation.weight for evaluation in evaluations]
        singles = _weighted_sum([single for single, _ in pairs], weights)
        return Difference.of_each(singles, _weighted_sum([double for _, double in pairs], weights))

    def _products(self, evaluation: BatchGraph) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        problem = evaluation.problem
        single = _product(evaluation, self.curvature)
        if not self.has_drawn:  # torch draws other numbers in float64: another function
            with contextlib.suppress(Exception):  # a forward that supports float32 only
                return single, _product(evaluation.in_float64(), self.curvature)
        # Move the weights in their last digit instead.
        weights = weights_in(problem, problem.dtype)
        for name, leaf in problem.leaves.items():
            signs = _random(leaf, problem.seed).sign()
            weights[name] = weights[name] * (1 + _LAST_DIGIT[self.precision] * signs)
        return single, _product(evaluation.at_weights(weights), self.curvature)


def _weighted_sum(
    products: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    sums = {}
    for name in products[0]:
        parts = zip(weights, products, strict=True)
        weighted = [weight * product[name].double() for weight, product in parts]
        sums[name] = functools.reduce(torch.add, weighted)
    return sums


def _product(evaluation: BatchGraph, curvature: str) -> dict[str, Tensor]:
    """The curvature times a vector that is the same in every precision."""
    problem = evaluation.problem
    names = list(evaluation.leaves)
    if curvature == "gauss-newton":
        leaves = [evaluation.leaves[name] for name in names]
        with evaluation.graphs():
            output = evaluation.output
            curved = evaluation.output_hessian(_random(output, problem.seed))
        # The graph in float64 is twice as large: the backward pass frees it. A copy of the
        # evaluation may hold the other one.
        retain = output.dtype == problem.dtype
        pulled = torch.autograd.grad(
            output, leaves, curved, retain_graph=retain, materialize_grads=True
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
    return krylov.random_like(like, (seed << 16) + number, torch.float32).to(like.dtype)


def _compare(single: Tensor, double: Tensor) -> Tensor:
    """The first five numbers of a `Difference`."""
    error = double.double() - single
    lengths = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        for tensor in (single, double, error)
    ]
    rows = single.shape[0] if single.ndim else 1
    along = error.mul_(single).reshape(rows, -1)  # no further copy
    by_row = along.sum(1)
    squares = torch.maximum(by_row.square().sum(), along.sum(0).square().sum())
    return torch.stack([*lengths, by_row.sum(), squares])
