"""Dropout written by hand: a signal times a mask that is drawn anew every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessinit.schemes.leaves import leaves_of
from hessinit.schemes.operations import CASTS, REARRANGING
from hessinit.schemes.record import Call, Noise, Record, Signal, Unknown

_ABOVE, _BELOW = ("gt", "ge", "greater"), ("lt", "le", "less")


def drawn(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...] | None) -> Noise:
    """What a call that draws gives; of `bernoulli` and its like, the share that is kept."""
    first = args[0] if args else None
    shaped = isinstance(first, Unknown) and first.name.endswith(("_like", "shape", "size"))
    like = name.endswith("_like") or shaped
    keep = None
    if name == "bernoulli":
        keep = _number(kwargs.get("p", args[1] if len(args) > 1 else first))
    return Noise(keep, uniform=name in ("rand", "rand_like"), like=like, shape=shape)


def made_of_noise(name: str, args: tuple[Any, ...], shape: tuple[int, ...] | None) -> Noise:
    """What a call on noise and constants gives: a mask stays one when it is moved, scaled or compared."""
    noise = next((leaf for leaf in leaves_of(args) if isinstance(leaf, Noise)), Noise())
    noise = replace(noise, shape=shape, like=noise.like and (name in CASTS or name not in REARRANGING))
    other = _number(args[1]) if len(args) > 1 and isinstance(args[0], Noise) else None
    plain = replace(noise, keep=None, scale=1.0, uniform=False)
    if name in REARRANGING:
        return noise
    if noise.uniform and other is not None and name in (*_ABOVE, *_BELOW) and 0 <= other <= 1:
        return replace(plain, keep=1 - other if name in _ABOVE else other)
    if noise.keep is not None and other and name in ("mul", "div"):
        return replace(noise, scale=noise.scale * other if name == "mul" else noise.scale / other)
    if name in ("logical_not", "invert", "bitwise_not") and noise.keep is not None:
        return replace(noise, keep=1 - noise.keep)
    return plain


def mask_in(name: str, args: tuple[Any, ...]) -> Noise | None:
    """The random mask that a call lays on a signal, 0 where the signal is lost, if its share is known."""
    noise = next((leaf for leaf in args if isinstance(leaf, Noise)), None)
    if noise is None or noise.keep is None:
        return None
    if name == "mul":
        return noise
    if len(args) < 3:
        return None
    if name == "where" and args[0] is noise and _number(args[2]) == 0:
        return replace(noise, scale=1.0)
    cleared = name == "masked_fill" and _number(args[2]) == 0
    if cleared or (name == "where" and args[0] is noise and _number(args[1]) == 0):
        return replace(noise, keep=1 - noise.keep, scale=1.0)
    return None


def multiply_by_mask(record: Record, source: int, noise: Noise, shape: tuple[int, ...] | None) -> Signal:
    """The steps of a signal times a mask whose share is known.

    One number for each unit is a dropout, which scales what it keeps by 1/keep, and a scale to undo that. One
    for each example is a stochastic depth: only its mean counts.
    """
    assert noise.keep is not None
    known = record[source].shape
    whole = noise.like if noise.shape is None or known is None else noise.shape == known
    if whole and 0 < noise.keep < 1:
        words = f"dropout {1 - noise.keep:.3g}"
        source = record.add(words, "dropout", (source,), keep=noise.keep, runs=True, shape=shape).index
    call = Call(torch.mul, (Signal(source), noise.keep * noise.scale))
    return record.add("mul", "elementwise", (source,), call=call, shape=shape)


def _number(given: Any) -> float | None:
    if isinstance(given, Unknown):
        return given.fill
    if isinstance(given, Tensor) and given.numel() and bool((given == given.flatten()[0]).all()):
        return float(given.flatten()[0])
    return float(given) if isinstance(given, (int, float)) else None
