"""Along which directions a quadratic form is taken: random ones, the loss gradient, or the user's own."""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, choose, did_you_mean
from hessinit.problem.checks import unwrap
from hessinit.problem.layers import Layer, layer_name
from hessinit.problem.problem import Problem
from hessinit.spectra.probes import ProbeKind, ProbeStream

KINDS = ["random", "gradient"]

_MANY_WEIGHTS = 4096


@dataclass(frozen=True)
class Directions:
    """Some directions in one weight, (count, *shape), as they go through the passes, and their true lengths.

    `factors` turn a form along `tensor` into the one along the direction of that length.
    """

    tensor: Tensor
    lengths: tuple[float, ...]
    factors: tuple[float, ...]


def check_directions(directions: Any, draws: int) -> None:
    """A known kind, or a mapping that is not empty."""
    if isinstance(directions, Mapping):
        if not directions:
            raise ProblemError(
                "directions={} names no layer; name at least one, or choose from 'random', 'gradient'."
            )
        return
    if not isinstance(directions, str):
        raise ProblemError(
            f"directions is a {type(directions).__name__}; it must be 'random', 'gradient', or a mapping "
            "from layer names to tensors of their weights' shapes."
        )
    choose("directions", directions, KINDS)
    if directions == "gradient" and draws != 1:
        raise ProblemError(
            f"draws={draws} with directions='gradient': there is one loss gradient. Leave draws out, or "
            "choose directions='random'."
        )


def by_parameter(model: nn.Module, directions: Mapping[Any, Any]) -> dict[str, tuple[str, Tensor]]:
    """The given directions by parameter, each with the key that the user gave it."""
    first: dict[int, str] = {}
    known: dict[str, str] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        known[name] = known[layer_name(name)] = first[id(parameter)]
    found: dict[str, tuple[str, Tensor]] = {}
    for key, given in directions.items():
        if key not in known:
            names = list(dict.fromkeys(map(layer_name, known)))
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ProblemError(
                f"directions[{key!r}] names no parameter of the model; its parameters are {shown}."
                + did_you_mean(str(key), names)
            )
        if known[key] in found:
            raise ProblemError(
                f"directions holds {found[known[key]][0]!r} and {key!r}, which are one and the same weight; "
                "give it once."
            )
        found[known[key]] = key, given
    return found


def as_patterns(parameters: Mapping[str, Any]) -> list[str]:
    """The parameters as `layers=` takes them: globs that fit nothing else."""
    return [glob.escape(name) for name in parameters]


def read_given(
    problem: Problem, given: Mapping[str, tuple[str, Any]], draws: int
) -> tuple[dict[str, Tensor], int]:
    """The user's own directions, checked, each (draws, *shape), and how many draws they hold."""
    read: dict[str, Tensor] = {}
    for layer in problem.layers:
        key, tensor = given[layer.parameter]
        read[layer.parameter] = _read_one(problem, layer, key, tensor)
    counts = {given[parameter][0]: len(tensor) for parameter, tensor in read.items()}
    (first, count), *others = counts.items()
    for key, other in others:
        if other != count:
            raise ProblemError(
                f"directions hold {count} for {first!r} and {other} for {key!r}; give every layer as many."
            )
    if draws not in (1, count):
        raise ProblemError(
            f"draws={draws}, but directions hold {count} for each layer; leave draws out: the tensors say it."
        )
    return read, count


def _read_one(problem: Problem, layer: Layer, key: str, given: Any) -> Tensor:
    several = ", ".join(["draws", *map(str, layer.shape)])
    rule = f"a tensor of shape {layer.shape}, or ({several}) for several"
    if not isinstance(given, Tensor):
        raise ProblemError(f"directions[{key!r}] is a {type(given).__name__}; it must be {rule}.")
    shape = tuple(given.shape)
    if layer.shape not in (shape, shape[1:]) or given.numel() == 0:
        raise ProblemError(f"directions[{key!r}] has shape {shape}; it must be {rule}.")
    if given.layout is not torch.strided:
        raise ProblemError(f"directions[{key!r}] is sparse; make it dense: .to_dense().")
    if given.is_complex():
        raise ProblemError(f"directions[{key!r}] has dtype {given.dtype}; it must be real.")
    tensor = given.detach().to(problem.device, problem.dtype)
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ProblemError(
            f"directions[{key!r}] holds {bad} NaN or inf among {tensor.numel()} values (in {problem.dtype}); "
            "it must be finite."
        )
    return tensor.reshape(-1, *layer.shape)


def draw_random(problem: Problem, layer: Layer, draws: int, at_once: int) -> Iterator[Directions]:
    """Of length 1, a few at a time; they depend on the seed, the layer's name and the dtype.

    Large weights get random signs: normal numbers would cost more than a gradient, and the mean of gᵀHg is
    trace/size either way. Small ones have too few signs, so they get directions uniform on the sphere.
    """
    seed = _mix(problem.seed, layer.name)
    kind: ProbeKind = "rademacher" if layer.size >= _MANY_WEIGHTS else "gaussian"
    stream = ProbeStream(layer.size, seed=seed, kind=kind, dtype=problem.dtype, device=problem.device)
    for first in range(0, draws, at_once):
        count = min(at_once, draws - first)
        probes = stream.draw().unsqueeze(0) if count == 1 else stream.draw_block(count).T.contiguous()
        factors = tuple(1 / square for square in inner_products(probes, probes))
        yield Directions(probes.view(count, *layer.shape), (1.0,) * count, factors)


def _mix(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def normalize(given: Tensor, at_once: int) -> Iterator[Directions]:
    """Directions (count, *shape) of any length, a few at a time; one of length 0 stays 0."""
    for part in given.split(at_once):
        # The squares of a vanished gradient, 1e-25, are 0 in float32: the largest entry is taken out first.
        largest = _as_rows(part).abs().amax(1)
        divisors = torch.where(largest > 0, largest, 1)
        tensor = part / divisors.view(-1, *[1] * (part.ndim - 1))
        scales = largest.tolist()
        lengths = [
            scale * math.sqrt(square)
            for scale, square in zip(scales, inner_products(tensor, tensor), strict=True)
        ]
        yield Directions(tensor, tuple(lengths), tuple(scale * scale for scale in scales))


def inner_products(one: Tensor, other: Tensor) -> list[float]:
    """Row by row, which `torch.linalg.vecdot` takes five times as long for: it writes every product down."""
    rows = zip(_as_rows(one), _as_rows(other), strict=True)
    return torch.stack([torch.dot(left, right) for left, right in rows]).tolist()


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)  # not flatten(1): a scalar parameter has no dimension 1
