"""From one evaluated batch to the Gram operators of its layers: a backward pass per column of the output's root."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, ConvolutionCall, read_call
from hessinit.engines.gram import LayerGram, TracedCall, WrittenGram, by_example
from hessinit.engines.output_root import OutputRoot
from hessinit.operators.evaluation import Evaluation
from hessinit.spectra.probes import ProbeStream

# A leaf, one of its calls, the edge that carries the gradient of the call's output, and whether its rows are time first.
Planned = tuple[str, Call, GradientEdge, bool]

# Unfolded patches are formed for so many numbers at a time, about what fits into a cache.
_NUMBERS_AT_ONCE = 2**20
_MOST_WRITTEN = 2**16


def trace_grams(evaluation: Evaluation, root: OutputRoot) -> dict[str, LayerGram]:
    """The Gram operators of all leaves whose every use is a known linear call; costs a backward pass per column.

    The passes stop at the layers' outputs: no weight gradient is formed.
    """
    leaves, size = evaluation.problem.leaves, evaluation.output.shape[0]
    known: dict[str, list[Call]] = {}
    edges: list[GradientEdge] = []
    for name, uses in evaluation.uses.items():
        calls = [read_call(use, leaves[name]) for use in uses]
        if uses and all(call is not None and call.rows % size == 0 for call in calls):
            known[name] = [call for call in calls if call is not None]
            edges += [GradientEdge(use.node, 0) for use in uses]
    layouts = (
        _layouts(evaluation, edges, [call for calls in known.values() for call in calls]) if edges else []
    )
    plan = _separable(known, edges, layouts)
    if not plan:
        return {}
    columns = _columns(evaluation, root, [edge for _, _, edge, _ in plan])
    scale = root.scale * evaluation.weight
    grams: dict[str, LayerGram] = {}
    traced: dict[str, list[TracedCall]] = {}
    for index, (name, call, _, time_first) in enumerate(plan):
        # Taken out one by one, so that no more than one layer is held twice.
        arrived, columns[index] = columns[index], ()
        if _is_worth_writing(call, time_first, size, leaves[name], len(known[name])):
            assert isinstance(call, ConvolutionCall)
            factor = _write_factor(call, arrived)
            grams[name] = WrittenGram(factor, size, tuple(leaves[name].shape), scale)
        else:
            signals = torch.stack([by_example(column, size, time_first) for column in arrived], dim=1)
            traced.setdefault(name, []).append(TracedCall(call, time_first, signals))
    for name, calls in traced.items():
        grams[name] = LayerGram(calls, tuple(leaves[name].shape), scale)
    return grams


def _is_worth_writing(call: Call, time_first: bool, size: int, leaf: Tensor, uses: int) -> bool:
    """Fewer weights than outputs, and a fast way to get each signal's own weight gradient."""
    if not isinstance(call, ConvolutionCall) or not call.is_plain_image_convolution():
        return False
    outputs = int(torch.Size(call.output_shape).numel()) // size
    return uses == 1 and not time_first and call.rows == size and leaf.numel() <= min(outputs, _MOST_WRITTEN)


def _write_factor(call: ConvolutionCall, columns: Sequence[Tensor]) -> Tensor:
    """(examples · columns, weights): every signal's own weight gradient, as patches times signals."""
    examples, channels, patch = call.rows, call.weight.shape[0], call.weight[0].numel()
    positions = columns[0][0, 0].numel()
    factor = columns[0].new_empty(examples, len(columns) * channels, patch)
    step = max(1, _NUMBERS_AT_ONCE // (patch * positions))
    for first in range(0, examples, step):
        part = slice(first, first + step)
        patches = F.unfold(
            call.inputs[part],
            tuple(call.weight.shape[2:]),
            tuple(call.dilation),
            tuple(call.padding),
            tuple(call.stride),
        )
        signals = torch.stack([column[part].flatten(2) for column in columns], dim=1)
        torch.bmm(signals.flatten(1, 2), patches.transpose(1, 2), out=factor[part])
    return factor.view(examples * len(columns), channels * patch)


def _columns(evaluation: Evaluation, root: OutputRoot, edges: list[GradientEdge]) -> list[Sequence[Tensor]]:
    """For each edge, what reaches it from every column of the root."""
    if all(type(edge.node).__name__ in ("AddmmBackward0", "MmBackward0") for edge in edges):
        batched = _backward_all(evaluation, edges, root.columns)
        if batched is not None:
            return [found.unbind(0) for found in batched]
    passes = [_backward(evaluation, edges, column) for column in root.columns]
    return [list(arrived) for arrived in zip(*passes, strict=True)]


def _backward_all(
    evaluation: Evaluation, edges: list[GradientEdge], columns: Tensor
) -> tuple[Tensor, ...] | None:
    """All columns in one batched pass: a third faster for dense networks, slower for convolutions; None if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # a missing batching rule is only a warning, and slower than a loop
            return torch.autograd.grad(
                evaluation.output, edges, columns, retain_graph=True, is_grads_batched=True
            )
    except (RuntimeError, UserWarning):
        return None


def _separable(
    known: dict[str, list[Call]], edges: list[GradientEdge], layouts: list[bool | None]
) -> list[Planned]:
    """The calls of the leaves none of whose calls mixes examples."""
    rows = iter(zip(edges, layouts, strict=True))
    plan: list[Planned] = []
    for name, calls in known.items():
        placed = [(name, call, *next(rows)) for call in calls]
        if all(layout is not None for *_, layout in placed):
            plan += [(name, call, edge, bool(layout)) for name, call, edge, layout in placed]
    return plan


def _backward(evaluation: Evaluation, edges: list[GradientEdge], cotangent: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(evaluation.output, edges, cotangent, retain_graph=True)


def _layouts(evaluation: Evaluation, edges: list[GradientEdge], calls: Sequence[Call]) -> list[bool | None]:
    """Per call: rows by example (False), by position (True), or mixed (None), seen by sending half of the examples back."""
    size = evaluation.output.shape[0]
    output, seed = evaluation.output, evaluation.problem.seed
    probe = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device).draw()
    silent = probe[:size] < 0
    silent[0], silent[-1] = size > 1, False
    cotangent = probe[size:].view_as(output)
    cotangent[silent] = 0
    found = _backward(evaluation, edges, cotangent)
    layouts: list[bool | None] = []
    for call, gradient in zip(calls, found, strict=True):
        layout = None
        for time_first in (False, True):
            rows = gradient.reshape(call.rows, -1)
            if not by_example(rows, size, time_first)[silent].any():
                layout = time_first
                break
        layouts.append(layout)
    return layouts
