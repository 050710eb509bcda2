"""Which entries of a tensor belong to which example: found by a factor for each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature.layer_uses import in_proportion, probe_examples
from hessinit.curvature.probes import ProbeStream
from hessinit.problem.layer_values import Place


@dataclass(frozen=True)
class Arrangement:
    """Reshaped to `shape`, the dimension `dim` counts the examples."""

    shape: tuple[int, ...]
    dim: int

    def by_example(self, tensor: Tensor) -> Tensor:
        """The tensor as (examples, entries of one example)."""
        return tensor.reshape(self.shape).movedim(self.dim, 0).flatten(1)


def possible_arrangements(shape: Sequence[int], examples: int) -> list[Arrangement]:
    """A dimension that counts the examples, or rows that go example by example, or position by position.

    >>> [one.shape for one in possible_arrangements((12, 5), 4)]
    [(4, 3, 5), (3, 4, 5)]
    >>> possible_arrangements((7, 5), 4)
    []
    """
    # The last 1, so that there is always something to flatten.
    found = [Arrangement((*shape, 1), dim) for dim, length in enumerate(shape) if length == examples]
    if shape and shape[0] > examples and shape[0] % examples == 0:
        positions = shape[0] // examples
        found.append(Arrangement((examples, positions, *shape[1:]), 0))
        found.append(Arrangement((positions, examples, *shape[1:]), 1))
    return found


def arrange(output: Tensor, places: Sequence[Place], seed: int) -> list[Arrangement | None]:
    """Per place, how its entries belong to the examples; None where examples see each other after it."""
    examples = output.shape[0]
    possible = [possible_arrangements(place.value.shape, examples) for place in places]
    stream = ProbeStream(output.numel() + examples, seed=seed, dtype=output.dtype, device=output.device)
    probe = stream.draw()
    for whole, shared, factors in probe_examples(
        lambda cotangent: gradients_at(output, places, cotangent),
        probe[examples:].view_as(output),
        probe[:examples],
    ):
        for candidates, base, gradient in zip(possible, whole, shared, strict=True):
            candidates[:] = [
                one
                for one in candidates
                if in_proportion(one.by_example(base), one.by_example(gradient), factors)
            ]
    return [candidates[0] if candidates else None for candidates in possible]


def gradients_at(of: Tensor, places: Sequence[Place], cotangent: Tensor) -> list[Tensor]:
    """The gradient at every place; zero where none arrives."""
    edges: list[GradientEdge] = [place.edge for place in places]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        of, edges, cotangent, retain_graph=True, allow_unused=True
    )
    return [
        torch.zeros_like(place.value) if gradient is None else gradient
        for place, gradient in zip(places, found, strict=True)
    ]
