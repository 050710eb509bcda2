"""Constants among the arguments of a call: which are one number everywhere, which are masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessinit.schemes.operations import REARRANGING, SCALINGS
from hessinit.schemes.record import Derived, Unknown

_FILLS = {"zeros": 0.0, "ones": 1.0}


def fill_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The number that the result of a call holds everywhere, whatever its shape; None if that is not known.

    >>> fill_of("zeros_like", (), {}), fill_of("new_full", (None, (2, 3), 7), {}), fill_of("arange", (3,), {})
    (0.0, 7.0, None)
    """
    plain = name.removeprefix("new_").removesuffix("_like")
    if plain in _FILLS:
        return _FILLS[plain]
    given: Any = None
    if plain == "full":
        given = kwargs.get("fill_value", args[-1] if args else None)
    elif name == "new_tensor":
        given = args[-1]
    elif name in REARRANGING and args and isinstance(args[0], Unknown):
        given = args[0].fill
    return float(given) if isinstance(given, (bool, int, float)) else None


def as_number(leaf: Any, name: str) -> Any:
    """A constant that is the same number everywhere as that number; anything else as it is.

    A signal times zeros stays: it is masked, as the first step of a recurrence, and not gone for good.
    """
    if isinstance(leaf, Unknown) and leaf.fill is not None:
        leaf = torch.full((2,), leaf.fill)
    if not isinstance(leaf, Tensor) or leaf.numel() < 2 or leaf.dtype is torch.bool or leaf.is_meta:
        return leaf
    first = leaf.flatten()[0]
    same = bool((leaf == first).all()) and (name not in SCALINGS or bool(first != 0))
    return first.clone() if same else leaf


def is_scalar(other: Derived | Tensor) -> bool:
    value = other.value if isinstance(other, Derived) else other
    return value is not None and value.numel() == 1


def is_mask(other: Derived | Tensor) -> bool:
    """A constant of zeros and one other number: what it lets through keeps its size."""
    if isinstance(other, Derived) or other.numel() < 2:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return True
    rest = other[other != 0]
    return rest.numel() < other.numel() and bool((rest == rest[:1]).all())


def one_number(other: Derived | Tensor, name: str) -> Tensor:
    """What stands for a tensor of gains or slopes: their root mean square, right for second moments."""
    value = other.value if isinstance(other, Derived) else other
    assert value is not None
    value = value.detach().cpu()
    if value.numel() > 1:
        value = value.double()
        value = value.reciprocal().square().mean().rsqrt() if name == "div" else value.square().mean().sqrt()
    value = value.double() if value.is_floating_point() else value
    return value.reshape(1) if name == "prelu" else value.reshape(())
