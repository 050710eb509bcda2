"""Walks over autograd graphs: from a tensor back to all that it was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hessinit.problem.operations import node_name, operation_of

Node = Any  # torch.autograd.graph.Node; its saved tensors are not typed
Consumers = dict[Node, list[Node]]


def nodes_behind(top: Node | None, stop: Node | None = None) -> Iterator[Node]:
    """Every node behind `top`, itself included, in no particular order; none behind `stop`."""
    reached = {top}
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        if node is stop:
            continue
        for source, _ in node.next_functions:
            if source not in reached:
                reached.add(source)
                waiting.append(source)


def nodes_in_order(top: Node) -> Iterator[Node]:
    """Every node behind `top`, itself included, each after those whose results it uses."""
    done: set[Node] = set()
    waiting = [(top, iter(top.next_functions))]
    while waiting:
        node, sources = waiting[-1]
        unvisited = (source for source, _ in sources if source is not None and source not in done)
        source = next(unvisited, None)
        if source is not None:
            waiting.append((source, iter(source.next_functions)))
            continue
        waiting.pop()
        if node not in done:
            done.add(node)
            yield node


def consumers_of(output: Tensor) -> Consumers:
    """The nodes that consume each node's result, for all the nodes behind `output`."""
    consumers: Consumers = {output.grad_fn: []}
    waiting: list[Node] = [output.grad_fn]
    for node in waiting:  # which grows
        for source, _ in node.next_functions:
            if source is None:
                continue
            if source not in consumers:
                waiting.append(source)
            consumers.setdefault(source, []).append(node)
    return consumers


def leaf_of(node: Node) -> Tensor | None:
    """The tensor whose gradient the node accumulates; None for a node inside the graph."""
    return getattr(node, "variable", None)


def first_leaf(nodes: Iterable[Node], leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the first of `leaves` that is met among `nodes`."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    met = (names.get(id(leaf_of(node))) for node in nodes)
    return next((name for name in met if name is not None), None)


def custom_functions(output: Tensor, stop: Tensor | None = None) -> list[str]:
    """The names of the user's own `torch.autograd.Function`s between `stop` and `output`."""
    nodes = nodes_behind(output.grad_fn, None if stop is None else stop.grad_fn)
    classes = [getattr(node, "_forward_cls", None) for node in nodes]
    functions = [function for function in classes if function is not None]
    return sorted({f.__name__ for f in functions if not f.__module__.startswith("hessinit.")})


def activation_kind(node: Node) -> str | None:
    """The name of the real elementwise activation behind a node; None for any other node."""
    is_activation = operation_of(node).is_activation
    if not is_activation or node._input_metadata[0].dtype.is_complex:
        return None
    return node_name(node)


def keeps_all_numbers(node: Node) -> bool:
    """Whether a node passes on all numbers that it gets, in the same order or transposed."""
    operation = operation_of(node)
    return operation.keeps_order or operation.transposes
