"""Which calls the signals are gathered at: known ones, whose rows belong to one example each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, read_call
from hessinit.engines.gram import by_example
from hessinit.engines.separation import in_proportion, probe_examples
from hessinit.problem.graph import Use
from hessinit.spectra.probes import ProbeStream


@dataclass(frozen=True)
class KnownCall:
    """A leaf, one of its calls, and the edge that the gradient of the call's output takes."""

    name: str
    call: Call
    edge: GradientEdge


@dataclass(frozen=True)
class Planned(KnownCall):
    """The same with the order of its rows: by example, or, with `time_first`, by position."""

    time_first: bool = False


def known_calls(uses: dict[str, list[Use]], leaves: dict[str, Tensor], size: int) -> list[KnownCall]:
    """The calls of the leaves whose every use is known, with the same number of rows for each example."""
    calls: list[KnownCall] = []
    for name, found in uses.items():
        known = [(use, read_call(use, leaves[name])) for use in found]
        if all(call is not None and call.rows % size == 0 for _, call in known):
            calls += [KnownCall(name, call, GradientEdge(use.node, 0)) for use, call in known if call]
    return calls


def plan_calls(
    output: Tensor, uses: dict[str, list[Use]], leaves: dict[str, Tensor], seed: int
) -> list[Planned]:
    """The known calls of the leaves none of whose calls mixes examples."""
    calls = known_calls(uses, leaves, output.shape[0])
    if not calls:
        return []
    layouts = find_layouts(output, calls, seed)
    mixed = {one.name for one, layout in zip(calls, layouts, strict=True) if layout is None}
    return [
        Planned(one.name, one.call, one.edge, bool(layout))
        for one, layout in zip(calls, layouts, strict=True)
        if one.name not in mixed
    ]


def find_layouts(output: Tensor, calls: Sequence[KnownCall], seed: int) -> list[bool | None]:
    """Per call: rows by example (False), by position (True), or mixed (None)."""
    size = output.shape[0]
    fitting = [[False, True] if one.call.rows > size > 1 else [False] for one in calls]
    stream = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device)
    probe = stream.draw()
    for whole, shared, factors in probe_examples(
        lambda cotangent: backward(output, calls, cotangent), probe[size:].view_as(output), probe[:size]
    ):
        for one, orders, base, gradient in zip(calls, fitting, whole, shared, strict=True):
            first, second = base.reshape(one.call.rows, -1), gradient.reshape(one.call.rows, -1)
            orders[:] = [
                order
                for order in orders
                if in_proportion(by_example(first, size, order), by_example(second, size, order), factors)
            ]
    return [orders[0] if orders else None for orders in fitting]


def backward(output: Tensor, calls: Sequence[KnownCall], cotangent: Tensor) -> list[Tensor]:
    """The gradient at the output of every call; zero where none arrives."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        output, [one.edge for one in calls], cotangent, retain_graph=True, allow_unused=True
    )
    return [
        cotangent.new_zeros(one.call.output_shape) if gradient is None else gradient
        for one, gradient in zip(calls, found, strict=True)
    ]
