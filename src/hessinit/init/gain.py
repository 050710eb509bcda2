"""The gain of an activation, 1/√E f(z)² for z ~ N(0, 1), by quadrature."""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, choose
from hessinit.problem.checks import check_switches
from hessinit.problem.preserve import uninterrupted, untouched_random_state

Function = Callable[[Tensor], Tensor]
Activation = Function | nn.Module | type[nn.Module] | str

_CPU = torch.device("cpu")
_NAMES = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu linear logsigmoid mish "
    "relu relu6 rrelu selu sigmoid silu softplus softshrink softsign tanh tanhshrink"
)
_SYNONYMS = {"swish": "silu", "leakyrelu": "leaky_relu"}


@uninterrupted
def gain(activation: Activation, *, backward: bool = False) -> float:
    """The factor that keeps the signal's size through `activation`: 1/√E f(z)² for z ~ N(0, 1).

    With `backward`, 1/√E f'(z)²: the gradient's size. The activation is any elementwise function: a
    module, its class, a function of tensors or a name; a PReLU counts with its present slopes. By
    quadrature in fp64, right to 1e-9 also across kinks and jumps; takes about a millisecond.

    torch.nn.init.calculate_gain has 5/3 for tanh, 1 for sigmoid, 3/4 for SELU, and nothing for
    GELU:

    >>> [round(gain(name), 4) for name in ("relu", "tanh", "sigmoid", "selu", "gelu")]
    [1.4142, 1.5925, 1.8462, 1.0, 1.5335]
    >>> round(gain(nn.LeakyReLU(0.2)), 6) == round(math.sqrt(2 / 1.04), 6)
    True
    >>> round(gain(torch.tanh, backward=True), 4)
    1.4674
    """
    check_switches(backward=backward)
    mean_square = moment(activation, slope=backward)
    if mean_square == 0:
        raise ProblemError(
            f"{_name_of(activation)} has no gain: {_SYMBOLS[backward]} is 0 for z ~ N(0, 1), and "
            "no weight makes up for it. Pass an activation that lets something through."
        )
    return 1 / math.sqrt(mean_square)


_SYMBOLS = {False: "E f(z)²", True: "E f'(z)²"}


def moment(activation: Activation, *, slope: bool = False) -> float:
    """E f(z)² or, with `slope`, E f'(z)², for z ~ N(0, 1): the factor on a signal's mean square.

    Refuses what is random or not elementwise. A module is copied; it and the generators stay as
    they were.
    """
    function = _resolve(activation)
    name = _name_of(function)
    if isinstance(function, nn.Module):
        # None where one was set on the instance.
        forward = getattr(function.forward, "__func__", None)
        if forward is nn.Identity.forward:
            return 1.0
        if forward is nn.PReLU.forward:
            return _moment_of_prelu(cast(nn.PReLU, function))
    # `_CPU` is the default device for tensors that `function` makes.
    with torch.inference_mode(False), torch.no_grad(), untouched_random_state(_CPU), _CPU:
        evaluate = _evaluation(function, name)
        _refuse_unless_elementwise(evaluate, name)
        try:
            return normal_mean_square(_slope_of(evaluate) if slope else evaluate)
        except ArithmeticError as error:
            raise ProblemError(
                f"{_SYMBOLS[slope]} of {name}, z ~ N(0, 1), cannot be found: {error}. Pass an "
                "activation that is finite everywhere and grows no faster than exp(2z)."
            ) from error


def _moment_of_prelu(module: nn.PReLU) -> float:
    """In closed form: the mean over the channels of its input, which have slopes of their own.

    The same for values and slopes, as it is linear on either side of 0.
    """
    slopes = module.weight.detach()
    mean_square = math.nan if slopes.is_meta else float(slopes.cpu().double().square().mean())
    if not math.isfinite(mean_square):
        raise ProblemError(
            f"{_name_of(module)} has no gain: its slopes are not finite. Give them values first."
        )
    return (1 + mean_square) / 2


def _resolve(activation: Activation) -> Function | nn.Module:
    if isinstance(activation, str):
        if activation in ("linear", "identity"):
            return nn.Identity()
        if activation.lower() == "prelu":
            raise ProblemError(
                "activation='prelu' has slopes that are learned; pass the nn.PReLU itself."
            )
        choose("activation", activation, _NAMES.split(), _SYNONYMS)
        return getattr(nn.functional, activation)
    if isinstance(activation, type) and issubclass(activation, nn.Module):
        with untouched_random_state(_CPU), _CPU:
            try:
                return activation().eval()
            except TypeError as error:
                raise ProblemError(
                    f"{activation.__name__} cannot be built without arguments ({error}). Pass an "
                    "instance."
                ) from error
    if isinstance(activation, type) or not callable(activation):
        raise ProblemError(
            f"activation={activation!r} is no activation; pass a module, a function of tensors, or "
            "a name such as 'relu'."
        )
    return activation


# --- A user's activation as a function of fp64 vectors, checked to be elementwise


def _slope_of(function: Function) -> Function:
    def slope(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.clone().requires_grad_()
            value = function(z)
            if not value.requires_grad:  # as of z > 0
                return torch.zeros_like(z)
            (slopes,) = torch.autograd.grad(
                value.sum(), z, allow_unused=True, materialize_grads=True
            )
        return slopes

    return slope


def _name_of(activation: object) -> str:
    if isinstance(activation, nn.Module):
        text = " ".join(repr(activation).split())
        return text if len(text) <= 60 else type(activation).__name__
    return str(getattr(activation, "__name__", None) or repr(activation))


def _evaluation(function: Function | nn.Module, name: str) -> Function:
    """`function` of a vector; refuses a result that is not a real tensor of the same shape."""
    forward = functools.cache(lambda: _forward_of_copy(function))

    def evaluate(z: Tensor) -> Tensor:
        try:
            result = forward()(z.clone())  # it may write in place
        except Exception as error:
            raise ProblemError(
                f"{name} could not be evaluated on an fp64 vector ({type(error).__name__}: "
                f"{error}). A gain belongs to a function of one number; pass that function alone."
            ) from error
        if not isinstance(result, Tensor) or result.shape != z.shape or result.is_complex():
            raise _not_elementwise(name, "it does not give one real number for each that it gets")
        return result.double()

    return evaluate


def _forward_of_copy(module: Function | nn.Module) -> Callable[[Tensor], Any]:
    """The function, or the forward of a copy in fp64, without hooks, which may hold anything."""
    if not isinstance(module, nn.Module):
        return module
    memo: Any = {
        id(value): OrderedDict()
        for part in module.modules()
        for name, value in vars(part).items()
        if name.endswith("_hooks")
    }
    return copy.deepcopy(module, memo).to(device=_CPU, dtype=torch.float64).forward


def _refuse_unless_elementwise(evaluate: Function, name: str) -> None:
    z = torch.linspace(-3, 3.1, 64, dtype=torch.float64)
    value = evaluate(z)
    # Room for a function that computes in fp32.
    near = 1e-5 * float(value.nan_to_num(0, 0, 0).abs().max())

    def same(first: Tensor, second: Tensor) -> bool:
        return torch.allclose(first, second, rtol=0, atol=near, equal_nan=True)

    if not same(evaluate(z), value):
        raise ProblemError(
            f"{name} is random: two calls differ, so no single gain describes it. Call .eval() on "
            "it, or pass the activation without its noise."
        )
    # Shuffled, and some left out, the smallest and the largest among them: whatever looks at
    # neighbours, positions, sums or extremes gives something else.
    chosen = (torch.arange(64) * 27 % 64)[5:40]
    if not same(evaluate(z[chosen]), value[chosen]):
        raise _not_elementwise(name, "its value at one unit depends on the other units")


def _not_elementwise(name: str, reason: str) -> ProblemError:
    return ProblemError(
        f"{name} is not elementwise: {reason}. A gain belongs to a function of one number; pass "
        "the elementwise function alone, and treat the rest as a layer."
    )


@dataclass(frozen=True)
class _Quadrature:
    """How an integral over a normal density is split.

    At `reach` the density has fallen to 1e-32 of its peak. A panel of `width` has the usual kinks
    (0, ±1/2, ±1, ±3, 6) on its edges, where they do no harm. A panel with a larger error than
    `tolerance` of the whole is split in `split`, up to `levels` times: a jump inside a panel of
    5e-13 no longer matters. `accepted` is the error, in parts of the whole, of all panels together
    that could be split no further.
    """

    reach: float = 12.0
    width: float = 0.5
    split: int = 16
    levels: int = 11
    most_panels: int = 20_000
    tolerance: float = 1e-12
    accepted: float = 1e-7


_QUADRATURE = _Quadrature()


def normal_mean_square(function: Callable[[Tensor], Tensor]) -> float:
    """E function(z)² for z ~ N(0, 1), where `function` maps fp64 vectors elementwise.

    Right to 1e-9, also across kinks and jumps; to 1e-7 for a function that computes in fp32. Costs
    one call on 1248 points, and about ten more for a kink that lies in an odd place. Raises
    `ArithmeticError` when there is no finite answer, or none can be found.
    """
    rule = _QUADRATURE
    starts = torch.arange(-rule.reach, rule.reach, rule.width, dtype=torch.float64, device="cpu")
    width = rule.width
    settled = 0.0
    for level in range(rule.levels):
        coarse, fine = _integrals(function, starts, width)
        total = settled + float(fine.sum())
        if level == 0 and float(fine[0] + fine[-1]) > 1e-9 * total:
            raise ArithmeticError(
                f"it grows so fast that values beyond |z| = {rule.reach:g} rule the mean"
            )
        error = (fine - coarse).abs()
        unsettled = error > rule.tolerance * total
        too_many = rule.split * int(unsettled.sum()) > rule.most_panels
        if level == rule.levels - 1 or too_many or not unsettled.any():
            break
        settled += float(fine[~unsettled].sum())
        width /= rule.split
        steps = width * torch.arange(rule.split, device="cpu")
        starts = (starts[unsettled, None] + steps).flatten()
    if float(error[unsettled].sum()) > rule.accepted * total:
        raise ArithmeticError(
            "its integral does not settle (a pole, too many jumps, half precision inside?)"
        )
    return total


# Nodes in (0, 1) of a coarse and a finer rule; a column of weights for each, zero at the other's.
_COARSE = numpy.polynomial.legendre.leggauss(10)
_FINE = numpy.polynomial.legendre.leggauss(16)
_NODES = torch.from_numpy((numpy.concatenate([_COARSE[0], _FINE[0]]) + 1) / 2)
_WEIGHTS = torch.block_diag(
    *(torch.from_numpy(weights / 2).unsqueeze(1) for _, weights in (_COARSE, _FINE))
)


def _integrals(
    function: Callable[[Tensor], Tensor], starts: Tensor, width: float
) -> tuple[Tensor, Tensor]:
    """The integrals over the panels of this width, by the coarse and by the finer rule."""
    points = (starts[:, None] + width * _NODES).flatten()
    # Weighted before it is squared: exp(z) and its like overflow later.
    amplitude = function(points) * torch.exp(points.square() / -4)
    density = amplitude.square() / math.sqrt(2 * math.pi)
    if not density.isfinite().all():
        poles = points[~density.isfinite()]
        raise ArithmeticError(f"it is not finite at z = {float(poles[poles.abs().argmin()]):.3g}")
    coarse, fine = (width * density.view(-1, 26) @ _WEIGHTS).unbind(1)
    return coarse, fine
