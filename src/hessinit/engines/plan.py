"""Which calls the signals are gathered at: known ones, whose rows belong to one example each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, read_call
from hessinit.engines.gram import by_example
from hessinit.problem.graph import Use
from hessinit.spectra.probes import ProbeStream

# So few examples are told apart without chance, by two probes for each binary digit of their number. More get
# one random probe (n pairs that see each other escape it once in 2ⁿ), and others where it cannot tell
# the order of the rows.
FEW_EXAMPLES = 16
MOST_PROBES = 8


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
    """Per call: rows by example (False), by position (True), or mixed (None).

    Half of the examples are sent back: whatever belongs to the others must stay zero.
    """
    size = output.shape[0]
    stream = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device)
    fitting = [[False, True] if one.call.rows > size > 1 else [False] for one in calls]
    for probes in range(MOST_PROBES):
        probe = stream.draw()
        silent = choose_silent(probes, probe[:size])
        # Where only the last position is used, rows by position may pass for rows by example.
        if silent is None or (probes and size > FEW_EXAMPLES and all(len(orders) < 2 for orders in fitting)):
            break
        cotangent = probe[size:].view_as(output)
        cotangent[silent] = 0
        found = backward(output, calls, cotangent)
        for one, orders, gradient in zip(calls, fitting, found, strict=True):
            rows = gradient.reshape(one.call.rows, -1)
            orders[:] = [order for order in orders if not bool(by_example(rows, size, order)[silent].any())]
    return [orders[0] if orders else None for orders in fitting]


def choose_silent(probes: int, random: Tensor) -> Tensor | None:
    """Which examples are silent in this probe; None when every one has been silent beside every other."""
    size = len(random)
    if size > FEW_EXAMPLES:
        silent = random < 0
        silent[0], silent[-1] = probes % 2 == 0, probes % 2 == 1
        return silent
    digit = probes // 2
    if digit >= (size - 1).bit_length():
        return None
    return (torch.arange(size, device=random.device) >> digit) % 2 == probes % 2


def backward(output: Tensor, calls: Sequence[KnownCall], cotangent: Tensor) -> list[Tensor]:
    """The gradient at the output of every call; zero where none arrives."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        output, [one.edge for one in calls], cotangent, retain_graph=True, allow_unused=True
    )
    return [
        cotangent.new_zeros(one.call.output_shape) if gradient is None else gradient
        for one, gradient in zip(calls, found, strict=True)
    ]
