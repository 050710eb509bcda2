"""The independent check: finite differences of the plain model against the derivatives of the operators.

The plain model is called as the user calls it, on both sides of its weights, along one random
direction of all measured weights. The outputs must change as `J` says, the loss gradient by the
outputs as `H_z` says, and for the exact Hessian the gradient of the whole loss as `H` says. This
catches a graph that misses a path to a weight, a custom function whose backward is not its
derivative, and a loss that computes its own gradient.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hessinit.curvature import operators
from hessinit.curvature.evaluation import (
    Direction,
    Evaluation,
    OutputLoss,
    evaluate_at,
    moved,
    output_at,
    weights_in,
)
from hessinit.curvature.probes import random_like
from hessinit.errors import DerivativeError
from hessinit.problem.graph import custom_functions, nodes_behind
from hessinit.results.curvature_report import LayerCurvature

# One for each kind of number; every row is compared by itself.
Matrices = list[Tensor]


@dataclass(frozen=True)
class Attempt:
    """A precision, a step in units of the direction, and the relative difference that passes."""

    dtype: torch.dtype
    step: float
    allowed: float


# float32 needs a long step, over which a network with kinks differs from its derivative. What fails
# there is tried in float64: steps that cross hardly any kink, and longer ones for a forward that
# rounds inside.
_OUTPUTS = (
    Attempt(torch.float32, 2e-3, 0.01),
    *(Attempt(torch.float64, step, 1e-3) for step in (1e-8, 1e-6, 1e-4, 2e-3)),
)
_KINKED = {
    "ReluBackward0",
    "LeakyReluBackward0",
    "HardtanhBackward0",
    "MaxPool2DWithIndicesBackward0",
}
# Short enough for the millions of kinks of a convolutional network.
_OF_SOME = Attempt(torch.float64, 1e-8, 0.01)
_OF_SOME_GRADIENTS = Attempt(torch.float64, 1e-9, 0.01)
_GRADIENTS = (
    Attempt(torch.float32, 5e-3, 0.02),
    *(Attempt(torch.float64, step, 2e-3) for step in (1e-7, 1e-9, 1e-6, 1e-5, 5e-3)),
)
_LOSS = tuple(Attempt(torch.float64, step, 2e-3) for step in (1e-7, 1e-5, 1e-3))
# For a forward, a loss or a device that supports float32 only.
_SINGLE = tuple(Attempt(torch.float32, step, 0.02) for step in (2e-3, 5e-4, 1e-2))

# The direction moves the output equally in all layers, except where a weight would have to move
# more than 1 / _LEAST_EFFECT times as far as another one.
_LEAST_EFFECT = 1e-3
# A weight with a smaller root mean square, such as a head of zeros, moves as if it had this one.
_LEAST_SIZE = 1e-3
# A row below this share of the whole is a difference of larger numbers, and is compared with this
# fraction.
_LEAST_ROW = 1e-6
# The derivative itself is known to so much, as a share of it.
_ROUNDING = {"full": 0.0, "tf32": 0.01, "bf16": 0.1}
# Of the network's curvature along the vector that it was found with, beyond its own error.
_ALLOWED_OF_ANSWER = 2e-3
# So many outputs are compared at most.
_MOST_COMPARED = 2**22
# Two steps agree if their changes differ by less than this share of the distance to the derivative.
_AGREEMENT = 0.3


class GraphLinearization:
    """`J` from the autograd graph; a subclass may compute it otherwise and in coordinates of its own."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        # Of a vocabulary's logits some are enough; the difference between two outputs is taken in
        # float64.
        output = evaluation.output
        self._every = 1 if output.ndim < 2 else -(-output.numel() // _MOST_COMPARED)

    def coordinates(self, output: Tensor, examples: Tensor | None = None) -> Tensor:
        """An output of these examples in the coordinates of `push`, example by example."""
        return output[..., :: self._every] if self._every > 1 else output

    def push(self, direction: Direction) -> Tensor:
        return self.coordinates(
            self.evaluation.push(list(direction), list(direction.values())).detach()
        )

    def effects(self, direction: Direction, cotangent: Tensor | None = None) -> dict[str, float]:
        """Roughly the size of the change that each layer's entries of the direction make alone.

        ‖Jᵀu‖² and n ‖J d‖² have the mean ‖J‖²_F, for random u and unit vectors d.
        """
        if cotangent is None:
            cotangent = random_like(self.evaluation.output, seed_of_check(self.evaluation))
        pulled = self.evaluation.pull(list(direction), cotangent)
        pairs = zip(direction, pulled, strict=True)
        return {
            name: _norm(one) * _norm(direction[name]) / math.sqrt(one.numel())
            for name, one in pairs
        }


def has_kinks(evaluation: Evaluation) -> bool:
    """Whether a long step would cross many, and a rough forward some."""
    kinds = {type(node).__name__ for node in nodes_behind(evaluation.output.grad_fn)}
    return bool(kinds & _KINKED)


def check_outputs(evaluation: Evaluation, linear: GraphLinearization | None = None) -> None:
    """Compare `J` with differences of the output; two forwards, and two more in float64 if it has kinks."""
    linear = linear or GraphLinearization(evaluation)
    if not _is_due(evaluation, f"outputs by {type(linear).__name__}"):
        return
    direction = _draw_direction(evaluation, linear)
    derivative = linear.push(direction)

    def comparison(examples: Tensor | None = None) -> _Comparison:
        def rows(coordinates: Tensor) -> Matrices:
            return [_as_row(coordinates if examples is None else coordinates[examples])]

        def values(dtype: torch.dtype, step: float) -> Matrices:
            output = output_at(evaluation, direction, step, dtype, examples)
            return [_as_row(linear.coordinates(output, examples))]

        def derive(at: Evaluation) -> Matrices:
            return rows(
                linear.coordinates(at.push(list(direction), list(direction.values())).detach())
            )

        fractions = [1 / math.sqrt(len(direction))]  # an error of 5 % in one layer must be detected
        return _Comparison(
            "the model's output",
            rows(derivative),
            values,
            derive,
            fractions=fractions,
            precision=evaluation.problem.precision,
        )

    whole = comparison()
    attempts = list(_OUTPUTS)
    if not evaluation.separable and has_kinks(evaluation):
        attempts.pop(0)  # a long step would cross many
    if evaluation.separable and evaluation.problem.dtype == torch.float32:
        tried = whole.attempt(attempts.pop(0))
        if tried is not None:
            if whole.passes(tried):
                return
            # It is enough if those examples agree in float64 that disagree most in float32.
            apart = _minus(tried.change, whole.derivative)[0].view(evaluation.batch.size, -1)
            worst = comparison(apart.norm(dim=1).topk(len(evaluation.sample())).indices)
            if worst.passes(worst.attempt(_OF_SOME)):
                return
    whole.judge(evaluation, attempts)


def check_gradients(evaluation: Evaluation) -> None:
    """Compare `H` and `J` with differences of gradient and output; two gradients, two more with kinks."""
    if not _is_due(evaluation, "gradients"):
        return
    direction = _draw_direction(evaluation, GraphLinearization(evaluation))
    fractions = [1 / math.sqrt(len(direction)), *[1.0] * len(direction)]

    def derive(at: Evaluation) -> Matrices:
        product = at.hessian(list(direction), list(direction.values()))
        return [_as_row(at.push(list(direction), list(direction.values()))), *map(_as_row, product)]

    def comparison(examined: Evaluation) -> _Comparison:
        def values(dtype: torch.dtype, step: float) -> Matrices:
            problem = examined.problem
            names = list(direction)
            with moved(problem, direction, step, dtype) as weights:
                output, gradients = problem.output_and_gradients(examined.batch, weights, names)
            return [_as_row(output), *map(_as_row, gradients)]

        return _Comparison(
            "the loss's gradient",
            derive(examined),
            values,
            derive,
            fractions=fractions,
            precision=evaluation.problem.precision,
        )

    whole = comparison(evaluation)
    attempts = list(_GRADIENTS)
    if evaluation.separable and evaluation.problem.dtype == torch.float32:
        if whole.passes(whole.attempt(attempts.pop(0))):
            return
        batch = evaluation.batch.take(evaluation.sample())
        with contextlib.suppress(Exception):  # a loss that needs the whole batch
            some = comparison(Evaluation(evaluation.problem, batch, evaluation.weight))
            if some.passes(some.attempt(_OF_SOME_GRADIENTS)):
                return
    whole.judge(evaluation, attempts)


def check_loss(evaluation: Evaluation) -> None:
    """Compare `H_z` with differences of the loss gradient by each output, and this gradient with the loss."""
    if not _is_due(evaluation, "loss"):
        return
    loss_there = evaluation.at_output if evaluation.softmax is None else evaluation.loss_of_some()
    cut, gradient = loss_there.gradient
    output = cut.detach()
    slope = gradient.detach()
    # A direction along which the loss rises, relative to the outputs: some losses need positive
    # ones.
    columns = _columns(output)
    typical = columns.square().mean(1, keepdim=True).sqrt().expand_as(columns)
    sizes = columns.abs() + 0.01 * torch.where(typical > 0, typical, float(typical.max()) or 1.0)
    lengths = 0.1 + random_like(output, seed_of_check(evaluation)).abs()
    direction = (
        sizes.T.reshape(output.shape) * lengths * torch.where(slope < 0, -1.0, 1.0).to(output)
    )
    bend = loss_there.hessian(direction)
    rise = (slope.double() * direction.double()).sum()
    if not bool(bend.isfinite().all()):
        return  # the engines report it

    def values(dtype: torch.dtype, step: float) -> Matrices:
        place = (output + step * direction).requires_grad_()
        loss = evaluation.problem.loss_of(place, loss_there.batch)
        (slope,) = torch.autograd.grad(loss, place, materialize_grads=True)
        return [_columns(slope.detach().double()), _as_row(loss)]

    # An output that a confident softmax excludes has a curvature below the rounding error of the
    # others.
    least = 1e4 * float(torch.finfo(output.dtype).eps)
    comparison = _Comparison(
        "the loss", [_columns(bend.double()), _as_row(rise)], values, None, least
    )
    comparison.judge(evaluation, _LOSS if output.dtype == torch.float64 else _SINGLE)


def check_answer(
    evaluations: Sequence[Evaluation], vector: Tensor | None, stated: LayerCurvature
) -> None:
    """Compare the Gauss-Newton norm with `(J v)ᵀ H_z J v` of the plain model and loss, v being its vector.

    What stands in for them (closed forms, substitutes, recorded graphs) has no part in it. Costs a
    forward with tangents. Of the exact Hessian only substitutes stand in, which `check_gradients`
    sees.
    """
    if vector is None or not evaluations[0].problem.check or stated.curvature == "hessian":
        return
    plain = math.nan
    # Of a function without a forward derivative; torch warns of its own code for some functions.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = sum(one.weight * _curvature_of_plain(one, vector) for one in evaluations)
    if abs(abs(plain) - stated.norm) > stated.error + _ALLOWED_OF_ANSWER * stated.norm:
        raise DerivativeError(
            f"along the direction in which the network's curvature was found to be {stated.norm:.4g}, that "
            f"of the model and the loss as they are is {plain:.4g}. Pass estimator='lanczos' or "
            "dtype=torch.float64; check=False gives the first number."
        )


def _curvature_of_plain(evaluation: Evaluation, vector: Tensor) -> float:
    """Along the flat vector; nan where a custom function may drop the change silently."""
    problem = evaluation.problem
    batch = evaluation.batch
    weights = weights_in(problem, problem.dtype)
    shapes = [leaf.shape for leaf in evaluation.leaves.values()]
    parts = operators.split(vector / torch.linalg.vector_norm(vector), shapes)
    with forward_ad.dual_level():
        for name, part in zip(evaluation.leaves, parts, strict=True):
            weights[name] = forward_ad.make_dual(weights[name].requires_grad_(), part)
        output, change = forward_ad.unpack_dual(problem.output(batch, weights=weights, plain=True))
    if change is None or custom_functions(output):
        return math.nan
    bend = OutputLoss(problem, output, batch).hessian(change.detach())
    return float((change.detach().double() * bend.double()).sum())


@dataclass(frozen=True)
class _Try:
    attempt: Attempt
    plus: Matrices
    minus: Matrices
    change: Matrices
    off: Tensor  # the distance of the change from the derivative, by row


class _Comparison:
    """A derivative, and the function that it is compared with, row by row.

    `values` evaluates the function in a precision, at a step along the direction; `derive` computes
    the derivative of another evaluation, to tell rounding from a wrong one; `fractions` of the rows
    matter.
    """

    def __init__(
        self,
        what: str,
        derivative: Matrices,
        values: Callable[[torch.dtype, float], Matrices],
        derive: Callable[[Evaluation], Matrices] | None,
        least: float = _LEAST_ROW,
        fractions: Sequence[float] = (1.0,),
        precision: str = "full",
    ) -> None:
        self.what = what
        self.derivative = derivative
        self.values = values
        self.derive = derive
        self.least_allowed = _ROUNDING[precision]
        self.sizes = _norms(derivative)
        # A row that is a difference of much larger numbers is not known better.
        self.known = self.sizes.clamp(min=least * float(torch.linalg.vector_norm(self.sizes)))
        self.limits = self.known * self.known.new_tensor(fractions)

    def judge(self, evaluation: Evaluation, attempts: Sequence[Attempt]) -> None:
        """Pass if an attempt agrees with the derivative, refuse if the closest one agrees with another one.

        Rounding, kinks and jumps differ from step to step; another derivative does not. Attempts
        that agree neither with the derivative nor with each other decide nothing.
        """
        # No attempt in a lower precision than that of the measurement.
        lower = attempts is not _SINGLE and evaluation.problem.dtype == torch.float64
        tried: list[_Try] = []
        for attempt in attempts:
            found = None if lower and attempt.dtype == torch.float32 else self.attempt(attempt)
            if self.passes(found):
                return
            tried += [found] if found is not None else []
        best = [one for one in tried if one.attempt.dtype == tried[-1].attempt.dtype]
        if len(best) <= 1 and attempts is not _SINGLE:
            self.judge(evaluation, _SINGLE)
            return
        closest = torch.stack([one.off for one in best]).min(0).values if best else self.sizes
        for one in best:
            allowed = self.allowed(one)
            wrong = (one.off <= closest) & (one.off > allowed)
            others = [
                _norms(_minus(one.change, other.change)) for other in best if other is not one
            ]
            wrong &= torch.stack(others).min(0).values <= _AGREEMENT * one.off
            if bool(wrong.any()):
                wrong &= one.off > allowed + self._explained(evaluation, one)
            if bool(wrong.any()):
                worst = int((one.off / self.known * wrong).argmax())
                lengths = (float(some[worst]) for some in (_norms(one.change), self.sizes, one.off))
                raise DerivativeError(_explain(evaluation, self.what, one.attempt.dtype, *lengths))

    def passes(self, found: _Try | None) -> bool:
        return found is not None and bool((found.off <= self.allowed(found)).all())

    def allowed(self, found: _Try) -> Tensor:
        return max(found.attempt.allowed, self.least_allowed) * self.limits

    def attempt(self, attempt: Attempt) -> _Try | None:
        """None if the function does not support the precision, or is not finite at the moved weights."""
        try:
            plus, minus = (self.values(attempt.dtype, sign * attempt.step) for sign in (1, -1))
        except Exception:
            if attempt.dtype == torch.float32:
                raise
            return None
        change = [difference / (2 * attempt.step) for difference in _minus(plus, minus)]
        off = _norms(_minus(change, self.derivative))
        return _Try(attempt, plus, minus, change, off) if bool(off.isfinite().all()) else None

    def _explained(self, evaluation: Evaluation, found: _Try) -> Tensor:
        """The distance that a kink at these weights and rounding, of function and derivative, can explain."""
        attempt = found.attempt
        sides = zip(found.plus, found.minus, self.values(attempt.dtype, 0.0), strict=True)
        explained = _norms(
            [(plus - 2 * middle + minus) / attempt.step for plus, minus, middle in sides]
        )
        explained += 4 * torch.finfo(attempt.dtype).eps * _norms(found.plus) / attempt.step
        if self.derive is not None and evaluation.problem.dtype == torch.float32:
            with contextlib.suppress(Exception):  # a forward that supports float32 only
                double = evaluate_at(evaluation)
                explained += 4 * _norms(_minus(self.derive(evaluation), self.derive(double)))
        return explained


def _norms(rows: Matrices) -> Tensor:
    return torch.cat([torch.linalg.vector_norm(some, dim=1) for some in rows])


def _minus(some: Matrices, others: Matrices) -> Matrices:
    return [one - other for one, other in zip(some, others, strict=True)]


def _as_row(tensor: Tensor) -> Tensor:
    return tensor.detach().double().reshape(1, -1)


def _is_due(evaluation: Evaluation, check: str) -> bool:
    if not evaluation.problem.check or check in evaluation.passed:
        return False
    evaluation.passed.add(check)
    return True


def seed_of_check(evaluation: Evaluation) -> int:
    return (evaluation.problem.seed << 20) + 0xC0DE


def _draw_direction(evaluation: Evaluation, linear: GraphLinearization) -> dict[str, Tensor]:
    """A random direction whose layers move the output equally, and no weight by more than its length."""
    drawn = {}
    for number, (name, leaf) in enumerate(evaluation.leaves.items()):
        probe = random_like(leaf, seed_of_check(evaluation) + number + 1)
        for row in evaluation.paddings[name]:
            probe[row] = 0
        length = max(_norm(leaf), _LEAST_SIZE * math.sqrt(leaf.numel()))
        drawn[name] = probe * (length / (_norm(probe) or 1.0))
    effects = linear.effects(drawn)
    smallest = min((one for one in effects.values() if one > 0), default=0.0)
    effect = max(smallest, _LEAST_EFFECT * max(effects.values()))
    return {
        name: part * min(1.0, effect / (effects[name] or effect or 1.0))
        for name, part in drawn.items()
    }


def _columns(output: Tensor) -> Tensor:
    """(outputs, examples)."""
    return output.reshape(output.shape[0] if output.ndim else 1, -1).T


def _norm(tensor: Tensor) -> float:
    """In float64: in float32 the square of a vanished change, such as 1e-25, is 0."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _explain(
    evaluation: Evaluation,
    what: str,
    dtype: torch.dtype,
    change: float,
    derivative: float,
    off: float,
) -> str:
    causes = []
    forward = evaluation.output
    loss = evaluation.loss
    if what != "the loss":
        names = ", ".join(custom_functions(forward))
        if names:
            causes.append(
                f"the backward of {names} is not the derivative of its forward, or cannot be differentiated "
                "(once_differentiable, a derivative saved in the forward, values that leave torch); write it "
                "with differentiable torch operations"
            )
        causes.append(
            ".detach(), .data, torch.no_grad() or numpy between a weight and the output, or a value kept "
            "from an earlier call, as by a spectral_norm in train mode (measure it in eval mode)"
        )
    if what != "the model's output":
        names = ", ".join(custom_functions(loss, stop=forward))
        if names:
            causes.append(
                f"{names} computes its gradient in the forward, as fused losses do, or its backward is not "
                "the derivative; measure with the plain loss, such as F.cross_entropy"
            )
        causes.append(
            ".detach() or .item() inside the loss, as for weights that depend on the output"
        )
    percent = 100 * off / max(change, derivative)
    numbered = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return (
        f"the derivative of {what} is not that of the function that is trained: along a random direction, "
        f"finite differences in {str(dtype).removeprefix('torch.')} give a vector of length {change:.4g}, "
        f"the derivative gives one of length {derivative:.4g}, and they differ by "
        f"{percent:.{0 if percent >= 10 else 1}f} %. "
        f"Likely causes, in order: {numbered}. If the backward differs from the forward on purpose (a "
        "straight-through estimator, gradient reversal, a stopped gradient), there is no Hessian; "
        "check=False measures what the backward gives."
    )
