"""The independent check: finite differences of the plain model against the operators' derivatives.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hessinit.curvature import operators
from hessinit.curvature.evaluation import BatchGraph, Evaluation, weights_in
from hessinit.curvature.krylov import random_like
from hessinit.curvature.loss_hessian import OutputLoss
from hessinit.errors import DerivativeError, ProblemError, argument
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.graph import custom_functions, nodes_behind
from hessinit.results.curvature_report import LayerCurvature

Direction = Mapping[str, Tensor]
Matrices = list[Tensor]  # one for each kind of number; every row is compared by itself


@dataclass(frozen=True)
class Attempt:
    """A precision, a step in units of the direction, and the relative difference that passes."""

    dtype: torch.dtype
    step: float
    allowed: float


@dataclass(frozen=True)
class CheckSettings:
    """Steps and thresholds of the check; benchmarks/check_power.py says what they find and miss.

    float32 needs a long step, over which a network with kinks differs from its derivative. What
    fails there is tried in float64: steps that cross hardly any kink, and longer ones for a forward
    that rounds inside.
    """

    outputs: tuple[Attempt, ...] = (
        Attempt(torch.float32, 2e-3, 0.01),
        *(Attempt(torch.float64, step, 1e-3) for step in (1e-8, 1e-6, 1e-4, 2e-3)),
    )
    gradients: tuple[Attempt, ...] = (
        Attempt(torch.float32, 5e-3, 0.02),
        *(Attempt(torch.float64, step, 2e-3) for step in (1e-7, 1e-9, 1e-6, 1e-5, 5e-3)),
    )
    loss: tuple[Attempt, ...] = tuple(
        Attempt(torch.float64, step, 2e-3) for step in (1e-7, 1e-5, 1e-3)
    )
    # For a forward, a loss or a device that supports float32 only.
    single: tuple[Attempt, ...] = tuple(
        Attempt(torch.float32, step, 0.02) for step in (2e-3, 5e-4, 1e-2)
    )
    # From the output that is known, with one forward. Half the difference passes, and the step is
    # that of both sides: with a shorter one, check_power.py misses two derivatives more of 200.
    one_sided: Attempt = Attempt(torch.float32, 2e-3, 0.005)
    # Short enough for the millions of kinks of a convolutional network.
    sample_outputs: Attempt = Attempt(torch.float64, 1e-8, 0.01)
    sample_gradients: Attempt = Attempt(torch.float64, 1e-9, 0.01)
    # The direction moves the output equally in all layers, except where a weight would have to move
    # more than 1 / least_effect times as far as another one.
    least_effect: float = 1e-3
    # A weight with a smaller root mean square, such as a head of zeros, moves as if it had this.
    least_size: float = 1e-3
    # A row below this share of the whole is a difference of larger numbers, and is compared with
    # this fraction.
    least_row: float = 1e-6
    # Of the network's curvature along the vector that it was found with, beyond its own error.
    allowed_of_answer: float = 2e-3
    most_compared: int = 2**22  # outputs
    # Two steps agree if their changes differ by less than this share of the distance to the
    # derivative.
    agreement: float = 0.3


SETTINGS = CheckSettings()

_KINKED = {
    "ReluBackward0",
    "LeakyReluBackward0",
    "HardtanhBackward0",
    "MaxPool2DWithIndicesBackward0",
}
# The derivative itself is known to so much, as a share of it.
_ROUNDING = {"full": 0.0, "tf32": 0.01, "bf16": 0.1}


@contextlib.contextmanager
def moved(
    problem: FunctionalProblem, direction: Direction, step: float, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The moved weights, also as `.data` of the model's parameters; their own storage is kept."""
    weights = weights_in(problem, dtype)
    for name, part in direction.items():
        is_copy = weights[name].dtype != problem.leaves[name].dtype
        add = weights[name].add_ if is_copy else weights[name].add
        weights[name] = add(part, alpha=step)
    parameters = {name: problem.model.get_parameter(name) for name in direction}
    # Another dtype would cut a parameter off from hooks that wait for its gradient, as those of DDP
    # do.
    saved = {
        name: parameter.data
        for name, parameter in parameters.items()
        if parameter.dtype == dtype and not parameter.is_inference()
    }
    try:
        for name in saved:
            parameters[name].data = weights[name].detach()
        yield weights
    finally:
        for name, values in saved.items():
            parameters[name].data = values


def output_at(
    evaluation: Evaluation,
    direction: Direction,
    step: float,
    dtype: torch.dtype,
    examples: Tensor | None = None,
) -> Tensor:
    """The output at the weights plus `step` times the direction, of some examples; one forward."""
    problem = evaluation.problem
    batch = evaluation.batch if examples is None else evaluation.batch.take(examples)
    with moved(problem, direction, step, dtype) as weights:
        with contextlib.suppress(RuntimeError, ProblemError), torch.no_grad():
            return problem.output(batch, weights=weights, plain=True)
        # A forward that differentiates by its inputs or its weights needs the graph; any other
        # fails again.
        weights = {
            name: weight.requires_grad_(name in direction) for name, weight in weights.items()
        }
        return problem.output(batch, weights=weights, plain=True).detach()


class GraphLinearization:
    """`J` from the autograd graph; a subclass may compute it in coordinates of its own."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        # Of a vocabulary's logits some are enough; the difference between two outputs is taken in
        # float64.
        shape = evaluation.output_shape
        self._every = 1 if len(shape) < 2 else -(-shape.numel() // SETTINGS.most_compared)

    def coordinates(self, output: Tensor, examples: Tensor | None = None) -> Tensor:
        """An output of these examples in the coordinates of `push`, example by example."""
        return output[..., :: self._every] if self._every > 1 else output

    def changes(self, direction: Direction) -> dict[str, Tensor]:
        """What each layer's entries of the direction change alone, if known without the graph."""
        return {}

    def random_cotangent(self) -> Tensor:
        return random_like(self.evaluation.output, seed_of_check(self.evaluation))

    def push(self, direction: Direction, changes: Mapping[str, Tensor]) -> Tensor:
        """The change of the output; `changes` are those of the layers that are known already."""
        pushed = list(changes.values())
        unknown = {name: part for name, part in direction.items() if name not in changes}
        if unknown:
            change = self.evaluation.push(list(unknown), list(unknown.values())).detach()
            pushed.append(self.coordinates(change))
        return pushed[0] if len(pushed) == 1 else torch.stack(pushed).sum(0)

    def effects(self, direction: Direction, changes: Mapping[str, Tensor]) -> dict[str, float]:
        """Roughly the size of the change that each layer's entries of the direction make alone.

        ‖Jᵀu‖² and n ‖J d‖² have the mean ‖J‖²_F, for random u and unit vectors d.
        """
        effects = {name: float(change.double().norm()) for name, change in changes.items()}
        unknown = [name for name in direction if name not in changes]
        if unknown:
            pulled = self.evaluation.pull(unknown, self.random_cotangent())
            for name, gradient in zip(unknown, pulled, strict=True):
                length = _norm(gradient) * _norm(direction[name])
                effects[name] = length / math.sqrt(gradient.numel())
        return effects


def has_kinks(evaluation: Evaluation) -> bool:
    """Whether a long step would cross many, and a rough forward some."""
    kinds = {type(node).__name__ for node in nodes_behind(evaluation.output.grad_fn)}
    return bool(kinds & _KINKED)


def check_outputs(evaluation: Evaluation, linear: GraphLinearization | None = None) -> None:
    """Compare `J` with differences of the output; a forward or two, with kinks two in float64."""
    linear = linear or GraphLinearization(evaluation)
    if not evaluation.is_due(f"outputs by {type(linear).__name__}"):
        return
    direction, changes = _draw_direction(evaluation, linear)
    derivative = linear.push(direction, changes)

    def comparison(examples: Tensor | None = None) -> _Comparison:
        def rows(coordinates: Tensor) -> Matrices:
            return [_as_row(coordinates if examples is None else coordinates[examples])]

        def values(dtype: torch.dtype, step: float) -> Matrices:
            output = output_at(evaluation, direction, step, dtype, examples)
            return [_as_row(linear.coordinates(output, examples))]

        def derive(graph: BatchGraph) -> Matrices:
            change = graph.push(list(direction), list(direction.values())).detach()
            return rows(linear.coordinates(change))

        fractions = [1 / math.sqrt(len(direction))]  # an error of 5 % in one layer must be detected
        return _Comparison(
            "the model's output",
            rows(derivative),
            values,
            derive,
            fractions=fractions,
            precision=evaluation.problem.precision,
        )

    of_all = comparison()
    attempts = list(SETTINGS.outputs)
    if not evaluation.separable and has_kinks(evaluation):
        attempts.pop(0)  # a long step would cross many
    if evaluation.separable and evaluation.problem.dtype == torch.float32:
        attempts.pop(0)
        differences = _attempt_in_float32(of_all, evaluation, linear)
        if of_all.passes(differences):
            return
        if differences is not None:
            # It is enough if those examples agree in float64 that disagree most in float32.
            apart = _minus(differences.change, of_all.derivative)[0].view(evaluation.batch.size, -1)
            worst = comparison(apart.norm(dim=1).topk(len(evaluation.sample)).indices)
            if worst.passes(worst.attempt(SETTINGS.sample_outputs)):
                return
    of_all.judge(evaluation, attempts)


def _attempt_in_float32(
    comparison: _Comparison, evaluation: Evaluation, linear: GraphLinearization
) -> _Differences | None:
    """Differences from the output that is known; on both sides if they are off without kinks."""
    here = evaluation.output_at_hand()
    if here is None:
        return comparison.attempt(SETTINGS.outputs[0])
    values_here = [_as_row(linear.coordinates(here))]
    one_sided = comparison.attempt_one_sided(SETTINGS.one_sided, values_here)
    if one_sided is None or comparison.passes(one_sided) or has_kinks(evaluation):
        return one_sided
    return comparison.attempt(SETTINGS.outputs[0], one_sided.plus)


def check_gradients(evaluation: Evaluation) -> None:
    """Compare `H` and `J` with differences of gradient and output.

    Costs two gradients, with kinks two more.
    """
    if not evaluation.is_due("gradients"):
        return
    direction, _ = _draw_direction(evaluation, GraphLinearization(evaluation))
    fractions = [1 / math.sqrt(len(direction)), *[1.0] * len(direction)]

    def derive(graph: BatchGraph) -> Matrices:
        product = graph.hessian(list(direction), list(direction.values()))
        change = graph.push(list(direction), list(direction.values()))
        return [_as_row(change), *map(_as_row, product)]

    def comparison(examined: BatchGraph) -> _Comparison:
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

    of_all = comparison(evaluation)
    attempts = list(SETTINGS.gradients)
    if evaluation.separable and evaluation.problem.dtype == torch.float32:
        if of_all.passes(of_all.attempt(attempts.pop(0))):
            return
        batch = evaluation.batch.take(evaluation.sample)
        with contextlib.suppress(Exception):  # a loss that needs the whole batch
            sample = comparison(BatchGraph(evaluation.problem, batch, evaluation.weight))
            if sample.passes(sample.attempt(SETTINGS.sample_gradients)):
                return
    of_all.judge(evaluation, attempts)


def check_loss(evaluation: Evaluation) -> None:
    """Compare `H_z` with differences of the loss gradient by the outputs, and it with the loss."""
    if not evaluation.is_due("loss"):
        return
    loss = evaluation.at_output if evaluation.softmax is None else evaluation.loss_of_sample()
    cut, gradient = loss.gradient
    output = cut.detach()
    slope = gradient.detach()
    # A direction along which the loss rises, relative to the outputs: some losses need positive
    # ones.
    columns = _columns(output)
    typical = columns.square().mean(1, keepdim=True).sqrt().expand_as(columns)
    sizes = columns.abs() + 0.01 * torch.where(typical > 0, typical, float(typical.max()) or 1.0)
    lengths = 0.1 + random_like(output, seed_of_check(evaluation)).abs()
    signs = torch.where(slope < 0, -1.0, 1.0).to(output)
    direction = sizes.T.reshape(output.shape) * lengths * signs
    bend = loss.hessian(direction)
    rise = (slope.double() * direction.double()).sum()
    if not bool(bend.isfinite().all()):
        return  # the engines report it

    def values(dtype: torch.dtype, step: float) -> Matrices:
        point = (output + step * direction).requires_grad_()
        value = evaluation.problem.loss_of(point, loss.batch)
        (slope,) = torch.autograd.grad(value, point, materialize_grads=True)
        return [_columns(slope.detach().double()), _as_row(value)]

    # An output that a confident softmax excludes has a curvature below the rounding error of the
    # others.
    least = 1e4 * float(torch.finfo(output.dtype).eps)
    derivative = [_columns(bend.double()), _as_row(rise)]
    comparison = _Comparison("the loss", derivative, values, None, least)
    double = output.dtype == torch.float64
    comparison.judge(evaluation, SETTINGS.loss if double else SETTINGS.single)


def check_answer(
    evaluations: Sequence[Evaluation], vector: Tensor | None, stated: LayerCurvature
) -> None:
    """Compare the Gauss-Newton norm with `(J v)ᵀ H_z J v` of the plain model and loss.

    v is the vector that the norm was found with. What replaces model and loss (closed forms,
    substitutes, recorded graphs) has no part in it. Costs a forward with tangents. In the exact
    Hessian only substitutes replace anything, which `check_gradients` sees.
    """
    if vector is None or not evaluations[0].problem.check or stated.curvature == "hessian":
        return
    curvature = math.nan
    # Of a function without a forward derivative; torch warns of its own code for some functions.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curvature = sum(
            evaluation.weight * _curvature_along(evaluation, vector) for evaluation in evaluations
        )
    allowed = stated.error + SETTINGS.allowed_of_answer * stated.norm
    if abs(abs(curvature) - stated.norm) > allowed:
        raise DerivativeError(
            "along the direction in which the network's curvature was found to be "
            f"{stated.norm:.4g}, that of the model and the loss as they are is {curvature:.4g}. "
            "Pass ",
            argument("estimator", "lanczos"),
            " or ",
            argument("dtype", torch.float64),
            "; ",
            argument("check", False),
            " gives the first number.",
        )


def _curvature_along(evaluation: Evaluation, vector: Tensor) -> float:
    """The plain model's curvature; nan where a custom function may drop the change silently."""
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
class _Differences:
    """The outcome of an attempt."""

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
        derive: Callable[[BatchGraph], Matrices] | None,
        least: float = SETTINGS.least_row,
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
        smallest = least * float(torch.linalg.vector_norm(self.sizes))
        self.known = self.sizes.clamp(min=smallest)
        self.limits = self.known * self.known.new_tensor(fractions)

    def judge(self, evaluation: Evaluation, attempts: Sequence[Attempt]) -> None:
        """Pass if an attempt agrees with the derivative; refuse if the closest agrees with another.

        Rounding, kinks and jumps differ from step to step; another derivative does not. Attempts
        that agree neither with the derivative nor with each other decide nothing.
        """
        # No attempt in a lower precision than that of the measurement.
        single = attempts is SETTINGS.single
        lower = not single and evaluation.problem.dtype == torch.float64
        outcomes: list[_Differences] = []
        for attempt in attempts:
            if lower and attempt.dtype == torch.float32:
                continue
            outcome = self.attempt(attempt)
            if self.passes(outcome):
                return
            if outcome is not None:
                outcomes.append(outcome)
        last = outcomes[-1].attempt.dtype if outcomes else None
        finest = [outcome for outcome in outcomes if outcome.attempt.dtype == last]
        if len(finest) <= 1 and not single:
            self.judge(evaluation, SETTINGS.single)
            return
        for outcome in finest:
            self._refuse_wrong(evaluation, outcome, finest)

    def _refuse_wrong(
        self, evaluation: Evaluation, outcome: _Differences, outcomes: Sequence[_Differences]
    ) -> None:
        """Refuse rows whose closest outcome is far from the derivative and near another outcome."""
        compared = [candidate for candidate in outcomes if candidate is not outcome]
        if not compared:
            return
        closest = (
            torch.stack([outcome.off, *(candidate.off for candidate in compared)]).min(0).values
        )
        allowed = self.allowed(outcome)
        wrong = (outcome.off <= closest) & (outcome.off > allowed)
        apart = [_norms(_minus(outcome.change, candidate.change)) for candidate in compared]
        wrong &= torch.stack(apart).min(0).values <= SETTINGS.agreement * outcome.off
        if bool(wrong.any()):
            wrong &= outcome.off > allowed + self._explained(evaluation, outcome)
        if bool(wrong.any()):
            worst = int((outcome.off / self.known * wrong).argmax())
            lengths = [_norms(outcome.change), self.sizes, outcome.off]
            message = _explain(
                evaluation, self.what, outcome.attempt.dtype, [float(row[worst]) for row in lengths]
            )
            unchecked = argument("check", False)
            raise DerivativeError(message, "; ", unchecked, " measures what the backward gives.")

    def passes(self, outcome: _Differences | None) -> bool:
        return outcome is not None and bool((outcome.off <= self.allowed(outcome)).all())

    def allowed(self, outcome: _Differences) -> Tensor:
        return max(outcome.attempt.allowed, self.least_allowed) * self.limits

    def attempt(self, attempt: Attempt, plus: Matrices | None = None) -> _Differences | None:
        """None if the function does not support the precision or is not finite there."""
        try:
            plus = plus or self.values(attempt.dtype, attempt.step)
            minus = self.values(attempt.dtype, -attempt.step)
        except Exception:
            if attempt.dtype == torch.float32:
                raise
            return None
        change = [difference / (2 * attempt.step) for difference in _minus(plus, minus)]
        off = _norms(_minus(change, self.derivative))
        if not bool(off.isfinite().all()):
            return None
        return _Differences(attempt, plus, minus, change, off)

    def attempt_one_sided(self, attempt: Attempt, here: Matrices) -> _Differences | None:
        """The same on one side only, where the function's values here are known; one evaluation."""
        plus = self.values(attempt.dtype, attempt.step)
        change = [difference / attempt.step for difference in _minus(plus, here)]
        off = _norms(_minus(change, self.derivative))
        return (
            _Differences(attempt, plus, here, change, off) if bool(off.isfinite().all()) else None
        )

    def _explained(self, evaluation: Evaluation, outcome: _Differences) -> Tensor:
        """The distance that kinks here and rounding, of function and derivative, can explain."""
        attempt = outcome.attempt
        here = self.values(attempt.dtype, 0.0)
        bends = [
            (plus - 2 * middle + minus) / attempt.step
            for plus, minus, middle in zip(outcome.plus, outcome.minus, here, strict=True)
        ]
        explained = _norms(bends)
        explained += 4 * torch.finfo(attempt.dtype).eps * _norms(outcome.plus) / attempt.step
        if self.derive is not None and evaluation.problem.dtype == torch.float32:
            with contextlib.suppress(Exception):  # a forward that supports float32 only
                double = self.derive(evaluation.in_float64())
                explained += 4 * _norms(_minus(self.derive(evaluation), double))
        return explained


def _norms(rows: Matrices) -> Tensor:
    return torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in rows])


def _minus(minuends: Matrices, subtrahends: Matrices) -> Matrices:
    return [first - second for first, second in zip(minuends, subtrahends, strict=True)]


def _as_row(tensor: Tensor) -> Tensor:
    return tensor.detach().double().reshape(1, -1)


def seed_of_check(evaluation: Evaluation) -> int:
    return (evaluation.problem.seed << 20) + 0xC0DE


def _draw_direction(
    evaluation: Evaluation, linear: GraphLinearization
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A random direction, and the changes by each layer that are known without the graph.

    Its layers move the output equally, and no weight moves by more than its length.
    """
    drawn: dict[str, Tensor] = {}
    for number, (name, leaf) in enumerate(evaluation.leaves.items()):
        probe = random_like(leaf, seed_of_check(evaluation) + number + 1)
        for row in evaluation.paddings[name]:
            probe[row] = 0
        length = max(_norm(leaf), SETTINGS.least_size * math.sqrt(leaf.numel()))
        drawn[name] = probe * (length / (_norm(probe) or 1.0))
    changes = linear.changes(drawn)
    effects = linear.effects(drawn, changes)
    smallest = min((effect for effect in effects.values() if effect > 0), default=0.0)
    common = max(smallest, SETTINGS.least_effect * max(effects.values()))
    factors = {
        name: min(1.0, common / (effect or common or 1.0)) for name, effect in effects.items()
    }
    direction = {name: part * factors[name] for name, part in drawn.items()}
    return direction, {name: change * factors[name] for name, change in changes.items()}


def _columns(output: Tensor) -> Tensor:
    """(outputs, examples)."""
    return output.reshape(output.shape[0] if output.ndim else 1, -1).T


def _norm(tensor: Tensor) -> float:
    """In float64 where needed: in float32 the square of a vanished change, such as 1e-25, is 0."""
    norm = float(torch.linalg.vector_norm(tensor.detach()))
    if 1e-15 < norm < 1e15:
        return norm
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _explain(
    evaluation: Evaluation, what: str, dtype: torch.dtype, lengths: Sequence[float]
) -> str:
    """The message of a refusal, from the lengths of change, derivative and their difference."""
    change, derivative, off = lengths
    causes = []
    forward = evaluation.output
    loss = evaluation.loss
    if what != "the loss":
        names = ", ".join(custom_functions(forward))
        if names:
            causes.append(
                f"the backward of {names} is not the derivative of its forward, or cannot be "
                "differentiated (once_differentiable, a derivative saved in the forward, values "
                "that leave torch); write it with differentiable torch operations"
            )
        causes.append(
            ".detach(), .data, torch.no_grad() or numpy between a weight and the output, or a "
            "value kept from an earlier call, as by a spectral_norm in train mode (measure it in "
            "eval mode)"
        )
    if what != "the model's output":
        names = ", ".join(custom_functions(loss, stop=forward))
        if names:
            causes.append(
                f"{names} computes its gradient in the forward, as fused losses do, or its "
                "backward is not the derivative; measure with the plain loss, such as "
                "F.cross_entropy"
            )
        causes.append(
            ".detach() or .item() inside the loss, as for weights that depend on the output"
        )
    percent = 100 * off / max(change, derivative)
    numbered = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    digits = 0 if percent >= 10 else 1
    return (
        f"the derivative of {what} is not that of the function that is trained: along a random "
        f"direction, finite differences in {str(dtype).removeprefix('torch.')} give a vector of "
        f"length {change:.4g}, the derivative gives one of length {derivative:.4g}, and they "
        f"differ by {percent:.{digits}f} %. Likely causes, in order: {numbered}. If the backward "
        "differs from the forward on purpose (a straight-through estimator, gradient reversal, a "
        "stopped gradient), there is no Hessian"
    )
