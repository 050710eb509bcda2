"""Scaling symmetries: factors for the parameters that do not change what the network computes.

Multiply every parameter p by c^x(p). Each tensor of the forward is then multiplied by c^d, and its
degree d is a linear function of the exponents x: a product adds the degrees of its factors, a ReLU
keeps the degree of its input, a normalization returns the degree of its gain. A sum needs terms of
one degree, a tanh needs degree 0, and so does the output. The exponents that change nothing are the
null space of these equations.

It holds weights that a normalization follows (van Laarhoven 2017, arXiv 1706.05350), everything
that writes into the residual stream of a pre-norm network, neighbours in a chain of ReLU layers,
the values against the output projection of an attention, and the gains of a normalization against
the weight that reads them. What is used of it, forwards have confirmed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessinit.curvature import operators
from hessinit.curvature.engine_choice import build_engine, evaluate_everywhere
from hessinit.curvature.evaluation import unused_leaves
from hessinit.curvature.preconditioner import (
    AdamRule,
    ScaledCurvature,
    adam_preconditioner,
    gradient_moments,
    spectral_norm,
)
from hessinit.init.options import KAPPA
from hessinit.init.scales import ProblemFactory, finite_or_inf, lanczos_settings, network_estimator
from hessinit.problem.checks import layer_name
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.in_place import InPlaceProblem
from hessinit.problem.ranks import length_over_ranks, lockstep_ranks
from hessinit.results.initialization import Symmetry

# A degree: the coefficients of the exponents x, by parameter. A tensor without one is a constant of
# degree 0.
Degree = Mapping[str, float]
Exponents = dict[str, float]
Arguments = Mapping[str, Any]
Names = tuple[str, ...]


@dataclass(frozen=True)
class SymmetryTolerance:
    """What counts as zero, as small and as unmoved."""

    # A constant up to this part of the tensor that it is added to is the eps of a normalization.
    eps: float = 1e-2
    # The largest relative change of the output (rms) up to which it counts as unmoved.
    unmoved: float = 1e-2
    # Of the linear equations: relative singular values, and exponents.
    singular: float = 1e-9
    exponent: float = 1e-6


SYMMETRY_TOLERANCE = SymmetryTolerance()


class Symmetries:
    """The null space of one network; `gains` are vectors that multiply, as in normalizations.

    `divides` says whether a tensor is divided by another, as in a normalization; else no weight is
    free.
    """

    def __init__(
        self,
        parameters: Iterable[str],
        equations: Iterable[Degree],
        gains: Iterable[str] = (),
        divides: bool = True,
    ) -> None:
        self.parameters = tuple(parameters)
        self.gains = tuple(sorted(gains))
        self.divides = divides
        self._row = {name: number for number, name in enumerate(self.parameters)}
        rows = {tuple(sorted(equation.items())) for equation in equations}
        matrix = np.zeros((max(len(rows), 1), len(self.parameters)))
        for number, row in enumerate(sorted(rows)):
            for name, coefficient in row:
                matrix[number, self._row[name]] = coefficient
        _, values, right = np.linalg.svd(matrix)
        zero = SYMMETRY_TOLERANCE.singular
        space = right[int((values > zero).sum()) :].T
        self._space = np.where(np.abs(space) < zero, 0.0, space)

    def solve(self, fixed: Mapping[str, float]) -> Exponents | None:
        """The smallest exponents with these values; None where no symmetry has them."""
        rows = self._space[[self._row[name] for name in fixed]]
        values = np.array(list(fixed.values()))
        combination = np.linalg.lstsq(rows, values, rcond=SYMMETRY_TOLERANCE.singular)[0]
        if not np.allclose(rows @ combination, values, atol=SYMMETRY_TOLERANCE.exponent):
            return None
        exponents = zip(self._row, (self._space @ combination).tolist(), strict=True)
        zero = SYMMETRY_TOLERANCE.exponent
        return {name: exponent for name, exponent in exponents if abs(exponent) > zero}

    def groups(self, names: Sequence[str], fixed: Iterable[str]) -> list[Names]:
        """Groups of `names`, in order, that one factor scales while all others and `fixed` stay.

        With all gains fixed, a weight that a normalization follows is a group of its own; all
        weights that write into the same residual stream are one group.
        """
        groups: list[Names] = []
        for apart in (False, True):
            for name in names:
                grouped = {member for group in groups for member in group}
                if name not in grouped:
                    still = dict.fromkeys([*fixed, *grouped] if apart else fixed, 0.0)
                    if group := self._group_of(name, names, still, apart):
                        groups.append(group)
        return groups

    def scale_free(
        self, weights: Sequence[str], among: Collection[str] | None = None
    ) -> Exponents | None:
        """Scale all of `weights` (`among` these) whose size the output does not show."""
        if not self.divides:
            return None
        grouped = itertools.chain.from_iterable(self.groups(weights, self.gains))
        free = [name for name in grouped if among is None or name in among]
        still = dict.fromkeys([*self.gains, *(name for name in weights if name not in free)], 0.0)
        return self.solve(still | dict.fromkeys(free, 1.0)) if free else None

    def against_gains(self, weights: Sequence[str], free: Collection[str]) -> list[Exponents]:
        """Enlarge weights by smaller gains of normalizations before them; `free` weights stay."""
        solutions = []
        for group in self.groups(self.gains, free):
            still = dict.fromkeys([*free, *(name for name in self.gains if name not in group)], 0.0)
            exponents = self.solve(still | dict.fromkeys(group, -1.0)) or {}
            moved = [exponents[name] for name in weights if name in exponents]
            if moved and min(moved) > 0:
                solutions.append(exponents)
        return solutions

    def _group_of(
        self, name: str, names: Sequence[str], still: Exponents, apart: bool
    ) -> Names | None:
        """The group of `name` while the exponents `still` are 0.

        With `apart`, a weight that would shrink stays: a bias ties two weights before a
        normalization.
        """
        zero = SYMMETRY_TOLERANCE.exponent
        fixed = still | {name: 1.0}
        while (exponents := self.solve(fixed)) is not None:
            shares = {member: exponents.get(member, 0.0) for member in names}
            if (min(shares.values()) < -zero and not apart) or max(shares.values()) > 1 + zero:
                return None
            between = [
                member for member, share in shares.items() if min(abs(share), abs(share - 1)) > zero
            ]
            if not between:
                return tuple(member for member, share in shares.items() if share > 0.5)
            # Two weights in a row share a factor; the second one, which writes into the stream,
            # takes it all.
            fixed[between[0]] = 0.0
        return None


def find_symmetries(
    problem: FunctionalProblem, fixed: Iterable[str] = (), *, nearly: bool = False
) -> Symmetries:
    """The scaling symmetries of the forward that do not scale `fixed` parameters.

    With `nearly`, GELU and its like count as linear, as they are for small inputs. Costs one
    forward of the first batch; call it within the problem's settings.
    """
    weights = problem.weights_of_forward()
    rules = _DEGREE_RULES | _NEARLY_LINEAR if nearly else _DEGREE_RULES
    with _Degrees(weights, rules) as mode:
        output = problem.output(problem.batches[0], weights=weights)
    mode.require_zero(mode.of(output))
    found = mode.equations, mode.gains, mode.divides
    if (ranks := lockstep_ranks()) is not None:
        found = ranks.exchange(found)[0]  # an eps is small beside the activations of these examples
    equations, gains, divides = found
    return Symmetries(weights, [*equations, *({name: 1.0} for name in fixed)], gains, divides)


def output_change(problem: FunctionalProblem, *logs: Mapping[str, float]) -> float:
    """The largest relative change of the output (rms) where each parameter is multiplied by e^log.

    Costs a forward of the first batch for each of `logs`, and one more.
    """
    batch = problem.batches[0]
    with torch.no_grad():
        output = problem.output_at_factors(batch, {})
        length = length_over_ranks(float(output.norm()))
        largest = 0.0
        for log in logs:
            factors = {name: math.exp(power) for name, power in log.items()}
            moved = problem.output_at_factors(batch, factors) - output
            change = length_over_ranks(float(moved.norm())) / (length or math.nan)
            largest = max(largest, finite_or_inf(change))
    return largest


@dataclass(frozen=True, eq=False)
class SymmetryBlock:
    """Weights whose joint curvature one factor sets, and exponents that keep the function as it is.

    It is kept only nearly, not `exact`, where GELU or its like stands between.
    """

    weights: Names
    exponents: Exponents
    exact: bool = True

    @property
    def power(self) -> float:
        """The curvature of the weights falls with twice this power of the factor."""
        return min(self.exponents[name] for name in self.weights)


@dataclass(frozen=True)
class Blocks:
    """First the scale-free weights, then those that gains of normalizations set; and all others."""

    scalable: tuple[SymmetryBlock, ...]
    remaining: Names

    @property
    def free(self) -> SymmetryBlock:
        return self.scalable[0]


def find_blocks(
    problem: FunctionalProblem, allowed: Sequence[str], biases_only: bool = False
) -> Blocks | None:
    """The blocks among the `allowed` weights; None where no weight is scale-free.

    With `biases_only`, of the other parameters only the biases beside these weights are scaled.
    Every symmetry that is used was confirmed by forwards: the output moves by less than 1 %.
    """
    parameters = dict(problem.model.named_parameters())
    weights = [name for name in problem.leaves if parameters[name].ndim > 1]
    modules = {name.rpartition(".")[0] for name in allowed}

    def is_fixed(name: str) -> bool:
        module, _, attribute = name.rpartition(".")
        if parameters[name].ndim > 1 or not parameters[name].requires_grad:
            return name not in allowed
        return biases_only and not (module in modules and "bias" in attribute)

    fixed = [*filter(is_fixed, parameters)]
    with problem.settings():
        exact = find_symmetries(problem, fixed)
        if exact.scale_free(weights):  # a weight that the output does not see is not meant
            fixed += _unused_leaves(problem)
            exact = find_symmetries(problem, fixed)
        free = _confirm_scale_free(problem, exact, weights)
        if free is None:
            return None
        nearly = find_symmetries(problem, fixed, nearly=True)
        scalable = [free]
        remaining = [name for name in weights if name not in free.weights]
        for symmetries in (exact, nearly):
            for exponents in symmetries.against_gains(weights, free.weights):
                block = _confirmed_block(
                    problem, exponents, remaining, or_nearly=symmetries is nearly
                )
                if block is not None:
                    scalable.append(block)
                    remaining = [name for name in remaining if name not in block.weights]
        return Blocks(tuple(scalable), tuple(remaining))


def _unused_leaves(problem: FunctionalProblem) -> list[str]:
    if isinstance(problem, InPlaceProblem):
        evaluations = evaluate_everywhere(problem)[0]
        return sorted(unused_leaves(evaluations))
    with torch.enable_grad():
        total = problem.output(problem.batches[0]).sum()
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        total, [*problem.leaves.values()], allow_unused=True
    )
    pairs = zip(problem.leaves, gradients, strict=True)
    return [name for name, gradient in pairs if gradient is None]


def _confirm_scale_free(
    problem: FunctionalProblem, symmetries: Symmetries, weights: Sequence[str]
) -> SymmetryBlock | None:
    """All scale-free weights; if that fails, without those that fail alone, as at a large eps."""

    def confirmed(among: Collection[str] | None = None) -> SymmetryBlock | None:
        return _confirmed_block(problem, symmetries.scale_free(weights, among), weights)

    block = confirmed()
    if block is not None or not symmetries.divides:
        return block
    groups = symmetries.groups(weights, symmetries.gains)
    alone = filter(None, map(confirmed, groups))
    return confirmed([name for block in alone for name in block.weights])


def _confirmed_block(
    problem: FunctionalProblem,
    exponents: Exponents | None,
    weights: Sequence[str],
    or_nearly: bool = False,
) -> SymmetryBlock | None:
    """A block whose symmetry leaves the output where it is, at half and at twice the weights."""
    exponents = exponents or {}
    scaled = tuple(name for name in weights if exponents.get(name, 0.0) > 0)
    if not scaled:
        return None
    half = {name: -math.log(2) * exponent for name, exponent in exponents.items()}
    twice = {name: math.log(2) * exponent for name, exponent in exponents.items()}
    exact = output_change(problem, half, twice) <= SYMMETRY_TOLERANCE.unmoved
    return SymmetryBlock(scaled, exponents, exact) if exact or or_nearly else None


def _add_degrees(first: Degree, second: Degree, factor: float = 1.0) -> Degree:
    total = dict(first)
    for name, coefficient in second.items():
        total[name] = total.get(name, 0.0) + factor * coefficient
    return {name: coefficient for name, coefficient in total.items() if coefficient}


class _Degrees(TorchDispatchMode):
    """Follows the degree of every tensor of a forward, and collects what must be 0 for a symmetry.

    An operation that is not known here needs degree 0, so that the space found may be too small,
    never too large.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rules: Mapping[str, DegreeRule]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules
        # With the tensor itself, so that no other one gets its id.
        self._degrees: dict[int, tuple[Tensor, Degree]] = {
            id(parameter): (parameter, {name: 1.0}) for name, parameter in parameters.items()
        }
        self.equations: list[Degree] = []
        self.divides = False
        self.gains: set[str] = set()

    def of(self, value: Any) -> Degree:
        return self._degrees.get(id(value), (value, {}))[1]

    def note_division(self, divides: bool = True) -> None:
        self.divides |= divides

    def note_gain(self, value: Any) -> None:
        """Note a parameter with one number for each channel, here a factor."""
        names = self.of(value)
        if len(names) == 1 and max(value.shape, default=1) == value.numel():
            self.gains.update(names)

    def require_zero(self, degree: Degree) -> None:
        if degree:
            self.equations.append(degree)

    def require_equal(self, degrees: Sequence[Degree]) -> Degree:
        for degree in degrees[1:]:
            self.require_zero(_add_degrees(degree, degrees[0], -1.0))
        return degrees[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | named
        degrees = [self.of(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(degrees):
            operation = func._schema.name.removeprefix("aten::")
            rule = self._rules.get(operation) or self._rules.get(operation.rstrip("_"), _needs_zero)
            degree = rule(self, arguments, degrees)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._degrees[id(leaf)] = (leaf, degree if leaf.is_floating_point() else {})
        return result


DegreeRule = Callable[[_Degrees, Arguments, list[Degree]], Degree]


def _needs_zero(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    for degree in degrees:
        mode.require_zero(degree)
    return {}


def _keep_degree(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    return degrees[0]


def _degree_zero(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    """A sign, or a new tensor: the same for every positive factor."""
    return {}


def _compare_degrees(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    """The same for every positive factor between tensors of one degree, or with 0."""
    if len(degrees) > 1:
        mode.require_equal(degrees)
    elif arguments["other"] != 0:
        _needs_zero(mode, arguments, degrees)
    return {}


def _power_rule(exponent: float) -> DegreeRule:
    def rule(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
        mode.note_division(exponent < 0)
        return {name: exponent * coefficient for name, coefficient in degrees[0].items()}

    return rule


def _degree_of_power(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    exponent = arguments.get("exponent")
    rule = _power_rule(exponent) if isinstance(exponent, int | float) else _needs_zero
    return rule(mode, arguments, degrees)


def _degree_of_product(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    total: Degree = {}
    for factor in tree_leaves(arguments):
        mode.note_gain(factor)
        total = _add_degrees(total, mode.of(factor))
    return total


def _degree_of_quotient(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    if arguments.get("rounding_mode") is not None:
        return _needs_zero(mode, arguments, degrees)
    mode.note_division(bool(mode.of(arguments["other"])))
    return _add_degrees(mode.of(arguments["self"]), mode.of(arguments["other"]), -1.0)


def _degree_of_sum(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    """Terms of one degree, or a tensor and a number, which may be small enough to be an eps."""
    if len(degrees) > 1:
        return mode.require_equal(degrees)
    tensor = arguments["self"]
    if isinstance(tensor, Tensor) and _is_eps(arguments["other"], tensor):
        return degrees[0]
    return _needs_zero(mode, arguments, degrees)


def _is_eps(number: float, tensor: Tensor) -> bool:
    return abs(number) <= SYMMETRY_TOLERANCE.eps * float(tensor.detach().abs().mean())


def _degree_if_equal(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    return mode.require_equal(degrees)


def _degree_of_affine_map(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    bias, first, second = degrees
    return mode.require_equal([_add_degrees(first, second), bias])


def _degree_of_choice(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    return mode.require_equal([mode.of(arguments["self"]), mode.of(arguments["other"])])


def _degree_of_convolution(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    product = _add_degrees(mode.of(arguments["input"]), mode.of(arguments["weight"]))
    return _with_bias(mode, product, arguments["bias"])


def _with_bias(mode: _Degrees, degree: Degree, bias: Tensor | None) -> Degree:
    return degree if bias is None else mode.require_equal([degree, mode.of(bias)])


def _degree_of_normalization(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    """The degree of the gain; fixed statistics, or a large eps, need an input of degree 0."""
    eps = arguments.get("eps") or 0.0
    values = arguments["input"]
    fixed = arguments.get("training") is False
    if fixed or eps > SYMMETRY_TOLERANCE.eps * float(values.detach().var()):
        mode.require_zero(mode.of(values))
    mode.note_division()
    mode.note_gain(arguments.get("weight"))
    return _with_bias(mode, mode.of(arguments.get("weight")), arguments.get("bias"))


def _degree_of_attention(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    mode.require_zero(_add_degrees(mode.of(arguments["query"]), mode.of(arguments["key"])))
    return mode.of(arguments["value"])


def _degree_of_filled(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    value = float(arguments["value"])
    scales = value == 0 or np.isinf(value)
    return mode.of(arguments["self"]) if scales else _needs_zero(mode, arguments, degrees)


def _degree_of_clamped(mode: _Degrees, arguments: Arguments, degrees: list[Degree]) -> Degree:
    """At 0, as a ReLU; or at a lower bound that is an eps."""
    low = arguments.get("min")
    high = arguments.get("max")
    is_eps = isinstance(low, int | float) and low > 0 and _is_eps(low, arguments["self"])
    scales = high in (None, 0) and (low in (None, 0) or is_eps)
    return degrees[0] if scales else _needs_zero(mode, arguments, degrees)


def _rule_table(*rules: tuple[DegreeRule, str]) -> dict[str, DegreeRule]:
    return {name: rule for rule, names in rules for name in names.split()}


_DEGREE_RULES = _rule_table(
    (
        _keep_degree,
        (
            "view _unsafe_view _reshape_alias t transpose permute expand squeeze unsqueeze slice "
            "select split split_with_sizes unbind clone alias detach _to_copy as_strided index "
            "index_select gather flip roll constant_pad_nd reflection_pad1d reflection_pad2d "
            "replication_pad2d repeat "
            "relu leaky_relu neg abs mean sum cumsum amax amin tril triu diagonal native_dropout "
            "embedding max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d "
            "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d "
            "upsample_bilinear2d pixel_shuffle linalg_vector_norm norm std im2col col2im unfold"
        ),
    ),
    (_compare_degrees, "gt lt ge le eq ne"),
    (
        _degree_zero,
        (
            "sign argmax argmin isnan isinf zeros_like ones_like empty_like full_like new_zeros "
            "new_ones new_empty new_full rand_like randn_like bernoulli"
        ),
    ),
    (_degree_of_product, "mul mm bmm mv dot"),
    (_degree_of_quotient, "div"),
    (_power_rule(0.5), "sqrt"),
    (_power_rule(-0.5), "rsqrt"),
    (_power_rule(-1.0), "reciprocal"),
    (_power_rule(2.0), "square var"),
    (_degree_of_power, "pow"),
    (_degree_of_sum, "add sub rsub"),
    (_degree_if_equal, "cat stack copy"),
    (_degree_of_affine_map, "addmm baddbmm addmv"),
    (_degree_of_convolution, "convolution cudnn_convolution"),
    (
        _degree_of_normalization,
        (
            "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
            "cudnn_batch_norm _batch_norm_with_update _batch_norm_no_update _fused_rms_norm"
        ),
    ),
    (
        _degree_of_attention,
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        ),
    ),
    (_degree_of_choice, "where"),
    (_degree_of_filled, "masked_fill"),
    (_degree_of_clamped, "clamp clamp_min clamp_max"),
)
_NEARLY_LINEAR = _rule_table((_keep_degree, "gelu silu mish elu tanh hardtanh hardswish"))


# --- Fit the curvature along symmetries: weights get as sharp as a rate allows; the function stays
#
# A symmetry that multiplies a block of weights by f divides its curvature by f², and by f in the
# norm that Adam sees. So the norms at the drawn weights tell every factor, and a second look
# confirms them.

NormOf = Callable[[Sequence[str]], float]


@dataclass(frozen=True)
class SymmetrySteps:
    """How far and how often blocks are scaled (benchmarks/initialize_cost.py counts the looks)."""

    largest_log: float = math.log(1e3)
    most_looks: int = 3
    # Bisections of a factor that moves the output, by the eps of a normalization.
    bisections: int = 7


SYMMETRY_STEPS = SymmetrySteps()


class SymmetricFit(NamedTuple):
    """What was scaled; `reason` says why the target was missed, or is empty.

    `output_change` is that of the function, relative: rounding and the eps of normalizations.
    """

    target: float
    symmetries: tuple[Symmetry, ...]
    output_change: float
    reason: str


class SymmetryScaler:
    """Multiplies the present weights by factors of symmetries, and measures the blocks.

    `readout` are weights that make the output: those that gains of normalizations set become at
    least a part of the target sharp. At low rates they would hardly move otherwise, and features of
    bounded length, as behind a normalization, then allow no confident output.
    """

    def __init__(
        self,
        factory: ProblemFactory,
        blocks: Blocks,
        adam: AdamRule | None,
        tolerance: float,
        readout: Sequence[str] = (),
    ) -> None:
        self._factory = factory
        self._blocks = blocks
        self._free = blocks.free
        self._readout = [
            block
            for block in blocks.scalable[1:]
            if block.exact and set(block.weights) <= set(readout)
        ]
        self._adam = adam
        self._tolerance = tolerance
        self._law = 2.0 if adam is None else 1.0  # the norm falls with this power of the factor
        scaled = {name for block in blocks.scalable for name in block.exponents}
        self._parameters = {
            name: weight for name, weight in factory.model.named_parameters() if name in scaled
        }
        self._norms: dict[SymmetryBlock, float] = {}
        self._remaining_norm = 0.0
        self._logs: dict[SymmetryBlock, float] = {}  # of the factors so far

    def fit_blocks_(self, target: float | None) -> SymmetricFit:
        """Bring the scale-free block to the `target`, and the others to at most that.

        A `target` of None takes the sharpest weights as they are, for lr="auto". Costs two norms of
        the scale-free weights, one of all others, and where that is too large two of each.
        """
        self._measure(target)
        before = dict(self._norms)
        if target is None:
            target = max(self._remaining_norm, *before.values())
        self._logs = dict.fromkeys(before, 0.0)
        self._scale_inexact_(target)
        change, bounded = self._scale_exact_(target)
        symmetries = tuple(
            Symmetry(
                weights=block.weights,
                scale_free=block is self._free,
                exact=block.exact,
                factors={
                    name: math.exp(log) for name, log in _logs_of_parameters({block: log}).items()
                },
                norm_before=before[block],
                norm=self._norms[block],
            )
            for block, log in self._logs.items()
            if log or block is self._free
        )
        return SymmetricFit(target, symmetries, change, self._reason_missed(target, bounded))

    def _measure(self, target: float | None, every_block: bool = False) -> None:
        """Measure the scale-free weights; if others exceed the target, every block and the rest."""
        remaining = self._blocks.remaining
        by_gains = self._blocks.scalable[1:]
        with self._curvature() as norm_of:
            measured = [self._free, *self._readout]
            self._norms = {block: norm_of(block.weights) for block in measured}
            self._remaining_norm = 0.0
            # No block of a semidefinite matrix is sharper than the matrix.
            names = [*(name for block in by_gains for name in block.weights), *remaining]
            if every_block or target is None or norm_of(names) > target:
                self._norms |= {block: norm_of(block.weights) for block in by_gains}
                self._remaining_norm = norm_of(remaining)

    def _scale_inexact_(self, target: float) -> None:
        """Make the blocks flat enough whose symmetry changes the function: these come first."""
        for _ in range(SYMMETRY_STEPS.most_looks):
            logs = self._logs_to(target, exact=False)
            logs = {block: log for block, log in logs.items() if log > math.log1p(self._tolerance)}
            if not logs:
                break
            self._multiply_(logs)
            self._measure(target, every_block=True)

    def _scale_exact_(self, target: float) -> tuple[float, bool]:
        """Scale the other blocks; return the output's change, and if it bounded the factors."""
        free = self._free
        total_change = 0.0
        bounded = False
        logs = self._logs_to(target, exact=True)
        for _ in range(SYMMETRY_STEPS.most_looks):
            norm_before = self._norms[free]
            logs, change, bounded = self._scale_unmoved_(logs)
            total_change += change
            with self._curvature() as norm_of:
                self._norms |= {block: norm_of(block.weights) for block, log in logs.items() if log}
            norm = self._norms[free]
            if bounded or abs(norm / target - 1) <= self._tolerance:
                break
            # Adam's eps, where gradients are tiny, bends the law: go on with the slope that was
            # measured.
            if logs[free] and 0 < norm < math.inf:
                slope = math.log(norm_before / norm) / (logs[free] * free.power)
                self._law = min(max(slope, self._law / 2), 2 * self._law)
            logs = {free: self._log(free, norm, target)}
        return total_change, bounded

    def _logs_to(self, target: float, exact: bool) -> dict[SymmetryBlock, float]:
        return {
            block: self._log(block, norm, target)
            for block, norm in self._norms.items()
            if block.exact is exact
        }

    def _log(self, block: SymmetryBlock, norm: float, target: float) -> float:
        """The log factor to the target; others than the scale-free weights may stay flatter."""
        if not (0 < norm < math.inf and target > 0):
            return 0.0
        lowest = {self._free: target, **dict.fromkeys(self._readout, KAPPA.readout * target)}
        goal = min(max(norm, lowest.get(block, 0.0)), target)
        log = math.log(norm / goal) / (self._law * block.power)
        return min(max(log, -SYMMETRY_STEPS.largest_log), SYMMETRY_STEPS.largest_log)

    def _scale_unmoved_(
        self, logs: dict[SymmetryBlock, float]
    ) -> tuple[dict[SymmetryBlock, float], float, bool]:
        """Scale as far as the output stays; return the logs, its change, and if it bounded them."""
        start = self._factory.functional()
        fraction = 1.0
        low = 0.0
        high = 1.0
        best = dict.fromkeys(logs, 0.0)
        best_change = 0.0
        with start.settings():
            for _ in range(SYMMETRY_STEPS.bisections):
                part = {block: fraction * log for block, log in logs.items()}
                change = output_change(start, _logs_of_parameters(part))
                if change <= SYMMETRY_TOLERANCE.unmoved:
                    best = part
                    best_change = change
                    low = fraction
                else:
                    high = fraction
                if low == 1.0:
                    break
                fraction = (low + high) / 2
        self._multiply_(best)
        return best, best_change, low < 1.0

    @torch.no_grad()
    def _multiply_(self, logs: Mapping[SymmetryBlock, float]) -> None:
        for name, log in _logs_of_parameters(logs).items():
            self._parameters[name].mul_(math.exp(log))
        self._logs |= {block: self._logs.get(block, 0.0) + log for block, log in logs.items()}

    def _reason_missed(self, target: float, bounded: bool) -> str:
        free = self._norms[self._free]
        if not abs(free / target - 1) <= self._tolerance:
            reason = "it does not answer to the scale"
            if bounded:
                reason = "a normalization's eps bounds the scale"
            return f"the scale-free weights have ‖H‖ = {free:.3g}, not {target:.3g}: {reason}"
        norms = {block.weights: norm for block, norm in self._norms.items()}
        norms[self._blocks.remaining] = self._remaining_norm
        limit = target * (1 + self._tolerance)
        sharp = "; ".join(
            f"{', '.join(map(layer_name, names[:2]))} has ‖H‖ = {norm:.3g}"
            for names, norm in norms.items()
            if norm > limit
        )
        return f"{sharp}, above {target:.3g}, and no symmetry lowers it" if sharp else ""

    @contextlib.contextmanager
    def _curvature(self) -> Iterator[NormOf]:
        """The norm that the optimizer sees of weights together: ‖H‖, or ‖P^-½ H P^-½‖ for Adam.

        Several fits of one call draw the same weights: what was measured there is not measured
        again.
        """
        digest = self._factory.digest()
        with contextlib.ExitStack() as stack:
            engine = functools.cache(lambda: self._measuring(stack))

            def norm_of(weights: Sequence[str]) -> float:
                key = ("norm", digest, self._adam, *weights)
                return self._factory.values.once(key, lambda: engine()(weights)) if weights else 0.0

            yield norm_of

    def _measuring(self, stack: contextlib.ExitStack) -> NormOf:
        problem = self._factory.functional(measured=True)
        curvature = self._factory.curvature
        settings = lanczos_settings(problem, self._tolerance / 5)
        stack.enter_context(problem.settings())
        evaluations, _ = evaluate_everywhere(problem)
        engine = build_engine(evaluations, curvature, settings, network_estimator(evaluations))
        if self._adam is None:
            return lambda weights: finite_or_inf(engine.extremes(weights).norm.value)
        preconditioner = adam_preconditioner(gradient_moments(evaluations), self._adam.eps)
        pieces = operators.split(
            preconditioner.scale, [leaf.shape for leaf in problem.leaves.values()]
        )
        scales = dict(zip(problem.leaves, pieces, strict=True))

        def norm_of(weights: Sequence[str]) -> float:
            scale = operators.join([scales[name] for name in weights])
            operator = ScaledCurvature(engine.operator(weights), scale)
            norm = spectral_norm(operator, settings, semidefinite=curvature == "gauss-newton")
            return finite_or_inf(norm.value)

        return norm_of


def _logs_of_parameters(logs: Mapping[SymmetryBlock, float]) -> dict[str, float]:
    by_name: dict[str, float] = {}
    for block, log in logs.items():
        for name, power in block.exponents.items():
            by_name[name] = by_name.get(name, 0.0) + log * power
    return by_name
