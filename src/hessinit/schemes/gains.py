"""The gain of an activation: how much a weight must grow to make up for what the activation takes away."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from hessinit.errors import ProblemError, choose
from hessinit.problem.preserve import untouched_random_state
from hessinit.schemes.elementwise import CPU, Function, elementwise, name_of, slope_of
from hessinit.schemes.quadrature import normal_mean_square

Activation = Function | nn.Module | type[nn.Module] | str

NAMES = (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "linear",
    "logsigmoid", "mish", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softshrink",
    "softsign", "tanh", "tanhshrink",
)  # fmt: skip
_SYNONYMS = {"swish": "silu", "hard_swish": "hardswish", "lrelu": "leaky_relu", "leakyrelu": "leaky_relu"}
# torch.nn.init.calculate_gain takes these for "linear".
_LINEAR = ("linear", "identity", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))


def gain(activation: Activation, *, backward: bool = False) -> float:
    """The factor that keeps the signal's size through `activation`: 1/√E f(z)² for z ~ N(0, 1).

    With `backward`, 1/√E f'(z)²: the gradient's size. The activation is any elementwise function: a module,
    its class, a function of tensors or a name; a PReLU counts with its present slopes. By quadrature in fp64,
    right to 1e-9 also across kinks and jumps; takes about a millisecond, and nothing the second time for the
    activations of torch.

    torch.nn.init.calculate_gain has 5/3 for tanh, 1 for sigmoid, 3/4 for SELU, and nothing for GELU:

    >>> [round(gain(name), 4) for name in ("relu", "tanh", "sigmoid", "selu", "gelu")]
    [1.4142, 1.5925, 1.8462, 1.0, 1.5335]
    >>> round(gain(nn.LeakyReLU(0.2)), 6) == round(math.sqrt(2 / 1.04), 6)
    True
    >>> round(gain(torch.tanh, backward=True), 4)
    1.4674
    """
    moment = _moment(activation, slope=backward)
    if moment == 0:
        what = "f'(z)²" if backward else "f(z)²"
        raise ProblemError(
            f"{name_of(activation)} has no gain: E {what} is 0 for z ~ N(0, 1), and no weight makes up for "
            "it. Pass an activation that lets something through."
        )
    return 1 / math.sqrt(moment)


def second_moment(function: Activation) -> float:
    """E f(z)² for z ~ N(0, 1): what is left of the signal's mean square after `function`.

    >>> second_moment(nn.Identity()), round(second_moment(nn.ReLU()), 9)
    (1.0, 0.5)
    """
    return _moment(function, slope=False)


def slope_moment(function: Activation) -> float:
    """E f'(z)² for z ~ N(0, 1): what is left of the gradient's mean square before `function`."""
    return _moment(function, slope=True)


def _moment(activation: Activation, *, slope: bool) -> float:
    function = _resolve(activation)
    if isinstance(function, nn.Module):
        forward = getattr(function.forward, "__func__", None)  # none where one was hung on the instance
        if forward is nn.Identity.forward:
            return 1.0
        if forward is nn.PReLU.forward:
            return _prelu_moment(cast(nn.PReLU, function))
    key = _lasting_key(function)
    if key is None:
        return _integrate(function, slope)
    return _integrate_once(_Lasting(key, function), slope)


def _resolve(activation: Activation) -> Function | nn.Module:
    if isinstance(activation, str):
        if activation in _LINEAR:
            return nn.Identity()
        if activation.lower() == "prelu":
            raise ProblemError("activation='prelu' has slopes that are learned; pass the nn.PReLU itself.")
        choose("activation", activation, list(NAMES), _SYNONYMS)
        return getattr(F, activation)
    if isinstance(activation, type) and issubclass(activation, nn.Module):
        with untouched_random_state(CPU), CPU:
            try:
                return activation().eval()
            except TypeError as error:
                raise ProblemError(
                    f"{activation.__name__} cannot be built without arguments ({error}). Pass an instance."
                ) from error
    if isinstance(activation, type) or not callable(activation):
        raise ProblemError(
            f"activation={activation!r} is no activation; pass a module, a function of tensors, "
            "or a name such as 'relu'."
        )
    return activation


def _prelu_moment(module: nn.PReLU) -> float:
    # In closed form, because several slopes go to the channels of its input: the mean over channels. The same
    # for values and slopes, as it is linear on either side of 0.
    if module.weight.is_meta:
        raise ProblemError(f"{name_of(module)} has no gain on the meta device: give its slopes values.")
    moment = (1 + float(module.weight.detach().cpu().double().square().mean())) / 2
    if not math.isfinite(moment):
        raise ProblemError(
            f"{name_of(module)} has no gain: its slopes are not finite. Give them values first."
        )
    return moment


@dataclass(frozen=True)
class _Lasting:
    """A function that always does what it does now, as far as `key` stays the same."""

    key: Hashable
    function: Function | nn.Module = field(compare=False)


def _lasting_key(function: Function | nn.Module) -> Hashable | None:
    """What a function of torch depends on; None for the user's own, which may change behind our back."""
    if not isinstance(function, nn.Module):
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", None) or "torch"
        known = any(getattr(place, name, None) is function for place in (torch, F))
        return function if known and home.split(".")[0] == "torch" else None
    state = chain(function.parameters(), function.buffers(), function.children())
    if not type(function).__module__.startswith("torch.nn.modules.") or next(state, None) is not None:
        return None
    # Its settings, `training` among them, and whatever was hung on it: a `forward` of its own, for one.
    settings = sorted((name, value) for name, value in vars(function).items() if not name.startswith("_"))
    if not all(value is None or isinstance(value, bool | int | float | str) for _, value in settings):
        return None
    return (type(function), type(function).forward, tuple(settings))


@functools.lru_cache(maxsize=256)
def _integrate_once(lasting: _Lasting, slope: bool) -> float:
    return _integrate(lasting.function, slope)


def _integrate(function: Function | nn.Module, slope: bool) -> float:
    with elementwise(function) as evaluate:
        try:
            return normal_mean_square(slope_of(evaluate) if slope else evaluate)
        except ArithmeticError as error:
            what = "f'(z)²" if slope else "f(z)²"
            raise ProblemError(
                f"E {what} of {name_of(function)}, z ~ N(0, 1), cannot be found: {error}. Pass an activation "
                "that is finite everywhere and grows no faster than exp(2z)."
            ) from error
