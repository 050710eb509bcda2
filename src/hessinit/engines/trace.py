"""From one evaluated batch to the Gram operators of its layers, by a few shared backward passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, read_call
from hessinit.engines.collect import Collector, collector_for
from hessinit.engines.gram import LayerGram, by_example
from hessinit.engines.output_root import OutputRoot
from hessinit.operators.evaluation import Evaluation
from hessinit.problem.graph import Use, find_uses
from hessinit.spectra.probes import ProbeStream

# Signals beyond this many bytes are gathered from a few examples at a time.
_BYTES_AT_ONCE = 2**26


@dataclass(frozen=True)
class Planned:
    """A leaf, one of its calls, the edge that the gradient of its output takes, and the order of its rows."""

    name: str
    call: Call
    edge: GradientEdge
    time_first: bool


@dataclass(frozen=True)
class Piece:
    """Some of the examples, evaluated, with their share of the root."""

    output: Tensor
    uses: dict[str, list[Use]]
    columns: Tensor
    part: slice


def trace_grams(evaluation: Evaluation, root: OutputRoot) -> dict[str, LayerGram]:
    """The Gram operators of all leaves whose every use is a known linear call.

    Costs a backward pass per column of the root.

    The passes stop at the layers' outputs: no weight gradient is formed.
    """
    leaves, size = evaluation.problem.leaves, evaluation.output.shape[0]
    whole = Piece(evaluation.output, evaluation.uses, root.columns, slice(0, size))
    plan = _plan(evaluation, whole)
    if not plan:
        return {}
    names = [one.name for one in plan]
    collectors = [
        collector_for(one.call, one.time_first, size, root.columns, names.count(one.name)) for one in plan
    ]
    step = _examples_at_once(plan, root, size)
    if step < size and not any(one.time_first for one in plan):
        # The graph of the whole batch must not stand beside those of the pieces: nothing may hold on to it.
        evaluation.forget()
        pieces = _pieces(evaluation, root, step)
        del whole, plan
    else:
        pieces = iter([whole])
    for piece in pieces:
        if not _gather(evaluation, piece, collectors):
            return {}
    grams: dict[str, list[Collector]] = {}
    for name, collector in zip(names, collectors, strict=True):
        grams.setdefault(name, []).append(collector)
    scale = root.scale * evaluation.weight
    return {name: found[0].gram(found, tuple(leaves[name].shape), scale) for name, found in grams.items()}


def _examples_at_once(plan: Sequence[Planned], root: OutputRoot, size: int) -> int:
    numbers = root.columns.shape[0] * sum(int(torch.Size(one.call.output_shape).numel()) for one in plan)
    needed = numbers * root.columns.element_size()
    return size if needed <= _BYTES_AT_ONCE else max(1, size * _BYTES_AT_ONCE // (2 * needed))


def _pieces(evaluation: Evaluation, root: OutputRoot, step: int) -> Iterator[Piece]:
    problem, batch = evaluation.problem, evaluation.batch
    for first in range(0, batch.size, step):
        part = slice(first, min(first + step, batch.size))
        output = problem.output(batch.take(torch.arange(part.start, part.stop)))
        yield Piece(output, find_uses(output, problem.leaves), root.columns[:, part], part)


def _gather(evaluation: Evaluation, piece: Piece, collectors: Sequence[Collector]) -> bool:
    """Send every column back through a piece; False when the piece is not built like the whole."""
    plan = _plan(evaluation, piece)
    if len(plan) != len(collectors):
        return False
    size = piece.output.shape[0]
    edges = [one.edge for one in plan]
    for one, collector in zip(plan, collectors, strict=True):
        collector.start(one.call, piece.part)
    dense = all(type(edge.node).__name__ in ("AddmmBackward0", "MmBackward0") for edge in edges)
    batched = _backward_all(piece, edges) if dense else None
    for index, column in enumerate(piece.columns):
        found = [arrived[index] for arrived in batched] if batched else _backward(piece.output, edges, column)
        for one, collector, gradient in zip(plan, collectors, found, strict=True):
            collector.add(index, gradient, by_example(gradient, size, one.time_first))
    for collector in collectors:
        collector.finish()
    return True


def _plan(evaluation: Evaluation, piece: Piece) -> list[Planned]:
    """The calls of the leaves whose every use is known, and none of whose calls mixes examples."""
    leaves, size = evaluation.problem.leaves, piece.output.shape[0]
    calls: list[tuple[str, Call, GradientEdge]] = []
    for name, uses in piece.uses.items():
        known = [read_call(use, leaves[name]) for use in uses]
        if all(call is not None and call.rows % size == 0 for call in known):
            calls += [
                (name, call, GradientEdge(u.node, 0)) for u, call in zip(uses, known, strict=True) if call
            ]
    if not calls:
        return []
    layouts = _layouts(piece, calls, evaluation.problem.seed)
    mixed = {name for (name, _, _), layout in zip(calls, layouts, strict=True) if layout is None}
    return [
        Planned(name, call, edge, bool(layout))
        for (name, call, edge), layout in zip(calls, layouts, strict=True)
        if name not in mixed
    ]


def _layouts(piece: Piece, calls: Sequence[tuple[str, Call, GradientEdge]], seed: int) -> list[bool | None]:
    """Per call: rows by example (False), by position (True), or mixed (None).

    Half of the examples are sent back: whatever belongs to the others must stay zero.
    """
    output = piece.output
    size = output.shape[0]
    probe = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device).draw()
    silent = probe[:size] < 0
    silent[0], silent[-1] = size > 1, False
    cotangent = probe[size:].view_as(output)
    cotangent[silent] = 0
    found = _backward(output, [edge for _, _, edge in calls], cotangent)
    layouts: list[bool | None] = []
    for (_, call, _), gradient in zip(calls, found, strict=True):
        rows = gradient.reshape(call.rows, -1)
        fitting = [order for order in (False, True) if not bool(by_example(rows, size, order)[silent].any())]
        layouts.append(fitting[0] if fitting else None)
    return layouts


def _backward(output: Tensor, edges: list[GradientEdge], cotangent: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, edges, cotangent, retain_graph=True, materialize_grads=False)


def _backward_all(piece: Piece, edges: list[GradientEdge]) -> tuple[Tensor, ...] | None:
    """All columns in one batched pass: a third faster for dense networks, slower for others.

    None where torch cannot batch it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # a missing batching rule is only a warning, and slower than a loop
            return torch.autograd.grad(
                piece.output, edges, piece.columns, retain_graph=True, is_grads_batched=True
            )
    except (RuntimeError, UserWarning):
        return None
