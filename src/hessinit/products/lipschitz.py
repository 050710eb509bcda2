"""The naive bound: the product of the spectral norms of all layers but one, along a chain of known pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.layer_uses import Node
from hessinit.products.layer_uses import shape_behind
from hessinit.products.lipschitz_constants import Piece, lipschitz_constant


@dataclass(frozen=True)
class Chain:
    """The nodes from the first to the last, each with the logarithm of its constant: products overflow."""

    nodes: tuple[Node, ...]
    logarithms: tuple[float, ...]

    def without(self, node: Node) -> float | None:
        """The logarithm of the product of all constants but this node's; None when it is not in the chain."""
        if node not in self.nodes:
            return None
        place = self.nodes.index(node)
        return sum((*self.logarithms[:place], *self.logarithms[place + 1 :]))


def read_chain(output: Tensor, starts: Sequence[Tensor], effort: LanczosSettings) -> Chain | str:
    """The chain of pieces between the start and the output, or what stands in its way, in words."""
    first = {_node_of(start) for start in starts}
    leading = _leading_to(output.grad_fn, first)
    if output.grad_fn not in leading:
        return "the output does not depend on what the network starts from"
    nodes: list[Node] = []
    logarithms: list[float] = []
    node: Node = output.grad_fn
    while node not in first:
        kind = type(node).__name__
        signals = [place for place, (source, _) in enumerate(node.next_functions) if source in leading]
        if len(signals) > 1:
            return f"the forward is not a chain: {kind} joins {_in_words(len(signals))} signals"
        source, number = node.next_functions[signals[0]]
        piece = Piece(node, signals[0], shape_behind(source, number), shape_behind(node), effort)
        constant = lipschitz_constant(piece)
        if constant is None:
            return f"no Lipschitz constant is known for {kind}"
        nodes.append(node)
        logarithms.append(math.log(constant) if constant > 0 else -math.inf)
        node = source
    nodes.append(node)  # an embedding, whose own lookup changes no length
    logarithms.append(0.0)
    return Chain(tuple(reversed(nodes)), tuple(reversed(logarithms)))


def _node_of(start: Tensor) -> Node:
    return start.grad_fn if start.grad_fn is not None else start.view_as(start).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _leading_to(node: Node, first: set[Node]) -> set[Node]:
    """All nodes at or behind `node` from which one of `first` can be reached."""
    leading: set[Node] = set()
    seen = {node}
    waiting = [(node, iter(_sources(node, first)))]
    while waiting:
        current, sources = waiting[-1]
        following = next(sources, None)
        if following is None:
            waiting.pop()
            if current in first or any(source in leading for source in _sources(current, first)):
                leading.add(current)
        elif following not in seen:
            seen.add(following)
            waiting.append((following, iter(_sources(following, first))))
    return leading


def _sources(node: Node, first: set[Node]) -> list[Node]:
    return [] if node in first else [source for source, _ in node.next_functions if source is not None]


def _in_words(count: int) -> str:
    return "two" if count == 2 else str(count)
