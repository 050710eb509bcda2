"""Where the weights are used, read off the autograd graph of one evaluation.

The graph is the one record of what a model did that is the same for modules, functional calls, tied weights
and weights used several times. Each use of a weight is a node of the graph; the gradient that reaches the
node's output is what the layer's Jacobian is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Node = Any  # torch.autograd.graph.Node; its saved tensors are not typed


@dataclass(frozen=True)
class Use:
    """One node that consumes a leaf; `transposed` when it consumes its transpose, as `F.linear` does."""

    node: Node
    position: int
    transposed: bool

    @property
    def kind(self) -> str:
        """The node's class, as `AddmmBackward0`."""
        return type(self.node).__name__

    @property
    def moment(self) -> int:
        """Grows in the order in which the forward ran."""
        return int(self.node._sequence_nr())

    @property
    def padding(self) -> int | None:
        """The row of an embedding that gets no gradient, whatever the output's derivative by it is."""
        if self.kind != "EmbeddingBackward0":
            return None
        row = self.node._saved_padding_idx  # unsigned; torch's "none" is -1
        return int(row) if 0 <= row < 2**62 else None


def find_uses(output: Tensor, leaves: dict[str, Tensor]) -> dict[str, list[Use]]:
    """For every leaf, the nodes that consume it, in the order they ran; an unused leaf has none.

    Transposes are looked through, however many. Every path from the output to a leaf ends in one of the uses:
    a use that were missed would make a curvature too small, silently.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    uses: dict[str, list[Use]] = {name: [] for name in leaves}
    seen = {output.grad_fn}
    waiting: list[Node] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        for position, (source, _) in enumerate(node.next_functions):
            transposed = False
            while type(source).__name__ == "TBackward0":
                source, transposed = source.next_functions[0][0], not transposed
            if source is None:
                continue
            name = names.get(id(getattr(source, "variable", None)))
            if name is not None:
                uses[name].append(Use(node, position, transposed))
            elif source not in seen:
                seen.add(source)
                waiting.append(source)
    for found in uses.values():
        found.sort(key=lambda use: use.moment)
    return uses
