"""Scaling symmetries: which parameters can be multiplied without changing what the network computes.

Multiply every parameter p by c^x(p). Each tensor of the forward is then multiplied by c^d, and its
degree d is a linear function of the exponents x: a product adds the degrees of its factors, a ReLU
keeps the degree of its input, a normalization returns the degree of its gain. A sum needs terms of
one degree, a tanh needs degree 0, and so does the output. The exponents that change nothing are the
null space of these equations.

It holds weights that a normalization follows (van Laarhoven 2017, arXiv 1706.05350), everything
that writes into the residual stream of a pre-norm network, neighbours in a chain of ReLU layers,
the values against the output projection of an attention, and the gains of a normalization against
the weight that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessinit.problem.functional import FunctionalProblem

# A degree: the coefficients of the exponents x, by parameter. A tensor without one is a constant of
# degree 0.
Degree = Mapping[str, float]
Exponents = dict[str, float]
Arguments = Mapping[str, Any]
Names = tuple[str, ...]

# A constant up to this part of the tensor that it is added to is the eps of a normalization.
_EPS = 1e-2


class Symmetries:
    """The null space of one network; `gains` are the vectors that multiply, as those of normalizations.

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
        space = right[int((values > 1e-9).sum()) :].T
        self._space = np.where(np.abs(space) < 1e-9, 0.0, space)

    def solve(self, wanted: Mapping[str, float]) -> Exponents | None:
        """The smallest exponents with these values; None where no symmetry has them."""
        rows = self._space[[self._row[name] for name in wanted]]
        values = np.array(list(wanted.values()))
        combination = np.linalg.lstsq(rows, values, rcond=1e-9)[0]
        if not np.allclose(rows @ combination, values, atol=1e-6):
            return None
        found = self._space @ combination
        return {
            name: float(found[row]) for name, row in self._row.items() if abs(found[row]) > 1e-6
        }

    def groups(self, names: Sequence[str], fixed: Iterable[str]) -> list[Names]:
        """Groups of `names`, in this order, that one factor can scale while all others and `fixed` ones stay.

        With all gains fixed, a weight that a normalization follows is a group of its own; all
        weights that write into the same residual stream are one group.
        """
        found: list[Names] = []
        for apart in (False, True):
            for name in names:
                taken = {one for group in found for one in group}
                if name not in taken:
                    still = dict.fromkeys([*fixed, *(taken if apart else ())], 0.0)
                    group = self._group_of(name, names, still, apart)
                    found += [group] if group else []
        return found

    def scale_free(
        self, weights: Sequence[str], among: Collection[str] | None = None
    ) -> Exponents | None:
        """Scale all of `weights` (`among` these) whose size the output does not show; None without any."""
        if not self.divides:
            return None
        groups = self.groups(weights, self.gains)
        free = [name for group in groups for name in group if among is None or name in among]
        still = dict.fromkeys([*self.gains, *(name for name in weights if name not in free)], 0.0)
        return self.solve(still | dict.fromkeys(free, 1.0)) if free else None

    def against_gains(self, weights: Sequence[str], free: Collection[str]) -> list[Exponents]:
        """Enlarge weights by smaller gains of the normalizations that they read; `free` weights stay."""
        found = []
        for group in self.groups(self.gains, free):
            still = dict.fromkeys([*free, *(name for name in self.gains if name not in group)], 0.0)
            exponents = self.solve(still | dict.fromkeys(group, -1.0)) or {}
            moved = [exponents[name] for name in weights if name in exponents]
            found += [exponents] if moved and min(moved) > 0 else []
        return found

    def _group_of(
        self, name: str, names: Sequence[str], wanted: Exponents, apart: bool
    ) -> Names | None:
        """With `apart`, a weight that would shrink stays: a bias ties two weights before a normalization."""
        wanted[name] = 1.0
        while (exponents := self.solve(wanted)) is not None:
            shares = {one: exponents.get(one, 0.0) for one in names}
            if (min(shares.values()) < -1e-6 and not apart) or max(shares.values()) > 1 + 1e-6:
                return None
            between = [
                one for one, share in shares.items() if min(abs(share), abs(share - 1)) > 1e-6
            ]
            if not between:
                return tuple(one for one, share in shares.items() if share > 0.5)
            # Two weights in a row share a factor; the second one, which writes into the stream,
            # takes it all.
            wanted[between[0]] = 0.0
        return None


def find_symmetries(
    problem: FunctionalProblem, fixed: Iterable[str] = (), *, nearly: bool = False
) -> Symmetries:
    """The scaling symmetries of the forward that do not scale `fixed` parameters.

    With `nearly`, GELU and its like count as linear, as they are for small inputs. Costs one
    forward of the first batch; call it within the problem's settings.
    """
    weights = {**problem.leaves, **problem.constants}
    with _Degrees(weights, _RULES | _NEARLY_LINEAR if nearly else _RULES) as mode:
        output = problem.output(problem.batches[0], weights=weights)
    mode.require_zero(mode.of(output))
    return Symmetries(
        weights, [*mode.equations, *({name: 1.0} for name in fixed)], mode.gains, mode.divides
    )


def output_change(problem: FunctionalProblem, *logs: Mapping[str, float]) -> float:
    """The largest relative change of the output (rms) where each parameter is multiplied by e^log.

    Costs a forward of the first batch for each of `logs`, and one more.
    """
    weights = {**problem.leaves, **problem.constants}
    batch = problem.batches[0]
    with torch.no_grad():
        output = problem.output(batch, weights=weights)
        largest = 0.0
        for each in logs:
            scaled = {name: one * math.exp(each.get(name, 0.0)) for name, one in weights.items()}
            change = float((problem.output(batch, weights=scaled) - output).norm() / output.norm())
            largest = max(largest, change if math.isfinite(change) else math.inf)
    return largest


def _sum(first: Degree, second: Degree, factor: float = 1.0) -> Degree:
    total = dict(first)
    for name, coefficient in second.items():
        total[name] = total.get(name, 0.0) + factor * coefficient
    return {name: coefficient for name, coefficient in total.items() if coefficient}


class _Degrees(TorchDispatchMode):
    """Follows the degree of every tensor of a forward, and collects what must be 0 for a symmetry.

    An operation that is not known here needs degree 0, so that the space found may be too small,
    never too large.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> None:
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
        return self._degrees[id(value)][1] if id(value) in self._degrees else {}

    def note_gain(self, value: Any) -> None:
        """Note a parameter with one number for each channel, here a factor."""
        if isinstance(value, Tensor) and max(value.shape, default=1) == value.numel():
            self.gains.update(name for name in self.of(value) if len(self.of(value)) == 1)

    def require_zero(self, degree: Degree) -> None:
        if degree:
            self.equations.append(degree)

    def require_equal(self, degrees: Sequence[Degree]) -> Degree:
        for degree in degrees[1:]:
            self.require_zero(_sum(degree, degrees[0], -1.0))
        return degrees[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        if any(self.of(one) for one in tensors):
            operation = func._schema.name.removeprefix("aten::")
            rule = self._rules.get(operation) or self._rules.get(operation.rstrip("_"), _needs_zero)
            degree = rule(self, given, [self.of(one) for one in tensors])
            for one in tree_leaves(result):
                if isinstance(one, Tensor):
                    self._degrees[id(one)] = (one, degree if one.is_floating_point() else {})
        return result


Rule = Callable[[_Degrees, Arguments, list[Degree]], Degree]


def _needs_zero(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    for degree in degrees:
        mode.require_zero(degree)
    return {}


def _keeps(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    return degrees[0]


def _is_free(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    """A sign, or a new tensor: the same for every positive factor."""
    return {}


def _comparison(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    """The same for every positive factor between tensors of one degree, or with 0."""
    if len(degrees) > 1:
        mode.require_equal(degrees)
    elif given["other"] != 0:
        _needs_zero(mode, given, degrees)
    return {}


def _power(exponent: float) -> Rule:
    def rule(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
        mode.divides |= exponent < 0
        return {name: exponent * coefficient for name, coefficient in degrees[0].items()}

    return rule


def _any_power(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    exponent = given.get("exponent")
    rule = _power(exponent) if isinstance(exponent, int | float) else _needs_zero
    return rule(mode, given, degrees)


def _product(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    total: Degree = {}
    for one in tree_leaves(given):
        mode.note_gain(one)
        total = _sum(total, mode.of(one))
    return total


def _quotient(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    if given.get("rounding_mode") is not None:
        return _needs_zero(mode, given, degrees)
    mode.divides |= bool(mode.of(given["other"]))
    return _sum(mode.of(given["self"]), mode.of(given["other"]), -1.0)


def _sum_of_terms(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    """Terms of one degree, or a tensor and a number, which may be small enough to be an eps."""
    if len(degrees) > 1:
        return mode.require_equal(degrees)
    tensor = given["self"]
    number = given["other"]
    if isinstance(tensor, Tensor) and abs(number) <= _EPS * float(tensor.detach().abs().mean()):
        return degrees[0]
    return _needs_zero(mode, given, degrees)


def _convolution(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    product = _sum(mode.of(given["input"]), mode.of(given["weight"]))
    return (
        product if given["bias"] is None else mode.require_equal([product, mode.of(given["bias"])])
    )


def _normalization(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    """The result has the degree of the gain; fixed statistics, or a large eps, need an input of degree 0."""
    eps = given.get("eps") or 0.0
    if given.get("training") is False or eps > _EPS * float(given["input"].detach().var()):
        mode.require_zero(mode.of(given["input"]))
    mode.divides = True
    mode.note_gain(given.get("weight"))
    gain = mode.of(given.get("weight"))
    bias = given.get("bias")
    return gain if bias is None else mode.require_equal([gain, mode.of(bias)])


def _attention(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    mode.require_zero(_sum(mode.of(given["query"]), mode.of(given["key"])))
    return mode.of(given["value"])


def _filled(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    value = float(given["value"])
    scales = value == 0 or np.isinf(value)
    return mode.of(given["self"]) if scales else _needs_zero(mode, given, degrees)


def _clamped(mode: _Degrees, given: Arguments, degrees: list[Degree]) -> Degree:
    """At 0, as a ReLU; or at a lower bound that is an eps."""
    low, high = (given.get(name) for name in ("min", "max"))
    is_eps = isinstance(low, int | float) and 0 < low <= _EPS * float(
        given["self"].detach().abs().mean()
    )
    scales = high in (None, 0) and (low in (None, 0) or is_eps)
    return degrees[0] if scales else _needs_zero(mode, given, degrees)


def _table(*rules: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rules for name in names.split()}


_RULES = _table(
    (
        _keeps,
        "view _unsafe_view _reshape_alias t transpose permute expand squeeze unsqueeze slice select",
    ),
    (
        _keeps,
        "split split_with_sizes unbind clone alias detach _to_copy as_strided index index_select",
    ),
    (
        _keeps,
        "gather flip roll constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d repeat",
    ),
    (
        _keeps,
        "relu leaky_relu neg abs mean sum cumsum amax amin tril triu diagonal native_dropout embedding",
    ),
    (
        _keeps,
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d",
    ),
    (
        _keeps,
        "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d pixel_shuffle",
    ),
    (_keeps, "linalg_vector_norm norm std im2col col2im unfold"),
    (_comparison, "gt lt ge le eq ne"),
    (_is_free, "sign argmax argmin isnan isinf zeros_like ones_like empty_like full_like"),
    (_is_free, "new_zeros new_ones new_empty new_full rand_like randn_like bernoulli"),
    (_product, "mul mm bmm mv dot"),
    (_quotient, "div"),
    (_power(0.5), "sqrt"),
    (_power(-0.5), "rsqrt"),
    (_power(-1.0), "reciprocal"),
    (_power(2.0), "square var"),
    (_any_power, "pow"),
    (_sum_of_terms, "add sub rsub"),
    (lambda mode, given, degrees: mode.require_equal(degrees), "cat stack copy"),
    (
        lambda mode, _, each: mode.require_equal([_sum(each[1], each[2]), each[0]]),
        "addmm baddbmm addmv",
    ),
    (_convolution, "convolution cudnn_convolution"),
    (
        _normalization,
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit",
    ),
    (
        _normalization,
        "cudnn_batch_norm _batch_norm_with_update _batch_norm_no_update _fused_rms_norm",
    ),
    (_attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"),
    (_attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (
        lambda mode, given, _: mode.require_equal(
            [mode.of(given["self"]), mode.of(given["other"])]
        ),
        "where",
    ),
    (_filled, "masked_fill"),
    (_clamped, "clamp clamp_min clamp_max"),
)
_NEARLY_LINEAR = _table((_keeps, "gelu silu mish elu tanh hardtanh hardswish"))
