"""Places in a graph, seen example by example, and the derivatives between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor of the forward, or the edge that stands for it, whose numbers belong to `size` examples.

    They come example by example or, with `steps`, step by step with all examples in each, as time first has
    it. What `gather` and `scatter` take may be a stack: one more dimension in front.
    """

    at: Tensor | GradientEdge
    shape: tuple[int, ...]
    size: int
    steps: int = 0

    @property
    def each(self) -> int:
        """How many numbers an example has here."""
        return math.prod(self.shape) // self.size

    def gather(self, tensor: Tensor) -> Tensor:
        """(examples, numbers of each)."""
        stack = tensor.shape[: tensor.ndim - len(self.shape)]
        if self.steps:
            tensor = tensor.reshape(*stack, self.steps, self.size, -1).transpose(-3, -2)
        return tensor.reshape((*stack, self.size, self.each))

    def scatter(self, by_example: Tensor) -> Tensor:
        """The reverse of `gather`."""
        stack = by_example.shape[:-2]
        if self.steps:
            by_example = by_example.reshape(*stack, self.size, self.steps, -1).transpose(-3, -2)
        return by_example.reshape((*stack, *self.shape))  # which may be ()


def gather_all(places: Sequence[Place], tensors: Sequence[Tensor]) -> Tensor:
    """What lies at several places, side by side: (examples, numbers of each)."""
    parts = [place.gather(tensor) for place, tensor in zip(places, tensors, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def scatter_all(places: Sequence[Place], by_example: Tensor) -> list[Tensor]:
    """The reverse of `gather_all`."""
    parts = by_example.split([place.each for place in places], dim=-1)
    return [place.scatter(part) for place, part in zip(places, parts, strict=True)]


class Jacobian:
    """Products with the derivative of some places (`heads`) by earlier ones (`tails`) of the same graph.

    Forward, the product backward is differentiated by its own argument, in which it is linear: that works
    wherever two derivatives do, and one graph serves all places. Vectors are by example; stacks of them go
    in one batched pass.
    """

    def __init__(self, heads: Sequence[Place], tails: Sequence[Place], like: Tensor) -> None:
        self.like = like
        self._heads, self._tails = list(heads), list(tails)
        self._adjoint: tuple[list[Tensor], list[Tensor | None]] | None = None

    def pull(self, heads: Sequence[Place], tails: Sequence[Place], vectors: Tensor) -> list[Tensor]:
        """The transpose times cotangents of some heads, at some tails."""
        outputs = [head.at for head in heads]
        found = _gradients(
            outputs, [tail.at for tail in tails], scatter_all(heads, vectors), vectors.ndim > 2
        )
        return self._filled(found, tails, vectors)

    def push(self, tails: Sequence[Place], heads: Sequence[Place], vectors: Tensor) -> list[Tensor]:
        """The derivative times tangents of some tails, at some heads."""
        placeholders, adjoint = self._linear_adjoint()
        pairs = [
            (adjoint[self._tails.index(tail)], tangent)
            for tail, tangent in zip(tails, scatter_all(tails, vectors), strict=True)
        ]
        reached = [(one, tangent) for one, tangent in pairs if one is not None and one.requires_grad]
        found: list[Tensor | None] = [None] * len(heads)
        if reached:
            outputs, tangents = zip(*reached, strict=True)
            inputs = [placeholders[self._heads.index(head)] for head in heads]
            found = _gradients(outputs, inputs, tangents, vectors.ndim > 2)
        return self._filled(found, heads, vectors)

    def _filled(
        self, found: Sequence[Tensor | None], places: Sequence[Place], vectors: Tensor
    ) -> list[Tensor]:
        """Zero where nothing arrives."""
        stack = vectors.shape[:-2]
        return [
            self.like.new_zeros((*stack, *place.shape)) if one is None else one.detach()
            for place, one in zip(places, found, strict=True)
        ]

    def _linear_adjoint(self) -> tuple[list[Tensor], list[Tensor | None]]:
        if self._adjoint is None:
            placeholders = [self.like.new_zeros(head.shape).requires_grad_() for head in self._heads]
            outputs, inputs = [head.at for head in self._heads], [tail.at for tail in self._tails]
            found = _gradients(outputs, inputs, placeholders, False, create_graph=True)
            self._adjoint = placeholders, found
        return self._adjoint


def _gradients(
    outputs: Any, inputs: Any, vectors: Sequence[Tensor], batched: bool, create_graph: bool = False
) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(
            outputs,
            inputs,
            vectors,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
    )


@dataclass(frozen=True)
class Reach:
    """From one end of the network (its output, or its start) to the places of its layers, and back."""

    jacobian: Jacobian
    end: tuple[Place, ...]
    from_output: bool

    @property
    def examples(self) -> int:
        return self.end[0].size

    @property
    def each(self) -> int:
        """How many numbers an example has at the end."""
        return sum(place.each for place in self.end)

    def out(self, places: Sequence[Place], vectors: Tensor) -> list[Tensor]:
        """From the end to the places."""
        send = self.jacobian.pull if self.from_output else self.jacobian.push
        return send(self.end, places, vectors)

    def back(self, places: Sequence[Place], vectors: Tensor) -> Tensor:
        """From the places to the end: the transpose of `out`."""
        send = self.jacobian.push if self.from_output else self.jacobian.pull
        return gather_all(self.end, send(places, self.end, vectors))
