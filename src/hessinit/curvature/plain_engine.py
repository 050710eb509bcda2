"""The plain engine: curvature from forwards at moved weights and ordinary backwards.

`G v = Jᵀ H_z J v`, where `J v` is the difference of the outputs at `w ± εv`, `H_z` the loss's own
derivatives at the outputs, and `Jᵀ` a backward pass. It needs what training needs and no more: no
second derivative of the model, no graph that can be taken apart, no whole weights in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hessinit.curvature import derivative_check, lanczos, operators
from hessinit.curvature.engine import Engine, Extremes, LanczosEngine, LanczosSettings
from hessinit.curvature.evaluation import Evaluation, graph_property, unused_leaves
from hessinit.curvature.krylov import random_like
from hessinit.curvature.loss_hessian import (
    LIMITS,
    LossFactor,
    OutputLoss,
    check_curved,
    factor_loss_hessian,
)
from hessinit.errors import DerivativeError, ProblemError, RankError, WeightsError, argument
from hessinit.problem import checks
from hessinit.problem.batches import Batch
from hessinit.problem.functional import FirstCall
from hessinit.problem.in_place import InPlaceProblem
from hessinit.results.curvature_report import Estimate


@dataclass(frozen=True)
class DifferenceRules:
    """Steps of the differences, and what they may be off; chosen with benchmarks/plain_engine.py.

    A step is relative: so many times the length of each weight, at most.
    """

    steps: tuple[float, ...] = (1e-3, 1e-2, 3e-2)  # the longer ones for forwards in 16 bits
    steps_in_float64: tuple[float, ...] = (1e-5, 1e-4)
    # The first step is taken whose differences and backward agree to this, else the best one.
    agreement: float = 2e-3
    # Beyond, the backward is not the derivative of the forward: of all weights together, which
    # must be seen through the rounding of 16 bits, and of one layer.
    wrong: float = 0.05
    wrong_layer: float = 0.01
    wrong_layer_in_16_bits: float = 0.15
    # Deviations at all steps that differ by less than this factor are the same.
    same: float = 1.1
    # The second step that every answer is taken with, over the first.
    second: float = 1 / 3
    # Times the difference between the two, and times the rounding error: the stated error.
    caution: float = 3.0
    # The rounding errors of more numbers than the square of this cancel.
    root_of_few: float = 10.0
    # From this tolerance on the differences of products are one-sided.
    one_sided_from: float = 1e-2
    # Where rounding hides a layer, its step is so many times as long, up to this relative one.
    longer: float = 10.0
    longest: float = 0.03
    # A weight of zeros moves as if it were drawn with this part of the usual length.
    zero_weight: float = 0.1
    # The gradients at w ± εv, less twice that at w, over their difference: with kinks about 1.
    most_kinked: float = 0.05
    # Of differences of the loss's gradient, relative to outputs of at most 1.
    loss_step: float = 3e-3


RULES = DifferenceRules()


class DifferencedLoss(OutputLoss):
    """The loss at the outputs, of which only the first derivative is known."""

    @cached_property
    def gradient(self) -> tuple[Tensor, Tensor]:
        cut = self.output.detach().to(self.problem.loss_dtype)
        return cut, self._slope(cut)

    def _slope(self, output: Tensor) -> Tensor:
        point = output.detach().requires_grad_()
        value = self.problem.loss_of(point, self.batch)
        (slope,) = torch.autograd.grad(value, point, materialize_grads=True)
        return slope.detach()

    def hessian(self, tangent: Tensor, *, factor: float = 1.0) -> Tensor:
        cut, _ = self.gradient
        along = tangent.to(cut.dtype)
        largest = float(along.abs().max())
        if not 0 < largest < math.inf:
            return torch.zeros_like(tangent)
        size = min(float(cut.square().mean().sqrt()), 1.0) or 1.0
        step = factor * RULES.loss_step * size / largest
        change = self._slope(cut + step * along) - self._slope(cut - step * along)
        return change.div_(2 * step).to(tangent.dtype)


class PlainEvaluation(Evaluation):
    """A batch at the model's own weights, checked; products by differences.

    `scale` is that of its part in the loss of all, where gradients are means over ranks.
    """

    problem: InPlaceProblem

    def __init__(self, problem: InPlaceProblem, batch: Batch) -> None:
        super(Evaluation, self).__init__(problem, batch)
        self._checks_made = set()
        call = problem.output_and_loss(batch, _check_finite)
        output = call.output.detach().clone()  # CUDA graphs write every output to the same place
        self._output = output
        self.output_shape = output.shape
        self.drew = call.drew
        self.casts_output = call.casts_output
        self.forward_seconds = 0.0  # `loss_gradients` includes it
        self.loss_value = float(call.loss.detach())
        self.separable = False
        self.sample = torch.arange(min(batch.size, 4))
        self.paddings = {name: set() for name in self.leaves}
        self._check_call(call)
        self.adds_to_loss = checks.find_added(problem, call.output, call.loss)
        del call
        # Until that fails, as in compiled and checkpointed models.
        self._keeps_graph = problem.ranks is None
        self._check_repeats()
        self._choose_loss()
        self.relative_step, self.moments = self._choose_step()

    @property
    def scale(self) -> float:
        return self.weight * self.problem.ranks_size

    @graph_property
    def output(self) -> Tensor:
        return self._output

    @graph_property
    def loss(self) -> Tensor:
        return self.problem.loss_of(self._output, self.batch)

    @graph_property
    def at_output(self) -> OutputLoss:
        kind = DifferencedLoss if self._is_differenced else OutputLoss
        return kind(self.problem, self._output, self.batch)

    def _check_call(self, call: FirstCall) -> None:
        if not math.isfinite(self.loss_value):
            raise WeightsError(
                f"the loss is {self.loss_value} though the model's output is finite: check the "
                "targets and the loss."
            )
        if not call.output.requires_grad:
            raise DerivativeError(
                "the model's output does not depend on any trained weight: it was detached, or "
                "computed under torch.no_grad()."
            )
        if self.drew and self.problem.dropout != "freeze":
            raise ProblemError(
                "the model's output is random; pass ",
                argument("dropout", "freeze"),
                " to keep one draw, or call model.eval().",
            )

    def _check_repeats(self) -> None:
        again = self.problem.output_without_graph(self.batch)
        off = math.inf
        if again.shape == self._output.shape:
            off = float((again - self._output).norm())
        if off > RULES.agreement * float(self._output.norm()):
            raise ProblemError(
                "the model's output changes from call to call under the same random numbers, so "
                "there is no single curvature: make it deterministic."
            )
        repeated = float(self.problem.loss_of(self._output, self.batch).detach())
        if abs(repeated - self.loss_value) > RULES.agreement * abs(self.loss_value):
            raise ProblemError(
                "the loss changes from call to call on the same output, so there is no single "
                "curvature: make it a function of its two arguments and of the model."
            )

    _is_differenced = False
    is_one_sided = False  # differences from the output here, which save a forward

    @graph_property
    def _graph(self) -> Tensor:
        """The output with its graph, for all backward passes."""
        return self.problem.output(self.batch)

    def _choose_loss(self) -> None:
        """Differentiate the loss twice, or, where that is wrong or cannot be done, once."""
        try:
            derivative_check.check_loss(self)
            self.output_hessian(torch.ones_like(self._output))
        except RankError:
            raise
        except (DerivativeError, RuntimeError):
            self._is_differenced = True
            self._checks_made.clear()
            self._free_graphs()
            derivative_check.check_loss(self)
            loss = DifferencedLoss(self.problem, self._output, self.batch)
            tangent = random_like(self._output, derivative_check.seed_of_check(self))
            bend = loss.hessian(tangent)
            again = loss.hessian(tangent, factor=RULES.second)
            if float((bend - again).norm()) > RULES.wrong * float(bend.norm()):
                raise DerivativeError(*_KINKS_OF_LOSS) from None

    @cached_property
    def factor(self) -> LossFactor | str:
        if self._is_differenced:
            return "the loss has only a first derivative"
        return factor_loss_hessian(self)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The length of each weight, or that which a weight of zeros would have."""
        lengths = self.lengths(self.leaves)
        for name, length in lengths.items():
            rows = self.problem.shape_of(name)[0]
            lengths[name] = length or RULES.zero_weight * math.sqrt(rows)
        return lengths

    def may_stretch(self, name: str) -> bool:
        """Whether the weight may move so much farther, relative to what it is, or usually is."""
        usual = math.sqrt(self.problem.shape_of(name)[0])
        length = max(self.lengths({name: self.leaves[name]})[name], usual)
        return RULES.longer * self.relative_step * self.sizes[name] <= RULES.longest * length

    def lengths(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        squares = [
            torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square()
            for tensor in tensors.values()
        ]
        totals = self.problem.totals(torch.stack(squares))
        return {name: math.sqrt(total) for name, total in zip(tensors, totals, strict=True)}

    def step_along(self, changes: Mapping[str, Tensor], factor: float = 1.0) -> float:
        """The step that moves no weight by more than `factor` times the relative step."""
        lengths = self.lengths(changes)
        relative = max(length / self.sizes[name] for name, length in lengths.items())
        return factor * self.relative_step / relative if relative else 0.0

    def push(
        self, names: Sequence[str], changes: Sequence[Tensor], *, factor: float = 1.0
    ) -> Tensor:
        by_name = dict(zip(names, changes, strict=True))
        step = self.step_along(by_name, factor)
        if not 0 < step < math.inf:
            return torch.zeros_like(self._output)
        with self.problem.moved(by_name, step):
            plus = self.problem.output_without_graph(self.batch)
        if self.is_one_sided and factor == 1:
            return plus.sub(self._output).div_(step)
        with self.problem.moved(by_name, -step):
            minus = self.problem.output_without_graph(self.batch)
        return plus.sub(minus).div_(2 * step)

    def pull(self, names: Sequence[str], cotangent: Tensor) -> tuple[Tensor, ...]:
        gradients = None
        if self._keeps_graph:
            gradients = self.problem.pull_again(self._graph, cotangent, names)
            self._keeps_graph = gradients is not None
        if gradients is None:
            self._free_graphs()
            gradients = self.problem.pull(self.batch, cotangent, names)
        return _with_zeros(gradients, [self.leaves[name] for name in names])

    def loss_gradients(self, part: Batch | None = None) -> tuple[Tensor, ...]:
        gradients = self.problem.gradients(part or self.batch, self.scale)
        return _with_zeros(gradients, list(self.leaves.values()))

    def gradients_at(self, changes: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
        """The gradient of the training loss at moved weights, for the weights that move."""
        with self.problem.moved(changes, step):
            gradients = dict(zip(self.leaves, self.loss_gradients(), strict=True))
        return {name: gradients[name] for name in changes}

    @property
    def is_coarse(self) -> bool:
        """Whether the forward works in 16 bits, so that only longer steps show through."""
        steps = RULES.steps_in_float64 if self.problem.dtype == torch.float64 else RULES.steps
        return self.relative_step != steps[0]

    @cached_property
    def output_noise(self) -> Tensor:
        """How rounding changes the output: as weights do that move in their last digit.

        A forward in 16 bits hardly sees that digit; there it is the bend over the long step.
        """
        if not self.is_coarse:
            with self.problem.moved(*self._last_digits):
                return self.problem.output_without_graph(self.batch) - self._output
        changes = self.random_changes()
        step = self.step_along(changes)
        with self.problem.moved(changes, step):
            plus = self.problem.output_without_graph(self.batch)
        with self.problem.moved(changes, -step):
            minus = self.problem.output_without_graph(self.batch)
        return (plus + minus - 2 * self._output) / math.sqrt(3)

    @property
    def _last_digits(self) -> tuple[dict[str, Tensor], float]:
        """Changes of the weights in their last digit, and the step along them."""
        signs = {name: change.sign() for name, change in self.random_changes().items()}
        changes = {name: self.leaves[name].detach() * sign for name, sign in signs.items()}
        return changes, float(torch.finfo(self.problem.dtype).eps)

    @cached_property
    def gradient_noise(self) -> dict[str, Tensor]:
        """How rounding changes the gradient of the training loss."""
        changes, digit = self._last_digits
        moved = self.gradients_at(changes, digit)
        here = self.gradients_at(changes, 0.0)
        return {name: moved[name] - here[name] for name in changes}

    def random_changes(self) -> dict[str, Tensor]:
        """A random change of every weight, as long as the weight."""
        seed = derivative_check.seed_of_check(self) + 1000 * self.problem.rank
        changes = {
            name: random_like(leaf.detach(), seed + number)
            for number, (name, leaf) in enumerate(self.leaves.items())
        }
        lengths = self.lengths(changes)
        for name, change in changes.items():
            change *= self.sizes[name] / (lengths[name] or 1.0)
        return changes

    def _along(self, gradients: Sequence[Tensor | None], changes: Mapping[str, Tensor]) -> float:
        """The inner product of gradients and changes of all weights, over all ranks."""
        products = [
            (gradient.double() * change).sum()
            for gradient, change in zip(gradients, changes.values(), strict=True)
            if gradient is not None
        ]
        none = torch.zeros((), dtype=torch.float64, device=self.problem.device)
        return sum(self.problem.totals(torch.stack([none, *products])))

    def _choose_step(self) -> tuple[float, dict[str, int | None]]:
        """The relative step, and the order of the weights that the output depends on.

        With u near J v, the differences give ⟨u, J v⟩, and the backward gives ⟨Jᵀu, v⟩.
        """
        changes = self.random_changes()
        names = list(changes)
        steps = RULES.steps
        if self.problem.dtype == torch.float64:
            steps = RULES.steps_in_float64
        self.relative_step = steps[0]
        pushed = self.push(names, list(changes.values()))
        # The random part sees outputs that should move and do not.
        noise = random_like(pushed, derivative_check.seed_of_check(self))
        cotangent = pushed + noise * (float(pushed.norm() / noise.norm()) or 1.0)
        gradients = self.problem.pull(self.batch, cotangent * self.scale, names)
        by_backward = self._along(gradients, changes)
        deviations = dict[float, float]()
        for step in steps:
            if step != self.relative_step:
                self.relative_step = step
                pushed = self.push(names, list(changes.values()))
            inner = (cotangent.double() * pushed.double()).sum() * self.weight
            (by_differences,) = self.problem.totals(inner.reshape(1))
            scale = max(abs(by_differences), abs(by_backward))
            deviations[step] = abs(by_differences - by_backward) / scale if scale else 0.0
            if deviations[step] <= RULES.agreement:
                break
        least = min(deviations.values())
        # Rounding and kinks differ from step to step, another derivative does not.
        spread = max(deviations.values()) / (least or 1.0)
        least_wrong = RULES.agreement if spread < RULES.same else RULES.wrong_layer
        is_constant = spread < 2 and least > least_wrong
        best = min(step for step, deviation in deviations.items() if deviation <= 2 * least)
        if is_constant or not least <= RULES.wrong:
            raise DerivativeError(
                "the backward of the model is not the derivative of its forward: along a random "
                f"direction they differ by {100 * least:.0f} %. If it differs on "
                "purpose (a straight-through estimator, gradient reversal, a stopped gradient), "
                "there is no curvature; if rounding hides how little the output changes, hold "
                "the model in float64."
            )
        order = enumerate(zip(names, gradients, strict=True))
        return best, {name: None if part is None else number for number, (name, part) in order}


def _check_finite(output: Tensor) -> None:
    if not checks.all_finite(output.detach()):
        raise WeightsError("the model's output holds NaN or inf; draw the weights anew.")


def _with_zeros(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient.detach()
        for gradient, leaf in zip(gradients, like, strict=True)
    )


class PlainCurvature(operators.WeightOperator):
    """The Gauss-Newton matrix or the Hessian of the training loss, by differences.

    `factor` is that of the step. A product costs two forwards and a gradient, or two gradients.
    """

    def __init__(
        self,
        evaluations: Sequence[PlainEvaluation],
        names: Sequence[str],
        curvature: str,
        factor: float = 1.0,
    ) -> None:
        super().__init__(evaluations, names)
        self._evaluations = evaluations
        self._is_exact = curvature == "hessian"
        self._factor = factor
        self.ranks = evaluations[0].problem.ranks

    def _product(self, vector: Tensor) -> Tensor:
        changes = dict(zip(self.names, operators.split(vector, self.shapes), strict=True))
        return operators.add_up(
            [operators.join(self._of_batch(batch, changes)) for batch in self._evaluations]
        )

    def _of_batch(
        self, evaluation: PlainEvaluation, changes: Mapping[str, Tensor]
    ) -> Sequence[Tensor]:
        if not self._is_exact:
            pushed = evaluation.push(self.names, list(changes.values()), factor=self._factor)
            curved = evaluation.output_hessian(pushed, overwrite=True)
            return evaluation.pull(self.names, curved * evaluation.scale)
        step = evaluation.step_along(changes, self._factor)
        if not 0 < step < math.inf:
            return [torch.zeros_like(change) for change in changes.values()]
        plus = evaluation.gradients_at(changes, step)
        minus = evaluation.gradients_at(changes, -step)
        return [(plus[name] - minus[name]) / (2 * step) for name in self.names]

    def rounding_along(self, vector: Tensor, norm: float) -> float:
        """The error that rounding causes in the curvature `norm` along a unit vector."""
        problem = self._evaluations[0].problem
        changes = dict(zip(self.names, operators.split(vector, self.shapes), strict=True))
        squares = []
        sizes = []
        for evaluation in self._evaluations:
            step = evaluation.step_along(changes, self._factor)
            if self._is_exact:
                noise = operators.join([evaluation.gradient_noise[name] for name in self.names])
                squares.append(noise.double().square().sum() / step**2)
            else:
                noise = evaluation.output_noise
                curved = evaluation.output_hessian(noise).double()
                squares.append((noise.double() * curved).sum() * evaluation.weight / step**2)
            sizes.append(noise.numel())
        half = torch.stack(squares).sum() / 2
        # Over all ranks, which must decide alike.
        square, size = problem.totals(torch.stack([half, torch.full_like(half, sum(sizes))]))
        share = min(1.0, RULES.root_of_few / math.sqrt(size or 1))
        if self._is_exact:
            return share * math.sqrt(square)
        # ⟨Jv + n, H_z (Jv + n)⟩, where the product of both is at most the root of theirs.
        return 2 * share * math.sqrt(max(square, 0.0) * norm) + max(square, 0.0)

    def along(self, vector: Tensor) -> float:
        """The curvature along a unit vector; of Gauss-Newton from forwards alone."""
        problem = self._evaluations[0].problem
        if self._is_exact:
            inner = (vector.double() * self._product(vector).double()).sum()
        else:
            parts = operators.split(vector, self.shapes)
            values = []
            for evaluation in self._evaluations:
                pushed = evaluation.push(self.names, parts, factor=self._factor)
                curved = evaluation.output_hessian(pushed)
                values.append((pushed.double() * curved.double()).sum() * evaluation.weight)
            inner = torch.stack(values).sum()
        return sum(problem.totals(inner.reshape(1)))


class PlainEngine(LanczosEngine):
    """Lanczos on products by differences; every answer is found again with another step."""

    name = "plain"
    states_rounding = True

    def __init__(
        self,
        evaluations: Sequence[PlainEvaluation],
        curvature: str,
        settings: LanczosSettings,
        reason: str,
        rank: int | None,
    ) -> None:
        # Of the Hessian the other end matters only where it may be the norm.
        super().__init__(evaluations, settings, reason, rank, "norm" if rank is None else "both")
        self._plain = evaluations
        self._curvature = curvature

    def operator(self, names: Sequence[str]) -> PlainCurvature:
        return PlainCurvature(self._plain, names, self._curvature)

    @property
    def _recorder(self) -> None:
        """Kernels are not recorded: weights move between them."""
        return None

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        return Engine.extremes_of_each(self, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        if all(name in unused_leaves(self._plain) for name in names):
            return self.unused()
        extremes, rounding = self._attempt(names)
        while (
            len(names) == 1
            and rounding > self.settings.tolerance * extremes.norm.value
            and all(evaluation.may_stretch(names[0]) for evaluation in self._plain)
        ):
            self._stretch(names[0], RULES.longer)
            longer, rounding = self._attempt(names)
            if longer.norm.error >= extremes.norm.error:
                self._stretch(names[0], 1 / RULES.longer)  # the network moves it, too
                break
            extremes = longer
        return extremes

    def _stretch(self, name: str, factor: float) -> None:
        for evaluation in self._plain:
            evaluation.sizes[name] *= factor

    def _attempt(self, names: Sequence[str]) -> tuple[Extremes, float]:
        """The extremes with the error of differences, and that of it which is rounding."""
        extremes = super().extremes(names)
        norm = extremes.norm.value
        if extremes.vector is None or not math.isfinite(norm):
            return extremes, 0.0
        vector = extremes.vector
        if not norm:  # of any direction
            vector = random_like(vector, self.settings.seed)
            vector /= math.sqrt(self._total(vector.square().sum()))
        operator = self.operator(names)
        rounding = RULES.caution * operator.rounding_along(vector, norm)
        second = PlainCurvature(self._plain, names, self._curvature, RULES.second)
        off = abs(abs(second.along(vector)) - norm) if norm else 0.0
        if self._curvature == "hessian":
            if off > RULES.wrong * norm + rounding:
                raise DerivativeError(*_KINKS)
        elif norm:
            # The norm takes differences once, and the curvature by forwards alone twice.
            off = max(off, abs(abs(operator.along(vector)) - norm))
        difference = RULES.caution * off + rounding
        if any(evaluation.is_coarse for evaluation in self._plain):
            # The weights are rounded before they are used, in the same way at both steps.
            difference += RULES.caution * norm * torch.finfo(torch.bfloat16).eps
        return self._widened(extremes, difference), rounding

    def _total(self, number: Tensor) -> float:
        return sum(self._plain[0].problem.totals(number.reshape(1)))

    def _widened(self, extremes: Extremes, difference: float) -> Extremes:
        norm = extremes.norm.value
        is_coarse = any(evaluation.is_coarse for evaluation in self._plain)
        if difference >= norm and not is_coarse:
            reason = "zero, up to the rounding of the forward"
            zero = Estimate(0.0, norm + difference, True, reason, extremes.top.products)
            return replace(extremes, top=zero, bottom=replace(zero, products=0))

        def widen(estimate: Estimate) -> Estimate:
            wider = replace(estimate, error=estimate.error + difference)
            if difference <= self.settings.tolerance * norm or not estimate.converged:
                return wider
            share = f"{difference / norm:.0e} of the norm"
            reason = (
                f"differences with two steps leave an error of {share}, by rounding or kinks; pass "
                "a larger tolerance"
            )
            return replace(wider, converged=False, reason=reason)

        return replace(extremes, top=widen(extremes.top), bottom=widen(extremes.bottom))

    def _start(self, names: Sequence[str]) -> lanczos.Start | None:
        is_whole = self._plain[0].problem.ranks is None
        return super()._start(names) if is_whole and self._curvature != "hessian" else None


_KINKS_OF_LOSS = (
    "the loss has only a first derivative, and that jumps, as by a hinge, so it has no curvature. ",
    "Write it with functions that have a second derivative.",
)
_KINKS = (
    "the gradient jumps, as by ReLU or rounding in 16 bits, which differences do not see; measure ",
    argument("curvature", "gauss-newton"),
    ".",
)


def plain_engine(
    evaluations: Sequence[Evaluation], curvature: str, settings: LanczosSettings
) -> PlainEngine:
    """The plain engine of "gauss-newton" or "hessian"; refuses the Hessian of what has kinks."""
    plain = [evaluation for evaluation in evaluations if isinstance(evaluation, PlainEvaluation)]
    reason = plain[0].problem.reason
    rank = None
    for evaluation in plain:
        _check_layers(evaluation)
    if curvature == "hessian":
        for evaluation in plain:
            _refuse_kinks(evaluation)
    else:
        # That of a share says nothing of the curvature of all examples.
        rank = None if plain[0].problem.ranks else _rank_of(plain)
        for evaluation in plain:
            if evaluation.adds_to_loss:
                raise DerivativeError(
                    "the loss depends on weights not only through the model's output, by a penalty "
                    "or an auxiliary loss, and Gauss-Newton leaves that out; measure ",
                    argument("curvature", "hessian"),
                    ", which counts it.",
                )
            check_curved(evaluation)
            evaluation.is_one_sided = settings.tolerance >= RULES.one_sided_from
    return PlainEngine(plain, curvature, settings, reason, rank)


def _rank_of(evaluations: Sequence[PlainEvaluation]) -> int | None:
    """At most that of a convex loss's curvature; None if it is not known to be convex."""
    rank = 0
    for evaluation in evaluations:
        is_small = evaluation.output.numel() <= LIMITS.least_closed_form and evaluation.output.ndim
        if is_small and isinstance(evaluation.factor, LossFactor):
            count = evaluation.factor.columns.shape[:2]
            rank += count.numel()
        elif not is_small and evaluation.softmax is not None:
            rank += evaluation.output.numel()
        else:
            return None
    return rank


def _check_layers(evaluation: PlainEvaluation) -> None:
    """Compare the backward by each layer with differences of outputs.

    Along its own gradient, or, where that is zero, along a random direction.
    """
    names = list(evaluation.leaves)
    cotangent = random_like(evaluation.output, derivative_check.seed_of_check(evaluation))
    pulled = evaluation.pull(names, cotangent * evaluation.scale)
    gradients = dict(zip(names, pulled, strict=True))
    lengths = evaluation.lengths(gradients)
    digit = torch.finfo(evaluation.output.dtype).eps * evaluation.output
    noises = (evaluation.output_noise, digit)
    noise = torch.stack([(cotangent * part).double().square().sum() for part in noises]).sum()
    wrong = RULES.wrong_layer
    factors = [1.0, 1 / RULES.longer, RULES.longer]
    if evaluation.is_coarse:
        wrong = RULES.wrong_layer_in_16_bits
        factors = [1.0]
    for name, gradient in gradients.items():
        along = gradient if lengths[name] else evaluation.random_changes()[name]
        for factor in factors:
            pushed = evaluation.push([name], [along], factor=factor)
            inner = (cotangent * pushed).double().sum() * evaluation.weight
            totals = evaluation.problem.totals(torch.stack([inner, noise]))
            by_differences, squared_rounding = totals
            by_backward = lengths[name] ** 2
            step = evaluation.step_along({name: along}, factor) or 1.0
            rounding = 2 * RULES.caution * math.sqrt(squared_rounding) / step
            allowed = rounding + wrong * by_backward
            if abs(by_differences - by_backward) <= wrong * by_backward:
                break
        if abs(by_differences - by_backward) > allowed:
            raise DerivativeError(
                f"the backward of the model by {checks.layer_name(name)} is not the derivative of "
                f"its forward, or a kink lies too near: differences of outputs give "
                f"{by_differences:.4g} along it, and the backward gives {by_backward:.4g}."
            )


def _refuse_kinks(evaluation: PlainEvaluation) -> None:
    """Differences of gradients average over kinks, and the Hessian is the curvature between them.

    The bend of a smooth gradient shrinks with the step, that of one with jumps does not.
    """
    changes = evaluation.random_changes()
    here = evaluation.gradients_at(changes, 0.0)

    def bend(factor: float) -> float:
        step = evaluation.step_along(changes, factor)
        plus = evaluation.gradients_at(changes, step)
        minus = evaluation.gradients_at(changes, -step)
        bends = [plus[name] - 2 * here[name] + minus[name] for name in changes]
        slopes = [plus[name] - minus[name] for name in changes]
        squares = [
            torch.stack([part.double().square().sum() for part in parts]).sum()
            for parts in (bends, slopes)
        ]
        of_bends, of_slopes = evaluation.problem.totals(torch.stack(squares))
        return math.sqrt(of_bends / of_slopes) if of_slopes else 0.0

    if bend(1.0) > RULES.most_kinked and bend(RULES.second) > RULES.most_kinked:
        raise DerivativeError(*_KINKS)
