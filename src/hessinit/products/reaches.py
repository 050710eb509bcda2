"""Which places the two products of a layer lie between, and which numbers there belong to which example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hessinit.curvature.layer_uses import in_proportion, probe_examples
from hessinit.curvature.probes import ProbeStream
from hessinit.products.layer_uses import LayerUses, shape_behind
from hessinit.products.places import Jacobian, Place, Reach
from hessinit.products.start import Start, Traced


@dataclass(frozen=True)
class Stretch:
    """One reach, and the places of all the layers that it serves."""

    reach: Reach
    layers: dict[str, tuple[Place, ...]]


def backward_stretches(traced: Traced, layers: Sequence[LayerUses]) -> list[Stretch]:
    """From the output to what follows each layer: one stretch for examples apart, one for whole batches."""
    output, stretches = traced.output, []
    for size in sorted({layer.size for layer in layers}):
        end = Place(output, tuple(output.shape), size)
        places = {layer.name: _places_after(layer) for layer in layers if layer.size == size}
        tails = [place for chosen in places.values() for place in chosen]
        stretches.append(Stretch(Reach(Jacobian([end], tails, output.detach()), (end,), True), places))
    return stretches


def _places_after(layer: LayerUses) -> tuple[Place, ...]:
    return tuple(
        Place(
            use.after,
            shape_behind(use.after.node),
            layer.size,
            use.call.rows // layer.size if use.after_time_first else 0,
        )
        for use in layer.uses
    )


def _places_before(layer: LayerUses, size: int) -> tuple[Place, ...]:
    return tuple(
        Place(
            use.before,
            shape_behind(use.before.node, use.before.output_nr),
            size,
            use.call.rows // size if use.time_first and size > 1 else 0,
        )
        for use in layer.uses
        if use.before is not None
    )


def forward_stretches(traced: Traced, layers: Sequence[LayerUses], seed: int) -> list[Stretch]:
    """From the start to each layer's input; layers with no input but tokens or constants are left out.

    Layers that see the start in the same way share a stretch. A start that is the same for all examples, as
    a table of positions, counts as a bias: the derivative is by the examples' own starts.
    """
    served: dict[tuple[tuple[int, int], ...], list[LayerUses]] = {}
    for layer, orders in zip(layers, _orders(traced, layers, seed), strict=True):
        if _places_before(layer, 1):
            served.setdefault(orders, []).append(layer)
    stretches = []
    for orders, chosen in served.items():
        size = chosen[0].size if orders else 1
        end = tuple(
            Place(traced.starts[index].tensor, tuple(traced.starts[index].tensor.shape), size, steps)
            for index, steps in orders or [(index, 0) for index in range(len(traced.starts))]
        )
        places = {layer.name: _places_before(layer, size) for layer in chosen}
        heads = [place for ones in places.values() for place in ones]
        jacobian = Jacobian(heads, end, traced.output.detach())
        stretches.append(Stretch(Reach(jacobian, end, False), places))
    return stretches


def _orders(traced: Traced, layers: Sequence[LayerUses], seed: int) -> list[tuple[tuple[int, int], ...]]:
    """For every layer, the starts that count and their steps; () where the batch is one example."""
    apart = [layer for layer in layers if layer.size > 1]
    found: dict[str, tuple[tuple[int, int], ...]] = {layer.name: () for layer in layers}
    # All layers in the same passes; each on its own only where that finds examples that see each other.
    together = _fitting(traced, apart, seed)
    whole = all(together)
    for layer in apart:
        fitting = together if whole else _fitting(traced, [layer], seed)
        needed = [orders for orders, start in zip(fitting, traced.starts, strict=True) if not start.looked_up]
        if all(needed):
            found[layer.name] = tuple((index, orders[0]) for index, orders in enumerate(fitting) if orders)
    return [found[layer.name] for layer in layers]


def _fitting(traced: Traced, layers: Sequence[LayerUses], seed: int) -> list[list[int]]:
    """For every start, the orders of its numbers in which no example depends on another one's."""
    places = [place for layer in layers for place in _places_before(layer, layer.size)]
    if not places:
        return [[0] for _ in traced.starts]
    size, like = layers[0].size, traced.output.detach()
    fitting = [_possible(start, size) for start in traced.starts]
    whole = [Place(start.tensor, tuple(start.tensor.shape), 1) for start in traced.starts]
    jacobian = Jacobian(places, whole, like)
    numbers = size * sum(place.each for place in places)
    stream = ProbeStream(size + numbers, seed=seed, dtype=like.dtype, device=like.device)
    probe = stream.draw()
    for bases, gradients, factors in probe_examples(
        lambda cotangents: jacobian.pull(places, whole, cotangents), probe[size:].view(size, -1), probe[:size]
    ):
        for orders, start, base, gradient in zip(fitting, traced.starts, bases, gradients, strict=True):
            orders[:] = [
                steps
                for steps in orders
                if in_proportion(
                    _by_example(start, base, size, steps), _by_example(start, gradient, size, steps), factors
                )
            ]
    return fitting


def _possible(start: Start, size: int) -> list[int]:
    """Steps of the orders that the shape allows: 0 for example by example."""
    shape = start.tensor.shape
    orders = [0] if start.tensor.numel() % size == 0 else []
    if start.tensor.ndim > 1 and shape[1] == size and shape[0] > 1:
        orders.append(int(shape[0]))
    elif start.tensor.ndim and shape[0] > size and shape[0] % size == 0:
        orders.append(int(shape[0]) // size)
    return orders


def _by_example(start: Start, gradient: Tensor, size: int, steps: int) -> Tensor:
    return Place(start.tensor, tuple(start.tensor.shape), size, steps).gather(gradient)


def lengths_of(reach: Reach) -> Tensor:
    """‖x‖ of every example at the start that `reach` leaves from."""
    parts = [place.gather(place.at.detach()) for place in reach.end if isinstance(place.at, Tensor)]
    squares = sum(part.double().pow(2).sum(dim=1) for part in parts)
    assert isinstance(squares, Tensor)
    return squares.sqrt()
