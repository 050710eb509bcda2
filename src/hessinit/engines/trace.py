"""From one evaluated batch to the Gram operators of its layers: a backward pass per column of the output's root."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, ConvolutionCall, DenseCall, read_call
from hessinit.engines.gram import LayerGram, TracedCall, WrittenGram, by_example
from hessinit.engines.output_root import OutputRoot
from hessinit.operators.evaluation import Evaluation
from hessinit.spectra.probes import ProbeStream

# A leaf, one of its calls, the edge that carries the gradient of the call's output, and whether its rows are time first.
Planned = tuple[str, Call, GradientEdge, bool]

# Unfolded patches are formed for so many numbers at a time.
_NUMBERS_AT_ONCE = 2**22
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
    signals = _signals(evaluation, root, plan)
    traced: dict[str, list[TracedCall]] = {}
    for (name, call, _, time_first), signal in zip(plan, signals, strict=True):
        traced.setdefault(name, []).append(TracedCall(call, time_first, signal))
    scale = root.scale * evaluation.weight
    return {name: _gram(calls, tuple(leaves[name].shape), scale) for name, calls in traced.items()}


def _gram(traced: Sequence[TracedCall], weight_shape: tuple[int, ...], scale: float) -> LayerGram:
    """By products, or written out where that is smaller and there is a fast way to do it."""
    one = traced[0]
    weights = int(torch.Size(weight_shape).numel())
    plain = (
        len(traced) == 1 and isinstance(one.call, ConvolutionCall) and one.call.is_plain_image_convolution()
    )
    if (
        not plain
        or one.time_first
        or one.call.rows != one.signals.shape[0]
        or weights > min(one.signals.shape[2], _MOST_WRITTEN)
    ):
        return LayerGram(traced, weight_shape, scale)
    assert isinstance(one.call, ConvolutionCall)
    return WrittenGram(_write_factor(one.call, one.signals), one.signals.shape[0], weight_shape, scale)


def _write_factor(call: ConvolutionCall, signals: Tensor) -> Tensor:
    """(examples · columns, weights): every signal's own weight gradient, as patches times signals."""
    examples, columns, _ = signals.shape
    channels, patch = call.weight.shape[0], call.weight[0].numel()
    factor = signals.new_empty(examples, columns * channels, patch)
    positions = signals.shape[2] // channels
    step = max(1, _NUMBERS_AT_ONCE // (patch * positions))
    for first in range(0, examples, step):
        part = slice(first, first + step)
        patches = F.unfold(
            call.inputs[part],
            call.weight.shape[2:],
            call.dilation,
            call.padding,
            call.stride,  # type: ignore[arg-type]
        )
        torch.bmm(
            signals[part].reshape(-1, columns * channels, positions),
            patches.transpose(1, 2),
            out=factor[part],
        )
    return factor.view(examples * columns, channels * patch)


def _signals(evaluation: Evaluation, root: OutputRoot, plan: Sequence[Planned]) -> list[Tensor]:
    """What reaches each call's output, (examples, columns, outputs), for every column of the root."""
    size = evaluation.output.shape[0]
    edges = [edge for _, _, edge, _ in plan]
    if all(isinstance(call, DenseCall) for _, call, _, _ in plan):
        batched = _backward_all(evaluation, edges, root.columns)
        if batched is not None:
            return [
                torch.stack([by_example(row, size, time_first) for row in found], dim=1)
                if time_first
                else found.reshape(found.shape[0], size, -1).transpose(0, 1)
                for found, (_, _, _, time_first) in zip(batched, plan, strict=True)
            ]
    passes = [_backward(evaluation, edges, column) for column in root.columns]
    return [
        torch.stack([by_example(found[index], size, time_first) for found in passes], dim=1)
        for index, (_, _, _, time_first) in enumerate(plan)
    ]


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
